# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train normal and radial posteriors by natural gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.distributions.transforms import SoftplusTransform
from torch import Tensor, nn
from torch.distributions import Transform, transform_to
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pyro_radial._pyro.checks import positive_float
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial._pyro.types import Node
from pyro_radial.distributions.numerics import accumulation_dtype
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.autoguide.per_site import LocScaleSite
from pyro_radial.infer.loss.elbo import TermsELBO, traces_of
from pyro_radial.infer.optim.joint import (
    DEFAULT_OPTIM,
    GraphOptimizer,
    GuideOptim,
    Optim,
    check_optim,
    make_optimizer,
    optimizer_parameters,
    rise_and_fall,
    unconstrained_parameters,
)
from pyro_radial.nn.bayesian_module import modules_of
from pyro_radial.nn.modules import device_of, evaluating

# The learning rate of means by default, in standard deviations.
LR = 1.0
# The rate of widths falls as WIDTH_STEPS over the number of steps, between these limits. In any run the rates sum to
# 12, so a width grows from 0.01 to 0.97 where the best is one.
WIDTH_STEPS, MOST_WIDTH_RATE, LEAST_WIDTH_RATE = 5.0, 0.5, 1e-5
# The rate of widths falls after this share of a run, or after this step where the length is unknown. In a network,
# widths that grow before the means have learned end at a higher loss.
SETTLING_SHARE, SETTLING_STEPS = 0.1, 30.0
# The rate of means falls like one over the root of the number of steps after these.
STEADY_STEPS = 100
# The root mean square of a step of log(variance) is at most the first rate of widths, within these limits.
# If widths of a deep network change faster, its activations grow before any curvature is measured.
LEAST_LIMIT, MOST_LIMIT = 0.02, 0.1
# A mean moves by at most this part of the root mean square of its site's weights.
MOST_SHARE = 0.1
# The share of a new value in the average of gradients, and in those of squared gradients and of recent means.
GRADIENT_SHARE, SQUARE_SHARE = 0.1, 0.05
# The weight of the distance from the average of recent means, relative to that of the standard deviation.
TRAVEL = 0.5
# Added to the root of averages of squares; the square of a smaller gradient may underflow.
TINY = 1e-12
# The sums of rates are marked at steps that grow by the eighth root of two, means and widths at each fourth mark. The
# second to last of these marks is 29 to 50 % of the steps ago.
MARK_GROWTH, MARKS_PER_SAMPLE = 2.0**0.125, 4
# Means and widths of about this many weights of a site are marked.
SAMPLED = 1000


