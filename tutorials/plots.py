# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plots of the tutorials: images in a grid, curves of referral, and a matrix of accuracies."""

from math import ceil

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, which color-blind readers can tell apart, without its black and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP"


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of a size in inches that opens no window."""
    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def plot_images(images, titles=None, *, num_columns=None, row_labels=None) -> list[Axes]:
    """Draw images ``[N, C, H, W]`` with intensities in ``[0, 1]`` row by row, and return an axes for each.

    Each image may have a title, and each row a label.
    """
    num_columns = min(len(images), num_columns or 8)
    num_rows = ceil(len(images) / num_columns)
    num_lines = max(title.count("\n") + 1 for title in titles) if titles else 0
    figure = new_figure(1.15 * num_columns + 0.3 * bool(row_labels), num_rows * (1.15 + 0.15 * num_lines))
    axes = []
    for index, image in enumerate(images.detach().cpu().permute(0, 2, 3, 1)):
        ax = figure.add_subplot(num_rows, num_columns, index + 1)
        ax.imshow(image.squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        if titles:
            ax.set_title(titles[index], fontsize=8, pad=3)
        if row_labels and index % num_columns == 0:
            ax.set_ylabel(row_labels[index // num_columns], fontsize=9)
        axes.append(ax)
    return axes


def plot_referral(curves, score="Score", ax=None) -> Axes:
    """Draw the score of the points that are left against the referred share, with a band of one standard error.

    ``curves`` are results of ``pyro_radial.uncertainty.referral_curve`` by the name of the method.
    """
    ax = new_figure(5.0, 3.6).add_subplot() if ax is None else ax
    for index, (name, curve) in enumerate(curves.items()):
        share, value, error = 100 * curve.referred, curve.score, curve.stderr
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        ax.plot(share, value, color=color, marker=marker, markersize=4.5, linewidth=1.5, label=name)
        ax.fill_between(share, value - error, value + error, color=color, alpha=0.2, linewidth=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(xlabel="Referred to an expert, %", ylabel=f"{score} of what is left")
    ax.legend(frameon=False)
    return ax


def plot_accuracy_matrix(matrix, ax=None) -> Axes:
    """Draw the accuracy on each task after learning each task, with the numbers; blank where it is not measured."""
    size = len(matrix.names)
    ax = new_figure(1.6 + 0.5 * size, 1.6 + 0.5 * size).add_subplot() if ax is None else ax
    image = ax.imshow(matrix.values.numpy(), cmap="Blues", vmin=0, vmax=1)
    for i, j in (~matrix.values.isnan()).nonzero().tolist():
        accuracy = float(matrix.values[i, j])
        red, green, blue, _ = image.cmap(accuracy)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.415  # There black and white contrast alike.
        color = "white" if dark else "black"
        ax.text(j, i, f"{accuracy:.3f}", ha="center", va="center", fontsize=8, color=color)
    ax.spines[:].set_visible(False)
    ax.set_xticks(range(size), matrix.names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(size), matrix.names)
    ax.tick_params(length=0)
    ax.set(xlabel="Accuracy on", ylabel="After learning")
    return ax
