# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A point estimate, for sites whose uncertainty does not matter."""

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
from pyro.distributions import constraints
from pyro.nn.module import PyroParam
from torch import Tensor

from pyro_radial.distributions.moments import moments
from pyro_radial.infer.autoguide.families.family import Family, Site
from pyro_radial.infer.autoguide.families.loc_scale import expanded_mean

__all__ = ["Point"]


class Point(Family):
    """One value, where the posterior is highest: what Pyro's ``AutoDelta`` gives a whole model.

    It is the mode in the site's own space, not in the unconstrained one where it is trained.
    :class:`~pyro_radial.PriorChain` leaves such sites out: a point is no prior for what comes later.

    Example::

        >>> import pyro
        >>> from pyro_radial import AutoRadial
        >>> def model():
        ...     pyro.sample("rate", dist.Gamma(2., 1.))
        ...     pyro.sample("w", dist.Normal(0., 1.).expand([3]).to_event(1))
        >>> guide = AutoRadial(model, families={"rate": Point()})
        >>> guide.setup()
        >>> type(guide.posterior()["rate"]).__name__
        'Delta'
    """

    is_point = True

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """The value."""
        return {"loc": PyroParam(value.clone(), constraints.real, site.event_dim)}

    def initial_at(self, site: Site, value: Tensor, distribution: Any, spread: bool) -> dict[str, PyroParam]:
        """The mean of the distribution in unconstrained space, where it is known."""
        mean, _ = moments(distribution, site.transform)
        return self.initial(site, value if mean is None else expanded_mean(site, mean).to(value))

    def distribution(self, site: Site, *, loc: Tensor) -> Any:  # type: ignore[override]
        """A ``Delta`` at ``loc``."""
        return dist.Delta(loc, event_dim=site.event_dim)

    def on_support(self, site: Site, distribution: Any) -> Any:
        """A ``Delta`` at the transformed value, with no Jacobian."""
        if site.transform is None:
            return distribution
        value = site.transform(distribution.mean)
        # A transform may change the number of event dimensions, as the one of a covariance does.
        return dist.Delta(value, event_dim=site.event_dim + value.dim() - distribution.mean.dim())

    def local_noise(self, name: str, distribution: Any) -> None:
        """None: a point has no noise."""

    def quantiles(self, site: Site, levels: Sequence[float], *, loc: Tensor) -> Tensor:  # type: ignore[override]
        """The value, at every level."""
        return loc.expand(len(levels), *loc.shape)
