# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plots of predictive uncertainty; they need matplotlib, and raise an ImportError without it.

Without axes, every function draws into a new figure that opens no window and that pyplot does not keep; save a plot
with ``ax.figure.savefig``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pyro_radial._pyro.checks import check_items, check_types, optional, positive_count
from pyro_radial.uncertainty.calibration import Reliability
from pyro_radial.uncertainty.intervals import QuantileCalibration
from pyro_radial.uncertainty.referral import ReferralCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["plot_images", "plot_quantile_calibration", "plot_referral", "plot_reliability"]

# Okabe and Ito's palette, which color-blind readers can tell apart, without its black and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP"
FEW = 10  # predictions in a bin; the standard error of their accuracy is up to 0.16
T = TypeVar("T")


def plot_reliability(reliabilities: Mapping[str, Reliability], ax: Axes | None = None) -> Axes:
    """Draw accuracy against confidence, one line per method.

    The diagonal is perfect calibration; a method below it is overconfident. Each point is a bin at its mean confidence.
    Bins with fewer than ten predictions are hollow and not joined to the line. Faint bars show the share of the
    predictions in each bin, on the same axis from 0 to 1. The legend gives the expected calibration error.

    :param reliabilities: results of :func:`~pyro_radial.uncertainty.reliability` by the name of the method.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes.
    :raises ValueError: if there is no method.

    Example::

        >>> from pyro_radial.uncertainty import reliability
        >>> probs = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        >>> ax = plot_reliability({"radial": reliability(probs, torch.tensor([0, 1]), num_bins=5)})
        >>> ax.get_legend().get_texts()[0].get_text()
        'radial (ECE 0.200)'
    """
    methods = styled("reliabilities", reliabilities, Reliability)
    ax = _diagonal_axes(ax)
    for index, (name, bins, color, marker) in enumerate(methods):
        num_bins = len(bins.count)
        width = 1 / (num_bins * len(methods))  # The bars of all methods stand side by side within each bin.
        left = [b / num_bins + index * width for b in range(num_bins)]
        shares = (bins.count / bins.count.sum()).tolist()
        ax.bar(left, shares, width, align="edge", color=color, alpha=0.2, linewidth=0, zorder=0)
        enough, few = bins.count >= FEW, (bins.count > 0) & (bins.count < FEW)
        label = f"{name} (ECE {bins.expected_calibration_error.item():.3f})"
        styles: list[dict[str, Any]] = [{"linewidth": 1.5, "label": label}, {"linestyle": "", "fillstyle": "none"}]
        for chosen, style in zip((enough, few), styles, strict=True):
            places = bins.confidence[chosen].tolist(), bins.accuracy[chosen].tolist()
            (points,) = ax.plot(*places, color=color, marker=marker, **style)
            # A point at (1, 1) is drawn whole; without points, layouts would count the figure's corner as a part of it.
            points.set(markersize=4.5, zorder=3, clip_on=not bool(chosen.any()))
    ax.set(xlabel="Confidence", ylabel="Accuracy (bars: share of predictions)")
    ax.legend(loc="upper left", frameon=False)
    return ax


def plot_quantile_calibration(curves: Mapping[str, QuantileCalibration], ax: Axes | None = None) -> Axes:
    """Draw the share of targets at or below their quantile against its level, one line per method.

    The diagonal is perfect calibration. The faint band around it is two standard errors wide on each side, for as many
    independent targets. A line above the diagonal on the left and below it on the right is overconfident. The legend
    gives the mean gap.

    :param curves: results of :func:`~pyro_radial.uncertainty.quantile_calibration` by the name of the method.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes.
    :raises ValueError: if there is no method.

    Example::

        >>> from pyro_radial.uncertainty import quantile_calibration
        >>> quantiles = torch.tensor([0.2, 0.5, 0.8])[:, None].expand(3, 4)
        >>> curve = quantile_calibration(quantiles, [0.2, 0.5, 0.8], torch.tensor([0.4, 0.6, 0.7, 0.9]))
        >>> plot_quantile_calibration({"radial": curve}).get_legend().get_texts()[0].get_text()
        'radial (gap 0.167)'
    """
    methods = styled("curves", curves, QuantileCalibration)
    ax = _diagonal_axes(ax)
    for name, curve, color, marker in methods:
        label = f"{name} (gap {curve.error.item():.3f})"
        (line,) = ax.plot(curve.level.cpu(), curve.share.cpu(), color=color, marker=marker, label=label)
        line.set(markersize=4.5, linewidth=1.5, clip_on=False)
    levels = torch.linspace(0, 1, 101, dtype=torch.float64)
    errors = 2 * (levels * (1 - levels) / min(curve.count for curve in curves.values())).sqrt()
    ax.fill_between(levels, levels - errors, levels + errors, color="0.55", alpha=0.2, linewidth=0, zorder=0)
    ax.set(xlabel="Level of the quantile", ylabel="Share of targets at or below it")
    ax.legend(loc="upper left", frameon=False)
    return ax


