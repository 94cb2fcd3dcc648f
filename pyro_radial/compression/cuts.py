# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Nested cuts by score, and the loss that each costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import check_flag, check_items, check_number, check_types, positive_count
from pyro_radial.compression.graph import count_flops, count_weights
from pyro_radial.compression.scores import Cut, Scores
from pyro_radial.compression.surgery import complete_cut, cut_network

__all__ = ["CutRecord", "cut_path", "evaluate_path"]


class CutRecord(NamedTuple):
    """A cut, and the loss and the size of the network that it leaves."""

    cut: Cut
    loss: float
    weights: int
    flops: int


def cut_path(scores: Scores, *, num_cuts: int = 50, per_layer: bool = False) -> list[Cut]:
    """List nested cuts, from one that keeps everything to one that keeps a single unit of each layer.

    Each cut removes the units below a threshold, except the best unit of each layer (of its outputs and of its inputs).

    :param scores: how much the units matter. Scores of different layers, and of outputs and inputs, are compared with
        each other, so they must be on a common scale.
    :param num_cuts: the largest number of cuts, at least 2, spread evenly over the distinct scores.
    :param per_layer: compare ranks of the scores within their own layer: each cut then removes the same share of every
        layer, and no common scale is needed.
    :returns: the cuts, starting with the one that keeps everything.
    :raises ValueError: if ``num_cuts`` is below two.

    Example::

        >>> scores = Scores(outputs={"0": torch.tensor([-1.0, -9.0, 0.0]), "2": torch.tensor([-3.0, -2.0])})
        >>> cut_path(scores, num_cuts=3)
        [Cut(outputs={'0': 3 of 3, '2': 2 of 2}, inputs={}), Cut(outputs={'0': 2 of 3, '2': 1 of 2}, inputs={}),
         Cut(outputs={'0': 1 of 3, '2': 1 of 2}, inputs={})]
    """
    check_types(Scores, scores=scores)
    check_flag("per_layer", per_layer)
    if positive_count("num_cuts", num_cuts) < 2:
        raise ValueError(f"num_cuts must be at least 2, got {num_cuts}")
    everything = torch.cat([_plain(values) for _, side in scores.sides() for values in side.values()]).sort().values
    outputs, inputs = (
        {layer: _ranks(_plain(values), None if per_layer else everything) for layer, values in side.items()}
        for _, side in scores.sides()
    )
    ranks = torch.cat([*outputs.values(), *inputs.values()])
    levels = torch.cat([torch.tensor([-1.0], dtype=ranks.dtype), ranks[ranks < math.inf].unique()])
    chosen = torch.linspace(0, len(levels) - 1, min(num_cuts, len(levels))).round().long()

    def above(level: Tensor) -> Cut:
        return Cut(*({layer: values > level for layer, values in side.items()} for side in (outputs, inputs)))

    return [above(level) for level in levels[chosen]]


def evaluate_path(
    net: nn.Sequential,
    path: Iterable[Cut],
    loss: Callable[[nn.Sequential], float],
    input_shape: Sequence[int],
    scores: Scores | None = None,
    *,
    progress: bool = True,
) -> list[CutRecord]:
    """Cut a network by each cut of a path, and measure the loss and the size of what is left.

    :param net: a chain, as for :func:`~pyro_radial.compression.cut_network`; not changed.
    :param path: the cuts, such as those of :func:`cut_path`.
    :param loss: a function from a network to its loss, such as its error on validation data.
    :param input_shape: shape of one input without the batch, to count operations.
    :param scores: how much the units matter, to choose the unit that a layer keeps if the cut would leave none.
    :param progress: whether to show progress.
    :returns: for each cut its completed form (:func:`~pyro_radial.compression.surgery.complete_cut`), the ``loss``,
        and the number of ``weights`` and ``flops``.

    Example::

        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> path = cut_path(Scores(outputs={"0": torch.tensor([0.0, 2.0, 1.0])}))
        >>> records = evaluate_path(net, path, lambda net: 0.1 * net[0].in_features, (2,), progress=False)
        >>> [(record.weights, record.flops, record.loss) for record in records]
        [(9, 13, 0.2), (6, 9, 0.2), (3, 5, 0.2)]
    """
    check_types(Callable, loss=loss)
    records = []
    with tqdm(check_items(Cut, "path", path), desc="cuts", disable=not check_flag("progress", progress)) as bar:
        for cut in bar:
            whole = complete_cut(net, cut, scores)
            small = cut_network(net, whole)
            weights, flops = count_weights(small).total, count_flops(small, input_shape).total
            value = check_number("loss(net)", loss(small), lambda number: True, "a number")
            record = CutRecord(whole, value, weights, flops)
            bar.set_postfix(weights=record.weights, loss=f"{record.loss:.4g}")
            records.append(record)
    return records


def _plain(scores: Tensor) -> Tensor:
    return scores.detach().cpu().double()


def _ranks(scores: Tensor, among: Tensor | None) -> Tensor:
    """The share of scores below each, by default within its layer; infinite for the best, which is never cut."""
    among = scores.sort().values if among is None else among
    ranks = torch.searchsorted(among, scores).double() / len(among)
    ranks[int(scores.argmax())] = math.inf
    return ranks
