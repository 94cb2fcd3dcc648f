# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Cuts of a network one after another, each where it costs the least loss for what it saves."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from pyro_radial.compression.prune import CutRecord, evaluate_cut
from pyro_radial.compression.scores import Cut


def cheapest_path(
    net: nn.Sequential,
    scores: dict[str, Tensor],
    loss: Callable[[nn.Module], float],
    limit: float,
    *,
    input_shape: tuple[int, ...],
    units_per_cut: int,
    flops_weight: float,
) -> list[CutRecord]:
    """Cuts, each inside the one before, by the layer where a share of the units costs least loss for what it saves."""
    cut = Cut({layer: torch.ones(len(values), dtype=torch.bool) for layer, values in scores.items()})
    path = [evaluate_cut(net, cut, loss, input_shape)]
    allowed = path[0].loss + limit
    while True:
        cuts = next_cuts(path[-1].cut, scores, units_per_cut)
        candidates = [evaluate_cut(net, cut, loss, input_shape) for cut in cuts]
        candidates = [record for record in candidates if record.loss <= allowed]
        if not candidates:
            return path
        path.append(min(candidates, key=partial(price, path[-1], flops_weight)))


def next_cuts(cut: Cut, scores: dict[str, Tensor], units_per_cut: int) -> list[Cut]:
    """For each layer, the cut without the worst share of the units that are left in it, at least one."""
    cuts = []
    for layer, values in scores.items():
        kept = cut.outputs[layer]
        left = int(kept.sum())
        if left > 1:
            worst = torch.where(kept, values, math.inf).argsort()[: max(1, left // units_per_cut)]
            cuts.append(Cut({name: cut.outputs[name].clone() for name in scores}))
            cuts[-1].outputs[layer][worst] = False
    return cuts


def price(before: CutRecord, flops_weight: float, after: CutRecord) -> float:
    saving = flops_weight * math.log(before.flops / after.flops) + math.log(before.weights / after.weights)
    return (after.loss - before.loss) / saving
