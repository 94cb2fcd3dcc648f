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
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.functional.auxiliary_sites import sites_led_to
from pyro_radial.functional.divergences import Divergence, DivergenceEstimate, ProcessDivergence, SteinKL
from pyro_radial.functional.guide_process import GuideProcess
from pyro_radial.functional.linearization import Structure
from pyro_radial.functional.measurement_points import MeasurementPoints
from pyro_radial.functional.priors import FunctionPrior
from pyro_radial.infer.elbo import RadialELBO, check_weight
from pyro_radial.nn.likelihood import FUNCTION_SITE
from pyro_radial.poutine.local_reparameterization import check_drawn

__all__ = ["FunctionalELBO"]

# Where the function site of a trace keeps its :class:`_Measurement`.
MEASUREMENT = "measurement"

PLACES = ("both", "measurement_points")


class _Measurement(NamedTuple):
    """What the divergence of one loss is of."""

    #: All points at which functions are compared, ``[M, ...]``.
    points: Tensor
    #: The values of the functions there, ``[S, M, O]``, or their process.
    functions: Tensor | GuideProcess
    #: The sites of the guide that no function depends on, which have a KL each.
    others: frozenset[str]


class FunctionalELBO(RadialELBO):
    r"""The evidence lower bound of functions at finitely many measurement points.

    .. math:: -\mathcal{L} = E_q[-\log p(y \mid f)]
        + \lambda\, D\big(q(f^X) \,\|\, p(f^X)\big),

    where X holds the inputs of the call and the measurement points, :math:`f^X` the function values there, q is their
    distribution under the guide, p a prior on functions and D a divergence. The priors and densities of the weights are
    never evaluated. A latent site that the function does not depend on, such as a noise level, keeps its ordinary KL.

    The loss bounds the log evidence only if X holds *all* training inputs and the prior has no ``noise``. A
    divergence of a process, such as :class:`~pyro_radial.functional.MarginalKL`, takes the model linearized at the
    means of the guide's sites, in evaluation mode, instead of draws. The weights can keep a KL to their own prior,
    ``weight_space_kl`` times the terms' ``weight_space_kl``, which ``kl_weight`` does not scale.

    Source: Sun, Zhang, Shi and Grosse (2019), "Functional variational Bayesian neural networks", eq. 3 to 9; their
    weight of the divergence, one over the number of measurement points, is ``kl_weight`` here.

    :param FunctionPrior prior: a prior on functions, such as :class:`~pyro_radial.functional.GaussianProcess`.
    :param measurement_points: a function of the call's inputs that returns further points, or None for the inputs
        alone. :class:`~pyro_radial.functional.AdversarialPoints` take a step up the divergence in each training loss.
    :param divergence: one of :mod:`pyro_radial.functional.divergences`, by default ``SteinKL()``.
    :param compare_at: "both" for inputs and measurement points, "measurement_points" for these alone.
    :param float weight_space_kl: the weight of the KL of the weights that the function depends on.
    :param str function_site: the deterministic site of the function values; the model must run on inputs alone too.
    :param int num_functions: S, the functions drawn for one loss.
    :param kl_weight: :math:`\lambda`, a number or a function of the step, as in :class:`~pyro_radial.RadialELBO`.
    :param kwargs: other arguments of :class:`~pyro_radial.RadialELBO`, except the number of particles.
    :raises ValueError: for a model without the function site or with values that are not real or not S functions at the
        inputs, and naming the sites, for an auxiliary site of the guide that leads to weights and to other sites.

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
        measurement_points: MeasurementPoints | None = None,
        *,
        divergence: Divergence | ProcessDivergence | None = None,
        compare_at: Literal["both", "measurement_points"] = "both",
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
        if compare_at == "measurement_points" and measurement_points is None:
            raise ValueError("FunctionalELBO: measurement_points must be given to compare at them alone, got None")
        self.prior = prior
        self.measurement_points = measurement_points
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
        if self.measurement_points is not None:
            further = self._further_points(self.measurement_points, model, guide_trace, x, functions)
            functions, points = self._with_further(functions, x, further, model, guide_trace)
        site: Any = model_trace.nodes[self.function_site]
        site[MEASUREMENT] = _Measurement(points, functions, self._others)
        return model_trace, guide_trace

    def _with_further(
        self, functions: Tensor | GuideProcess, x: Tensor, further: Tensor, model: Any, guide_trace: Trace
    ) -> tuple[Tensor | GuideProcess, Tensor]:
        """The functions, known at the inputs, and the points, where the further ones come in."""
        alone = self.compare_at == "measurement_points"
        points = further if alone else torch.cat([x, further])
        if isinstance(functions, GuideProcess):
            return functions, points
        there = self._values_at(further, model, guide_trace)
        return there if alone else torch.cat([functions, there], 1), points

    def _values_at(self, points: Tensor, model: Any, guide_trace: Trace) -> Tensor:
        """The values of the same functions at other points."""
        return self._values(poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(points), len(points))

    def _further_points(
        self,
        measurement_points: MeasurementPoints,
        model: Any,
        guide_trace: Trace,
        x: Tensor,
        functions: Tensor | GuideProcess,
    ) -> Tensor:
        """The further points as they are now; in training, those that can take one step up the divergence."""
        further = measurement_points(x)
        if further.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"FunctionalELBO: measurement_points must give points of the shape of one input, {list(x.shape[1:])}, "
                f"got {list(further.shape[1:])}"
            )
        ascend = getattr(measurement_points, "ascend", None)
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
                    "FunctionalELBO: divergence must estimate a value that the measurement points can raise, such as "
                    f"GaussianKL or RegularizedKL, got {type(self.divergence).__name__}"
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
