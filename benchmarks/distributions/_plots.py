# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What plots of errors over concentrations share."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator


def legends_below(figure: Figure, axes: Any) -> None:
    """The lines of these axes, named once for the whole figure."""
    handles = [handle for ax in axes for handle in ax.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) // 2, frameon=False)


def shade(ax: Axes, kappa: np.ndarray, values: np.ndarray) -> None:
    """Mark where ``values`` do not exist."""
    missing = np.isnan(values)
    if missing.any():
        ax.axvspan(kappa[missing].min(), kappa[missing].max(), color="#D55E00", alpha=0.12, lw=0)
        ax.text(0.02, 0.95, "shaded: ive is 0 or not finite", transform=ax.transAxes, va="top", fontsize=9)


def tidy(figure: Figure, axes: Any) -> Figure:
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        for axis in (ax.xaxis, ax.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_locator(LogLocator(numticks=8))
                axis.set_minor_locator(NullLocator())
    return figure
