# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The plot of learning one task after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyro_radial._pyro.checks import check_types
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.uncertainty.plots import new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_accuracy_matrix"]


def plot_accuracy_matrix(matrix: AccuracyMatrix, ax: Axes | None = None) -> Axes:
    """Draw the accuracy on each task after learning each task, with the numbers.

    Colors run from 0 to 1 in every plot, so plots can be compared. Entries that are not measured are blank.

    :param matrix: the accuracies.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes.
    :raises ImportError: without matplotlib.

    Example::

        >>> matrix = AccuracyMatrix.empty(["first", "second"]).with_row(0, [0.9]).with_row(1, [0.6, 0.8])
        >>> [text.get_text() for text in plot_accuracy_matrix(matrix).texts]
        ['0.900', '0.600', '0.800']
    """
    check_types(AccuracyMatrix, matrix=matrix)
    size = len(matrix.names)
    side = 1.6 + 0.5 * size
    ax = new_axes((side, side), ax)
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
