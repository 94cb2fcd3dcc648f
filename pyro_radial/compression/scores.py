# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How much each unit of a network matters under a posterior."""

from collections.abc import Iterator
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import ExpTransform

from pyro_radial.compression.units import Scores
from pyro_radial.distributions.constraints import is_real
from pyro_radial.distributions.half_cauchy import log_mode, sqrt_product
from pyro_radial.distributions.moments import moments
from pyro_radial.infer.autoguide.base import AutoPerSite
from pyro_radial.nn.priors.site_names import Side, TensorSites

__all__ = ["unit_scores"]

_SIDES: dict[str, Side] = {"outputs": "row", "inputs": "column"}


@torch.no_grad()
def unit_scores(guide: AutoPerSite) -> Scores:
    r"""The log of how much each row and column of every weight tensor matters under the guide's posterior.

    Where a tensor has the sites of a :class:`~pyro_radial.nn.priors.RadialDirectionalPrior` it is the log-mode of
    the group's local radius,

    .. math:: \tfrac12 (\mu_a + \mu_b) - \tfrac14 (\sigma_a^2 + \sigma_b^2)

    for log-normal factors a and b of its square, plus the log of E[mu . x], the length of the mean direction, which
    tells groups apart where each has a concentration of its own. Elsewhere, for a row or column with mean
    :math:`\mu` and standard deviation :math:`\sigma`, it is the signal-to-noise ratio

    .. math:: \tfrac12 \log \frac{\sum_i \mu_i^2}{\sum_i \sigma_i^2}.

    Scores of one tensor compare with each other. Those of different tensors do so as far as all local radii have the
    same prior, about their own tensor's global radius; signal-to-noise ratios as far as all tensors are as noisy.

    Source: Oh, Adamczewski and Park (2019), section 3.3: local radii alone, since the global one scales every group.
    Their code takes the mode of one factor twice, and no root.

    :param guide: a trained guide of the library, with sites named as the parameters of a network.
    :returns: scores of outputs (rows) and inputs (columns) by layer. The last tensor's rows are left out: they are
        the network's own outputs.
    :raises ValueError: if no site is a weight tensor.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule
        >>> guide = AutoRadial(BayesianModule(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))))
        >>> guide.setup(torch.zeros(1, 3))
        >>> unit_scores(guide).outputs.keys(), unit_scores(guide).inputs.keys()
        (dict_keys(['0']), dict_keys(['0', '2']))
    """
    posterior = guide.posterior()
    scores: dict[str, dict[str, Tensor]] = {units: {} for units in _SIDES}
    names = list(_weight_tensors(posterior))
    if not names:
        raise ValueError(f"guide must have a weight tensor among its sites, got {list(posterior)}")
    for name in names:
        sites = TensorSites(name)
        for units, side in _SIDES.items():
            if sites.global_radius.gamma in posterior:
                values = _directional(posterior, sites, side)
            else:
                values = _ratio(posterior[name], side)
            if values is not None:
                scores[units][name.removesuffix(".weight")] = values
    scores["outputs"].pop(names[-1].removesuffix(".weight"), None)
    return Scores(**scores)


def _weight_tensors(posterior: dict[str, Any]) -> Iterator[str]:
    """Names of parameters of two or more dims, in the order of the network."""
    for site, distribution in posterior.items():
        if tensor := TensorSites.with_global_radius(site):
            yield tensor.parameter
        elif len(distribution.event_shape) >= 2 and is_real(distribution.support):
            yield site


def _directional(posterior: dict[str, Any], sites: TensorSites, side: Side) -> Tensor | None:
    if sites.direction(side) not in posterior:
        return None
    radius = sites.local_radius(side)
    factors = (_log_normal(posterior[factor]) for factor in (radius.gamma, radius.inverse_gamma))
    length = torch.linalg.vector_norm(posterior[sites.direction(side)].mean, dim=-1)
    return log_mode(sqrt_product(*factors)) + length.log()


def _log_normal(distribution: Any) -> dist.LogNormal:
    """The posterior of a positive site as the log-normal distribution that it is."""
    return dist.LogNormal(*moments(distribution, ExpTransform()))


def _ratio(distribution: Any, side: Side) -> Tensor:
    mean, variance = (t if side == "row" else t.transpose(0, 1) for t in (distribution.mean, distribution.variance))
    return 0.5 * (mean.square().flatten(1).sum(-1) / variance.flatten(1).sum(-1)).log()
