# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plots of predictive uncertainty and of training.

Without axes to draw into, every function makes a bare figure, which opens no window and is not kept by pyplot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

import torch

from pyro_radial._pyro.checks import positive_count
from pyro_radial.uncertainty.calibration import Reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["COLORS", "MARKERS", "new_axes", "plot_images", "plot_reliability", "plot_training_terms"]

# Okabe and Ito's palette, told apart also by the color-blind, without its black and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP"
FEW = 10  # predictions in a bin; the standard error of their accuracy is up to 0.16


def plot_reliability(reliabilities: Mapping[str, Reliability], ax: Axes | None = None) -> Axes:
    """Draw accuracy against confidence, one line per method.

    The diagonal is perfect calibration; below it a method is overconfident. Each point is one bin, placed at its
    mean confidence; bins with fewer than ten predictions are hollow and not joined to the line, for their accuracy
    is mostly chance; empty bins have no point. The faint bars are the share of the predictions in each bin, on the
    same axis from 0 to 1. The legend gives the expected calibration error.

    :param reliabilities: results of :func:`~pyro_radial.uncertainty.reliability` by the name of the method.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes; save the plot with ``ax.figure.savefig``.
    :raises ValueError: if there is no method.
    :raises ImportError: without matplotlib.

    Example::

        >>> from pyro_radial.uncertainty import reliability
        >>> probs = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        >>> ax = plot_reliability({"radial": reliability(probs, torch.tensor([0, 1]), num_bins=5)})
        >>> ax.get_legend().get_texts()[0].get_text()
        'radial (ECE 0.200)'
    """
    if not reliabilities:
        raise ValueError("reliabilities must hold at least one method, got none")
    ax = new_axes((4.2, 4.2)) if ax is None else ax
    ax.plot([0, 1], [0, 1], color="0.55", linestyle="--", linewidth=1, label="_perfect calibration", zorder=1)
    for index, (name, bins) in enumerate(reliabilities.items()):
        color = COLORS[index % len(COLORS)]
        _draw_shares(ax, bins, index, len(reliabilities), color)
        marker = MARKERS[index % len(MARKERS)]
        enough = bins.count >= FEW
        (line,) = ax.plot(*_points(bins, enough), color=color, marker=marker, linewidth=1.5)
        line.set_label(f"{name} (ECE {bins.expected_calibration_error.item():.3f})")
        few = (bins.count > 0) & (bins.count < FEW)
        (hollow,) = ax.plot(*_points(bins, few), color=color, marker=marker, linestyle="", fillstyle="none")
        for points, of in ((line, enough), (hollow, few)):
            # A point at (1, 1) is drawn whole; without points, layouts would take the figure's corner for a part of it.
            points.set(markersize=4.5, zorder=3, clip_on=not bool(of.any()))
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.set(xlabel="Confidence", ylabel="Accuracy (bars: share of predictions)")
    ax.legend(loc="upper left", frameon=False)
    return ax


