# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a distribution that are spread more evenly than independent ones."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import (
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
)

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.numerics import append_dims, event_norm


def even_draws(distribution: Any, number: int) -> Tensor:
    r"""Draw so many values ``[number, *shape]``, each of which has the distribution.

    Draws of normal, multivariate normal and radial distributions come in pairs :math:`m + d, m - d` around the mean,
    one half of the draws after the other, so that errors of first order cancel. The radii of radial pairs are one of
    each of the equally likely intervals of a half-normal, in random order. Other distributions have independent draws.

    Source: Owen (2013), "Monte Carlo theory, methods and examples", sections 8.2 and 8.4.
    """
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    if isinstance(distribution, TransformedDistribution):
        values = even_draws(distribution.base_dist, number)
        for transform in distribution.transforms:
            values = transform(values)
        return values
    num_pairs = -(-number // 2)
    if isinstance(distribution, MultivariateNormal | LowRankMultivariateNormal):
        half = distribution.sample((num_pairs,))
        return torch.cat([half, (2.0 * distribution.loc - half)[: number - num_pairs]])
    if number == 1 or not (
        _draws_as(Normal, distribution) or _draws_as(RadialNormal, distribution)
    ):
        independent: Tensor = distribution.sample((number,))
        return independent
    loc, scale = distribution.loc, distribution.scale
    draws = loc.new_empty(number, *loc.shape)
    noise = draws[:num_pairs].normal_()
    if isinstance(distribution, RadialNormal) and distribution.num_elements > 1:
        norm = event_norm(noise, distribution.event_dim)
        radius = _even_half_normals(norm)
        noise.mul_(append_dims(radius / norm, distribution.event_dim).to(noise.dtype))
    torch.addcmul(loc, scale, noise[: number - num_pairs], value=-1.0, out=draws[num_pairs:])
    torch.addcmul(loc, scale, noise, out=noise)
    return draws


def _draws_as(kind: Any, distribution: Any) -> bool:
    """Whether its values are drawn as this class draws them; a subclass may draw in its own way."""
    if not isinstance(distribution, kind):
        return False
    subclass = type(distribution)
    return subclass.rsample is kind.rsample and subclass.sample is kind.sample


def _even_half_normals(like: Tensor) -> Tensor:
    """Return half-normal numbers of the shape ``[S, ...]``: along S, one in each of S equally likely intervals."""
    interval = torch.rand_like(like).argsort(0)
    probability = (interval + torch.rand_like(like)) / len(like)
    # The largest number below one keeps the radius finite.
    return dist.HalfNormal(1.0).icdf(probability.clamp_max(1.0 - torch.finfo(like.dtype).eps))
