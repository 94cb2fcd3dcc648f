# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Families with a mean direction and a concentration for each direction of a site."""

from typing import Any, ClassVar

import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import normalize

from pyro_radial._pyro.checks import proper_fraction
from pyro_radial._pyro.types import Node
from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.distributions.von_mises_fisher import VonMisesFisherStable
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide.families.family import Family, Site


class Directional(Family):
    """Base class of families of directions, with parameters ``loc`` (normalized to the mean) and ``concentration``.

    A subclass defines ``kind``, the class of its distribution, and :meth:`concentration_at`.

    :param float init_mean_cosine: the initial E[mu . x] of every direction, between 0 and 1.
    :param bool shared_concentration: one concentration for the whole site, or one for each direction.
    :raises ValueError: for a cosine out of range.
    """

    #: The class of the distribution of each direction.
    kind: ClassVar[Any]

    def __init__(self, init_mean_cosine: float = 0.9, shared_concentration: bool = True) -> None:
        self.init_mean_cosine = proper_fraction("init_mean_cosine", init_mean_cosine)
        self.shared_concentration = shared_concentration

    def concentration_at(self, mean_cosine: Any, size: int) -> Any:
        """Return the concentration with this mean cosine, a number or a tensor, in ``size`` dimensions."""
        raise NotImplementedError(
            f"{type(self).__name__} must define concentration_at(mean_cosine, size)"
        )

    def transform(self, site: Node) -> None:
        """Return None, because the distribution is on the sphere itself."""
        if not is_on_sphere(site["fn"].support):
            raise ValueError(
                f"{type(self).__name__}: site '{site['name']}' must be a direction, got "
                f"{type(leaf(site['fn'])).__name__} on {site['fn'].support}"
            )

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """Return the direction, and the concentration with the initial mean cosine."""
        concentration = self.concentration_at(self.init_mean_cosine, value.shape[-1])
        return self._parameters(site, value, torch.full_like(value[..., 0], concentration))

    def initial_at(
        self, site: Site, value: Tensor, distribution: Distribution, spread: bool
    ) -> dict[str, PyroParam]:
        """Return the mean direction and concentration of a rotationally symmetric distribution.

        A distribution of another kind gives the concentration with its mean cosine.
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
            # At a high concentration the cosine may be rounded to 1.
            concentration = self.concentration_at(
                cosine.clamp(max=1.0 - torch.finfo(cosine.dtype).eps), inner.dim
            )
        return self._parameters(site, direction, concentration.to(value).expand(value.shape[:-1]))

    def _parameters(
        self, site: Site, direction: Tensor, concentrations: Tensor
    ) -> dict[str, PyroParam]:
        if self.shared_concentration and site.event_dim > 1:
            groups = tuple(range(1 - site.event_dim, 0))
            concentrations = concentrations.log().mean(groups, keepdim=True).exp()
        return {
            "loc": PyroParam(direction.clone(), constraints.real, site.event_dim),
            # The logarithm is trained: useful concentrations span orders of magnitude.
            "concentration": PyroParam(
                concentrations.clone(), constraints.positive, site.event_dim - 1
            ),
        }

    def distribution(self, site: Site, *, loc: Tensor, concentration: Tensor) -> TorchDistribution:  # type: ignore[override]
        """Return the distribution of each direction, with the site's event dimensions."""
        directions = self.kind(normalize(loc, dim=-1), concentration, validate_args=False)
        return directions.to_event(site.event_dim - 1)

    def center(self, site: Site, *, loc: Tensor, concentration: Tensor) -> Tensor:  # type: ignore[override]
        """Return the mean direction."""
        return normalize(loc, dim=-1)

    def spread(self, *, loc: Tensor, concentration: Tensor) -> Tensor:  # type: ignore[override]
        """Return the concentration."""
        return concentration


class VonMisesFisher(Directional):
    r"""A :class:`~pyro_radial.distributions.VonMisesFisherStable` on a site of directions.

    Its parameters are ``loc``, a vector that is normalized to the mean direction, and ``concentration``.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors for Bayesian Neural Networks", eq. 10.

    :param float init_mean_cosine: A, the initial E[mu . x] of every direction, between 0 and 1 (0.9 in the paper). It
        sets :math:`\kappa` to :math:`A (n - A^2) / (1 - A^2)` in n dimensions (Banerjee et al. 2005, eq. 4.4).
    :param bool shared_concentration: one concentration for the whole site, or one for each direction.
    :raises ValueError: for a cosine out of range.

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

    kind = VonMisesFisherStable

    def concentration_at(self, mean_cosine: Any, size: int) -> Any:
        """Return the formula above, an approximation that is worst in few dimensions."""
        return mean_cosine * (size - mean_cosine**2) / (1.0 - mean_cosine**2)
