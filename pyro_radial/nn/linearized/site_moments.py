# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Means and covariances of the distributions that sites have."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal

from pyro_radial.distributions.wrappers import leaf, remove_masks
from pyro_radial.nn.bayesian_module import BayesianModule, modules_of
from pyro_radial.nn.linearized.linearization import CovarianceBlock

SiteMoments = tuple[dict[str, Tensor], list[CovarianceBlock]]


def sites_of_network(model: object) -> dict[str, torch.Size]:
    """Return the shapes of the sites of a model that are parameters of its networks, by name."""
    shapes = {}
    for network in modules_of(BayesianModule, model):
        if network.has_plain_sites:
            for name in network.sites_in_use:
                shapes[name] = network.skeleton.get_parameter(name).shape
    return shapes


def moments_of_site(site: str, distribution: Any) -> tuple[Tensor, CovarianceBlock] | None:
    """Return the mean and the covariance of a site without reading their values, or None if one is unknown."""
    distribution = remove_masks(distribution)
    try:
        mean: Tensor = distribution.mean
        normal = leaf(distribution)
        if isinstance(normal, LowRankMultivariateNormal) and normal.batch_shape.numel() == 1:
            # Its full covariance may be too large.
            variance = normal.cov_diag.reshape(mean.shape)
            factor = normal.cov_factor.reshape(mean.numel(), -1)
            return mean, CovarianceBlock((site,), variance, factor=factor)
        full = getattr(normal, "covariance_matrix", None)
        if full is None:
            return mean, CovarianceBlock((site,), distribution.variance.expand(mean.shape))
    except (NotImplementedError, AttributeError):
        return None
    return mean, CovarianceBlock((site,), full.expand(*mean.shape, mean.shape[-1]), is_full=True)


@torch.no_grad()
def site_moments(posterior: Mapping[str, Any], needed: Mapping[str, torch.Size]) -> SiteMoments:
    """Return the means of all sites with moments, by name, and the blocks of their covariance.

    :param needed: the shapes of the sites that must have moments.
    :raises ValueError: for a needed site without moments or of another shape, moments that are not finite, and a
        posterior without any variance.
    """
    mean: dict[str, Tensor] = {}
    marginals: dict[str, CovarianceBlock] = {}
    for name, distribution in posterior.items():
        moments = moments_of_site(name, distribution)
        if moments is not None:
            mean[name], marginals[name] = moments
    for name, shape in needed.items():
        if name not in mean:
            got = "none" if name not in posterior else type(leaf(posterior[name])).__name__
            raise ValueError(
                f"posterior must have a mean and a variance at site '{name}', got {got}"
            )
        if mean[name].shape != shape:
            raise ValueError(
                f"posterior must have shape {tuple(shape)} at site '{name}', got {tuple(mean[name].shape)}"
            )
    for name, block in marginals.items():
        if not bool(mean[name].isfinite().all() & block.covariance.isfinite().all()):
            raise ValueError(
                f"posterior must have a finite mean and variance at site '{name}', got NaN or infinity"
            )
    blocks = list(marginals.values())
    if not any(bool((block.covariance != 0).any()) for block in blocks):
        raise ValueError(
            f"posterior must have variances, got {'a point' if mean else 'none'} at {sorted(posterior)}: its "
            "functions are one function; use a guide such as AutoRadial or AutoMeanField"
        )
    return mean, blocks
