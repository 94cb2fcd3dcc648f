# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Natural gradients for normal and radial posteriors."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.distributions.transforms import SoftplusTransform
from torch import Tensor, nn
from torch.distributions import Transform, transform_to
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pyro_radial._pyro.checks import check_number, check_types, optional, positive_float
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.distributions.moments import moments
from pyro_radial.distributions.special import accumulation_dtype
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.autoguide.base import LocScaleSite
from pyro_radial.infer.compiled.captured_loss import compiled
from pyro_radial.infer.compiled.graph import record, restored
from pyro_radial.infer.compiled.recording import Update
from pyro_radial.infer.elbo import RadialELBO, num_data_of
from pyro_radial.infer.training.data import device_of, evaluating
from pyro_radial.infer.training.optimizers import DEFAULT_OPTIM, GuideOptim, Optim, check_optim, make_optimizer
from pyro_radial.nn.bayesian_module import submodules
from pyro_radial.nn.likelihoods import Likelihood

__all__ = ["NaturalGradient", "NaturalGradientOptimizer"]

# The share of the steps in which the learning rate rises.
WARM_UP = 0.05
# Widths that changed by less, in the logarithm, were not trained: their parameter is rounded.
ROUNDING = 1e-5


class NaturalGradient(GuideOptim):
    r"""Train the normal and radial sites of a guide along the natural gradient of the ELBO.

    Let L be the loss in nats for the whole data set, m a site's mean, :math:`\sigma` its scale and v its marginal
    variance: :math:`\sigma^2`, or :math:`\sigma^2 / D` with D elements to a radius. A step is

    .. math::
        v^{-1} &\leftarrow v^{-1} \big(1 + a + \tfrac12 a^2\big), \qquad
            a = (1 - \beta_2)\, \frac{\partial L}{\partial \log \sigma} \\
        m &\leftarrow m - \mathrm{lr} \cdot \frac{v}{v_0} \cdot \frac{1}{N} \overline{\nabla_m L}

    where the bar is a running average with decay :math:`\beta_1`, N the number of data and :math:`v_0` the mean of the
    site's first variances. So ``lr`` is that of SGD at first. The term :math:`a^2 / 2` keeps the variance positive.
    At rest, for both families and any prior p, with g the gradient of the negative log-likelihood at the drawn weights,

    .. math:: v^{-1} = E[g\,(w - m) / v] - E[(\partial \log p / \partial w)\,(w - m) / v].

    Source: Shen et al. (2024), "Variational Learning is Effective for Large Deep Networks", algorithm 1, for normal
    posteriors and priors; its :math:`h + \delta` is :math:`1 / N v`. Here the prior's gradient is averaged too.

    Other sites and parameters, such as those of norm layers, take a step of an ordinary optimizer. Without a scheduler,
    :func:`~pyro_radial.fit` lets all rates rise in the first 5 % of the steps and fall to zero along a cosine.

    :param float lr: the learning rate of the means. Regression with little noise needs a smaller one.
    :param float hess_init: the curvature h of the loss per datum that widths start from: :math:`v = 1 / (N h + 1/s^2)`
        with s the prior's standard deviation. By default, and in a trained guide, they start where the guide has them.
    :param float beta1: the decay of the average of gradients.
    :param float beta2: the decay of the average of curvatures.
    :param others: the optimizer of other parameters, as for :func:`~pyro_radial.fit`; Adam at 1e-3 by default.
    :raises ValueError: for a number out of range, a guide without normal or radial sites, or an unknown number of data.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit
        >>> from pyro_radial.nn import likelihoods
        >>> x = torch.randn(64, 2)
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian())
        >>> data = x, x.sum(-1, keepdim=True)
        >>> result = fit(model, AutoRadial(model), data, epochs=3, optim=NaturalGradient(lr=0.1), progress=False)
        >>> len(result.history)
        3
    """

    def __init__(
        self,
        lr: float = 1.0,
        *,
        hess_init: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.99999,
        others: Optim = DEFAULT_OPTIM,
    ) -> None:
        self.lr, self.hess_init = positive_float("lr", lr), optional(positive_float, "hess_init", hess_init)
        self.beta1, self.beta2 = (
            check_number(name, beta, lambda decay: 0.0 <= decay < 1.0, "at least zero and less than one")
            for name, beta in (("beta1", beta1), ("beta2", beta2))
        )
        check_optim(others, "others")
        if isinstance(others, GuideOptim):
            raise ValueError(f"others must be an optimizer of any parameters, got {type(others).__name__}")
        self.others = others

    def optimizer(self, model: Any, guide: nn.Module, *args: Any, **kwargs: Any) -> "NaturalGradientOptimizer":
        """Make the torch optimizer for a loop of your own, and set the guide's first widths for ``hess_init``.

        :param args: arguments of the model and the guide, such as the first batch.
        :returns: an optimizer; call ``step`` after ``loss.backward()``, with the loss of the whole data set.
        """
        check_types(Callable, model=model)
        check_types(nn.Module, guide=guide)
        with evaluating(model, guide), torch.no_grad(), poutine.block(), seeded(0, device_of(guide, model)):
            getattr(guide, "setup", guide)(*args, **kwargs)
            drawn = poutine.trace(guide).get_trace(*args, **kwargs)
            trace = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*args, **kwargs)
        pairs, parts = [], [part for part in submodules(guide) if isinstance(part, AutoPerSite)]
        for part in parts:
            sites = {name: site for name, site in part.loc_scale_sites().items() if not _is_local(trace.nodes[name])}
            num_data = _known_num_data(model, trace)
            if self.hess_init is not None:
                self._set_widths(part, sites, trace, num_data * self.hess_init)
            pairs += [Pair.of(site, num_data) for site in sites.values()]
        if not pairs:
            families = {n: type(f).__name__ for part in parts for n, f in part.chosen_families().items()}
            raise ValueError(
                f"guide must have a site with a normal or radial family, got {families or type(guide).__name__}; use "
                "another optimizer"
            )
        own = {id(parameter) for pair in pairs for parameter in (pair.loc, pair.scale)}
        every = {**dict(RadialELBO()(model, guide).named_parameters()), **_parameters(drawn, trace)}
        rest = {name: p for name, p in every.items() if p.requires_grad and id(p) not in own}
        # Each parameter under one name.
        once = dict({id(parameter): (name, parameter) for name, parameter in rest.items()}.values())
        others = make_optimizer(self.others, once) if rest else None
        return NaturalGradientOptimizer(pairs, others, lr=self.lr, beta1=self.beta1, beta2=self.beta2)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LambdaLR:
        """Let rates rise for 5 % of the steps, then fall to zero along a cosine; ``step`` it after each step."""
        return LambdaLR(optimizer, partial(_rise_and_fall, steps=steps, rising=max(1, round(WARM_UP * steps))))

    def _set_widths(self, guide: AutoPerSite, sites: Mapping[str, Any], trace: Any, curvature: float) -> None:
        """Start the widths that were never trained at the prior's precision and the curvature of all data."""
        changes, stddevs = guide.scale_change(), {}
        for name in (name for name in sites if changes[name] < ROUNDING):
            stddev = moments(trace.nodes[name]["fn"], sites[name].site.transform).stddev
            precision = sites[name].loc.new_zeros(()) if stddev is None else stddev.square().reciprocal()
            stddevs[name] = (precision + curvature).rsqrt()
        guide.set_stddevs(stddevs)


