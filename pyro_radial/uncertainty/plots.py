# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plots of calibration; they need matplotlib, and raise an ImportError without it.

Without axes, every function draws into a new figure that opens no window and that pyplot does not keep; save a plot
with ``ax.figure.savefig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pyro_radial._pyro.checks import optional, proper_fraction
from pyro_radial.uncertainty.calibration import Reliability
from pyro_radial.uncertainty.intervals import QuantileCalibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_quantile_calibration", "plot_reliability"]

# Okabe and Ito's palette, which color-blind readers can tell apart, without its black and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP"
FEW = 10  # predictions in a bin; the standard error of their accuracy is up to 0.16
T = TypeVar("T")


def plot_reliability(reliabilities: Mapping[str, Reliability], ax: Axes | None = None) -> Axes:
    """Draw accuracy against confidence, one line per method.

    The diagonal is perfect calibration; a method below it is overconfident. Each point is a bin at its mean confidence.
    Bins with fewer than ten predictions are hollow and not joined to the line. Faint bars show the share of the
    predictions in each bin, on the same axis from 0 to 1. The legend gives the expected calibration error. For a rare
    class, zoom in by ``ax.set(xlim=(0, 0.1), ylim=(0, 0.1))``.

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
    methods = _style("reliabilities", reliabilities)
    ax = _diagonal_axes(ax)
    for index, (name, bins, color, marker) in enumerate(methods):
        num_bins = len(bins.count)
        edges = torch.arange(num_bins + 1, dtype=torch.float64, device="cpu") / num_bins
        if bins.edges is not None:
            edges = bins.edges.cpu()
        # The bars of all methods stand side by side within each bin.
        widths = edges.diff() / len(methods)
        bar_starts = edges[:-1] + index * widths
        shares = (bins.count / bins.count.sum()).tolist()
        ax.bar(
            bar_starts.tolist(),
            shares,
            widths.tolist(),
            align="edge",
            color=color,
            alpha=0.2,
            linewidth=0,
            zorder=0,
        )
        enough = bins.count >= FEW
        few = (bins.count > 0) & ~enough
        label = f"{name} (ECE {bins.expected_calibration_error.item():.3f})"
        styles: list[dict[str, Any]] = [
            {"linewidth": 1.5, "label": label},
            {"linestyle": "", "fillstyle": "none"},
        ]
        for in_bins, style in zip((enough, few), styles, strict=True):
            coordinates = bins.confidence[in_bins].tolist(), bins.accuracy[in_bins].tolist()
            (points,) = ax.plot(*coordinates, color=color, marker=marker, **style)
            # A point at (1, 1) is drawn whole; without points, layouts would count the figure's corner as a part of it.
            points.set(markersize=4.5, zorder=3, clip_on=not bool(in_bins.any()))
    ax.set(xlabel="Confidence", ylabel="Accuracy (bars: share of predictions)")
    if all(bins.of_class is not None for bins in reliabilities.values()):
        ax.set(
            xlabel="Probability of the class", ylabel="Share of the class (bars: of predictions)"
        )
    ax.legend(loc="upper left", frameon=False)
    return ax


def plot_quantile_calibration(
    curves: Mapping[str, QuantileCalibration], ax: Axes | None = None, *, level: float | None = None
) -> Axes:
    """Draw the share of targets at or below their quantile against its level, one line per method.

    The diagonal is perfect calibration. The faint band around it is two standard errors wide on each side, for as many
    independent targets. A line above the diagonal on the left and below it on the right is overconfident. The legend
    gives the mean gap.

    :param curves: results of :func:`~pyro_radial.uncertainty.quantile_calibration` by the name of the method.
    :param ax: axes to draw into; default a new figure.
    :param float level: a level of central intervals, between zero and one. Dotted lines mark its two quantiles; the
        interval holds the difference of the shares there.
    :returns: the axes.
    :raises ValueError: if there is no method.

    Example::

        >>> from pyro_radial.uncertainty import quantile_calibration
        >>> quantiles = torch.tensor([0.2, 0.5, 0.8])[:, None].expand(3, 4)
        >>> curve = quantile_calibration(quantiles, [0.2, 0.5, 0.8], torch.tensor([0.4, 0.6, 0.7, 0.9]))
        >>> plot_quantile_calibration({"radial": curve}).get_legend().get_texts()[0].get_text()
        'radial (gap 0.167)'
    """
    methods = _style("curves", curves)
    optional(proper_fraction, "level", level)
    ax = _diagonal_axes(ax)
    for name, curve, color, marker in methods:
        label = f"{name} (gap {curve.error.item():.3f})"
        (line,) = ax.plot(
            curve.level.cpu(), curve.frequency.cpu(), color=color, marker=marker, label=label
        )
        line.set(markersize=4.5, linewidth=1.5, clip_on=False)
    levels = torch.linspace(0, 1, 101, dtype=torch.float64, device="cpu")
    errors = 2 * (levels * (1 - levels) / min(curve.count for curve in curves.values())).sqrt()
    ax.fill_between(
        levels, levels - errors, levels + errors, color="0.55", alpha=0.2, linewidth=0, zorder=0
    )
    if level is not None:
        ends = [(1 - level) / 2, (1 + level) / 2]
        label = f"ends of {100 * level:g} % intervals"
        ax.vlines(ends, 0, 1, color="0.3", linestyle=":", linewidth=1, label=label, zorder=1)
    ax.set(xlabel="Level of the quantile", ylabel="Share of targets at or below it")
    ax.legend(loc="upper left", frameon=False)
    return ax


def _style(argument: str, results: Mapping[str, T]) -> list[tuple[str, T, str, str]]:
    """Return the name, result, color and marker of each method; raise a ValueError for none."""
    if not results:
        raise ValueError(f"{argument} must hold at least one method, got none")
    return [
        (name, result, COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)])
        for index, (name, result) in enumerate(results.items())
    ]


def _diagonal_axes(ax: Axes | None) -> Axes:
    """Draw the diagonal of perfect calibration in a unit square, in the given axes or a new figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'pyro-radial[plots]'") from error
    if ax is None:
        ax = Figure(figsize=(4.2, 4.2), layout="constrained", dpi=150).add_subplot()
        ax.spines[["top", "right"]].set_visible(False)
    ax.plot(
        [0, 1],
        [0, 1],
        color="0.55",
        linestyle="--",
        linewidth=1,
        label="_perfect calibration",
        zorder=1,
    )
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    return ax
