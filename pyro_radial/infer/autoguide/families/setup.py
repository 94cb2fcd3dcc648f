# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""From a site in Pyro's trace of a model to what a family sees of it."""

from collections.abc import Mapping
from typing import Any

import torch
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import Transform

from pyro_radial._pyro.compat import periodic_repeat
from pyro_radial.infer.autoguide.families.family import Site

__all__ = ["as_one_number", "as_site", "initial_values"]


def as_site(name: str, prior_site: Any, transform: Transform | None, init_stddev: float) -> tuple[Site, Tensor]:
    """The site where a family makes its distribution, and its initial value there, plates at full size.

    :param str name: of the site.
    :param prior_site: the site in the trace.
    :param transform: from that space to the site's support.
    :param float init_stddev: the standard deviation to start at.
    :raises FloatingPointError: naming the site, for an initial value that is not finite there.
    """
    value = prior_site["value"].detach()
    unconstrained = value if transform is None else transform.inv(value)
    if not torch.isfinite(unconstrained).all():
        raise FloatingPointError(f"the initial value of site '{name}' is not finite")
    # A transform may change the number of event dimensions, as the one of a covariance does.
    event_dim = prior_site["fn"].event_dim + unconstrained.dim() - value.dim()
    unconstrained = _repeated_to_full_size(unconstrained, prior_site, event_dim)
    return Site(name, unconstrained.shape, event_dim, init_stddev, transform), unconstrained


def _repeated_to_full_size(value: Tensor, prior_site: Any, event_dim: int) -> Tensor:
    """The value of a subsampled site repeated to the size of its plates, so that every row has parameters."""
    for frame in prior_site["cond_indep_stack"]:
        full_size = frame.full_size or frame.size
        if full_size != frame.size:
            value = periodic_repeat(value, full_size, frame.dim - event_dim)
    return value.contiguous()


def initial_values(parameters: Mapping[str, PyroParam]) -> dict[str, Tensor]:
    """The tensors that parameters start at."""
    return {name: torch.as_tensor(parameter.init_value) for name, parameter in parameters.items()}


def as_one_number(spread: Tensor) -> Tensor:
    """The tensor, as a scalar where all its elements are one: a copy of all scales is worth saving."""
    first = spread.flatten()[0]
    return first.clone() if bool((spread == first).all()) else spread.clone()
