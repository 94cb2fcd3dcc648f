# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The names of the sites that :class:`~pyro_radial.nn.priors.RadialDirectionalPrior` makes for a weight tensor."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["RadiusSites", "Side", "TensorSites"]

Side = Literal["row", "column"]

_PREFIXES: dict[Side, str] = {"row": "", "column": "column_"}
_GLOBAL_RADIUS = ".global_radius"


@dataclass(frozen=True)
class RadiusSites:
    """The names of a half-Cauchy radius.

    :param str radius: the deterministic site of its value; the two factors of its square are named after it.

    Example::

        >>> RadiusSites("weight.local_radius").inverse_gamma
        'weight.local_radius_inverse_gamma'
    """

    radius: str

    @property
    def gamma(self) -> str:
        """The site of the gamma factor."""
        return f"{self.radius}_gamma"

    @property
    def inverse_gamma(self) -> str:
        """The site of the inverse-gamma factor."""
        return f"{self.radius}_inverse_gamma"


@dataclass(frozen=True)
class TensorSites:
    """The names of the sites of one weight tensor.

    :param str parameter: the name of the parameter in the network.

    Example::

        >>> sites = TensorSites("0.weight")
        >>> sites.direction("row"), sites.local_radius("column").gamma
        ('0.weight.direction', '0.weight.column_local_radius_gamma')
        >>> TensorSites.with_global_radius("0.weight.global_radius_gamma")
        TensorSites(parameter='0.weight')
    """

    parameter: str

    @property
    def global_radius(self) -> RadiusSites:
        """The radius of the tensor."""
        return RadiusSites(self.parameter + _GLOBAL_RADIUS)

    def direction(self, side: Side) -> str:
        """The directions of its rows or columns."""
        return f"{self.parameter}.{_PREFIXES[side]}direction"

    def local_radius(self, side: Side) -> RadiusSites:
        """The radii of its rows or columns."""
        return RadiusSites(f"{self.parameter}.{_PREFIXES[side]}local_radius")

    @classmethod
    def with_global_radius(cls, site: str) -> "TensorSites | None":
        """The tensor whose global radius has this gamma site; None for any other site."""
        suffix = RadiusSites(_GLOBAL_RADIUS).gamma
        return cls(site.removesuffix(suffix)) if site.endswith(suffix) else None
