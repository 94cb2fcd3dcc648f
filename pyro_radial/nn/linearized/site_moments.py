# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Means and covariances of the distributions that sites have."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal

from pyro_radial.distributions.wrappers import leaf, unmasked
from pyro_radial.nn.bayesian_module import BayesianModule, modules_of
from pyro_radial.nn.linearized.linearization import CovarianceBlock

Moments = tuple[dict[str, Tensor], list[CovarianceBlock]]


def sites_of_network(model: object) -> dict[str, torch.Size]:
    """Return the shapes of the sites of a model that are parameters of its networks, by name."""
    shapes = {}
    for network in modules_of(BayesianModule, model):
        if network.has_plain_sites:
            for name in network.sites_in_use:
                shapes[name] = network.skeleton.get_parameter(name).shape
    return shapes


def moments_of(site: str, distribution: Any) -> tuple[Tensor, CovarianceBlock] | None:
    """Return the mean and the covariance of a site without reading their values, or None if one is unknown."""
    distribution = unmasked(distribution)
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
def site_moments(posterior: Mapping[str, Any], needed: Mapping[str, torch.Size]) -> Moments:
    """Return the moments of all sites that have them; those needed must, of the given shapes, and not all be points."""
    found = {name: moments_of(name, distribution) for name, distribution in posterior.items()}
    known = {name: moments for name, moments in found.items() if moments is not None}
    for name, shape in needed.items():
        if name not in known:
            got = "none" if name not in posterior else type(leaf(posterior[name])).__name__
            raise ValueError(
                f"posterior must have a mean and a variance at site '{name}', got {got}"
            )
        if known[name][0].shape != shape:
            raise ValueError(
                f"posterior must have shape {tuple(shape)} at site '{name}', got {tuple(known[name][0].shape)}"
            )
    for name, (mean, block) in known.items():
        if not bool(mean.isfinite().all() & block.covariance.isfinite().all()):
            raise ValueError(
                f"posterior must have a finite mean and variance at site '{name}', got NaN or infinity"
            )
    blocks = [block for _, block in known.values()]
    # AutoCorrelated gives its sites their joint covariance; a part without the others has its marginal.
    joint_parts = [part.joint for part in posterior.values() if hasattr(part, "joint")]
    joints = {joint.sites: joint for joint in joint_parts}
    for sites, joint in joints.items():
        if known.keys() >= set(sites):
            blocks = [block for block in blocks if block.sites[0] not in sites]
            blocks.append(joint)
    if not any(bool((block.covariance != 0).any()) for block in blocks):
        raise ValueError(
            f"posterior must have variances, got {'a point' if known else 'none'} at {sorted(posterior)}: its "
            "functions are one function; use a guide such as AutoRadial or AutoMeanField"
        )
    return {name: mean for name, (mean, _) in known.items()}, blocks