class Pair(NamedTuple):
    """The unconstrained parameters of a site, its average gradient and unit of rates, and how scales are computed."""

    loc: Tensor
    scale: Tensor
    average: Tensor
    unit: float
    to_scale: Transform
    per_stddev: float

    @classmethod
    def of(cls, found: LocScaleSite, num_data: int) -> "Pair":
        """The parameters of a site; the unit of its rate is the precision for each datum."""
        to_scale, per_stddev = transform_to(found.family.scale_constraint), found.family.scale_of(found.site, 1.0)
        variance = (to_scale(found.scale.detach()) / per_stddev).double().square().mean()
        unit = 1.0 / (num_data * float(variance))
        return cls(found.loc, found.scale, torch.zeros_like(found.loc), unit, to_scale, per_stddev)


class NaturalGradientOptimizer(Optimizer):
    """The optimizer that :meth:`NaturalGradient.optimizer` makes; set ``compile`` to compile its steps."""

    def __init__(self, pairs: list[Pair], others: Optimizer | None, **settings: float) -> None:
        super().__init__([parameter for pair in pairs for parameter in (pair.loc, pair.scale)], settings)
        self._pairs, self._others = pairs, others
        self.state.update({pair.loc: {"steps": 0, "average": pair.average, "unit": pair.unit} for pair in pairs})
        self.compile = False
        self._compiled: Callable[..., Any] | None = None
        self._changed = [tensor for pair in pairs for tensor in (pair.loc, pair.scale, pair.average)]
        # Whether the graph of the latest loss was to take the step.
        self._in_graph = False
        self._numbers = pairs[0].loc.new_zeros(2 + len(pairs), dtype=accumulation_dtype(pairs[0].loc))
        if others is not None:
            self.defaults["others"] = f"{type(others).__name__}({ {**others.defaults, 'lr': None} })"
            self.param_groups += others.param_groups
            self.state.update(others.state)
            self._share()

    def _share(self) -> None:
        """Let the ordinary optimizer use the groups and the state of this one."""
        if self._others is not None:
            self._others.param_groups, self._others.state = self.param_groups[1:], self.state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state as in torch."""
        super().load_state_dict(dict(state_dict))
        for pair in self._pairs:
            # Graphs hold the tensor.
            self.state[pair.loc]["average"] = pair.average.copy_(self.state[pair.loc]["average"])
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step on the gradients."""
        gradients = [tensor.grad for pair in self._pairs for tensor in (pair.loc, pair.scale)]
        taken = self._in_graph and all(gradient is None for gradient in gradients)
        self._in_graph = False
        if self.compile and all(gradient is not None for gradient in gradients):
            self._step_compiled(gradients)
        elif not taken:
            self._update(gradients, self._next_numbers())
        for pair in self._pairs:
            self.state[pair.loc]["steps"] += taken or pair.loc.grad is not None
        if self._others is not None:
            self._others.step()

    def in_graph(self, check: Callable[[], None] | None = None) -> Update:
        """Return the next step, and a check of the loss's terms, for its graph; call :meth:`step` afterwards too."""
        self._write_numbers()
        self._in_graph = True
        return Update(self._move, self._changed, check)

    @torch.no_grad()
    def _move(self, loss: Tensor, gradients: Mapping[int, Any], scales: Mapping[int, Tensor]) -> set[int]:
        """Record a step, unless a site has no gradient; see :class:`Update`."""
        found = {id(t): gradients.get(id(t)) for pair in self._pairs for t in (pair.loc, pair.scale)}
        if any(gradient is None for gradient in found.values()):
            return set()
        self._update([*found.values()], self._numbers.unbind(), scales, torch.isfinite(loss))
        return {*found}

    def _step_compiled(self, gradients: Sequence[Any]) -> None:
        self._write_numbers()
        if self._compiled is None:
            with restored(self._changed):
                graph = record(lambda *own: (self._update(own, self._numbers.unbind()), None), gradients)
            code = compiled(graph, gradients, {})
            self._compiled = lambda *own: code(*graph.constants, *own)
        self._compiled(*gradients)

    def _next_numbers(self) -> list[float]:
        """The shares of a new gradient and a new curvature, and each site's learning rate in the next step."""
        group = self.param_groups[0]
        states = [self.state[pair.loc] for pair in self._pairs]
        rates = [group["lr"] * own["unit"] / (1.0 - group["beta1"] ** (own["steps"] + 1)) for own in states]
        return [1.0 - group["beta1"], 1.0 - group["beta2"], *rates]

    def _write_numbers(self) -> None:
        self._numbers.copy_(torch.tensor(self._next_numbers(), dtype=torch.float64))

    def _update(
        self, gradients: Sequence[Any], numbers: Sequence[Any], scales: Mapping[int, Tensor] = {}, finite: Any = True
    ) -> list[Tensor]:
        """Move all sites with a gradient, from gradients of each ``loc`` and ``scale``; returns no outputs."""
        share, rate, *rates = numbers
        for pair, by_loc, by_scale, lr in zip(self._pairs, gradients[::2], gradients[1::2], rates, strict=True):
            if by_loc is not None:
                _update(pair, by_loc, by_scale, (lr, share, rate), scales.get(id(pair.scale)), finite)
        return []


