# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Families with a location and a scale for every element."""

from typing import Any

import torch
from pyro.distributions import constraints
from pyro.nn.module import PyroParam
from torch import Tensor

from pyro_radial._pyro.checks import positive_float
from pyro_radial.distributions.moments import moments
from pyro_radial.infer.autoguide.families.family import Family, Site

__all__ = ["LocScale", "expanded_mean"]


class LocScale(Family):
    """Base of families with the parameters ``loc`` (real) and ``scale`` (positive), each of the site's shape.

    A subclass defines ``distribution``, and :meth:`scale_of` where the scale is not the marginal standard deviation.

    :param float init_stddev: the marginal standard deviation that every element starts at, in unconstrained space;
        without it the guide's.
    :raises ValueError: if it is not positive and finite.
    """

    #: What keeps scales positive, and so what a learning rate for scales is a rate of.
    scale_constraint: Any = constraints.softplus_positive

    def __init__(self, init_stddev: float | None = None) -> None:
        self.init_stddev = None if init_stddev is None else positive_float("init_stddev", init_stddev)

    def scale_of(self, site: Site, stddev: Any) -> Any:
        """The scale whose marginal standard deviation is this."""
        return stddev

    def initial_scale(self, site: Site) -> float:
        """The scale that every element starts at."""
        return self.scale_of(site, self.init_stddev or site.init_stddev)

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """The value, and one scale for all elements."""
        return self._parameters(site, value.clone(), torch.full_like(value, self.initial_scale(site)))

    def initial_at(self, site: Site, value: Tensor, distribution: Any, spread: bool) -> dict[str, PyroParam]:
        """The mean and, element by element, the standard deviation of the distribution in unconstrained space.

        Of one without them there, the mean alone or neither.
        """
        mean, stddev = moments(distribution, site.transform)
        # Copies: the parameters are trained in place, and the distribution's own tensors must not move with them.
        loc = value.clone() if mean is None else torch.empty_like(value).copy_(expanded_mean(site, mean))
        if stddev is None or not spread:
            return self.initial(site, loc)
        return self._parameters(site, loc, torch.empty_like(value).copy_(self.scale_of(site, stddev)))

    def _parameters(self, site: Site, loc: Tensor, scale: Tensor) -> dict[str, PyroParam]:
        # The event_dim of a parameter is what lets a plate select the rows of a mini-batch.
        return {
            "loc": PyroParam(loc, constraints.real, site.event_dim),
            "scale": PyroParam(scale, self.scale_constraint, site.event_dim),
        }


def expanded_mean(site: Site, mean: Tensor) -> Tensor:
    """The mean at a site's full size, or an error that names the site."""
    try:
        return mean.expand(site.shape)
    except RuntimeError:
        raise ValueError(
            f"start_at: the distribution of site '{site.name}' has shape {tuple(mean.shape)}, which does not expand to "
            f"the site's {tuple(site.shape)} in unconstrained space"
        ) from None
