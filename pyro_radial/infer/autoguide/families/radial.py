# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One radius and one direction for a whole site, or for each row of it."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyro_radial._pyro.checks import positive_float
from pyro_radial.distributions.radial_normal import RadialNormal
from pyro_radial.distributions.special import MEAN_LOG_HALF_NORMAL, log_sphere_area
from pyro_radial.infer.autoguide.families.family import Site
from pyro_radial.infer.autoguide.families.loc_scale import LocScale

__all__ = ["GuideRadialNormal", "Radial"]


class GuideRadialNormal(RadialNormal):
    """A radial normal that reports, exactly at its pole, the mean of its log-density instead of infinity.

    A guide's density is evaluated wherever a handler puts a site, so also at ``guide.median()``; an infinite value
    there would make a loss infinite without a word on why.
    """

    @property
    def _log_density_at_loc(self) -> float:  # type: ignore[override]
        elements = self.num_elements
        mean_log_rho = (elements - 1) * MEAN_LOG_HALF_NORMAL
        return 0.5 * math.log(2.0 / math.pi) - log_sphere_area(elements) - 0.5 - mean_log_rho


class Radial(LocScale):
    r"""A :class:`~pyro_radial.distributions.RadialNormal`, on constrained sites its pushforward.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", section 3.

    :param float init_stddev: the marginal standard deviation :math:`\sigma / \sqrt D` that every element starts at, in
        unconstrained space; without it, and without ``init_scale``, the guide's.
    :param float init_scale: the paper's :math:`\sigma` in its place.
    :param int event_dim: how many of a site's last dimensions share one radius, at most; by default its whole event.
    :raises ValueError: for a start that is not positive and finite, both starts at once, or an ``event_dim`` that is
        no integer of at least zero.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_radial import AutoMeanField
        >>> def model():
        ...     pyro.sample("weight", dist.Normal(0., 1.).expand([2, 3]).to_event(2))
        >>> guide = AutoMeanField(model, families={"weight": Radial(event_dim=1)})
        >>> guide.setup()
        >>> guide.posterior()["weight"].base_dist.event_shape
        torch.Size([3])
    """

    def __init__(
        self, init_stddev: float | None = None, *, init_scale: float | None = None, event_dim: int | None = None
    ) -> None:
        super().__init__(init_stddev)
        if init_scale is not None and init_stddev is not None:
            raise ValueError("give init_scale or init_stddev, not both")
        if event_dim is not None and (isinstance(event_dim, bool) or not isinstance(event_dim, int) or event_dim < 0):
            raise ValueError(f"event_dim must be a non-negative integer, got {event_dim!r}")
        self.init_scale = None if init_scale is None else positive_float("init_scale", init_scale)
        self.event_dim = event_dim

    def radius_dim(self, site: Site) -> int:
        """How many of a site's last dimensions share one radius."""
        return site.event_dim if self.event_dim is None else min(self.event_dim, site.event_dim)

    def elements_per_radius(self, site: Site) -> int:
        """D, the number of elements that share one radius."""
        return site.shape[len(site.shape) - self.radius_dim(site) :].numel()

    def scale_of(self, site: Site, stddev: Any) -> Any:
        r""":math:`\sigma = \sqrt D` times the marginal standard deviation."""
        return stddev * math.sqrt(self.elements_per_radius(site))

    def initial_scale(self, site: Site) -> float:
        """The paper's sigma, where it is given."""
        return super().initial_scale(site) if self.init_scale is None else self.init_scale

    def distribution(self, site: Site, *, loc: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
        """``RadialNormal(loc, scale)`` with the site's event dimensions."""
        return self._make(RadialNormal, site, loc, scale)

    def guide_distribution(self, site: Site, *, loc: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
        """The same with a finite density at its pole."""
        return self._make(GuideRadialNormal, site, loc, scale)

    def _make(self, cls: type[RadialNormal], site: Site, loc: Tensor, scale: Tensor) -> Any:
        radius_dim = self.radius_dim(site)
        # The constraint keeps scales positive, so that checking each element at every step would find nothing.
        return cls(loc, scale, radius_dim, validate_args=False).to_event(site.event_dim - radius_dim)

    def quantiles(self, site: Site, levels: Sequence[float], *, loc: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        """Those of each element's marginal, which is not normal for D >= 2."""
        return RadialNormal(loc, scale, self.radius_dim(site)).marginal_quantiles(levels)