def _update(
    pair: Pair, by_loc: Tensor, by_scale: Any, numbers: Sequence[Any], deviation: Tensor | None, finite: Any
) -> None:
    """Move a site's parameters and its average gradient by rates of means, averages and precisions, if ``finite``."""
    lr, share, rate = numbers
    deviation = pair.to_scale(pair.scale) if deviation is None else deviation
    variance = (deviation / pair.per_stddev).square()
    if by_scale is not None:
        per_log = deviation * _inverse_slope(pair.to_scale, pair.scale, deviation)
        # rate * dL / d log(scale)
        a = by_scale * per_log * rate
        growth = a + 0.5 * a.square()
        # Half of log(1 + growth), to the third order; its logarithm takes as long as the rest of this step.
        pair.scale.sub_(_if(finite, growth / (2.0 + growth) * per_log))
        variance = variance / (1.0 + growth)
    pair.average.add_(_if(finite, (by_loc - pair.average) * share))
    pair.loc.sub_(_if(finite, variance * pair.average * lr))


def _if(finite: Any, change: Tensor) -> Tensor:
    return change if finite is True else torch.where(finite, change, 0.0)


def _inverse_slope(to_scale: Transform, unconstrained: Tensor, scale: Tensor) -> Tensor:
    """One over the derivative of scales by unconstrained parameters."""
    if isinstance(to_scale, SoftplusTransform):
        return 1.0 + unconstrained.exp().reciprocal()
    return torch.exp(-to_scale.log_abs_det_jacobian(unconstrained, scale))


def _rise_and_fall(step: int, steps: int, rising: int) -> float:
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - rising))))


def _is_local(site: Any) -> bool:
    """Whether a site is inside a subsampled plate."""
    return any((frame.full_size or frame.size) != frame.size for frame in site["cond_indep_stack"])


def _known_num_data(model: Any, trace: Any) -> int:
    likelihoods = [part for part in submodules(model) if isinstance(part, Likelihood)]
    number = num_data_of(trace)
    if number is None or any(likelihood.num_data is None for likelihood in likelihoods):
        raise ValueError(
            "num_data of the likelihood must be given, or a hand-written model's targets be in a plate of that size"
        )
    return number


def _parameters(*traces: Any) -> dict[str, Tensor]:
    """The unconstrained parameters in traces by name."""
    values = {n: s["value"] for trace in traces for n, s in trace.nodes.items() if s["type"] == "param"}
    return {name: v.unconstrained() if hasattr(v, "unconstrained") else v for name, v in values.items()}
