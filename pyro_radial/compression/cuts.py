# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Choosing what to cut by rule: at the largest gap of the scores, or where the validation loss still allows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_radial.compression.counts import chain_flops, chain_weights
from pyro_radial.compression.graph import read_chain
from pyro_radial.compression.surgery import complete_chain_cut, cut_chain
from pyro_radial.compression.units import Cut, Scores

__all__ = ["CutRecord", "best_on_path", "cut_path", "evaluate_path", "gap_cut", "largest_gap"]


class CutRecord(NamedTuple):
    """The loss and the size of a network that is cut."""

    cut: Cut
    loss: float
    weights: int
    flops: int


def largest_gap(scores: Tensor, min_share: float = 0.25) -> float:
    """The middle of the largest gap between scores that are next to each other.

    Where the scores form two clusters, the units to keep and those to cut, that is the threshold between them. Where
    they form one, the largest gap sets apart a straggler at either end, and in 3 of 10 layers with normal scores would
    leave a single unit. Hence ``min_share``: with the default, 94 of 100 such layers of 50 units stay whole and all but
    2 of 1000 of 500, while of two clusters twelve standard deviations apart, a quarter of the units kept, at most 2 of
    1000 are missed. Layers of fewer units have such gaps by chance: of those of 20, 73 of 100 stay whole, of those of
    10 only 21.

    :param scores: one score per unit, those of one layer in any order.
    :param min_share: the least share of the range of the scores that counts as a gap, in ``[0, 1]``. What the
        scores' own rounding explains never does.
    :returns: the threshold; units whose score reaches it are kept. Without a gap it is the lowest score, so that all
        are kept. A score of minus infinity is apart from every finite one, of which the lowest is then the threshold.
    :raises ValueError: if an argument does not fit; the message names it.

    Example::

        >>> import torch
        >>> largest_gap(torch.tensor([-1.0, -9.0, 0.0, -8.0]))
        -4.5
    """
    Scores(outputs={"scores": scores})
    if not 0 <= min_share <= 1:
        raise ValueError(f"min_share must be in [0, 1], got {min_share}")
    ordered = scores.detach().double().sort().values
    if ordered[0] == -math.inf:
        finite = ordered[ordered > -math.inf]
        return float(finite[0]) if len(finite) else -math.inf
    gaps = ordered.diff()
    rounding = 8 * torch.finfo(scores.dtype).eps * ordered.abs().max()
    if len(gaps) == 0 or gaps.max() <= rounding or gaps.max() < min_share * (ordered[-1] - ordered[0]):
        return float(ordered[0])
    at = int((gaps == gaps.max()).nonzero()[0])  # Of equal gaps the lowest, which cuts the least.
    return float(ordered[at] + ordered[at + 1]) / 2


def gap_cut(scores: Scores, min_share: float = 0.25) -> Cut:
    """Cut each layer, outputs and inputs apart, at the :func:`largest_gap` of its scores.

    :param scores: how much the units matter.
    :param min_share: as for :func:`largest_gap`.
    :returns: masks over the layers that have scores.

    Example::

        >>> import torch
        >>> gap_cut(Scores(outputs={"0": torch.tensor([-1.0, -9.0, 0.0]), "2": torch.tensor([3.0, 3.0])}))
        Cut(outputs={'0': 2 of 3, '2': 2 of 2}, inputs={})
    """
    outputs, inputs = (
        {layer: values >= largest_gap(values, min_share) for layer, values in side.items()}
        for _, side in scores.sides()
    )
    return Cut(outputs, inputs)


