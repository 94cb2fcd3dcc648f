# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plots of what is left after referral, of risk against coverage, and of the calibration of quantiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from pyro_radial.uncertainty.intervals import QuantileCalibration
from pyro_radial.uncertainty.plots import COLORS, MARKERS, new_axes
from pyro_radial.uncertainty.referral import ReferralCurve
from pyro_radial.uncertainty.risk_coverage import RiskCoverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_quantile_calibration", "plot_referral", "plot_risk_coverage"]

T = TypeVar("T")


def plot_referral(curves: Mapping[str, ReferralCurve], score: str = "Score", ax: Axes | None = None) -> Axes:
    """Draw the score of what is left against the referred share, one line per method.

    The band is one bootstrap standard error to either side. Bands of two methods that were tested on the same points
    err together, so they may overlap where the difference is certain.

    :param curves: results of :func:`~pyro_radial.uncertainty.referral_curve` by the name of the method.
    :param score: what the score is called on its axis.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes; save the plot with ``ax.figure.savefig``.
    :raises ValueError: if there is no method.
    :raises ImportError: without matplotlib.

    Example::

        >>> import torch
        >>> from pyro_radial.uncertainty import accuracy, referral_curve
        >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.45, 0.55], [0.6, 0.4]])
        >>> curve = referral_curve(accuracy, probs, torch.tensor([0, 1, 0, 0]), 1 - probs.amax(-1), shares=[0, 0.25])
        >>> ax = plot_referral({"radial": curve}, "Accuracy")
        >>> ax.get_legend().get_texts()[0].get_text()
        'radial'
    """
    ax = new_axes((5.0, 3.6)) if ax is None else ax
    for name, curve, color, marker in _styled("curves", curves):
        share, value, error = 100 * curve.share, curve.score, curve.stderr
        ax.plot(share, value, color=color, marker=marker, markersize=4.5, linewidth=1.5, label=name)
        ax.fill_between(share, value - error, value + error, color=color, alpha=0.2, linewidth=0)
    ax.set(xlabel="Referred to an expert, %", ylabel=f"{score} of what is left")
    ax.legend(frameon=False)
    return ax


def plot_risk_coverage(curves: Mapping[str, RiskCoverage], risk: str = "Risk", ax: Axes | None = None) -> Axes:
    """Draw the mean loss of the most certain points against their share, one line per method.

    At full coverage it is the mean loss of all. Of few points it is mostly chance: the left end of a line is rough. The
    legend gives the area under the curve.

    :param curves: results of :func:`~pyro_radial.uncertainty.risk_coverage` by the name of the method.
    :param risk: what the mean loss is called on its axis, such as "Error rate".
    :param ax: axes to draw into; default a new figure.
    :returns: the axes; save the plot with ``ax.figure.savefig``.
    :raises ValueError: if there is no method.
    :raises ImportError: without matplotlib.

    Example::

        >>> import torch
        >>> from pyro_radial.uncertainty import risk_coverage
        >>> ax = plot_risk_coverage({"radial": risk_coverage(torch.tensor([0.0, 1.0]), torch.tensor([0.1, 0.2]))})
        >>> ax.get_legend().get_texts()[0].get_text()
        'radial (area 0.250)'
    """
    ax = new_axes((5.0, 3.6)) if ax is None else ax
    for name, curve, color, _ in _styled("curves", curves):
        # A curve of one point would be invisible as a line.
        marker = "o" if len(curve.risk) == 1 else ""
        label = f"{name} (area {curve.area.item():.3f})"
        (line,) = ax.plot(curve.coverage, curve.risk, color=color, marker=marker, linewidth=1.5, label=label)
        line.set_clip_on(False)  # A line at zero is drawn whole.
    ax.set(xlim=(0, 1), xlabel="Coverage: share of the points, the most certain first", ylabel=risk)
    ax.set_ylim(bottom=min(0.0, *(float(curve.risk.min()) for curve in curves.values())))
    ax.legend(frameon=False)
    return ax


def plot_quantile_calibration(curves: Mapping[str, QuantileCalibration], ax: Axes | None = None) -> Axes:
    """Draw the share of targets at or below their quantile against its level, one line per method.

    The diagonal is perfect calibration, and the faint band around it holds a share of that many independent targets
    within two of its standard errors. A line above the diagonal on the left and below it on the right is
    overconfident. The legend gives the mean gap.

    :param curves: results of :func:`~pyro_radial.uncertainty.quantile_calibration` by the name of the method.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes; save the plot with ``ax.figure.savefig``.
    :raises ValueError: if there is no method.
    :raises ImportError: without matplotlib.

    Example::

        >>> import torch
        >>> from pyro_radial.uncertainty import quantile_calibration
        >>> quantiles = torch.tensor([0.2, 0.5, 0.8])[:, None].expand(3, 4)
        >>> curve = quantile_calibration(quantiles, [0.2, 0.5, 0.8], torch.tensor([0.4, 0.6, 0.7, 0.9]))
        >>> plot_quantile_calibration({"radial": curve}).get_legend().get_texts()[0].get_text()
        'radial (gap 0.167)'
    """
    ax = new_axes((4.2, 4.2)) if ax is None else ax
    ax.plot([0, 1], [0, 1], color="0.55", linestyle="--", linewidth=1, label="_perfect calibration", zorder=1)
    for name, curve, color, marker in _styled("curves", curves):
        level, share = curve.level.cpu(), curve.share.cpu()
        label = f"{name} (gap {curve.error.item():.3f})"
        (line,) = ax.plot(level, share, color=color, marker=marker, markersize=4.5, linewidth=1.5, label=label)
        line.set_clip_on(False)
    _draw_chance(ax, min(curve.count for curve in curves.values()))
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.set(xlabel="Level of the quantile", ylabel="Share of targets at or below it")
    ax.legend(loc="upper left", frameon=False)
    return ax


def _draw_chance(ax: Axes, count: int) -> None:
    """Two binomial standard errors around the diagonal."""
    levels = [step / 100 for step in range(101)]
    errors = [2 * (level * (1 - level) / count) ** 0.5 for level in levels]
    lower, upper = ([level + sign * error for level, error in zip(levels, errors, strict=True)] for sign in (-1, 1))
    ax.fill_between(levels, lower, upper, color="0.55", alpha=0.2, linewidth=0, zorder=0)


def _styled(argument: str, curves: Mapping[str, T]) -> Iterator[tuple[str, T, str, str]]:
    """Each method with its curve, color and marker."""
    if not curves:
        raise ValueError(f"{argument} must hold at least one method, got none")
    for index, (name, curve) in enumerate(curves.items()):
        yield name, curve, COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
