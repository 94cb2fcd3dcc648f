# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss with a prior on functions in the place of one on weights."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.poutine import Trace
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.random_state import seeded
from pyro_radial.functional.auxiliary_sites import sites_led_to
from pyro_radial.functional.divergences import Divergence, DivergenceEstimate, ProcessDivergence, SteinKL
from pyro_radial.functional.guide_process import GuideProcess
from pyro_radial.functional.linearization import Structure
from pyro_radial.functional.measurement_points import Context
from pyro_radial.functional.priors import FunctionPrior
from pyro_radial.infer.elbo import RadialELBO, check_weight
from pyro_radial.nn.likelihood import FUNCTION_SITE
from pyro_radial.poutine.local_reparameterization import check_drawn

__all__ = ["FunctionalELBO"]

# Where the function site of a trace keeps its :class:`_Measurement`.
MEASUREMENT = "measurement"

PLACES = ("both", "context")


class _Measurement(NamedTuple):
    """What the divergence of one loss is of."""

    #: The measurement points, those of the context among them, ``[M, ...]``.
    points: Tensor
    #: The values of the functions there, ``[S, M, O]``, or their process.
    functions: Tensor | GuideProcess
    #: The sites of the guide that no function depends on, which have a KL each.
    others: frozenset[str]


class FunctionalELBO(RadialELBO):
    r"""The evidence lower bound of functions on a finite measurement set.

    .. math:: -\mathcal{L} = E_q[-\log p(y \mid f)]
        + \lambda\, D\big(q(f^X) \,\|\, p(f^X)\big),

    with X the inputs of the call and further measurement points, :math:`f^X` the function values there, q their
    distribution under the guide's weights, p a prior over functions, and D a divergence between the two: by default the
    KL, its gradient by scores. The weights' own priors and densities are never evaluated, so that they may be anything;
    a latent site on which the function does not depend, such as a noise level, keeps its ordinary KL. An auxiliary site
    of the guide, as in Pyro's ``AutoNormal`` and ``AutoMultivariateNormal``, counts with the sites that it leads to.

    It is a bound on the log evidence only where X holds *all* training inputs, since the KL on fewer points is smaller
    (Burt et al. 2020, "Understanding variational inference in function-space"); on a mini-batch the likelihood is
    scaled to all N data and D is that on X, unscaled. As X grows D grows to the KL between the processes, which is
    infinite for a finite network under most Gaussian process priors: on few points it is finite, and
    :class:`~pyro_radial.functional.RegularizedKL` is on all. Under a smooth kernel a few points are enough for a
    divergence of no use; a prior with ``noise`` is compared with the network's values with as much noise, as in the
    paper's code. That divergence is smaller than the one of the functions themselves, so the loss bounds nothing then.

    A divergence of a process, :class:`~pyro_radial.functional.MarginalKL`, sees no draws but the model linearized at
    the means of the guide's sites, in evaluation mode. The likelihood alone draws then: one function, or
    noise for each row.
    With ``compare_at="context"`` X is the context without the inputs of the call, as where old tasks are to be
    remembered (Rudner et al. 2022, "Continual Learning via Sequential Function-Space Variational Inference"): at the
    inputs of a new task the posterior of the old ones is the wrong prior. The KL of the weights to their own prior can
    be kept as a second term, ``weight_space_kl`` times :attr:`LossTerms.weight_space_kl
    <pyro_radial.infer.LossTerms.weight_space_kl>`, which ``kl_weight`` does not touch. None of these losses is a bound.

    All functions of a step are drawn at once, so :math:`f` must not depend on the data of a mini-batch but for its
    inputs. Works with ``SVI``, and as ``elbo(model, guide)`` with a torch optimizer; ``fit`` takes it as its loss.

    Source: Sun, Zhang, Shi and Grosse (2019), "Functional variational Bayesian neural networks", eq. 3 to 9; they weigh
    the divergence by one over the size of the measurement set, which is ``kl_weight`` here.

    :param FunctionPrior prior: a prior over functions, such as :class:`~pyro_radial.functional.GaussianProcess`.
    :param context: a function of the call's inputs that returns further measurement points, or None for the inputs
        alone; see :mod:`pyro_radial.functional.measurement_points`. One with a method ``ascend``, such as
        :class:`~pyro_radial.functional.AdversarialPoints`, takes a step up the divergence for each training loss.
    :param divergence: see :mod:`pyro_radial.functional.divergences`.
    :param compare_at: "both" for the inputs of the call and the context, "context" for the context alone.
    :param float weight_space_kl: the weight of the KL of those weights that the function depends on; zero for none.
    :param str function_site: the deterministic site where the model records the function values; its first argument
        are the inputs, and it runs on them alone as well.
    :param int num_functions: S, the functions drawn for one loss.
    :param kl_weight: :math:`\lambda`, a number or a function of the step, as in :class:`~pyro_radial.RadialELBO`.
    :param kwargs: as there, but for the particles.
    :raises ValueError: for a model without the function site, with values that are not real-valued or not S functions
        at the inputs, and from the prior, the context and the divergence; naming the sites, for an auxiliary site of
        the guide from which both weights and sites beside the function are computed.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel
        >>> from pyro_radial.functional import GaussianProcess, RegularizedKL, UniformBox
        >>> from pyro_radial.nn import likelihoods
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
        >>> model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=5, scale=0.1))
        >>> kernel = lambda a, b: torch.exp(-0.5 * (a - b.T) ** 2)
        >>> box = UniformBox([-2.0], [2.0], num_points=10)
        >>> elbo = FunctionalELBO(GaussianProcess(kernel), box, divergence=RegularizedKL(1e-3), num_functions=50)
        >>> guide = AutoMeanField(model)
        >>> loss = elbo(model, guide)(torch.randn(5, 1), torch.randn(5, 1))
        >>> loss.backward()
        >>> sorted(elbo.terms.kl_by_site)
        ['f']
    """

    def __init__(
        self,
        prior: FunctionPrior,
        context: Context | None = None,
        *,
        divergence: Divergence | ProcessDivergence | None = None,
        compare_at: Literal["both", "context"] = "both",
        weight_space_kl: float = 0.0,
        function_site: str = FUNCTION_SITE,
        num_functions: int = 100,
        kl_weight: float | Callable[[int], float] = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            positive_count("num_functions", num_functions), vectorize_particles=True, kl_weight=kl_weight, **kwargs
        )
        if compare_at not in PLACES:
            raise ValueError(f"FunctionalELBO: compare_at must be one of {PLACES}, got {compare_at!r}")
        if compare_at == "context" and context is None:
            raise ValueError("FunctionalELBO: context must be given to compare at it alone, got None")
        self.prior = prior
        self.context = context
        self.divergence: Divergence | ProcessDivergence = SteinKL() if divergence is None else divergence
        self.compare_at = compare_at
        self.weight_space_kl = check_weight(weight_space_kl, "weight_space_kl")
        self.function_site = function_site
        # Found once, of the model and guide that this loss serves, as the nesting of their plates is; with random
        # numbers apart, so that a loss draws the same whether or not it is the first.
        self._others: frozenset[str] | None = None
        self._structures: dict[Any, Structure] = {}

    def _guess_max_plate_nesting(self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As Pyro's, without the log-densities that it computes on the way, and with random numbers of its own."""
        with poutine.block(), seeded(0, _inputs(args).device):
            traces = [poutine.trace(fn).get_trace(*args, **kwargs) for fn in (guide, model)]
        stacks = (site["cond_indep_stack"] for trace in traces for site in trace.nodes.values() if "fn" in site)
        nesting = max((-frame.dim for stack in stacks for frame in stack if frame.vectorized), default=0)
        # With the plate of the particles, as Pyro counts.
        self.max_plate_nesting = nesting + (self.num_particles > 1)

    def _get_trace(self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Trace, Trace]:
        """Model and guide on the data, with the values of the same functions at the measurement points."""
        model_trace, guide_trace = super()._get_trace(model, guide, args, kwargs)
        x = _inputs(args)
        values = self._values(model_trace, len(x))
        process = None
        if isinstance(self.divergence, ProcessDivergence):
            process = GuideProcess(self._model, model_trace, guide_trace, self.function_site, self._structures)
        else:
            for name, latent in guide_trace.iter_stochastic_nodes():
                check_drawn(name, latent, "FunctionalELBO: guide must draw whole functions")
        if self._others is None:
            with seeded(0, x.device):
                weights = self._sites_of_the_function(model, guide_trace, x, process)
                self._others = self._sites_beside_the_function(weights, guide, (model_trace, guide_trace), args, kwargs)
        functions, points = process or values, x
        if self.context is not None:
            further = self._further_points(self.context, model, guide_trace, x, functions)
            functions, points = self._with_further(functions, x, further, model, guide_trace)
        site: Any = model_trace.nodes[self.function_site]
        site[MEASUREMENT] = _Measurement(points, functions, self._others)
        return model_trace, guide_trace

    def _with_further(
        self, functions: Tensor | GuideProcess, x: Tensor, further: Tensor, model: Any, guide_trace: Trace
    ) -> tuple[Tensor | GuideProcess, Tensor]:
        """The functions, known at the inputs, and the points, where the points of the context come in."""
        alone = self.compare_at == "context"
        points = further if alone else torch.cat([x, further])
        if isinstance(functions, GuideProcess):
            return functions, points
        there = self._values_at(further, model, guide_trace)
        return there if alone else torch.cat([functions, there], 1), points

    def _values_at(self, points: Tensor, model: Any, guide_trace: Trace) -> Tensor:
        """The values of the same functions at other points."""
        return self._values(poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(points), len(points))

    def _further_points(
        self, context: Context, model: Any, guide_trace: Trace, x: Tensor, functions: Tensor | GuideProcess
    ) -> Tensor:
        """The points of the context as they are now; in training, those that can take one step up the divergence."""
        further = context(x)
        if further.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"FunctionalELBO: context must give points of the shape of one input, {list(x.shape[1:])}, "
                f"got {list(further.shape[1:])}"
            )
        ascend = getattr(context, "ascend", None)
        if ascend is not None and torch.is_grad_enabled():
            ascend(self._divergence_at(model, guide_trace, x, functions))
        return further

    def _divergence_at(
        self, model: Any, guide_trace: Trace, x: Tensor, functions: Tensor | GuideProcess
    ) -> Callable[[Tensor], Tensor]:
        """The divergence as a function of further points, for functions that stay as they are."""
        fixed = guide_trace.copy()
        fixed.detach_()
        values = functions.detach() if isinstance(functions, Tensor) else functions

        def divergence_at(further: Tensor) -> Tensor:
            estimate = self._divergence(*self._with_further(values, x, further, model, fixed))
            if estimate.value is None:
                raise ValueError(
                    "FunctionalELBO: divergence must estimate a value that the context can raise, such as GaussianKL "
                    f"or RegularizedKL, got {type(self.divergence).__name__}"
                )
            return estimate.surrogate

        return divergence_at

    def _values(self, trace: Trace, num_points: int) -> Tensor:
        """The function values of a run, ``[S, N, O]``."""
        if self.function_site not in trace.nodes:
            raise ValueError(
                f"FunctionalELBO: model must record a site '{self.function_site}', got none; record the function's "
                f'values with pyro.deterministic("{self.function_site}", values)'
            )
        value: Any = trace.nodes[self.function_site]["value"]
        if not value.is_floating_point():
            raise ValueError(f"FunctionalELBO: site '{self.function_site}' must be real-valued, got {value.dtype}")
        lead = tuple(size for size in value.shape if size != 1)
        expected = tuple(size for size in (self.num_particles, num_points) if size != 1)
        if lead[: len(expected)] != expected:
            raise ValueError(
                f"FunctionalELBO: site '{self.function_site}' must hold {self.num_particles} functions at {num_points} "
                f"inputs, got shape {tuple(value.shape)}"
            )
        return value.reshape(self.num_particles, num_points, -1)

    def _divergence(self, functions: Any, points: Tensor) -> DivergenceEstimate:
        """The divergence, with the noise that the prior's function values carry on the network's as well."""
        if self.prior.noise and isinstance(functions, Tensor):
            functions = functions + self.prior.noise * torch.randn_like(functions)
        try:
            return self.divergence(functions, points, self.prior)
        except ValueError as error:
            raise ValueError(
                f"FunctionalELBO: the divergence refuses site '{self.function_site}', with values at {len(points)} "
                f"points of num_functions = {self.num_particles} functions: {error}"
            ) from error

    def _sites_beside_the_function(
        self,
        weights: frozenset[str],
        guide: Any,
        traces: tuple[Trace, Trace],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> frozenset[str]:
        """The sites of the guide that have a KL of their own.

        These are the latent sites of the model on which no function value depends, and the auxiliary sites that lead to
        them. An auxiliary site that leads to a weight is part of the function, whose density the divergence knows.
        """
        model_trace, guide_trace = traces
        names = {name for name, _ in guide_trace.iter_stochastic_nodes()}
        auxiliary = names - set(model_trace.nodes)
        others = names - auxiliary - weights
        for name, leads_to in sites_led_to(guide, auxiliary, args, kwargs).items():
            beside = sorted(leads_to - weights)
            if beside and leads_to & weights:
                raise ValueError(
                    f"FunctionalELBO: guide must draw sites {beside}, on which no function value depends, apart from "
                    f"the function's, got auxiliary site '{name}' that leads to both and whose density cannot be "
                    "divided; give these sites a guide of their own in an AutoGuideList, or use AutoNormal or "
                    "AutoMeanField"
                )
            if beside:
                others.add(name)
        return frozenset(others)

    def _sites_of_the_function(
        self, model: Any, guide_trace: Trace, x: Tensor, process: GuideProcess | None
    ) -> frozenset[str]:
        """The latent sites that the function values depend on, found by a gradient."""
        if process is not None:
            try:
                return process.sites(x)
            except ValueError as error:
                raise ValueError(f"FunctionalELBO: {error}") from error
        trace = guide_trace.copy()
        leaves = {}
        for name, site in dict[str, Any](trace.iter_stochastic_nodes()).items():
            leaves[name] = site["value"].detach().requires_grad_()
            trace.nodes[name] = {**site, "value": leaves[name]}
        with torch.enable_grad():
            run = poutine.trace(poutine.replay(model, trace=trace)).get_trace(x)
            values = self._values(run, len(x))
            gradients = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
        return frozenset(name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None)

    def _kl_by_site(self, model_trace: Trace, guide_trace: Trace) -> dict[str, Tensor]:
        """The divergence of the functions under their own site, and the KLs of sites that are no part of them."""
        site: Any = model_trace.nodes[self.function_site]
        points, functions, others = site[MEASUREMENT]
        estimate = self._divergence(functions, points)
        value = 0.0 if estimate.value is None else estimate.value
        # The value of one, the gradient of the other; summed over the particles as all terms are.
        divergence = value + estimate.surrogate - estimate.surrogate.detach()
        kls = {
            name: self._site_kl(name, site, model_trace, guide_trace)
            for name, site in guide_trace.iter_stochastic_nodes()
            if name in others
        }
        return {self.function_site: self.num_particles * divergence, **kls}

    def _weight_space_kl_by_site(self, model_trace: Trace, guide_trace: Trace) -> dict[str, Tensor]:
        """The KLs of the sites that the functions depend on, and of auxiliary sites that lead to them."""
        if not self.weight_space_kl:
            return {}
        site: Any = model_trace.nodes[self.function_site]
        others = site[MEASUREMENT].others
        return {
            name: self._site_kl(name, site, model_trace, guide_trace)
            for name, site in guide_trace.iter_stochastic_nodes()
            if name not in others
        }


def _inputs(args: tuple[Any, ...]) -> Tensor:
    if not args or not isinstance(args[0], Tensor):
        what = type(args[0]).__name__ if args else "none"
        raise ValueError(f"FunctionalELBO: the model's first argument must be the tensor of inputs, got {what}")
    return args[0]
