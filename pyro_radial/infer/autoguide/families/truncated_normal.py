# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""An independent normal for each element that keeps within so many standard deviations: truncated mean field."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.checks import positive_float
from pyro_radial.distributions.truncated_normal import TruncatedNormal as Truncated
from pyro_radial.infer.autoguide.families.family import Site
from pyro_radial.infer.autoguide.families.loc_scale import LocScale

__all__ = ["TruncatedNormal"]


class TruncatedNormal(LocScale):
    r"""A factorized :class:`~pyro_radial.distributions.TruncatedNormal`; on a constrained site its pushforward.

    Its draws keep near the mean, so that gradients vary less than mean field's. Its KL to a normal prior
    :math:`N(m, t^2)` is closed, that of the normal with its mean and its variance :math:`v \sigma^2` and a constant:

    .. math:: KL = \log \frac{t}{\sigma} - \log Z - \frac v2 + \frac{v \sigma^2 + (\mu - m)^2}{2 t^2},
        \qquad Z = \mathrm{erf}(c / \sqrt 2).

    As a prior it rules out all values beyond c, so that a :class:`~pyro_radial.PriorChain` of it needs
    ``form="normal"``; the exact form is refused by name.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", appendix F. They draw truncated weights
    for the likelihood and keep the KL of the normal that is not truncated, which bounds no evidence (as they say); here
    both are of the one posterior, and the loss is a bound. Theirs has 1 in the place of v: it differs by a constant and
    by :math:`(1 - v) \sigma^2 / 2 t^2`, which at scales far below the prior's is little.

    :param float truncation: c, how many of the normal's standard deviations :math:`\sigma` an element may be from its
        mean; positive and finite.
    :param float init_stddev: the standard deviation, :math:`\sqrt v \sigma`, that every element starts at, in
        unconstrained space; without it the guide's.
    :raises ValueError: for an argument that is not positive and finite.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_radial import AutoMeanField
        >>> def model():
        ...     pyro.sample("weight", dist.Normal(0., 1.).expand([2, 3]).to_event(2))
        >>> guide = AutoMeanField(model, families={".": TruncatedNormal(truncation=1.0)}, init_stddev=0.12)
        >>> guide.setup()
        >>> posterior = guide.posterior()["weight"]
        >>> posterior.stddev[0], posterior.base_dist.scale[0]
        (tensor([0.1200, 0.1200, 0.1200]), tensor([0.2224, 0.2224, 0.2224]))
    """

    def __init__(self, truncation: float, init_stddev: float | None = None) -> None:
        super().__init__(init_stddev)
        self.truncation = positive_float("truncation", truncation)

    def scale_of(self, site: Site, stddev: Any) -> Any:
        r""":math:`\sigma`, the standard deviation over :math:`\sqrt v`."""
        return stddev / math.sqrt(Truncated(0.0, 1.0, self.truncation).unit_variance)

    def distribution(self, site: Site, *, loc: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
        """``TruncatedNormal(loc, scale, truncation)`` with the site's event dimensions."""
        # The constraint keeps scales positive, so that checking each element at every step would find nothing.
        return Truncated(loc, scale, self.truncation, validate_args=False).to_event(site.event_dim)

    def quantiles(self, site: Site, levels: Sequence[float], *, loc: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        """Those of each element's truncated normal."""
        probabilities = torch.tensor(levels, dtype=loc.dtype, device=loc.device)
        return Truncated(loc, scale, self.truncation).icdf(probabilities.reshape(-1, *(1,) * loc.dim()))