def plot_referral(curves: Mapping[str, ReferralCurve], score: str = "Score", ax: Axes | None = None) -> Axes:
    """Draw the score of the points that are left against the referred share, one line per method.

    The band is one bootstrap standard error on each side. The errors of methods tested on the same points are
    correlated, so their bands may overlap although the difference is certain.

    :param curves: results of :func:`~pyro_radial.uncertainty.referral_curve` by the name of the method.
    :param score: name of the score for its axis.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes.
    :raises ValueError: if there is no method.

    Example::

        >>> from pyro_radial.uncertainty import referral_curve
        >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.45, 0.55], [0.6, 0.4]])
        >>> accuracy = lambda probs, labels: (probs.argmax(-1) == labels).float().mean()
        >>> curve = referral_curve(accuracy, probs, torch.tensor([0, 1, 0, 0]), 1 - probs.amax(-1), shares=[0, 0.25])
        >>> ax = plot_referral({"radial": curve}, "Accuracy")
        >>> ax.get_legend().get_texts()[0].get_text()
        'radial'
    """
    methods = styled("curves", curves, ReferralCurve)
    check_types(str, score=score)
    ax = new_axes((5.0, 3.6), ax)
    for name, curve, color, marker in methods:
        share, value, error = 100 * curve.share, curve.score, curve.stderr
        ax.plot(share, value, color=color, marker=marker, markersize=4.5, linewidth=1.5, label=name)
        ax.fill_between(share, value - error, value + error, color=color, alpha=0.2, linewidth=0)
    ax.set(xlabel="Referred to an expert, %", ylabel=f"{score} of what is left")
    ax.legend(frameon=False)
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

    Example::

        >>> axes = plot_images(torch.rand(6, 1, 28, 28), [f"entropy {i}" for i in range(6)], num_columns=3)
        >>> len(axes), axes[4].get_title()
        (6, 'entropy 4')
    """
    check_types(torch.Tensor, images=images)
    if images.ndim != 4 or len(images) == 0 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must have shape [N, 1, H, W] or [N, 3, H, W], got {list(images.shape)}")
    if not ((images >= 0) & (images <= 1)).all():
        raise ValueError(f"images must be in [0, 1], got {images.min().item():.3g} to {images.max().item():.3g}")
    titles = None if titles is None else check_items(str, "titles", titles)
    if titles is not None and len(titles) != len(images):
        raise ValueError(f"titles must be {len(images)}, one per image, got {len(titles)}")
    num_columns = min(len(images), optional(positive_count, "num_columns", num_columns) or 8)
    num_rows = ceil(len(images) / num_columns)
    row_labels = None if row_labels is None else check_items(str, "row_labels", row_labels)
    if row_labels is not None and len(row_labels) != num_rows:
        raise ValueError(f"row_labels must be {num_rows}, one per row, got {len(row_labels)}")
    num_lines = max(title.count("\n") + 1 for title in titles) if titles else 0
    height = num_rows * (1.15 + 0.15 * num_lines)
    figure = new_figure((1.15 * num_columns + 0.3 * (row_labels is not None), height), figure)
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


def styled(argument: str, results: Mapping[str, T], kind: type) -> list[tuple[str, T, str, str]]:
    """The name, result, color and marker of each method; a ValueError if there is none, or one of another type."""
    check_types(Mapping, **{argument: results})
    check_types(kind, **{f"{argument}[{name!r}]": result for name, result in results.items()})
    if not results:
        raise ValueError(f"{argument} must hold at least one method, got none")
    return [
        (name, result, COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)])
        for index, (name, result) in enumerate(results.items())
    ]


def new_axes(size: tuple[float, float], ax: Axes | None = None) -> Axes:
    """The given axes, or those of a new figure of a width and height in inches."""
    if ax is None:
        ax = new_figure(size).add_subplot()
        ax.spines[["top", "right"]].set_visible(False)
    from matplotlib.axes import Axes

    check_types(Axes, ax=ax)
    return ax


def new_figure(size: tuple[float, float], figure: Any = None) -> Any:
    """The given figure, or a new one; as :func:`new_axes`."""
    try:
        from matplotlib.figure import Figure, FigureBase
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'pyro-radial[plots]'") from error
    figure = Figure(figsize=size, layout="constrained", dpi=150) if figure is None else figure
    check_types(FigureBase, figure=figure)
    return figure


def _diagonal_axes(ax: Axes | None) -> Axes:
    """A unit square with the diagonal of perfect calibration."""
    ax = new_axes((4.2, 4.2), ax)
    ax.plot([0, 1], [0, 1], color="0.55", linestyle="--", linewidth=1, label="_perfect calibration", zorder=1)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    return ax
