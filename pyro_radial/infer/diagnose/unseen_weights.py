# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Give weights that no row reaches their priors, which are their exact posteriors."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial._pyro.types import Model
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.data import Batches
from pyro_radial.infer.diagnose.arrival import Arrival
from pyro_radial.infer.loss.elbo import TermsELBO, traces_of
from pyro_radial.infer.optim.natural_gradient import SiteState, some_of
from pyro_radial.nn.modules import evaluating

# The least number of draws under which the likelihood must not depend on a weight.
DRAWS = 16


def give_priors(
    model: Model,
    guide: nn.Module,
    batches: Batches,
    sites: Sequence[SiteState],
    arrivals: Mapping[str, Arrival],
) -> dict[str, Arrival]:
    """Give weights their normal prior if the likelihood does not depend on them, once any width is on its way up.

    An optimizer needs a sum of rates as large as the logarithm of their distance. The likelihood depends on a weight if
    it has a gradient in an epoch of batches. The search ends once each weight has one, so mostly after one batch.

    :returns: the arrivals, in which these weights have arrived.
    """
    result = dict(arrivals)
    if not any(arrival.share_too_narrow for arrival in arrivals.values()):
        return result
    with one_at_a_time(), evaluating(model, guide), seeded(0, batches.device):
        priors = _normal_priors(model, guide, batches)
        # A scale that weights share is no weight's own.
        sites = [site for site in sites if site.name in priors and site.weights_per_scale == 1]
        unseen = _find_unseen(model, guide, batches, sites)
    for site, mask in zip(sites, unseen, strict=True):
        mean, stddev = priors[site.name]
        with torch.no_grad():
            site.scale.copy_(
                torch.where(mask, site.to_scale.inv(stddev * site.per_stddev), site.scale)
            )
            site.loc.copy_(torch.where(mask, mean, site.loc))
        sum_of_rates, *errors = arrivals[site.name]
        settled = (error.masked_fill(some_of(mask), 0.0) for error in errors)
        result[site.name] = Arrival(sum_of_rates, *settled)
    return result


def _normal_priors(model: Model, guide: nn.Module, batches: Batches) -> dict[str, Tensor]:
    """Return the means and standard deviations of each normal prior that depends on no other site or parameter."""
    batch = batches.first_rows()
    priors: dict[str, Tensor] = {}
    with poutine.block():
        trace, drawn = traces_of(model, guide, *batch)
    for name in drawn.stochastic_nodes:
        prior: Any = trace.nodes[name]["fn"] if name in trace else None
        if isinstance(leaf(prior), Normal):
            both = torch.stack([prior.mean, prior.stddev])
            if not both.requires_grad:
                priors[name] = both
    return priors


def _find_unseen(
    model: Model, guide: nn.Module, batches: Batches, sites: Sequence[SiteState]
) -> list[Tensor]:
    """Return a mask of the weights without a gradient of the likelihood for each site's scales."""
    scales = [site.scale for site in sites]
    likelihood = TermsELBO(kl_weight=0.0)
    unseen = [torch.ones_like(scale, dtype=torch.bool) for scale in scales]
    for number in range(max(DRAWS, batches.per_epoch)):
        if not any(map(torch.any, unseen)):
            break
        batch = batches.get(0, number % batches.per_epoch)
        loss = likelihood(model, guide)(*batch)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(loss, scales, materialize_grads=True)
        for mask, gradient in zip(unseen, gradients, strict=True):
            mask &= gradient == 0.0
    return unseen
