# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A normal distribution with a full or a low-rank covariance among the elements of an event."""

from collections.abc import Sequence

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import Distribution, ReshapeTransform, TransformedDistribution

from pyro_radial._pyro.checks import optional, positive_count, positive_float
from pyro_radial.distributions.wrappers import (
    Transformed,
    elementary,
    is_reshape,
    leaf,
    pull_back,
    remove_masks,
)
from pyro_radial.infer.autoguide.families.family import Family, Site, start_at
from pyro_radial.infer.autoguide.families.normal import Normal

#: A normal on vectors.
Joint = dist.MultivariateNormal | dist.LowRankMultivariateNormal
#: The most elements of an event without a rank, whose factor then has a million.
MAX_ELEMENTS = 1_000


class MultivariateNormal(Family):
    r"""A normal with a covariance among the elements of each event; on a constrained site its pushforward.

    Independent elements are narrower than the posterior where elements are correlated, so their intervals hold too few
    of the true values. This family keeps what is correlated within a site, and :class:`Normal` is enough for a site
    of single numbers in a plate. Its covariance is

    .. math:: S L L^T S, \qquad S = \mathrm{diag}(\mathrm{scale}),

    with the parameters ``loc``, ``scale`` and ``scale_tril``, the lower triangle L with ones on its diagonal, as in
    Pyro's ``AutoMultivariateNormal``. For large events give a rank r. The covariance is then

    .. math:: S (I + F F^T) S,

    with the parameter ``factor``, F of shape ``[elements, r]``, in place of ``scale_tril``: r directions can be wide,
    and the others are as wide as ``scale``. To normal priors, factorized or not, both have KLs in closed form.

    :param float init_stddev: the initial standard deviation of every element in unconstrained space; the guide's by
        default. Without a rank elements start independent, with one F starts random.
    :param int rank: r, at most the number of elements of an event; None for a full covariance.
    :raises ValueError: for a start that is not positive and finite, or a rank below one; naming the site, for a rank
        above its number of elements, or without a rank for an event of more than 1,000 elements.

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

    def __init__(self, init_stddev: float | None = None, *, rank: int | None = None) -> None:
        self.init_stddev = optional(positive_float, "init_stddev", init_stddev)
        self.rank = optional(positive_count, "rank", rank)

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """Return the value, one standard deviation for all elements, and no correlation or a random factor."""
        stddev = torch.full_like(value, self.init_stddev or site.init_stddev)
        return self._parameters(site, value.clone(), stddev)

    def initial_at(
        self, site: Site, value: Tensor, distribution: Distribution, spread: bool
    ) -> dict[str, PyroParam]:
        """Return the mean and the covariance of the distribution in unconstrained space, as far as they are known."""
        loc, stddev = start_at(site, value, distribution)
        if stddev is None or not spread:
            return self.initial(site, loc)
        stddevs = torch.empty_like(value).copy_(stddev)
        return self._parameters(site, loc, stddevs, _joint(site, distribution))

    def _parameters(
        self,
        site: Site,
        loc: Tensor,
        stddev: Tensor,
        joint: Joint | None = None,
    ) -> dict[str, PyroParam]:
        """Return the parameters at these marginals, with the correlations of ``joint`` if there is one."""
        stddevs = _flat(site, stddev)
        size = stddevs.shape[-1]
        # A single number is normal.
        if self.rank is not None and site.event_dim:
            return self._make_low_rank(site, loc, stddevs, joint)
        if size > MAX_ELEMENTS:
            raise ValueError(
                f"MultivariateNormal: site '{site.name}' must have at most {MAX_ELEMENTS:,} elements in an event, got "
                f"{size:,}: give it a rank, as MultivariateNormal(rank=20)"
            )
        factor = stddevs.diag_embed()
        if joint is not None:
            factor.copy_(joint.scale_tril)
        scale = factor.diagonal(dim1=-2, dim2=-1)
        parameters = Normal().parameters_at(site, loc, scale.reshape(loc.shape).clone())
        if site.event_dim:
            unit = factor / scale.unsqueeze(-1)
            parameters["scale_tril"] = PyroParam(unit, constraints.unit_lower_cholesky, 2)
        return parameters

    def _make_low_rank(
        self, site: Site, loc: Tensor, stddevs: Tensor, joint: Joint | None
    ) -> dict[str, PyroParam]:
        """Return the parameters with a factor of the rank: that of ``joint`` if it has this rank, else a random one."""
        rank = self.rank or 0
        if rank > stddevs.shape[-1]:
            raise ValueError(
                f"MultivariateNormal: rank must be at most {stddevs.shape[-1]}, the elements of an event of site "
                f"'{site.name}', got {rank}"
            )
        shape = (*stddevs.shape, rank)
        if isinstance(joint, dist.LowRankMultivariateNormal) and joint.cov_factor.shape[-1] == rank:
            scale = joint.cov_diag.sqrt().expand_as(stddevs)
            factor = (joint.cov_factor / scale.unsqueeze(-1)).expand(shape).clone()
        else:
            # Half of each variance is an element's own. From F = 0 no gradient would lead away.
            scale = stddevs * 0.5**0.5
            directions = torch.randn(shape, dtype=loc.dtype, device=loc.device)
            factor = torch.nn.functional.normalize(directions, dim=-1)
        return {
            **Normal().parameters_at(site, loc, scale.reshape(loc.shape).clone()),
            "factor": PyroParam(factor, constraints.real, 2),
        }

    def distribution(  # type: ignore[override]
        self,
        site: Site,
        *,
        loc: Tensor,
        scale: Tensor,
        scale_tril: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> TorchDistribution:
        """Return the normal with this covariance in the shape of the site's events."""
        flat = _flat(site, loc)
        scales = _flat(site, scale)
        vector: Joint
        if factor is not None:
            vector = dist.LowRankMultivariateNormal(
                flat, scales.unsqueeze(-1) * factor, scales.square(), validate_args=False
            )
        elif scale_tril is not None:
            # The constraints keep the factor triangular with a positive diagonal.
            vector = dist.MultivariateNormal(
                flat, scale_tril=scales.unsqueeze(-1) * scale_tril, validate_args=False
            )
        else:
            return Normal().distribution(site, loc=loc, scale=scale)
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
        factor: Tensor | None = None,
    ) -> Tensor:
        """Return the quantiles of each element's normal."""
        # The standard deviations for a scale of one.
        unit_stddev = torch.ones_like(scale)
        if scale_tril is not None:
            unit_stddev = torch.linalg.vector_norm(scale_tril, dim=-1)
        if factor is not None:
            unit_stddev = (1.0 + factor.square().sum(-1)).sqrt()
        stddev = scale * unit_stddev.reshape(scale.shape)
        return Normal().quantiles(site, levels, loc=loc, scale=stddev)


def _flat(site: Site, value: Tensor) -> Tensor:
    """Return a value with each event as one dimension."""
    batch = value.shape[: value.dim() - site.event_dim]
    return value.reshape(*batch, -1) if site.event_dim else value.unsqueeze(-1)


def _joint(site: Site, distribution: Distribution) -> Joint | None:
    """Return the normal on whole events that a distribution is in unconstrained space, or None for another."""
    transforms = [] if site.transform is None else elementary([site.transform])
    inner = leaf(pull_back(remove_masks(distribution), transforms))
    if isinstance(inner, TransformedDistribution) and is_reshape(inner.transforms):
        inner = leaf(inner.base_dist)
    of_events = inner.event_shape.numel() == site.shape[len(site.shape) - site.event_dim :].numel()
    return inner if isinstance(inner, Joint) and of_events else None