class NaturalGradient(GuideOptim):
    r"""Train the normal and radial sites of a guide along the natural gradient of the ELBO.

    Let L be the loss in nats for the whole data set, m a site's mean, :math:`\sigma` its scale and v its marginal
    variance: :math:`\sigma^2`, or :math:`\sigma^2 / D` with D elements to a radius. Step t is

    .. math::
        \log v &\leftarrow \log v - \min\Big(\rho_t, c \Big/ \sqrt{\overline{d^2}}\Big)\, d, \qquad
            d = \partial L / \partial \log \sigma, \quad
            \rho_t = \max\big(10^{-5}, \min(\tfrac12, 5 / (t + s))\big) \\
        m &\leftarrow m - \eta_t\, u\, \overline{\nabla_m L} \Big/ \sqrt{\overline{(\nabla_m L)^2}}, \qquad
            u^2 = \min\big(v + \tfrac14 (m - \bar m)^2,\ \tfrac{1}{100}\, \mathrm{mean}(m^2 + v)\big), \quad
            \eta_t = \mathrm{lr}\,\min\big(1, \sqrt{100 / t}\big)

    where bars are running averages over about 20 steps. For T steps of :func:`~pyro_radial.fit`, s is T / 10 and c is
    50 / T, between 0.02 and 0.1; in other loops they are 30 and 0.1. So means move as in Adam, in units of their
    posterior standard deviation, or of the way that they came lately, and by at most a tenth of the root mean square of
    their site's weights. Widths average over about the last fifth of the steps. Neither depends on where widths
    started. One scale for many weights follows the mean of their d. At rest, for both families and any prior p, with g
    the gradient of the negative log-likelihood at the drawn weights w,

    .. math:: v^{-1} = E[g\,(w - m) / v] - E[(\partial \log p / \partial w)\,(w - m) / v].

    Other sites and parameters take a step of an ordinary optimizer. Without a scheduler, :func:`~pyro_radial.fit` lets
    all rates rise in the first 5 % of the steps and fall to zero along a cosine.

    :param float lr: the learning rate of means, in standard deviations.
    :param other_optim: the optimizer of other parameters, as for :func:`~pyro_radial.fit`; Adam at 1e-3 by default.
    :raises ValueError: for a number out of range, or a guide without normal or radial sites.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit
        >>> from pyro_radial.nn import likelihoods
        >>> x = torch.randn(64, 2)
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian())
        >>> data = x, x.sum(-1, keepdim=True)
        >>> result = fit(model, AutoRadial(model), data, epochs=800, optim=NaturalGradient(), progress=False)
        >>> max(arrival.width_error for arrival in result.arrivals.values()) < 0.1
        True
    """

    def __init__(self, lr: float = LR, *, other_optim: Optim = DEFAULT_OPTIM) -> None:
        self.lr = positive_float("lr", lr)
        check_optim(other_optim, "other_optim")
        if isinstance(other_optim, GuideOptim):
            raise ValueError(
                f"other_optim must be an optimizer of any parameters, got {type(other_optim).__name__}"
            )
        self.other_optim = other_optim

    def optimizer(
        self, model: Any, guide: nn.Module, *args: Any, **kwargs: Any
    ) -> "NaturalGradientOptimizer":
        """Make the torch optimizer for a loop of your own.

        :param args: arguments of the model and the guide, such as the first batch.
        :returns: an optimizer; call ``step`` after ``loss.backward()``, with the loss of the whole data set.
        """
        with (
            evaluating(model, guide),
            torch.no_grad(),
            poutine.block(),
            seeded(0, device_of(guide, model)),
        ):
            getattr(guide, "setup", guide)(*args, **kwargs)
            trace, drawn = traces_of(model, guide, *args, **kwargs)
        sites: list[SiteState] = []
        site_guides = modules_of(AutoPerSite, guide)
        for site_guide in site_guides:
            if site_guide.has_shared_scales:
                raise ValueError(
                    "guide must have widths='elbo' for NaturalGradient, which trains them, got 'predictive'; leave "
                    "optim out, or take an optimizer of torch"
                )
            for name, site in site_guide.loc_scale_sites().items():
                if not _is_local(trace.nodes[name]):
                    sites.append(SiteState.of(name, site))
        if not sites:
            families: dict[str, str] = {}
            for site_guide in site_guides:
                for name, family in site_guide.chosen_families().items():
                    families[name] = type(family).__name__
            raise ValueError(
                f"guide must have a site with a normal or radial family, got {families or type(guide).__name__}; use "
                "another optimizer"
            )
        site_parameters = set(_locs_and_scales(sites))
        all_parameters = {
            **dict(TermsELBO()(model, guide).named_parameters()),
            **unconstrained_parameters(drawn, trace),
        }
        # A parameter with two names comes once.
        names: dict[Tensor, str] = {}
        for name, parameter in all_parameters.items():
            if parameter.requires_grad and parameter not in site_parameters:
                names[parameter] = name
        other_parameters = {name: parameter for parameter, name in names.items()}
        other_optimizer = (
            make_optimizer(self.other_optim, other_parameters) if other_parameters else None
        )
        return NaturalGradientOptimizer(sites, other_optimizer, lr=self.lr, settling=SETTLING_STEPS)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LambdaLR:
        """Let rates rise for 5 % of the steps, then fall to zero along a cosine; ``step`` it after each step.

        The rates of widths fall from a tenth of the steps on.
        """
        optimizer.param_groups[0]["settling"] = SETTLING_SHARE * steps
        return rise_and_fall(optimizer, steps)


