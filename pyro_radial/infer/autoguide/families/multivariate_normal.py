# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A normal distribution with a full covariance among the elements of an event."""

from collections.abc import Sequence

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution
from torch.distributions.transforms import ReshapeTransform

from pyro_radial._pyro.checks import optional, positive_float
from pyro_radial.distributions.moments import moments
from pyro_radial.distributions.wrappers import (
    Transformed,
    elementary,
    is_reshape,
    leaf,
    pull_back,
    unmasked,
)
from pyro_radial.infer.autoguide.families.family import Family, LocScale, Site, expanded_mean
from pyro_radial.infer.autoguide.families.normal import Normal

#: The most elements of an event, whose factor then has a million.
MAX_ELEMENTS = 1_000


class MultivariateNormal(Family):
    r"""A normal with a full covariance among the elements of each event; on a constrained site its pushforward.

    Independent elements are narrower than the posterior where elements are correlated, so their intervals hold too few
    of the true values. This family keeps what is correlated within a site, and :class:`Normal` is enough for a site
    of single numbers in a plate. Its covariance is

    .. math:: S L L^T S, \qquad S = \mathrm{diag}(\mathrm{scale}),

    with the parameters ``loc``, ``scale`` and ``scale_tril``, the lower triangle L with ones on its diagonal, as in
    Pyro's ``AutoMultivariateNormal``. To normal priors, factorized or not, its KL has a closed form.
    :class:`~pyro_radial.NaturalGradient` leaves these sites to its ``others``.

    :param float init_stddev: the initial standard deviation of every element in unconstrained space; the guide's by
        default. Elements start independent.
    :raises ValueError: for a start that is not positive and finite and, naming the site, for an event of more than
        1,000 elements.

    Example::

        >>> import pyro
        >>> from pyro_radial import AutoMeanField
        >>> def model():
        ...     with pyro.plate("genes", 5):
        ...         pyro.sample("effects", dist.Normal(torch.zeros(2), 1.).to_event(1))
        >>> guide = AutoMeanField(model, families={"effects": MultivariateNormal()})
        >>> guide.setup()
        >>> guide.posterior()["effects"].covariance_matrix.shape
        torch.Size([5, 2, 2])
    """

    def __init__(self, init_stddev: float | None = None) -> None:
        self.init_stddev = optional(positive_float, "init_stddev", init_stddev)

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """Return the value, one scale for all elements, and no correlation."""
        stddev = torch.full_like(value, self.init_stddev or site.init_stddev)
        return self._parameters(site, value.clone(), stddev)

    def initial_at(
        self, site: Site, value: Tensor, distribution: Distribution, spread: bool
    ) -> dict[str, PyroParam]:
        """Return the mean and the covariance of the distribution in unconstrained space, as far as they are known."""
        mean, stddev = moments(distribution, site.transform)
        loc = value.clone()
        if mean is not None:
            loc.copy_(expanded_mean(site, mean))
        if stddev is None or not spread:
            return self.initial(site, loc)
        joint = _joint(site, distribution)
        return self._parameters(site, loc, torch.empty_like(value).copy_(stddev), joint)

    def _parameters(
        self,
        site: Site,
        loc: Tensor,
        stddev: Tensor,
        joint: dist.MultivariateNormal | None = None,
    ) -> dict[str, PyroParam]:
        stddevs = _flat(site, stddev)
        size = stddevs.shape[-1]
        if size > MAX_ELEMENTS:
            raise ValueError(
                f"MultivariateNormal: site '{site.name}' must have at most {MAX_ELEMENTS:,} elements in an event, got "
                f"{size:,}: use Normal or Radial for it, or AutoCorrelated with a rank"
            )
        factor = stddevs.diag_embed()
        if joint is not None:
            factor.copy_(joint.scale_tril)
        own = factor.diagonal(dim1=-2, dim2=-1)
        scale = own.reshape(loc.shape).clone()
        parameters = {
            "loc": PyroParam(loc, constraints.real, site.event_dim),
            "scale": PyroParam(scale, LocScale.scale_constraint, site.event_dim),
        }
        # A single number is normal.
        if site.event_dim:
            unit = factor / own.unsqueeze(-1)
            parameters["scale_tril"] = PyroParam(unit, constraints.unit_lower_cholesky, 2)
        return parameters

    def distribution(  # type: ignore[override]
        self, site: Site, *, loc: Tensor, scale: Tensor, scale_tril: Tensor | None = None
    ) -> TorchDistribution:
        """Return the normal with this covariance in the shape of the site's events."""
        if scale_tril is None:
            return Normal().distribution(site, loc=loc, scale=scale)
        factor = _flat(site, scale).unsqueeze(-1) * scale_tril
        # The constraints keep the factor triangular with a positive diagonal.
        vector = dist.MultivariateNormal(_flat(site, loc), scale_tril=factor, validate_args=False)
        if site.event_dim == 1:
            return vector
        shape = ReshapeTransform(vector.event_shape, loc.shape[-site.event_dim :])
        return Transformed(vector, [shape], validate_args=False)

    def quantiles(  # type: ignore[override]
        self,
        site: Site,
        levels: Sequence[float],
        *,
        loc: Tensor,
        scale: Tensor,
        scale_tril: Tensor | None = None,
    ) -> Tensor:
        """Return the quantiles of each element's normal."""
        stddev = scale
        if scale_tril is not None:
            rows = torch.linalg.vector_norm(scale_tril, dim=-1)
            stddev = scale * rows.reshape(scale.shape)
        return Normal().quantiles(site, levels, loc=loc, scale=stddev)


def _flat(site: Site, value: Tensor) -> Tensor:
    """Return a value with each event as one dimension."""
    batch = value.shape[: value.dim() - site.event_dim]
    return value.reshape(*batch, -1) if site.event_dim else value.unsqueeze(-1)


def _joint(site: Site, distribution: Distribution) -> dist.MultivariateNormal | None:
    """Return the normal on whole events that a distribution is in unconstrained space, or None for another."""
    transforms = [] if site.transform is None else elementary([site.transform])
    inner = leaf(pull_back(unmasked(distribution), transforms))
    if isinstance(inner, TransformedDistribution) and is_reshape(inner.transforms):
        inner = leaf(inner.base_dist)
    of_events = inner.event_shape.numel() == site.shape[len(site.shape) - site.event_dim :].numel()
    return inner if isinstance(inner, dist.MultivariateNormal) and of_events else None
