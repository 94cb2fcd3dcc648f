# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a network's outputs from one pass: the network linearized at the posterior's means."""

import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor
from tqdm.auto import tqdm

from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial._pyro.types import Guide, Model
from pyro_radial.infer.prediction.guide_draws import GuideDraws, check_global
from pyro_radial.nn.linearized.linearization import Linearization, undisturbed
from pyro_radial.nn.linearized.site_moments import site_moments, sites_of_network
from pyro_radial.nn.modules import evaluating

Marginals = Callable[[Tensor], tuple[Tensor, Tensor]]


def draw_linearized(
    marginals: Marginals,
    x: Tensor,
    num_samples: int | None,
    chunk_size: int,
    device: torch.device,
    progress: bool,
) -> Tensor:
    """Draw ``[S, N, *outputs]``, jointly for the outputs of one input; without a number, return the probit's logits."""
    samples: list[Tensor] = []
    for rows in tqdm(x.split(chunk_size), desc="predict", unit="pass", disable=not progress):
        f, covariance = marginals(rows.to(device))
        if num_samples is None:
            samples.append(probit_logits(f, covariance).unsqueeze(0))
        else:
            draws = _draw_normals(f.reshape(len(f), -1), covariance, num_samples)
            samples.append(draws.transpose(0, 1).reshape(num_samples, *f.shape))
    return torch.cat(samples, 1)


def probit_logits(f: Tensor, covariance: Tensor) -> Tensor:
    """Return the logits ``[N, *outputs]`` of the probit for means and covariances ``[N, O, O]``."""
    variance = covariance.diagonal(dim1=-2, dim2=-1).reshape_as(f)
    return f / (1.0 + math.pi / 8.0 * variance).sqrt()


def output_marginals(model: Model, posterior: Any, function_site: str) -> Marginals:
    """Return a function of rows: the means ``[N, *outputs]`` and covariances ``[N, O, O]`` of the outputs."""
    if hasattr(posterior, "joint_marginals"):
        exact: Marginals = posterior.joint_marginals(model)
        return exact
    try:
        mean, blocks = site_moments(posterior, sites_of_network(model))
    except ValueError as error:
        raise ValueError(f"guide: {error}") from None
    linear = Linearization(model, mean, blocks, function_site)

    def marginals(rows: Tensor) -> tuple[Tensor, Tensor]:
        with undisturbed(), evaluating(model):
            f, covariance = linear.joint_marginals(rows)
        return f.reshape(len(f), *linear.structure(rows).shape), covariance

    return marginals


def posterior_with_moments(guide: Guide, x: Tensor, method: str) -> Any:
    """Return a guide's posterior by site, or the guide if it knows the outputs' moments; not for sites in a plate."""
    if hasattr(guide, "joint_marginals"):
        return guide
    parts: list[Any] = list(guide) if isinstance(guide, AutoGuideList) else [guide]
    draws = GuideDraws(guide)
    for part in parts:
        if not hasattr(part, "posterior"):
            raise ValueError(
                f"guide must have a method posterior() for method={method!r}, as the guides of this library have, got "
                f"{getattr(part, '__name__', type(part).__name__)}"
            )
    with one_at_a_time(), evaluating(guide):
        check_global(draws.draw(x), "method must be 'draws'", repr(method))
    posterior: dict[str, Any] = {}
    for part in parts:
        posterior |= part.posterior()
    return posterior


def _draw_normals(mean: Tensor, covariance: Tensor, num_samples: int) -> Tensor:
    """Draw from normals, ``[N, S, O]``, with means ``[N, O]`` and covariances ``[N, O, O]``, which may be singular."""
    covariance = covariance.double()
    factor, info = torch.linalg.cholesky_ex(covariance)
    failed = info > 0
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(covariance[failed])
        factor[failed] = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
    noise = torch.randn(
        len(mean), num_samples, mean.shape[-1], dtype=mean.dtype, device=mean.device
    )
    return torch.baddbmm(mean.unsqueeze(1), noise, factor.to(mean).mT)
