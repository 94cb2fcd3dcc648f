# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plots of the search for the scales of a trained network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyro_radial.infer.posthoc.calibrate_scales import ScaleSearch
from pyro_radial.uncertainty.plots import COLORS, MARKERS, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_scale_search"]


def plot_scale_search(searches: Mapping[str, ScaleSearch], ax: Axes | None = None) -> Axes:
    """Draw the validation NLL against the searched number, one line per search, and the NLL without noise.

    The axis of the NLL ends a little above the network without noise, for large scales are much worse. A marker is the
    best number, whose NLL the legend gives; what sweeps over the sites make of it is a dotted line.

    :param searches: results of :func:`~pyro_radial.infer.calibrate_scales` by the name of the strategy.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes.
    :raises ValueError: if there is no search.
    :raises ImportError: without matplotlib.

    Example::

        >>> import torch
        >>> from pyro_radial.infer import ScaleCurve, ScaleSearch
        >>> curve = ScaleCurve(torch.tensor([0.1, 1.0]), torch.tensor([0.4, 0.5]), torch.tensor([0.1, 0.1]))
        >>> search = ScaleSearch(curve, {}, {"weight": 0.1}, 0.4, 0.1, 0.6, 3, 1.0)
        >>> ax = plot_scale_search({"constant": search})
        >>> ax.get_xscale(), len(ax.lines)
        ('log', 3)
    """
    if not searches:
        raise ValueError("searches must hold at least one search, got none")
    ax = new_axes((5.0, 3.2)) if ax is None else ax
    plain = [search.plain_nll for search in searches.values()]
    for value in dict.fromkeys(plain):
        ax.axhline(value, color="0.55", linestyle="--", linewidth=1, label="_no noise", zorder=1)
    for index, (name, search) in enumerate(searches.items()):
        color, curve = COLORS[index % len(COLORS)], search.curve
        label = f"{name} ({curve.nll.min():.3f})"
        ax.plot(curve.numbers.numpy(), curve.nll.numpy(), color=color, linewidth=1.5, label=label)
        marker = MARKERS[index % len(MARKERS)]
        ax.plot([curve.best], [float(curve.nll.min())], color=color, marker=marker, markersize=4.5, label="_best")
        if search.site_curves:
            ax.axhline(search.nll, color=color, linestyle=":", linewidth=1, label="_by site", zorder=1)
    lowest = min(min(search.nll, float(search.curve.nll.min())) for search in searches.values())
    highest = max(plain)
    margin = 0.25 * (highest - lowest) or 0.1
    # The legend stands below the curves.
    ax.set(xscale="log", ylim=(lowest - 2.0 * margin, highest + margin))
    ax.set(xlabel="Multiple of the relative scales", ylabel="Validation NLL (nats per row)")
    ax.legend(frameon=False, loc="lower left", ncols=2, fontsize="small")
    return ax
