# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a network's outputs from one pass: the network linearized at the posterior's means."""

from typing import Any

import torch
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor
from tqdm.auto import tqdm

from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.infer.prediction.guide_draws import GuideDraws, check_global
from pyro_radial.infer.training.data import evaluating
from pyro_radial.nn.linearized.linearization import Linearization, undisturbed
from pyro_radial.nn.linearized.site_moments import site_moments, sites_of_network

__all__ = ["linearized_samples", "posterior_with_moments"]


def linearized_samples(
    model: Any, posterior: Any, x: Tensor, num_samples: int, chunk_size: int, function_site: str, progress: bool
) -> Tensor:
    """Draw outputs ``[S, N, *outputs]``: jointly for one input, independently for different inputs."""
    try:
        mean, blocks = site_moments(posterior, sites_of_network(model))
    except ValueError as error:
        raise ValueError(f"guide: {error}") from None
    linear = Linearization(model, mean, blocks, function_site)
    device = next(iter(mean.values())).device
    samples: Tensor | None = None
    for start in tqdm(range(0, len(x), chunk_size), desc="predict", unit="pass", disable=not progress):
        rows = slice(start, start + chunk_size)
        with undisturbed(), evaluating(model):
            f, covariance = linear.joint_marginals(x[rows].to(device))
        if samples is None:
            shape = linear.structure(x[rows]).shape
            samples = f.new_empty(len(x), num_samples, *shape)
        samples[rows] = _draws(f, covariance, num_samples).reshape(len(f), num_samples, *shape)
    assert samples is not None
    return samples.transpose(0, 1)


def posterior_with_moments(guide: Any, x: Tensor) -> dict[str, Any]:
    """The posterior of a guide by site, or a ValueError if it has none, or has sites inside a plate."""
    parts: list[Any] = list(guide) if isinstance(guide, AutoGuideList) else [guide]
    draws = GuideDraws(guide)
    for part in parts:
        if not hasattr(part, "posterior"):
            raise ValueError(
                "guide must have a method posterior() for method='linearized', as the guides of this library have, got "
                f"{getattr(part, '__name__', type(part).__name__)}"
            )
    with one_at_a_time(), evaluating(guide):
        check_global(draws.draw(x), "method must be 'draws'", "'linearized'")
    return {name: distribution for part in parts for name, distribution in part.posterior().items()}


def _draws(mean: Tensor, covariance: Tensor, num_samples: int) -> Tensor:
    """Normal draws ``[N, S, O]`` with means ``[N, O]`` and covariances ``[N, O, O]``, which may be singular."""
    covariance = covariance.double()
    factor, info = torch.linalg.cholesky_ex(covariance)
    failed = info > 0
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(covariance[failed])
        factor[failed] = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
    noise = torch.randn(len(mean), num_samples, mean.shape[-1], dtype=mean.dtype, device=mean.device)
    return torch.baddbmm(mean.unsqueeze(1), noise, factor.to(mean).mT)
