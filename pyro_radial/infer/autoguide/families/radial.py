# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One radius and one direction for a whole site, or for each of its rows."""

import math
from collections.abc import Sequence
from typing import Any

from pyro.distributions import TorchDistribution
from torch import Tensor

from pyro_radial._pyro.checks import non_negative_integer, optional, positive_float
from pyro_radial.distributions.numerics import MEAN_LOG_HALF_NORMAL, log_sphere_area
from pyro_radial.distributions.radial_normal import RadialNormal
from pyro_radial.infer.autoguide.families.family import LocScale, Site


class GuideRadialNormal(RadialNormal):
    """A radial normal with the mean of its log-density, instead of infinity, exactly at its location.

    Handlers may put a site at ``guide.median()``, where an infinite density would make the loss infinite.
    """

    @property
    def _log_density_at_loc(self) -> float:  # type: ignore[override]
        elements = self.num_elements
        mean_log_rho = (elements - 1) * MEAN_LOG_HALF_NORMAL
        return 0.5 * math.log(2.0 / math.pi) - log_sphere_area(elements) - 0.5 - mean_log_rho


class Radial(LocScale):
    r"""A :class:`~pyro_radial.distributions.RadialNormal`; on a constrained site its pushforward.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", section 3.

    :param float init_stddev: the initial marginal standard deviation :math:`\sigma / \sqrt D` of every element in
        unconstrained space; the guide's by default.
    :param float init_scale: the paper's :math:`\sigma` instead.
    :param int event_dim: the largest number of a site's last dimensions that share one radius; all of its event by
        default.
    :param bool shared_scale: one scale for all elements of a site's event, or one for each element.
    :raises ValueError: for a start that is not positive and finite, for both starts, or for an ``event_dim`` that is
        not a non-negative integer.

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
        self,
        init_stddev: float | None = None,
        *,
        init_scale: float | None = None,
        event_dim: int | None = None,
        shared_scale: bool = False,
    ) -> None:
        super().__init__(init_stddev, shared_scale=shared_scale)
        if init_scale is not None and init_stddev is not None:
            raise ValueError("give init_scale or init_stddev, not both")
        self.init_scale = optional(positive_float, "init_scale", init_scale)
        self.event_dim = optional(non_negative_integer, "event_dim", event_dim)

    def radius_dim(self, site: Site) -> int:
        """Return the number of a site's last dimensions that share one radius."""
        return site.event_dim if self.event_dim is None else min(self.event_dim, site.event_dim)

    def elements_per_radius(self, site: Site) -> int:
        """Return D, the number of elements that share one radius."""
        return site.shape[len(site.shape) - self.radius_dim(site) :].numel()

    def scale_of(self, site: Site, stddev: Any) -> Any:
        r"""Return :math:`\sigma`, which is :math:`\sqrt D` times the marginal standard deviation."""
        return stddev * math.sqrt(self.elements_per_radius(site))

    def initial_scale(self, site: Site) -> float:
        """Return the paper's sigma, if it is given."""
        return super().initial_scale(site) if self.init_scale is None else self.init_scale

    def distribution(self, site: Site, *, loc: Tensor, scale: Tensor) -> TorchDistribution:  # type: ignore[override]
        """Return ``RadialNormal(loc, scale)`` with the site's event dimensions."""
        return self._make(RadialNormal, site, loc, scale)

    def guide_distribution(self, site: Site, *, loc: Tensor, scale: Tensor) -> TorchDistribution:  # type: ignore[override]
        """Return the same with a finite density at ``loc``."""
        return self._make(GuideRadialNormal, site, loc, scale)

    def _make(
        self, cls: type[RadialNormal], site: Site, loc: Tensor, scale: Tensor
    ) -> TorchDistribution:
        radius_dim = self.radius_dim(site)
        # The constraint keeps scales positive, so there is nothing to validate.
        return cls(loc, scale, radius_dim, validate_args=False).to_event(
            site.event_dim - radius_dim
        )

    def quantiles(  # type: ignore[override]
        self, site: Site, levels: Sequence[float], *, loc: Tensor, scale: Tensor
    ) -> Tensor:
        """Return the quantiles of each element's marginal, which is not normal for D >= 2."""
        return RadialNormal(loc, scale, self.radius_dim(site)).marginal_quantiles(levels)