class SiteState(NamedTuple):
    """A site's unconstrained parameters, the averages of its gradients, and the transform of its scales."""

    name: str
    loc: Tensor
    scale: Tensor
    #: The average of the gradients of ``loc``, and of their squares.
    average: Tensor
    square: Tensor
    #: The average of recent values of ``loc``.
    recent: Tensor
    #: The average of squared derivatives by log(scale).
    width_square: Tensor
    #: Locations and log(scale) of some weights at the two latest marks of means and widths.
    marks: Tensor
    to_scale: Transform
    #: The scale at a standard deviation of one.
    per_stddev: float
    #: The number of weights that share one scale.
    weights_per_scale: int

    @classmethod
    def of(cls, name: str, site: LocScaleSite) -> "SiteState":
        """Return the state of a site before its first step.

        :param site: the parameters of the site in a guide, their family, and ``site.site``, the model's site.
        """
        state = cls(
            name,
            site.loc,
            site.scale,
            average=torch.zeros_like(site.loc),
            square=torch.zeros_like(site.loc),
            recent=site.loc.detach().clone(),
            width_square=torch.zeros_like(site.scale),
            marks=site.loc.new_zeros(()),
            to_scale=transform_to(site.family.scale_constraint),
            per_stddev=site.family.scale_of(site.site, 1.0),
            weights_per_scale=site.loc.numel() // site.scale.numel(),
        )
        return state._replace(marks=torch.stack([state.sampled_now()] * 2))

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the site by their names in the optimizer's state."""
        return {
            "average": self.average,
            "square": self.square,
            "recent": self.recent,
            "width_square": self.width_square,
            "marks": self.marks,
        }

    def sampled_now(self) -> Tensor:
        """Return the locations and log(scale) of some weights."""
        return torch.stack(
            [some_of(self.loc), self.to_scale(some_of(self.scale.expand_as(self.loc))).log()]
        )


class StepRates(NamedTuple):
    """The learning rates and averaging weights of a site's next step; in a graph 0-d tensors.

    If all are zero, the step changes nothing.
    """

    loc: float | Tensor
    width: float | Tensor
    #: The limit of the root mean square of a step of log(variance).
    limit: float | Tensor
    #: The weights of new values in the average of gradients, and in those of their squares and of recent means.
    average: float | Tensor
    square: float | Tensor


