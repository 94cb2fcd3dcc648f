# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The process of a guide in training: the model linearized at the means of the guide's sites."""

from collections.abc import Callable
from typing import Any

from pyro.distributions import Delta
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_radial.distributions.constraints import is_real
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.functional.joint_posterior import joint_posteriors
from pyro_radial.functional.linearization import CovarianceBlock, Linearization, Structure
from pyro_radial.functional.priors.site_moments import moments_of
from pyro_radial.infer.site_kl import own_distribution
from pyro_radial.infer.training.data import evaluating

__all__ = ["GuideProcess"]


class GuideProcess:
    """The function values' moments under a guide, differentiable in its parameters.

    The model runs in evaluation mode: units are not dropped, and running statistics are used and stay as they are.

    :param model: a Pyro model.
    :param Trace model_trace: a run of it on that of the guide.
    :param Trace guide_trace: a run of the guide.
    :param str function_site: the deterministic site of the function's values.
    :param structures: as of :class:`~pyro_radial.functional.linearization.Linearization`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        model_trace: Trace,
        guide_trace: Trace,
        function_site: str,
        structures: dict[Any, Structure],
    ) -> None:
        mean: dict[str, Tensor] = {}
        blocks: list[CovarianceBlock] = []
        for means, block in joint_posteriors(model_trace, guide_trace):
            mean |= means
            blocks.append(block)
        for name, site in model_trace.iter_stochastic_nodes():
            if name in mean:
                continue
            distribution = None if site_is_subsample(site) else _posterior(name, site, guide_trace)
            moments = None if distribution is None else moments_of(name, distribution)
            if moments is not None:
                mean[name], block = moments
                blocks.append(block)
        self._model = model
        self._linearization = Linearization(model, mean, blocks, function_site, structures)

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each function value, ``[N, O]``.

        :raises ValueError: naming the site, for one that the function depends on whose posterior has none.
        """
        with evaluating(self._model):
            return self._linearization.marginals(x)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances over points of each output, ``[O, N, N]``, in float64.

        :raises ValueError: as :meth:`marginals`.
        """
        with evaluating(self._model):
            return self._linearization.moments(x)

    def sites(self, x: Tensor) -> frozenset[str]:
        """The sites that the function depends on.

        :raises ValueError: as :meth:`marginals`.
        """
        with evaluating(self._model):
            return frozenset(self._linearization.structure(x).sites)


def _posterior(name: str, site: Any, guide_trace: Trace) -> Any:
    """The distribution of a site in a guide, before a plate of particles; None where it is not known."""
    if name not in guide_trace:
        return None
    distribution = own_distribution(guide_trace.nodes[name])
    if not isinstance(leaf(distribution), Delta):
        return distribution
    # Pyro's AutoNormal draws the value apart, and then puts it at the site.
    drawn_apart: Any = guide_trace.nodes.get(f"{name}_unconstrained")
    if drawn_apart is not None:
        return own_distribution(drawn_apart) if is_real(site["fn"].support) else None
    # A point, unless it may be computed from something drawn.
    is_drawn = any(
        (other["infer"] or {}).get("is_auxiliary", False) for _, other in guide_trace.iter_stochastic_nodes()
    )
    return None if is_drawn else distribution
