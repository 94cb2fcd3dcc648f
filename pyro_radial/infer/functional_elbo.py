# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss with a prior on functions in the place of one on weights."""

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine import Trace
from torch import Tensor

from pyro_radial.functional.divergences import DivergenceEstimate, SteinKL
from pyro_radial.functional.priors import FunctionPrior
from pyro_radial.infer.elbo import RadialELBO

Context = Callable[[Tensor], Tensor]
Divergence = Callable[[Tensor, Tensor, FunctionPrior], DivergenceEstimate]


class FunctionalELBO(RadialELBO):
    r"""The evidence lower bound of functions on a finite measurement set.

    .. math:: -\mathcal{L} = E_q[-\log p(y \mid f)]
        + \lambda\, D\big(q(f^X) \,\|\, p(f^X)\big),

    with X the inputs of the call and further measurement points, :math:`f^X` the function values there, q their
    distribution under the guide's weights, p a prior over functions, and D a divergence between the two: by default the
    KL, its gradient by scores. The weights' own priors and densities are never evaluated, so that they may be anything;
    a latent site on which the function does not depend, such as a noise level, keeps its ordinary KL.

    It is a bound on the log evidence only where X holds *all* training inputs, since the KL on fewer points is smaller
    (Burt et al. 2020, "Understanding variational inference in function-space"); on a mini-batch the likelihood is
    scaled to all N data and D is that on X, unscaled. As X grows D grows to the KL between the processes, which is
    infinite for a finite network under most Gaussian process priors: on few points it is finite, and
    :class:`~pyro_radial.functional.RegularisedKL` is on all. Under a smooth kernel a few points are enough for a
    divergence of no use; a prior with ``noise`` is compared with the network's values with as much noise, as in the
    paper's code. That divergence is smaller than the one of the functions themselves, so the loss bounds nothing then.

    Source: Sun, Zhang, Shi and Grosse (2019), "Functional variational Bayesian neural networks", eq. 3 to 9; they weigh
    the divergence by one over the size of the measurement set, which is ``kl_weight`` here.

    All functions of a step are drawn at once, so :math:`f` must not depend on the data of a mini-batch but for its
    inputs. Works with ``SVI``, and as ``elbo(model, guide)`` with a torch optimizer; ``fit`` takes it as its loss.

    :param FunctionPrior prior: a prior over functions, such as :class:`~pyro_radial.functional.GaussianProcess`.
    :param context: a function of the call's inputs that returns further measurement points, or None for the inputs
        alone; see :mod:`pyro_radial.functional.contexts`. One with a method ``ascend``, such as
        :class:`~pyro_radial.functional.AdversarialPoints`, takes a step up the divergence for each training loss.
    :param divergence: see :mod:`pyro_radial.functional.divergences`.
    :param str function_site: the deterministic site where the model records the function values; its first argument
        are the inputs, and it runs on them alone as well.
    :param int num_functions: S, the functions drawn for one loss.
    :param kl_weight: :math:`\lambda`, a number or a function of the step, as in :class:`~pyro_radial.RadialELBO`.
    :param kwargs: as there, but for the particles.
    :raises ValueError: for a model without the function site, with values that are not real-valued or not S functions
        at the inputs, and from the prior, the context and the divergence.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel
        >>> from pyro_radial.functional import GaussianKL, GaussianProcess, UniformBox
        >>> from pyro_radial.nn import likelihoods
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
        >>> model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=5, scale=0.1))
        >>> kernel = lambda a, b: torch.exp(-0.5 * (a - b.T) ** 2)
        >>> box = UniformBox([-2.0], [2.0], num_points=10)
        >>> elbo = FunctionalELBO(GaussianProcess(kernel), box, divergence=GaussianKL(), num_functions=50)
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
        divergence: Divergence | None = None,
        function_site: str = "f",
        num_functions: int = 100,
        kl_weight: float | Callable[[int], float] = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_functions, vectorize_particles=True, kl_weight=kl_weight, **kwargs)
        self.prior = prior
        self.context = context
        self.divergence = SteinKL() if divergence is None else divergence
        self.function_site = function_site
        self._points: Tensor | None = None
        self._functions: Tensor | None = None
        self._function_sites: frozenset[str] | None = None

    def _guess_max_plate_nesting(self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As Pyro's, without the log-densities that it computes on the way."""
        with poutine.block():
            traces = [poutine.trace(fn).get_trace(*args, **kwargs) for fn in (guide, model)]
        stacks = (site["cond_indep_stack"] for trace in traces for site in trace.nodes.values() if "fn" in site)
        nesting = max((-frame.dim for stack in stacks for frame in stack if frame.vectorized), default=0)
        # With the plate of the particles, as Pyro counts.
        self.max_plate_nesting = nesting + (self.num_particles > 1)

    def _get_trace(self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Trace, Trace]:
        """Model and guide on the data, and the values of the same functions at the measurement points."""
        model_trace, guide_trace = super()._get_trace(model, guide, args, kwargs)
        x = _inputs(args)
        values = self._values(model_trace, len(x))
        if self._function_sites is None:
            self._function_sites = self._sites_of_the_function(model, guide_trace, x)
        if self.context is not None:
            further = self.context(x)
            if further.shape[1:] != x.shape[1:]:
                raise ValueError(
                    f"FunctionalELBO: context gives points of shape {list(further.shape[1:])}, but an input of the "
                    f"model has shape {list(x.shape[1:])}"
                )
            if hasattr(self.context, "ascend") and torch.is_grad_enabled():
                self._let_context_ascend(model, guide_trace, x, values)
            values = torch.cat([values, self._values_at(further, model, guide_trace)], 1)
            x = torch.cat([x, further])
        self._points, self._functions = x, values
        return model_trace, guide_trace

    def _values_at(self, points: Tensor, model: Any, guide_trace: Trace) -> Tensor:
        """The values of the same functions at other points."""
        return self._values(poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(points), len(points))

    def _let_context_ascend(self, model: Any, guide_trace: Trace, x: Tensor, values: Tensor) -> None:
        """One step of measurement points that seek a larger divergence; the functions stay as they are."""
        fixed = guide_trace.copy()
        fixed.detach_()

        def divergence_at(points: Tensor) -> Tensor:
            both = torch.cat([values.detach(), self._values_at(points, model, fixed)], 1)
            estimate = self._divergence(both, torch.cat([x, points]))
            if estimate.value is None:
                raise ValueError(
                    f"FunctionalELBO: {type(self.divergence).__name__} estimates no value that the context could "
                    "raise; adversarial points need GaussianKL or RegularisedKL"
                )
            return estimate.surrogate

        assert self.context is not None
        self.context.ascend(divergence_at)  # type: ignore[attr-defined]

    def _values(self, trace: Trace, num_points: int) -> Tensor:
        """The function values of a run, ``[S, N, O]``."""
        if self.function_site not in trace.nodes:
            raise ValueError(
                f"FunctionalELBO: the model has no site '{self.function_site}'; record the function's values with "
                f'pyro.deterministic("{self.function_site}", values)'
            )
        value: Any = trace.nodes[self.function_site]["value"]
        if not value.is_floating_point():
            raise ValueError(f"FunctionalELBO: site '{self.function_site}' must be real-valued, but is {value.dtype}")
        lead = tuple(size for size in value.shape if size != 1)
        expected = tuple(size for size in (self.num_particles, num_points) if size != 1)
        if lead[: len(expected)] != expected:
            raise ValueError(
                f"FunctionalELBO: site '{self.function_site}' has shape {tuple(value.shape)}, but must hold "
                f"{self.num_particles} functions at {num_points} inputs"
            )
        return value.reshape(self.num_particles, num_points, -1)

    def _divergence(self, functions: Tensor, points: Tensor) -> DivergenceEstimate:
        """The divergence, with the noise that the prior's function values carry on the network's as well."""
        if self.prior.noise:
            functions = functions + self.prior.noise * torch.randn_like(functions)
        try:
            return self.divergence(functions, points, self.prior)
        except ValueError as error:
            raise ValueError(
                f"FunctionalELBO: the divergence refuses site '{self.function_site}', with values at {len(points)} "
                f"points of num_functions = {self.num_particles} functions: {error}"
            ) from error

    def _sites_of_the_function(self, model: Any, guide_trace: Trace, x: Tensor) -> frozenset[str]:
        """The latent sites that the function values depend on, found by a gradient once."""
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
        assert self._functions is not None
        assert self._points is not None
        assert self._function_sites is not None
        functions, points = self._functions, self._points
        self._functions = self._points = None
        estimate = self._divergence(functions, points)
        value = 0.0 if estimate.value is None else estimate.value
        # The value of one, the gradient of the other; summed over the particles as all terms are.
        divergence = value + estimate.surrogate - estimate.surrogate.detach()
        others = {
            name: self._site_kl(name, site, model_trace, guide_trace)
            for name, site in guide_trace.iter_stochastic_nodes()
            if name not in self._function_sites
        }
        return {self.function_site: self.num_particles * divergence, **others}


def _inputs(args: tuple[Any, ...]) -> Tensor:
    if not args or not isinstance(args[0], Tensor):
        raise ValueError("FunctionalELBO: the model's first argument must be the tensor of inputs")
    return args[0]
