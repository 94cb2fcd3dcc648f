# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""An independent normal distribution for each element (mean field)."""

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_radial.infer.autoguide.families.family import LocScale, Site

__all__ = ["Normal"]


class Normal(LocScale):
    """A factorized normal distribution; on a constrained site its pushforward, e.g. a log-normal on a positive one.

    :param float init_stddev: the initial standard deviation of every element in unconstrained space; the guide's by
        default.

    Example::

        >>> import pyro
        >>> from pyro_radial import AutoRadial
        >>> def model():
        ...     pyro.sample("weight", dist.Normal(0., 1.).expand([2, 3]).to_event(2))
        ...     pyro.sample("bias", dist.Normal(0., 1.).expand([2]).to_event(1))
        >>> guide = AutoRadial(model, families={"bias": Normal()})
        >>> guide.setup()
        >>> {site: type(distribution).__name__ for site, distribution in guide.posterior().items()}
        {'weight': 'RadialNormal', 'bias': 'Independent'}
    """

    def distribution(self, site: Site, *, loc: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
        """``Normal(loc, scale)`` with the site's event dimensions."""
        # The constraint keeps scales positive, so there is nothing to validate.
        return dist.Normal(loc, scale, validate_args=False).to_event(site.event_dim)

    def quantiles(self, site: Site, levels: Sequence[float], *, loc: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        """The quantiles of each element's normal."""
        probabilities = torch.tensor(levels, dtype=loc.dtype, device=loc.device)
        return dist.Normal(loc, scale).icdf(probabilities.reshape(-1, *(1,) * loc.dim()))
