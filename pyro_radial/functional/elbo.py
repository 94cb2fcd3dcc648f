# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss with a prior on functions instead of weights."""

from collections.abc import Callable
from typing import Any, Literal

import pyro.poutine as poutine
import torch
from pyro.infer.util import validation_enabled
from torch import Tensor

from pyro_radial._pyro.checks import check_choice, positive_count, prefix_errors
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial._pyro.types import Guide, Model
from pyro_radial.functional.divergences.estimate import (
    Divergence,
    DivergenceEstimate,
    ProcessDivergence,
)
from pyro_radial.functional.divergences.process import LinearizedKL
from pyro_radial.functional.divergences.stein import SteinKL
from pyro_radial.functional.guide_process import GuideProcess, sites_led_to
from pyro_radial.functional.measurement_points import MeasurementPoints
from pyro_radial.functional.priors.function_prior import (
    FunctionPrior,
    check_finite,
    check_floating,
    check_prior,
)
from pyro_radial.infer.loss.elbo import Run, TermsELBO, check_weight
from pyro_radial.nn.likelihoods import FUNCTION_SITE
from pyro_radial.nn.linearized.linearization import Structure
from pyro_radial.poutine.local_reparameterization import check_drawn


class FunctionalELBO(TermsELBO):
    r"""The evidence lower bound of functions at finitely many measurement points.

    .. math:: -\mathcal{L} = E_q[-\log p(y \mid f)]
        + \lambda\, D\big(q(f^X) \,\|\, p(f^X)\big),

    where X holds the inputs and the measurement points, :math:`f^X` the function values there, q is their distribution
    under the guide, p a prior on functions and D a divergence. The densities of the weights are never evaluated. A
    latent site that the function does not depend on, such as a noise level, keeps its ordinary KL.

    The loss bounds the log evidence only if X holds *all* training inputs and the prior has no ``noise``. A
    divergence of a process, such as :class:`~pyro_radial.functional.LinearizedKL`, takes the model linearized at the
    means of the guide's sites, in evaluation mode, instead of draws.

    Source: Sun, Zhang, Shi and Grosse (2019), "Functional variational Bayesian neural networks", eq. 3 to 9; their
    weight of the divergence, one over the number of measurement points, is ``kl_weight`` here.

    :param FunctionPrior prior: a prior on functions, such as :class:`~pyro_radial.functional.GaussianProcess`.
    :param measurement_points: a function of the call's inputs that returns further points, such as
        :class:`~pyro_radial.functional.UniformBox`, or None for the inputs alone.
    :param divergence: one of :mod:`pyro_radial.functional.divergences`. By default the first loss chooses
        ``LinearizedKL()`` if the guide draws each site of the function from a distribution with a known mean and
        covariance, or as a part of one normal vector, and ``SteinKL()`` for other guides, known by their draws.
    :param compare_at: "both" for inputs and measurement points, "measurement_points" for these alone.
    :param float weight_space_kl: the weight of the KL of these weights to their own prior, whatever ``kl_weight``.
    :param str function_site: the deterministic site of the function values; the model must run on inputs alone too.
    :param int num_functions: S, the functions drawn for one loss.
    :param kl_weight: :math:`\lambda`, a number or a function of the step, as in :class:`~pyro_radial.TermsELBO`.
    :param kwargs: other arguments of :class:`~pyro_radial.TermsELBO`, except the number of particles.
    :raises ValueError: for a model without the function site or with values that are not real or not S functions at the
        inputs, and naming the sites, for an auxiliary site of the guide that leads to weights and to other sites.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel
        >>> from pyro_radial.functional import GaussianProcess, LinearizedKL, UniformBox
        >>> from pyro_radial.nn import likelihoods
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
        >>> model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=5, scale=0.1))
        >>> kernel = lambda a, b: torch.exp(-0.5 * (a - b.T) ** 2)
        >>> box = UniformBox([-2.0], [2.0], num_points=10)
        >>> elbo = FunctionalELBO(GaussianProcess(kernel), box, divergence=LinearizedKL(1e-3), num_functions=50)
        >>> elbo(model, AutoMeanField(model))(torch.randn(5, 1), torch.randn(5, 1)).backward()
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
        if reserved := kwargs.keys() & {"num_particles", "vectorize_particles"}:
            raise ValueError(
                f"{min(reserved)} must be left out, because num_functions is the number of draws"
            )
        super().__init__(
            positive_count("num_functions", num_functions),
            vectorize_particles=True,
            kl_weight=kl_weight,
            **kwargs,
        )
        check_prior(prior)
        self.divergence = divergence
        check_choice("compare_at", compare_at, ("both", "measurement_points"))
        if compare_at == "measurement_points" and measurement_points is None:
            raise ValueError("measurement_points must be given to compare at them alone, got None")
        self.prior = prior
        self.measurement_points = measurement_points
        self.compare_at = compare_at
        self.weight_space_kl = check_weight(weight_space_kl, "weight_space_kl")
        self.function_site = function_site
        # The default divergence and the sites that the function depends on are found once, like the nesting of plates,
        # and without random numbers of the loss, so that the first loss draws the same as any other.
        self._default_divergence: Divergence | ProcessDivergence | None = None
        self._sites_with_kl: frozenset[str] | None = None
        self._structures: dict[tuple[object, ...], Structure] = {}

    def _kls(self, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the divergence of the functions with the KLs of the other sites, and the KLs of the weights."""
        x = _inputs(run.args)
        functions: Tensor | GuideProcess = self._values(run.model_trace, len(x))
        divergence = self.divergence or self._default_divergence
        if divergence is None:
            # The guide has known moments, or is known by draws.
            process = GuideProcess(run, self.function_site, self._structures)
            with seeded(0, x.device):
                is_known = self._sites_of_function(run, x) <= process.sites_with_moments
            divergence = self._default_divergence = LinearizedKL() if is_known else SteinKL()
        if isinstance(divergence, ProcessDivergence):
            functions = GuideProcess(run, self.function_site, self._structures)
        else:
            for name, latent in run.guide_trace.iter_stochastic_nodes():
                check_drawn(name, latent, "guide must draw whole functions")
        if self._sites_with_kl is None:
            with seeded(0, x.device):
                self._sites_with_kl = self._find_sites_with_kl(run, x, functions)
        sites_with_kl = self._sites_with_kl
        points = x
        if self.measurement_points is not None:
            drawn_points = self.measurement_points(x)
            if drawn_points.shape[1:] != x.shape[1:]:
                raise ValueError(
                    f"measurement_points must give points of the shape of one input, {list(x.shape[1:])}, got "
                    f"{list(drawn_points.shape[1:])}"
                )
            check_floating("measurement_points", drawn_points)
            check_finite("measurement_points", drawn_points)
            functions, points = self._with_points(functions, x, drawn_points, run)
        estimate = self._estimate(divergence, functions, points)
        value = 0.0 if estimate.value is None else estimate.value
        # The value of one, the gradient of the other; summed over the particles as all terms are.
        differentiable = value + estimate.surrogate - estimate.surrogate.detach()
        kls = {self.function_site: self.num_particles * differentiable}
        kls |= self._site_kls(run, lambda name: name in sites_with_kl)
        if not self.weight_space_kl:
            return kls, {}
        return kls, self._site_kls(run, lambda name: name not in sites_with_kl)

    def _with_points(
        self, functions: Tensor | GuideProcess, x: Tensor, drawn_points: Tensor, run: Run
    ) -> tuple[Tensor | GuideProcess, Tensor]:
        """Return the functions at all points where they are compared with the prior, and these points."""
        without_inputs = self.compare_at == "measurement_points"
        points = drawn_points if without_inputs else torch.cat([x, drawn_points])
        if isinstance(functions, GuideProcess):
            return functions, points
        replayed = poutine.replay(self._vectorized_num_particles(run.model), trace=run.guide_trace)
        trace = poutine.trace(replayed).get_trace(drawn_points)
        values = self._values(trace, len(drawn_points))
        return values if without_inputs else torch.cat([functions, values], 1), points

    def _values(self, trace: poutine.Trace, num_points: int) -> Tensor:
        """Return the function values of a run, ``[S, N, O]``."""
        site = self.function_site
        if site not in trace.nodes:
            raise ValueError(
                f"model must record a site '{site}', got none; record the function's values with "
                f'pyro.deterministic("{site}", values)'
            )
        value: Any = trace.nodes[site]["value"]
        if not value.is_floating_point():
            raise ValueError(f"site '{site}' must be real-valued, got {value.dtype}")
        lead = tuple(size for size in value.shape if size != 1)
        expected = tuple(size for size in (self.num_particles, num_points) if size != 1)
        if lead[: len(expected)] != expected:
            raise ValueError(
                f"site '{site}' must hold {self.num_particles} functions at {num_points} inputs, got shape "
                f"{tuple(value.shape)}"
            )
        return value.reshape(self.num_particles, num_points, -1)

    def _estimate(
        self, divergence: Divergence | ProcessDivergence, functions: Any, points: Tensor
    ) -> DivergenceEstimate:
        """Return the divergence, or raise a ValueError that names the site.

        Functions that are drawn get the prior's noise first, since the prior's own function values have it.
        """
        if self.prior.noise and isinstance(functions, Tensor):
            functions = functions + self.prior.noise * torch.randn_like(functions)
        with prefix_errors(
            f"the divergence refuses site '{self.function_site}', with values at {len(points)} points of "
            f"num_functions = {self.num_particles} functions"
        ):
            return divergence(functions, points, self.prior)

    def _find_sites_with_kl(
        self, run: Run, x: Tensor, functions: Tensor | GuideProcess
    ) -> frozenset[str]:
        """Return the sites of the guide that have a KL of their own.

        These are the latent sites of the model that no function value depends on, and the auxiliary sites that lead to
        them. An auxiliary site that leads to a weight is part of the function, and the divergence knows its density.
        """
        weights = (
            functions.sites(x)
            if isinstance(functions, GuideProcess)
            else self._sites_of_function(run, x)
        )
        names = {name for name, _ in run.guide_trace.iter_stochastic_nodes()}
        auxiliary = names - set(run.model_trace.nodes)
        sites_with_kl = names - auxiliary - weights
        guide = self._vectorized_num_particles(run.guide)
        for name, leads_to in sites_led_to(guide, auxiliary, run.args, run.kwargs).items():
            outside_function = sorted(leads_to - weights)
            if outside_function and leads_to & weights:
                raise ValueError(
                    f"guide must draw sites {outside_function}, on which no function value depends, apart from the "
                    f"function's sites, got auxiliary site '{name}' that leads to both and has one density; give these "
                    "sites a guide of their own in an AutoGuideList, or use AutoNormal or AutoMeanField"
                )
            if outside_function:
                sites_with_kl.add(name)
        return frozenset(sites_with_kl)

    def _sites_of_function(self, run: Run, x: Tensor) -> frozenset[str]:
        """Return the latent sites that the function values depend on, found by a gradient."""
        trace = run.guide_trace.copy()
        leaves = {}
        for name, site in dict[str, Any](trace.iter_stochastic_nodes()).items():
            leaves[name] = site["value"].detach().requires_grad_()
            trace.nodes[name] = {**site, "value": leaves[name]}
        with torch.enable_grad():
            replayed = poutine.replay(self._vectorized_num_particles(run.model), trace=trace)
            values = self._values(poutine.trace(replayed).get_trace(x), len(x))
            gradients = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
        return frozenset(
            name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None
        )

    def _guess_max_plate_nesting(
        self, model: Model, guide: Guide, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Guess as Pyro does, but without log-densities and without random numbers of the loss."""
        with validation_enabled(False), seeded(0, _inputs(args).device):
            super()._guess_max_plate_nesting(model, guide, args, kwargs)


def _inputs(args: tuple[object, ...]) -> Tensor:
    if not args or not isinstance(args[0], Tensor):
        got = type(args[0]).__name__ if args else "none"
        raise ValueError(f"the model's first argument must be the tensor of inputs, got {got}")
    return args[0]
