# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Families with a mean direction and a concentration for every direction of a site."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pyro.distributions import constraints
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.nn.functional import normalize

from pyro_radial._pyro.checks import proper_fraction
from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.distributions.von_mises_fisher import VonMisesFisherStable
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide.families.family import Family, Site

__all__ = ["Directional"]


class Directional(Family):
    """Base of families of directions, whose parameters are ``loc``, a vector that is normalized to the mean direction,
    and ``concentration``.

    A subclass has a ``kind``, the class of its distribution, and :meth:`concentration_at`.

    :param float init_mean_cosine: E[mu . x] of every direction at the start, between 0 and 1.
    :param bool shared_concentration: one concentration for a site, or one for each of its directions.
    :raises ValueError: for a cosine out of its range, or a shared_concentration that is neither True nor False.
    """

    #: The class of the distribution of each direction.
    kind: ClassVar[Any]

    def __init__(self, init_mean_cosine: float = 0.9, shared_concentration: bool = True) -> None:
        self.init_mean_cosine = proper_fraction("init_mean_cosine", init_mean_cosine)
        if not isinstance(shared_concentration, bool):
            raise ValueError(f"shared_concentration must be True or False, got {shared_concentration!r}")
        self.shared_concentration = shared_concentration

    def concentration_at(self, mean_cosine: Any, size: int) -> Any:
        """The concentration of this mean cosine in so many dimensions; of a number, or of a tensor each."""
        raise NotImplementedError(f"{type(self).__name__} must define concentration_at(mean_cosine, size)")

    def transform(self, site: Mapping[str, Any]) -> None:
        """None: the distribution is made on the sphere itself."""
        if not is_on_sphere(site["fn"].support):
            raise ValueError(
                f"{type(self).__name__}: site '{site['name']}' must be a direction, got "
                f"{type(leaf(site['fn'])).__name__} on {site['fn'].support}"
            )

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """The direction, and the concentration of the mean cosine."""
        concentration = self.concentration_at(self.init_mean_cosine, value.shape[-1])
        return self._parameters(site, value, torch.full_like(value[..., 0], concentration))

    def initial_at(self, site: Site, value: Tensor, distribution: Any, spread: bool) -> dict[str, PyroParam]:
        """The mean direction and concentration of another distribution of this kind.

        Of one of another kind with a mean direction, the concentration of its mean cosine; of no other.
        """
        inner = leaf(distribution)
        if not isinstance(inner, self.kind | VonMisesFisherStable):
            return self.initial(site, value)
        direction = inner.loc.expand_as(value).to(value)
        if not spread:
            return self.initial(site, direction)
        concentration = inner.concentration
        if not isinstance(inner, self.kind):
            cosine = torch.linalg.vector_norm(inner.mean, dim=-1)
            # At a high concentration it may be rounded to 1.
            concentration = self.concentration_at(cosine.clamp(max=1.0 - torch.finfo(cosine.dtype).eps), inner.dim)
        return self._parameters(site, direction, concentration.to(value).expand(value.shape[:-1]))

    def _parameters(self, site: Site, direction: Tensor, concentrations: Tensor) -> dict[str, PyroParam]:
        if self.shared_concentration and site.event_dim > 1:
            groups = tuple(range(1 - site.event_dim, 0))
            concentrations = concentrations.log().mean(groups, keepdim=True).exp()
        return {
            "loc": PyroParam(direction.clone(), constraints.real, site.event_dim),
            # Its logarithm is what is trained: useful concentrations span orders of magnitude.
            "concentration": PyroParam(concentrations.clone(), constraints.positive, site.event_dim - 1),
        }

    def distribution(self, site: Site, *, loc: Tensor, concentration: Tensor) -> Any:  # type: ignore[override]
        """The distribution of each direction, with the site's event dimensions."""
        directions = self.kind(normalize(loc, dim=-1), concentration, validate_args=False)
        return directions.to_event(site.event_dim - 1)

    def center(self, site: Site, *, loc: Tensor, concentration: Tensor) -> Tensor:  # type: ignore[override]
        """The mean direction."""
        return normalize(loc, dim=-1)

    def spread(self, *, loc: Tensor, concentration: Tensor) -> Tensor:  # type: ignore[override]
        """The concentration."""
        return concentration
