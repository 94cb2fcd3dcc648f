# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A plot of scores, and of the units that a cut keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_radial._pyro.checks import check_types
from pyro_radial.compression.scores import Cut, Scores
from pyro_radial.uncertainty.plots import COLORS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["plot_scores"]

KEPT, CUT = COLORS[0], COLORS[1]


def plot_scores(scores: Scores, cut: Cut, *, figure: Figure | SubFigure | None = None) -> list[Axes]:
    """Draw the sorted scores of each layer, and which of its units are kept.

    The dashed line separates the kept scores from the cut ones; it is missing if they overlap. Scores of minus infinity
    have no point. Outputs are in the upper row, inputs in the lower.

    Source: figure 7 of Oh, Adamczewski and Park (2019), which has histograms.

    :param scores: how much the units matter.
    :param cut: the units to keep, such as the ``cut`` of a record.
    :param figure: an empty figure to draw into; default a new one that fits.
    :returns: one axes per layer with scores, those of outputs first; the figure is ``axes[0].figure``.
    :raises ValueError: naming the layer, if the cut does not fit the scores.
    :raises ImportError: without matplotlib.

    Example::

        >>> scores = Scores(outputs={"0": torch.tensor([-1.0, -9.0, 0.0])})
        >>> plot_scores(scores, Cut({"0": torch.tensor([True, False, True])}))[0].get_title()
        'Layer 0, outputs: 2 of 3 kept'
    """
    check_types(Scores, scores=scores)
    check_types(Cut, cut=cut)
    rows = [(side, values, getattr(cut, side)) for side, values in scores.sides() if values]
    for side, values, kept in rows:
        for layer in values:
            if layer in kept and len(kept[layer]) != len(values[layer]):
                raise ValueError(f"cut.{side}[{layer!r}] must be of {len(values[layer])} units, got {len(kept[layer])}")
    columns = max(len(values) for _, values, _ in rows)
    figure = new_figure((2.7 * columns + 0.3, 2.4 * len(rows) + 0.3), figure)
    axes = []
    for row, (side, values, kept) in enumerate(rows):
        for column, (layer, of_layer) in enumerate(values.items()):
            ax = figure.add_subplot(len(rows), columns, row * columns + column + 1)
            mask = kept.get(layer, torch.ones(len(of_layer), dtype=torch.bool))
            _draw_scores(ax, of_layer.detach().cpu(), mask.detach().cpu())
            ax.set_title(f"Layer {layer}, {side}: {int(mask.sum())} of {len(mask)} kept", fontsize=9)
            if column == 0:
                ax.set_ylabel("Score (log scale)", fontsize=9)
            axes.append(ax)
    axes[0].legend(handles=axes[0].lines[:2], loc="upper right", frameon=False, fontsize=8)
    return axes


def _draw_scores(ax: Axes, scores: Tensor, kept: Tensor) -> None:
    from matplotlib.ticker import MaxNLocator  # Here matplotlib is known to be installed.

    order = scores.argsort(descending=True)
    scores, kept = scores[order], kept[order]
    ranks = torch.arange(1, len(scores) + 1)
    for mask, color, label in ((kept, KEPT, "kept"), (~kept, CUT, "cut")):
        finite = mask & scores.isfinite()
        (points,) = ax.plot(ranks[finite].numpy(), scores[finite].numpy(), color=color, label=label)
        points.set(marker="o", markersize=3, linestyle="")
    if kept.any() and not kept.all() and bool(scores[kept].min() > scores[~kept].max() > -torch.inf):
        middle = float(scores[kept].min() + scores[~kept].max()) / 2
        ax.axhline(middle, color="0.4", linestyle="--", linewidth=1, zorder=1)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel("Unit, by score", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