class NaturalGradientOptimizer(GraphOptimizer):
    """The optimizer that :meth:`NaturalGradient.optimizer` makes.

    A loop calls :meth:`step`. A graph of the loss contains :meth:`update_in_graph`, which is the same update by tensor
    operations alone; :meth:`write_rates` comes before a replay of the graph, and :meth:`count_step` after it.

    :param sites: the sites to train by natural gradients.
    :param other_optimizer: the optimizer of other parameters, or None.
    :param settings: the learning rate ``lr``, and ``settling``, the number of steps before the rate of widths falls.
    """

    def __init__(
        self, sites: Sequence[SiteState], other_optimizer: Optimizer | None, **settings: Any
    ) -> None:
        super().__init__(_locs_and_scales(sites), settings)
        #: The sites that are trained by natural gradients.
        self.sites = sites
        #: The optimizer of other parameters, whose groups and state are parts of those of this optimizer.
        self.other_optimizer = other_optimizer
        #: The tensors that :meth:`update_in_graph` changes, and marks, which only :meth:`count_step` changes.
        self.changed_tensors = []
        for site in sites:
            counts = {"steps": 0, "width_steps": 0, "sum_of_mean_rates": 0.0, "sum_of_rates": 0.0}
            # The number of steps and both sums at each mark.
            self.state[site.loc] = {**counts, "trail": [[0, 0.0, 0.0]], **site.state_tensors()}
            self.changed_tensors += site.loc, site.scale, *site.state_tensors().values()
        loc = sites[0].loc
        #: A 0-d tensor; while it is not zero, :meth:`update_in_graph` changes nothing.
        self.stopped = loc.new_zeros((), dtype=torch.float32)
        # The rates of the step in a graph, and the tensor from which the graph reads them, with a row for each site.
        self._written: list[StepRates] = []
        self._rates = loc.new_zeros(
            len(sites), len(StepRates._fields), dtype=accumulation_dtype(loc)
        )
        if other_optimizer is not None:
            self.defaults["other_optim"] = (
                f"{type(other_optimizer).__name__}({ {**other_optimizer.defaults, 'lr': None} })"
            )
            self.param_groups += other_optimizer.param_groups
            self.state.update(other_optimizer.state)
            self._share_groups()

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes for a copy, not only those that torch's optimizers have."""
        return self.__dict__.copy()

    def _share_groups(self) -> None:
        """Let the optimizer of other parameters use the groups and the state of this optimizer."""
        if self.other_optimizer is not None:
            self.other_optimizer.param_groups = self.param_groups[1:]
            self.other_optimizer.state = self.state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state as in torch."""
        super().load_state_dict(dict(state_dict))
        for site in self.sites:
            # Graphs read these tensors, so loaded values are copied into them.
            loaded = self.state[site.loc]
            for name, tensor in site.state_tensors().items():
                loaded[name] = tensor.copy_(loaded[name])
        self._share_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step on the gradients of the parameters, as optimizers of torch do.

        :param closure: computes the loss and the gradients first.
        :returns: the result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [(site.loc.grad, site.scale.grad) for site in self.sites]
        rates = self.next_rates()
        self._update_sites(gradients, rates, {})
        self._count_steps(gradients, rates)
        if self.other_optimizer is not None:
            self.other_optimizer.step()
        return loss

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a step that :meth:`update_in_graph` has taken."""
        # A graph updates the locations and scales of all sites.
        self._count_steps([(site.loc, site.scale) for site in self.sites], self._written)

    def _count_steps(
        self, updated: Sequence[tuple[Tensor | None, Tensor | None]], rates: Sequence[StepRates]
    ) -> None:
        """Count a step of each ``loc`` and ``scale`` that is not None in ``updated``, and mark where it is time to."""
        for site, (loc, scale), site_rates in zip(self.sites, updated, rates, strict=True):
            state = self.state[site.loc]
            if loc is not None:
                state["steps"] += 1
                state["sum_of_mean_rates"] += site_rates.loc
            if scale is not None:
                state["width_steps"] += 1
                state["sum_of_rates"] += site_rates.width
            trail, point = state["trail"], self._point_of(site)
            if point[0] > trail[-1][0] and point[0] >= MARK_GROWTH * trail[-1][0]:
                trail.append(point)
                if len(trail) % MARKS_PER_SAMPLE == 1:
                    # The current means and widths replace the older mark.
                    site.marks.copy_(torch.stack([site.marks[1], site.sampled_now()]))

    def parameters_to_clip(self) -> list[Tensor]:
        """Return all parameters but the scales, which would end at wrong values if their gradients were clipped."""
        scales = {site.scale for site in self.sites}
        return [p for p in optimizer_parameters(self) if p not in scales]

    def progress(self) -> dict[str, dict[str, Any]]:
        """Return what says how far each site has come, as plain values and small tensors; this takes no time.

        ``trail`` has numbers of steps and sums of both rates at the marks and now, ``marked`` is the place of the mark
        that ``before`` is from.
        """
        sites: dict[str, dict[str, Any]] = {}
        for site, rates in zip(self.sites, self.next_rates(), strict=True):
            trail = self.state[site.loc]["trail"]
            marked = max(0, (len(trail) - 1) // MARKS_PER_SAMPLE - 1) * MARKS_PER_SAMPLE
            point = self._point_of(site)
            sites[site.name] = {
                "trail": [*trail] if trail[-1] == point else [*trail, point],
                "marked": marked,
                "before": site.marks[0].clone(),
                "now": site.sampled_now(),
                "squares": torch.stack(
                    [some_of(site.square), some_of(site.width_square.expand_as(site.loc))]
                ),
                "per_stddev": site.per_stddev,
                "width_rate": rates.width,
                "limit": rates.limit,
            }
        return sites

    def _point_of(self, site: SiteState) -> list[float]:
        """Return a site's number of steps and sums of both rates."""
        state = self.state[site.loc]
        return [
            max(state["steps"], state["width_steps"]),
            state["sum_of_mean_rates"],
            state["sum_of_rates"],
        ]

    def write_rates(self) -> None:
        """Write the rates of the next step where :meth:`update_in_graph` reads them."""
        rates = self._written = self.next_rates()
        rows = rates[:1] if rates.count(rates[0]) == len(rates) else rates
        pinned = self._rates.is_cuda
        numbers = torch.tensor(rows, dtype=self._rates.dtype, device="cpu", pin_memory=pinned)
        self._rates.copy_(numbers, non_blocking=True)

    @torch.no_grad()
    def update_in_graph(
        self,
        loss: Tensor,
        gradients: Mapping[Tensor, Tensor | None],
        scales: Mapping[Tensor, Tensor],
    ) -> frozenset[Tensor]:
        """Update all sites at the rates of :meth:`write_rates`, by operations that a graph can record.

        Nothing changes if the loss is not finite, or if a site has no gradient.

        :param gradients: the gradient of each parameter.
        :param scales: the constrained scales by their unconstrained parameters; missing ones are computed.
        :returns: the parameters that the graph updates.
        """
        is_finite = torch.isfinite(loss) & (self.stopped == 0.0)
        finite_gradients: list[tuple[Tensor, Tensor]] = []
        for site in self.sites:
            loc_gradient = gradients.get(site.loc)
            scale_gradient = gradients.get(site.scale)
            if loc_gradient is None or scale_gradient is None:
                return frozenset()
            finite_gradients.append(
                (
                    torch.where(is_finite, loc_gradient, 0.0),
                    torch.where(is_finite, scale_gradient, 0.0),
                )
            )
        rows = torch.where(is_finite, self._rates, 0.0).unbind()
        rates = [
            StepRates(*row.to(site.loc).unbind())
            for site, row in zip(self.sites, rows, strict=True)
        ]
        self._update_sites(finite_gradients, rates, scales)
        return frozenset(_locs_and_scales(self.sites))

    def next_rates(self) -> list[StepRates]:
        """Return the rates of each site's next step."""
        rates: list[StepRates] = []
        # Most often all sites have the same number of steps.
        by_count: dict[tuple[int, int], StepRates] = {}
        for site in self.sites:
            state = self.state[site.loc]
            count = state["steps"], state["width_steps"]
            if count not in by_count:
                by_count[count] = self._rates_after(*count)
            rates.append(by_count[count])
        return rates

    def _rates_after(self, steps: int, width_steps: int) -> StepRates:
        """Return the rates of the step that follows ``steps`` steps of means and ``width_steps`` steps of widths."""
        group = self.param_groups[0]
        # The sums of the weights in the averages so far; division by them removes the bias, as in Adam.
        of_average = 1.0 - (1.0 - GRADIENT_SHARE) ** (steps + 1)
        of_square = 1.0 - (1.0 - SQUARE_SHARE) ** (steps + 1)
        of_widths = 1.0 - (1.0 - SQUARE_SHARE) ** (width_steps + 1)
        slowing = min(1.0, math.sqrt(STEADY_STEPS / (steps + 1)))
        limit = min(MOST_LIMIT, max(LEAST_LIMIT, width_rate(0, group["settling"])))
        return StepRates(
            loc=group["lr"] / of_average * (math.sqrt(of_square) * slowing),
            width=width_rate(width_steps + 1, group["settling"]),
            limit=limit * math.sqrt(of_widths),
            average=GRADIENT_SHARE,
            square=SQUARE_SHARE,
        )

    def _update_sites(
        self,
        gradients: Sequence[tuple[Tensor | None, Tensor | None]],
        rates: Sequence[StepRates],
        scales: Mapping[Tensor, Tensor],
    ) -> None:
        """Update each site's ``loc`` and ``scale`` from their gradients; one without a gradient stays as it is."""
        for site, (loc_gradient, scale_gradient), site_rates in zip(
            self.sites, gradients, rates, strict=True
        ):
            scale = scales.get(site.scale)
            if scale is None:
                scale = site.to_scale(site.scale)
            variance = (scale / site.per_stddev).square()
            if scale_gradient is not None:
                _update_scale(site, scale_gradient, site_rates, scale)
            if loc_gradient is not None:
                _update_loc(site, loc_gradient, site_rates, variance)


def width_rate(step: int, settling: float) -> float:
    """Return the learning rate of widths in a step, counted from one."""
    return max(LEAST_WIDTH_RATE, min(MOST_WIDTH_RATE, WIDTH_STEPS / (step + settling)))


def some_of(values: Tensor) -> Tensor:
    """Return the values of about a thousand weights of a site, or of all if it has fewer."""
    # An odd step does not stay in one column of a matrix.
    return values.detach().flatten()[:: values.numel() // SAMPLED | 1]


def by_log_scale(to_scale: Transform, unconstrained: Tensor, scale: Tensor) -> Tensor:
    """Return the derivative of unconstrained scales by log(scale)."""
    if isinstance(to_scale, SoftplusTransform):
        return scale * (1.0 + unconstrained.exp().reciprocal())
    return scale * torch.exp(-to_scale.log_abs_det_jacobian(unconstrained, scale))


def _update_scale(site: SiteState, scale_gradient: Tensor, rates: StepRates, scale: Tensor) -> None:
    """Update a site's scales in place."""
    by_log = by_log_scale(site.to_scale, site.scale, scale)
    derivative = scale_gradient * by_log
    if site.weights_per_scale > 1:
        # The Fisher information of a shared scale is that of one weight times their number.
        derivative = derivative / site.weights_per_scale
    site.width_square.lerp_(derivative.square(), rates.square)
    # Derivatives are divided by their root mean square and not clipped. A few large ones balance the steady pull of the
    # prior, so they must keep their size.
    fall = derivative * (rates.limit / (site.width_square.sqrt() + TINY)).clamp(max=rates.width)
    site.scale.addcmul_(fall, by_log, value=-0.5)


def _update_loc(site: SiteState, loc_gradient: Tensor, rates: StepRates, variance: Tensor) -> None:
    """Update a site's means by a step of Adam in units of posterior standard deviations and of their recent change.

    The unit is limited to a tenth of the root mean square of the site's weights.
    """
    site.average.lerp_(loc_gradient, rates.average)
    site.square.lerp_(loc_gradient.square(), rates.square)
    site.recent.lerp_(site.loc, rates.square)
    travel = site.loc - site.recent
    squared_unit = torch.addcmul(variance, travel, travel, value=TRAVEL**2)
    largest_squared_unit = MOST_SHARE**2 * torch.addcmul(variance, site.loc, site.loc).mean()
    unit = torch.minimum(squared_unit, largest_squared_unit).sqrt()
    site.loc.sub_(unit * site.average / (site.square.sqrt() + TINY) * rates.loc)


def _is_local(node: Node) -> bool:
    """Return whether a site is inside a subsampled plate."""
    return any((frame.full_size or frame.size) != frame.size for frame in node["cond_indep_stack"])


def _locs_and_scales(sites: Sequence[SiteState]) -> list[Tensor]:
    """Return each site's ``loc`` and ``scale``, one site after another."""
    parameters: list[Tensor] = []
    for site in sites:
        parameters += site.loc, site.scale
    return parameters
