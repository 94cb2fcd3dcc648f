# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How wide a posterior is beside its prior."""

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch

from pyro_radial.distributions.moments import moments
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.poutine import mean_only

__all__ = ["share_wider_than"]


@torch.no_grad()
def share_wider_than(fraction: float, model: Callable[..., Any], guide: AutoPerSite, x: Any) -> float | None:
    """The share of all weights whose posterior standard deviation is above a fraction of the prior's.

    A prior that depends on other sites is taken at the posterior's means.

    :param float fraction: of the prior's standard deviation.
    :param model: a Pyro model.
    :param guide: its guide, set up.
    :param x: inputs.
    :returns: a number from 0 to 1, of the sites with known moments; None where there are none.
    """
    center = poutine.trace(mean_only(guide)).get_trace(x)
    prior = poutine.trace(poutine.replay(model, trace=center)).get_trace(x).nodes
    wide = total = 0
    for name, posterior in guide.posterior().items():
        own, before = moments(posterior).stddev, moments(prior[name]["fn"]).stddev
        if own is not None and before is not None:
            wide += int((own > fraction * before).sum())
            total += own.numel()
    return wide / total if total else None
