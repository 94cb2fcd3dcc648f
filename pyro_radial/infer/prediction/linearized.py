# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a network's outputs from one pass: the network linearized at the posterior's means."""

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor, nn

from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial._pyro.types import Guide, Model
from pyro_radial.infer.prediction.guide_draws import GuideDraws, check_global
from pyro_radial.nn.linearized.linearization import Linearization, undisturbed
from pyro_radial.nn.linearized.site_moments import SiteMoments, site_moments, sites_of_network
from pyro_radial.nn.modules import evaluating

Marginals = Callable[[Tensor], tuple[Tensor, Tensor]]


class LinearizedGuide(nn.Module):
    """Base class of guides with a normal posterior on weights of a network and points at all other sites.

    For ``method="linearized"`` and "probit", :func:`~pyro_radial.predict` asks such a guide for the moments of outputs.

    :param values: the values of all sites by name, with the weights at their means.
    """

    #: Whether draws of the weights have the posterior's widths too, not only the linearized network.
    weights_can_be_drawn = True

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = tuple(values)
        for position, value in enumerate(values.values()):
            self.register_buffer(f"value_{position}", value)

    def median(self) -> dict[str, Tensor]:
        """Return the values of all sites, with the weights at their means."""
        return {name: self.get_buffer(f"value_{i}") for i, name in enumerate(self._names)}

    def joint_marginals(self, model: Model) -> Marginals:
        """Return a function of rows: the means ``[N, *outputs]`` and covariances ``[N, O, O]`` of outputs."""
        raise NotImplementedError(f"{type(self).__name__} has no joint_marginals(model)")


def sample_noise(like: Tensor) -> Tensor:
    """Sample standard normal noise with the shape of a vector, at an auxiliary site."""
    return pyro.sample(
        "_weight_noise",
        dist.Normal(torch.zeros_like(like), 1.0).to_event(1),
        infer={"is_auxiliary": True},
    )


def probit_logits(f: Tensor, covariance: Tensor) -> Tensor:
    """Return the logits ``[N, *outputs]`` of the probit for means and covariances ``[N, O, O]``."""
    variance = covariance.diagonal(dim1=-2, dim2=-1).reshape_as(f)
    return f / (1.0 + math.pi / 8.0 * variance).sqrt()


def output_marginals(
    model: Model, guide: Guide, x: Tensor, method: str, function_site: str
) -> Marginals:
    """Return a function of rows: the means ``[N, *outputs]`` and covariances ``[N, O, O]`` of the outputs.

    :param x: a row of inputs, for a guide that takes inputs.
    """
    if isinstance(guide, LinearizedGuide):
        return guide.joint_marginals(model)
    mean, blocks = moments_for_network(model, joint_posterior(guide, x, method))
    return linearized_marginals(model, Linearization(model, mean, blocks, function_site))


def joint_posterior(guide: Guide, x: Tensor, method: str) -> dict[str, Any]:
    """Return the distributions of all sites of a guide, or of a list of guides; none may be inside a plate.

    :param x: a row of inputs, for a guide that takes inputs.
    """
    guides: list[Any] = list(guide) if isinstance(guide, AutoGuideList) else [guide]
    draws = GuideDraws(guide)
    posterior: dict[str, Any] = {}
    for member in guides:
        if not hasattr(member, "posterior"):
            raise ValueError(
                f"guide must have a method posterior() for method={method!r}, as the guides of this library have, got "
                f"{getattr(member, '__name__', type(member).__name__)}"
            )
        posterior |= member.posterior()
    with one_at_a_time(), evaluating(guide):
        check_global(draws.run(x), "method must be 'draws'", repr(method))
    return posterior


def moments_for_network(model: Model, posterior: dict[str, Any]) -> SiteMoments:
    """Return the moments of a guide's sites, among them all that are parameters of the model's networks."""
    try:
        return site_moments(posterior, sites_of_network(model))
    except ValueError as error:
        raise ValueError(f"guide: {error}") from None


def linearized_marginals(model: Model, linear: Linearization) -> Marginals:
    """Return a function of rows: the means and covariances of the outputs of a linearized model."""

    def marginals(rows: Tensor) -> tuple[Tensor, Tensor]:
        with undisturbed(), evaluating(model):
            f, covariance = linear.joint_marginals(rows)
        return f.reshape(len(f), *linear.structure(rows).shape), covariance

    return marginals


def draw_normals(
    mean: Tensor, covariance: Tensor, num_samples: int, noise: Tensor | None = None
) -> Tensor:
    """Draw from normals, ``[N, S, O]``, with means ``[N, O]`` and covariances ``[N, O, O]``, which may be singular.

    :param noise: standard normal numbers ``[S, O]`` for all rows; by default each row has its own.
    """
    covariance = covariance.double()
    factor, info = torch.linalg.cholesky_ex(covariance)
    failed = info > 0
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(covariance[failed])
        factor[failed] = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
    if noise is None:
        noise = torch.randn(
            len(mean), num_samples, mean.shape[-1], dtype=mean.dtype, device=mean.device
        )
    noise = noise.expand(len(mean), num_samples, mean.shape[-1])
    return torch.baddbmm(mean.unsqueeze(1), noise, factor.to(mean).mT)
