# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Means and covariances of a posterior's sites, checked."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_radial.distributions.wrappers import leaf, unmasked
from pyro_radial.functional.linearization import CovarianceBlock

__all__ = ["joint_moments", "moments_of", "site_moments"]

Moments = tuple[dict[str, Tensor], list[CovarianceBlock]]


def moments_of(site: str, distribution: Any) -> tuple[Tensor, CovarianceBlock] | None:
    """The mean of a site and its covariance, without a look at their values; None where one is not known."""
    distribution = unmasked(distribution)
    try:
        mean: Tensor = distribution.mean
        full = getattr(leaf(distribution), "covariance_matrix", None)
        if full is None:
            return mean, CovarianceBlock((site,), distribution.variance.expand(mean.shape))
    except (NotImplementedError, AttributeError):
        return None
    return mean, CovarianceBlock((site,), full.expand(*mean.shape, mean.shape[-1]), is_full=True)


@torch.no_grad()
def site_moments(posterior: Mapping[str, Any], needed: Mapping[str, torch.Size]) -> Moments:
    """Those of all sites that have them.

    :param posterior: distributions by site name.
    :param needed: the shapes of the sites that must have them.
    :raises ValueError: naming the site of one that has none or other than finite ones; for a posterior that is a point.
    """
    found = {name: moments_of(name, distribution) for name, distribution in posterior.items()}
    known = {name: moments for name, moments in found.items() if moments is not None}
    for name, shape in needed.items():
        if name not in known:
            got = "none" if name not in posterior else f"a {type(leaf(posterior[name])).__name__}"
            raise ValueError(f"posterior must have a mean and a variance at site '{name}', got {got}")
        if known[name][0].shape != shape:
            raise ValueError(
                f"posterior must have shape {tuple(shape)} at site '{name}', got {tuple(known[name][0].shape)}"
            )
    for name, (mean, block) in known.items():
        if not bool(mean.isfinite().all() & block.covariance.isfinite().all()):
            raise ValueError(f"posterior must have a finite mean and variance at site '{name}', got NaN or infinity")
    blocks = [block for _, block in known.values()]
    if not any(bool((block.covariance != 0).any()) for block in blocks):
        raise ValueError(
            f"posterior must have variances, got {'a point' if known else 'none'} at {sorted(posterior)}: its "
            "functions are one function; use a guide such as AutoRadial or AutoMeanField"
        )
    return {name: mean for name, (mean, _) in known.items()}, blocks


@torch.no_grad()
def joint_moments(posterior: Any, needed: Mapping[str, torch.Size]) -> Moments:
    """Those of all sites together.

    :param posterior: one normal distribution of all elements of these sites, in this order.
    :param needed: the sites' shapes.
    :raises ValueError: for any other.
    """
    if not isinstance(posterior, MultivariateNormal):
        raise ValueError(
            "posterior must be distributions by site name, as guide.posterior() returns, or one MultivariateNormal of "
            f"all weights, got {type(posterior).__name__}"
        )
    sizes = [math.prod(shape) for shape in needed.values()]
    if not needed or posterior.mean.shape != (sum(sizes),):
        raise ValueError(
            f"posterior must be of the {sum(sizes)} weights of sites {list(needed)}, or be given by site name, got one "
            f"of shape {tuple(posterior.mean.shape)}"
        )
    if not bool(posterior.mean.isfinite().all() & posterior.covariance_matrix.isfinite().all()):
        raise ValueError("posterior must have a finite mean and covariance, got NaN or infinity")
    parts = posterior.mean.split(sizes)
    mean = {name: part.reshape(shape) for part, (name, shape) in zip(parts, needed.items(), strict=True)}
    return mean, [CovarianceBlock(tuple(needed), posterior.covariance_matrix, is_full=True)]