def cut_path(scores: Scores, *, num_cuts: int = 50, per_layer: bool = False) -> list[Cut]:
    """Cuts from everything to one unit of each layer, each keeping a part of what the one before it keeps.

    Each cut takes away the units below a threshold, except the best of each layer (of its outputs and of its inputs).

    :param scores: how much the units matter; those of different layers, and of outputs and inputs, are compared with
        each other, so they must be on a common scale.
    :param num_cuts: how many cuts there are at most. Between the first and the last, they are spread evenly over the
        distinct scores.
    :param per_layer: compare not the scores but their ranks in their own layer, as a share of its units: each cut
        then takes away the same share of every layer, and no common scale is needed.
    :returns: the cuts, from the one that keeps everything on.
    :raises ValueError: if ``num_cuts`` is below two.

    Example::

        >>> import torch
        >>> scores = Scores(outputs={"0": torch.tensor([-1.0, -9.0, 0.0]), "2": torch.tensor([-3.0, -2.0])})
        >>> cut_path(scores, num_cuts=3)
        [Cut(outputs={'0': 3 of 3, '2': 2 of 2}, inputs={}), Cut(outputs={'0': 2 of 3, '2': 1 of 2}, inputs={}),
         Cut(outputs={'0': 1 of 3, '2': 1 of 2}, inputs={})]
    """
    if num_cuts < 2:
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
    :param path: the cuts, such as those of :func:`cut_path`; each is evaluated once.
    :param loss: a function from a network to its loss, such as its error on validation data.
    :param input_shape: shape of one input without the batch, to count operations.
    :param scores: how much the units matter, for layers that would be cut to nothing, as where the best output of
        one is not the best input of the next.
    :param progress: whether to show progress.
    :returns: one record per cut, in order, with all that follows from the cut
        (:func:`~pyro_radial.compression.complete_cut`).

    Example::

        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> path = cut_path(Scores(outputs={"0": torch.tensor([0.0, 2.0, 1.0])}))
        >>> records = evaluate_path(net, path, lambda net: 0.1 * net[0].in_features, (2,), progress=False)
        >>> [(record.weights, record.flops, record.loss) for record in records]
        [(9, 13, 0.2), (6, 9, 0.2), (3, 5, 0.2)]
    """
    records, chain = [], read_chain(net)
    with tqdm(list(path), desc="cuts", disable=not progress) as bar:
        for cut in bar:
            whole = complete_chain_cut(chain, cut, scores)
            small = cut_chain(chain, whole)
            small_chain = read_chain(small)
            weights, flops = chain_weights(small_chain).total, chain_flops(small_chain, input_shape).total
            record = CutRecord(whole, float(loss(small)), weights, flops)
            bar.set_postfix(weights=record.weights, loss=f"{record.loss:.4g}")
            records.append(record)
    return records


def best_on_path(records: Sequence[CutRecord], tolerance: float) -> CutRecord:
    r"""The smallest network whose loss is within a tolerance of the lowest.

    :param records: as from :func:`evaluate_path`. A loss that is not finite is never within the tolerance.
    :param tolerance: the loss to give up at most, in its own units. One standard error of the loss is customary: for
        a share e of errors among n, :math:`\sqrt{e (1 - e) / n}`. Zero picks among those with the lowest loss.
    :returns: the record with the fewest weights, and of several the one with the fewest operations.
    :raises ValueError: if ``tolerance`` is negative, or no loss is finite.

    Example::

        >>> records = [CutRecord(Cut(), 0.10, 90, 130), CutRecord(Cut(), 0.11, 60, 90), CutRecord(Cut(), 0.30, 30, 50)]
        >>> best_on_path(records, tolerance=0.02).weights
        60
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be finite and at least 0, got {tolerance}")
    finite = [record for record in records if math.isfinite(record.loss)]
    if not finite:
        raise ValueError(f"records must hold a finite loss, got {[record.loss for record in records]}")
    allowed = min(record.loss for record in finite) + tolerance
    return min(
        (record for record in finite if record.loss <= allowed), key=lambda record: (record.weights, record.flops)
    )


def _plain(scores: Tensor) -> Tensor:
    return scores.detach().cpu().double()


def _ranks(scores: Tensor, among: Tensor | None) -> Tensor:
    """The share of sorted scores, by default of its own layer, below each; the best one's infinite, never reached."""
    among = scores.sort().values if among is None else among
    ranks = torch.searchsorted(among, scores).double() / len(among)
    ranks[int(scores.argmax())] = math.inf
    return ranks