def plot_images(
    images: torch.Tensor,
    titles: Sequence[str] | None = None,
    *,
    num_columns: int | None = None,
    row_labels: Sequence[str] | None = None,
    figure: Figure | SubFigure | None = None,
) -> list[Axes]:
    """Draw a grid of images, row by row.

    :param images: intensities in ``[0, 1]``, shape ``[N, C, H, W]`` with one (gray) or three (red, green, blue)
        channels.
    :param titles: one title per image, such as its class and predictive entropy.
    :param num_columns: images per row; default all in one row up to eight.
    :param row_labels: one label per row, such as "least certain".
    :param figure: an empty figure to draw into; default a new one that fits the grid.
    :returns: one axes per image; the figure is ``axes[0].figure``.
    :raises ValueError: if an argument does not fit the images; the message names it.
    :raises ImportError: without matplotlib.

    Example::

        >>> axes = plot_images(torch.rand(6, 1, 28, 28), [f"entropy {i}" for i in range(6)], num_columns=3)
        >>> len(axes), axes[4].get_title()
        (6, 'entropy 4')
    """
    if images.ndim != 4 or len(images) == 0 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must have shape [N, 1, H, W] or [N, 3, H, W], got {list(images.shape)}")
    if not ((images >= 0) & (images <= 1)).all():
        raise ValueError(f"images must be in [0, 1], got {images.min().item():.3g} to {images.max().item():.3g}")
    if titles is not None and len(titles) != len(images):
        raise ValueError(f"titles must be {len(images)}, one per image, got {len(titles)}")
    if num_columns is not None:
        positive_count("num_columns", num_columns)
    num_columns = min(len(images), num_columns or 8)
    num_rows = ceil(len(images) / num_columns)
    if row_labels is not None and len(row_labels) != num_rows:
        raise ValueError(f"row_labels must be {num_rows}, one per row, got {len(row_labels)}")
    if figure is None:
        num_lines = max(title.count("\n") + 1 for title in titles) if titles else 0
        height = num_rows * (1.15 + 0.15 * num_lines)
        figure = _new_figure((1.15 * num_columns + 0.3 * (row_labels is not None), height))
    axes = []
    for index, image in enumerate(images.detach().cpu().permute(0, 2, 3, 1)):
        ax = figure.add_subplot(num_rows, num_columns, index + 1)
        ax.imshow(image.squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        if titles is not None:
            ax.set_title(titles[index], fontsize=8, pad=3)
        if row_labels is not None and index % num_columns == 0:
            ax.set_ylabel(row_labels[index // num_columns], fontsize=9)
        axes.append(ax)
    return axes


def plot_training_terms(history: Sequence[Mapping[str, float]], ax: Axes | None = None) -> Axes:
    """Draw the terms of the training loss, the negative ELBO per datum, by epoch.

    :param history: one mapping per epoch with keys ``epoch``, ``nll`` and ``kl``, the last two in nats per datum, and
        where it was measured ``validation_nll``.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes; save the plot with ``ax.figure.savefig``.
    :raises ValueError: if ``history`` is empty or an epoch lacks a key.
    :raises ImportError: without matplotlib.

    Example::

        >>> ax = plot_training_terms([{"epoch": 1, "nll": 0.9, "kl": 0.5}, {"epoch": 2, "nll": 0.6, "kl": 0.4}])
        >>> [line.get_label() for line in ax.lines]
        ['NLL', 'KL', 'NLL + KL']
    """
    if not history:
        raise ValueError("history must hold at least one epoch, got none")
    for record in history:
        if missing := {"epoch", "nll", "kl"} - record.keys():
            raise ValueError(f"history must have key {sorted(missing)[0]!r} in every epoch, got {dict(record)}")
    ax = new_axes((5.0, 3.2)) if ax is None else ax
    from matplotlib.ticker import MaxNLocator  # Here matplotlib is known to be installed.

    nll, kl = ([record[key] for record in history] for key in ("nll", "kl"))
    total = [a + b for a, b in zip(nll, kl, strict=True)]
    epochs = [record["epoch"] for record in history]
    marker = "o" if len(history) == 1 else ""  # A line of one point would be invisible.
    ax.plot(epochs, nll, label="NLL", color=COLORS[0], marker=marker, linewidth=1.5)
    ax.plot(epochs, kl, label="KL", color=COLORS[1], marker=marker, linewidth=1.5)
    # Broad and behind: where one term dominates, the sum would hide it.
    ax.plot(epochs, total, label="NLL + KL", color="0.85", marker=marker, linewidth=5, zorder=1)
    validated = [record for record in history if "validation_nll" in record]
    if validated:
        ax.plot(
            [record["epoch"] for record in validated],
            [record["validation_nll"] for record in validated],
            label="NLL, validation",
            color=COLORS[0],
            linestyle="--",
            marker="o",
            markersize=3,
            linewidth=1.5,
        )
    ax.set(xlabel="Epoch", ylabel="Nats per datum")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return ax


def _points(bins: Reliability, chosen: torch.Tensor) -> tuple[list[float], list[float]]:
    """Confidences and accuracies of the chosen bins."""
    return bins.confidence[chosen].tolist(), bins.accuracy[chosen].tolist()


def _draw_shares(ax: Axes, bins: Reliability, index: int, num_methods: int, color: str) -> None:
    """Faint bars, those of all methods side by side within each bin."""
    num_bins = len(bins.count)
    width = 1 / (num_bins * num_methods)
    left = [b / num_bins + index * width for b in range(num_bins)]
    shares = (bins.count / bins.count.sum()).tolist()
    ax.bar(left, shares, width, align="edge", color=color, alpha=0.2, linewidth=0, zorder=0)


def _new_figure(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'pyro-radial[plots]'") from error
    return Figure(figsize=size, layout="constrained", dpi=150)


def new_axes(size: tuple[float, float]) -> Axes:
    """The axes of a new figure.

    :param size: width and height in inches.
    :raises ImportError: without matplotlib.
    """
    ax = _new_figure(size).add_subplot()
    ax.spines[["top", "right"]].set_visible(False)
    return ax
