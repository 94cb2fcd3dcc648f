# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The standard deviations of a guide's sites, set without training."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_radial.infer.autoguide.base import AutoPerSite
from pyro_radial.infer.autoguide.families import LocScale

__all__ = ["Stddevs"]


class Stddevs:
    """The marginal standard deviations of all sites on the real numbers that have a location and a scale.

    :param guide: a guide of this library with its parameters.
    :param str who: what errors call the caller.
    :raises ValueError: for another guide, one without parameters, and one without such a site.
    """

    def __init__(self, guide: Any, who: str) -> None:
        if not isinstance(guide, AutoPerSite):
            raise ValueError(
                f"{who}: guide must be one of this library, such as AutoRadial, got {type(guide).__name__}"
            )
        if guide.prototype_trace is None:
            raise ValueError(
                f"{who}: guide must have its parameters, got a {type(guide).__name__} without any yet; call "
                "guide.setup(x, y), and guide.load_means(network.state_dict())"
            )
        self._guide, self._who = guide, who
        families = guide.chosen_families()
        self._families = {
            name: family
            for name, family in families.items()
            if isinstance(family, LocScale) and guide._site[name].transform is None
        }
        if not self._families:
            found = {name: type(family).__name__ for name, family in families.items()}
            raise ValueError(f"{who}: guide must have a site with a location and a scale, got {found}")

    @property
    def means(self) -> dict[str, Tensor]:
        """Copies of the means, by site."""
        return {name: self._parameter("loc", name).detach().clone() for name in self._families}

    def state(self) -> dict[str, Tensor]:
        """The scales as the guide keeps them, for :meth:`restore`."""
        return {name: self._parameter("scale", name).detach().clone() for name in self._families}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`state` returned."""
        for name, value in state.items():
            self._parameter("scale", name).copy_(value)

    @torch.no_grad()
    def set(self, stddevs: Mapping[str, Tensor]) -> None:
        """Set the marginal standard deviations of some sites.

        :param stddevs: tensors by site that broadcast to the site's shape.
        :raises ValueError: naming the site, for numbers that are not positive and finite, and another shape.
        """
        for name, stddev in stddevs.items():
            family, site, target = self._families[name], self._guide._site[name], self._parameter("scale", name)
            if not bool(((stddev > 0) & stddev.isfinite()).all()):
                raise ValueError(f"{self._who}: scales must be positive and finite, got others at site '{name}'")
            try:
                scale = family.scale_of(site, stddev).to(target).expand(target.shape)
            except RuntimeError as error:
                raise ValueError(
                    f"{self._who}: scales must broadcast to site '{name}' of shape {tuple(target.shape)}, got shape "
                    f"{tuple(stddev.shape)}"
                ) from error
            target.copy_(transform_to(family.scale_constraint).inv(scale))

    def _parameter(self, kind: str, name: str) -> Tensor:
        """The tensor that is trained."""
        place = f"{self._guide._places[name]}_unconstrained"
        tensor: Tensor = attrgetter(place)(getattr(self._guide, f"{kind}s"))
        return tensor
