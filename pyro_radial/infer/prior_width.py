# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How wide a posterior is beside its prior."""

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample

from pyro_radial.distributions.moments import moments

__all__ = ["share_wider_than"]


@torch.no_grad()
def share_wider_than(fraction: float, model: Callable[..., Any], guide: Callable[..., Any], x: Any) -> float | None:
    """The share of all weights whose posterior standard deviation is above a fraction of the prior's.

    Both are of one run, with its draws of sites that priors depend on and its rows of plates that are subsampled.

    :param float fraction: of the prior's standard deviation.
    :param model: a Pyro model.
    :param guide: its guide.
    :param x: inputs.
    :returns: a number from 0 to 1, of the sites with known moments; None where there are none.
    """
    drawn = poutine.trace(guide).get_trace(x)
    prior = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(x).nodes
    wide = total = 0
    for name, site in drawn.iter_stochastic_nodes():
        if site_is_subsample(site):
            continue
        own, before = moments(site["fn"]).stddev, moments(prior[name]["fn"]).stddev
        if own is not None and before is not None:
            wide += int((own > fraction * before).sum())
            total += own.numel()
    return wide / total if total else None
