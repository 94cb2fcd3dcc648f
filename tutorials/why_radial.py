# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plot how far draws of mean-field and radial posteriors are from the mean: ``python tutorials/why_radial.py``."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import chi, halfnorm

PLOT = Path(__file__).with_suffix(".png")
# Of the draws, the middle nine tenths.
BAND = (0.05, 0.5, 0.95)
RADIAL, MEAN_FIELD = "#0072B2", "#D55E00"
SHELLS = (10, 100, 1_000, 10_000)


def distances(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The band of distances of a draw from the mean, in units of sigma, radial and mean field, of ``size`` weights.

    A radial draw is at a half-normal distance by construction. One of mean field is at the norm of ``size`` normals,
    which is chi distributed.
    """
    return halfnorm.ppf(BAND), chi(size).ppf(BAND)


def draw_growth(ax: Axes) -> None:
    """The distance as the tensor grows, of posteriors with the same sigma."""
    sizes = np.unique(np.logspace(0, 6, 61).round())
    radial, mean_field = (np.array(band) for band in zip(*map(distances, sizes), strict=True))
    for name, band, color in (("mean field", mean_field, MEAN_FIELD), ("radial", radial, RADIAL)):
        ax.fill_between(sizes, band[:, 0], band[:, 2], color=color, alpha=0.25, linewidth=0)
        ax.plot(sizes, band[:, 1], color=color, label=name)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="weights in the tensor, D",
        ylabel=r"distance of a draw from the mean, in $\sigma$",
    )
    ax.set_title(r"Same $\sigma$: median, and nine tenths of the draws", fontsize=10)
    ax.legend(frameon=False, loc="upper left")


def draw_shells(ax: Axes) -> None:
    """The density of the distance, of posteriors in which every weight has the same standard deviation."""
    grid = np.linspace(0, 2, 801)
    for size, alpha in zip(SHELLS, np.linspace(0.35, 1, len(SHELLS)), strict=True):
        density = chi(size).pdf(grid * size**0.5) * size**0.5
        ax.plot(grid, density, color=MEAN_FIELD, alpha=alpha)
        ax.annotate(f"D = {size:,}", (1.04 + 0.4 / size**0.5, density.max() * 0.8), fontsize=8, color=MEAN_FIELD)
    ax.plot(grid, halfnorm.pdf(grid), color=RADIAL)
    ax.annotate("radial, any D", (0.08, halfnorm.pdf(0.08)), (0.08, 1.3), fontsize=8, color=RADIAL)
    ax.set(
        yscale="log",
        ylim=(0.05, 100),
        xlim=(0, 2),
        ylabel="density",
        xlabel=r"distance, in standard deviations $\times\sqrt{D}$",
    )
    ax.set_title("Same standard deviation of each weight", fontsize=10)


def draw() -> Figure:
    """Both plots side by side."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_growth(left)
    draw_shells(right)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    draw().savefig(PLOT, dpi=120)
    print(PLOT)
