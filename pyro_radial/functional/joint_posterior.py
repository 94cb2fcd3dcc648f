# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The moments of sites that a guide cuts out of one normal vector, as Pyro's guides with a joint posterior do."""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from pyro.distributions import Delta
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal, Normal, biject_to

from pyro_radial._pyro.compat import is_capturing
from pyro_radial.distributions.constraints import is_real
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.functional.linearization import CovarianceBlock
from pyro_radial.infer.site_kl import own_distribution

__all__ = ["joint_posteriors"]


class _Vector(NamedTuple):
    """A normal vector with mean ``[P]``, variances ``[P]`` and a factor ``[P, R]`` or none, and draws of it."""

    mean: Tensor
    variance: Tensor
    factor: Tensor | None
    draws: Tensor


def joint_posteriors(model_trace: Trace, guide_trace: Trace) -> Iterator[tuple[dict[str, Tensor], CovarianceBlock]]:
    """The means of sites that are drawn together, by name, and their covariance.

    Of Pyro's ``AutoMultivariateNormal``, ``AutoLowRankMultivariateNormal``, ``AutoDiagonalNormal``, and other guides
    that draw a normal vector at an auxiliary site, and then put its parts, in order, at sites of their own. Sites whose
    values are constrained have no moments here.

    :param model_trace: a run of the model on that of the guide.
    :param guide_trace: a run of the guide.
    """
    sites = dict[str, Any](guide_trace.iter_stochastic_nodes())
    order = list(sites)
    auxiliary = [name for name, site in sites.items() if (site["infer"] or {}).get("is_auxiliary", False)]
    for name in auxiliary:
        vector = _vector(sites[name])
        following = takewhile(lambda other: other not in auxiliary, order[order.index(name) + 1 :])
        if vector is not None and (parts := _parts(vector, following, sites, model_trace)):
            yield from _moments(vector, parts, model_trace)


def _vector(site: Any) -> _Vector | None:
    """What an auxiliary site draws, if it is one normal vector."""
    distribution: Any = own_distribution(site)
    if len(distribution.event_shape) != 1 or distribution.batch_shape.numel() != 1:
        return None
    base: Any = leaf(distribution)
    if isinstance(base, LowRankMultivariateNormal):
        variance, factor = base.cov_diag, base.cov_factor
    elif isinstance(base, MultivariateNormal):
        variance, factor = torch.zeros_like(base.loc), base.scale_tril
    elif isinstance(base, Normal):
        variance, factor = base.variance, None
    else:
        return None
    (size,) = distribution.event_shape
    factor = None if factor is None else factor.reshape(size, -1)
    return _Vector(base.loc.reshape(size), variance.reshape(size), factor, site["value"].reshape(-1, size))


def _parts(vector: _Vector, names: Iterable[str], sites: dict[str, Any], model_trace: Trace) -> dict[str, slice]:
    """Which elements of the vector are at which site, unchanged."""
    parts, start = {}, 0
    for name in names:
        if name not in model_trace or not isinstance(leaf(own_distribution(sites[name])), Delta):
            continue
        prior: Any = model_trace.nodes[name]["fn"]
        free = biject_to(prior.support).inv(sites[name]["value"]).reshape(len(vector.draws), -1)
        part = slice(start, start + free.shape[-1])
        # Of what is captured the values are not known; runs before it were looked at.
        if is_real(prior.support) and (is_capturing() or torch.equal(free, vector.draws[:, part])):
            parts[name] = part
        start = part.stop
    return parts


def _moments(
    vector: _Vector, parts: dict[str, slice], model_trace: Trace
) -> Iterator[tuple[dict[str, Tensor], CovarianceBlock]]:
    """All parts together, or, where they are independent, each by itself."""
    means = {}
    for name, part in parts.items():
        prior: Any = own_distribution(model_trace.nodes[name])
        means[name] = vector.mean[part].reshape(prior.batch_shape + prior.event_shape)
    if vector.factor is None:
        for name, part in parts.items():
            yield {name: means[name]}, CovarianceBlock((name,), vector.variance[part].reshape(means[name].shape))
        return
    variance, factor = (torch.cat([of[part] for part in parts.values()]) for of in (vector.variance, vector.factor))
    yield means, CovarianceBlock(tuple(parts), variance, factor=factor)
