# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The distribution of each site in a trained guide: of this library, or of Pyro's whose sites are independent."""

from collections.abc import Iterator, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuideList, AutoNormal
from torch import Tensor
from torch.distributions import biject_to

from pyro_radial._pyro.compat import initial_scale, loc_and_scale
from pyro_radial.distributions.constraints import is_real

__all__ = ["parts", "posterior_of", "scale_change"]


def parts(guide: Any) -> list[Any]:
    """The guides in a list of guides, or the one that is none."""
    return [p for part in guide for p in parts(part)] if isinstance(guide, AutoGuideList) else [guide]


@torch.no_grad()
def posterior_of(guide: Any) -> dict[str, Any]:
    """``{site: distribution}`` on each site's own support, detached from training.

    :param guide: one with a method ``posterior()``, Pyro's ``AutoNormal`` or ``AutoDiagonalNormal``, an
        ``AutoGuideList`` of such, or distributions by site name.
    :raises ValueError: for another guide, whose sites need not be independent.
    :raises RuntimeError: for a guide without parameters.
    """
    if isinstance(guide, Mapping):
        return dict(guide)
    posterior: dict[str, Any] = {}
    for part in parts(guide):
        if hasattr(part, "posterior"):
            posterior |= part.posterior()
        elif _is_factorized_normal(part):
            posterior |= {name: _pushforward(site, *normal) for name, site, *normal in _normals(part)}
        else:
            raise ValueError(
                "guide must have a method posterior(), as AutoRadial and AutoMeanField have, or be Pyro's AutoNormal "
                f"or AutoDiagonalNormal, got {type(part).__name__}; use one of these, or give its distributions by "
                "site name, {site: distribution}"
            )
    return posterior


@torch.no_grad()
def scale_change(part: Any) -> dict[str, float]:
    """How far the scales of each site have moved from their start, as ``AutoRadial.scale_change`` says; else empty."""
    if hasattr(part, "scale_change"):
        change: dict[str, float] = part.scale_change()
        return change
    if not _is_factorized_normal(part):
        return {}
    ratios = {name: scale.double() / initial_scale(part) for name, _, _, scale in _normals(part)}
    return {name: float(ratio.log().square().mean().sqrt()) for name, ratio in ratios.items()}


def _is_factorized_normal(part: Any) -> bool:
    """Whether this is one of Pyro's two, or a subclass that samples as it does."""
    return any(isinstance(part, cls) and type(part).forward is cls.forward for cls in (AutoNormal, AutoDiagonalNormal))


def _normals(part: Any) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
    """The name of each site, the site, and the mean and standard deviation of its normal in unconstrained space."""
    if part.prototype_trace is None:
        raise RuntimeError(f"{type(part).__name__} has no parameters yet; train it first")
    position = 0
    for name, site in part.prototype_trace.iter_stochastic_nodes():
        if isinstance(part, AutoNormal):
            loc, scale = loc_and_scale(part, name)
        else:
            # One vector for all sites, in the model's order.
            shape = biject_to(site["fn"].support).inverse_shape(site["value"].shape)
            own = slice(position, position + shape.numel())
            loc, scale = part.loc[own].view(shape), part.scale[own].view(shape)
            position = own.stop
        yield name, site, loc.detach().clone(), scale.detach().clone()


def _pushforward(site: Any, loc: Tensor, scale: Tensor) -> Any:
    # A transform may change the number of event dimensions, as the one of a covariance does.
    normal = dist.Normal(loc, scale).to_event(site["fn"].event_dim + loc.dim() - site["value"].dim())
    support = site["fn"].support
    if is_real(support):
        return normal
    return dist.TransformedDistribution(normal, [biject_to(support).with_cache()], validate_args=False)
