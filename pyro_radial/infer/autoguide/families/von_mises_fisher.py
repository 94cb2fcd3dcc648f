# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A von Mises-Fisher distribution on a site of directions."""

from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions import constraints
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.nn.functional import normalize

from pyro_radial._checks import proper_fraction
from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.distributions.von_mises_fisher import VonMisesFisherStable
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide.families.family import Family, Site

__all__ = ["VonMisesFisher"]


class VonMisesFisher(Family):
    r"""A :class:`~pyro_radial.distributions.VonMisesFisherStable` with a free mean direction and a concentration.

    The parameters are ``loc``, a vector that is normalized to the mean direction, and ``concentration``.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors for Bayesian Neural Networks", eq. 10.

    :param float init_mean_cosine: E[mu . x] of every direction at the start, between 0 and 1; 0.9 is the paper's. It
        sets :math:`\kappa` to :math:`A (n - A^2) / (1 - A^2)` in n dimensions (Banerjee et al. 2005, eq. 4.4).
    :param bool shared_concentration: one concentration for a site, or one for each of its directions.
    :raises ValueError: for a cosine out of its range.

    Example::

        >>> import pyro
        >>> from pyro_radial import AutoMeanField
        >>> from pyro_radial.distributions import HypersphericalUniform
        >>> def model():
        ...     pyro.sample("x", HypersphericalUniform(3))
        >>> guide = AutoMeanField(model, families={"x": VonMisesFisher(init_mean_cosine=0.5)})
        >>> guide.setup()
        >>> guide.posterior()["x"].mean.norm()
        tensor(0.5070)
    """

    def __init__(self, init_mean_cosine: float = 0.9, shared_concentration: bool = True) -> None:
        self.init_mean_cosine = proper_fraction("init_mean_cosine", init_mean_cosine)
        self.shared_concentration = shared_concentration

    def transform(self, site: Mapping[str, Any]) -> None:
        """None: the distribution is made on the sphere itself."""
        if not is_on_sphere(site["fn"].support):
            raise ValueError(
                f"VonMisesFisher: site '{site['name']}' must be a direction, got {type(leaf(site['fn'])).__name__} on "
                f"{site['fn'].support}"
            )

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """The direction, and the concentration of the mean cosine."""
        size, cosine = value.shape[-1], self.init_mean_cosine
        concentration = cosine * (size - cosine**2) / (1.0 - cosine**2)
        return self._parameters(site, value, torch.full_like(value[..., 0], concentration))

    def initial_at(self, site: Site, value: Tensor, distribution: Any, spread: bool) -> dict[str, PyroParam]:
        """The mean direction and concentration of another von Mises-Fisher distribution; of no other."""
        inner = leaf(distribution)
        if not isinstance(inner, VonMisesFisherStable):
            return self.initial(site, value)
        direction = inner.loc.expand_as(value).to(value)
        if not spread:
            return self.initial(site, direction)
        return self._parameters(site, direction, inner.concentration.to(value).expand(value.shape[:-1]))

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
        directions = VonMisesFisherStable(normalize(loc, dim=-1), concentration, validate_args=False)
        return directions.to_event(site.event_dim - 1)

    def center(self, site: Site, *, loc: Tensor, concentration: Tensor) -> Tensor:  # type: ignore[override]
        """The mean direction."""
        return normalize(loc, dim=-1)

    def spread(self, *, loc: Tensor, concentration: Tensor) -> Tensor:  # type: ignore[override]
        """The concentration."""
        return concentration
