# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plots of learning one task after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pyro_radial._pyro.checks import check_items, check_types
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.uncertainty.plots import new_axes, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_accuracy_matrix", "plot_average_accuracy", "plot_final_accuracy"]

Runs = Mapping[str, AccuracyMatrix | Sequence[AccuracyMatrix]]

DODGE = 0.1  # between methods, in tasks, so that their bars do not hide each other
LINE: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.5}


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


def plot_average_accuracy(runs: Runs, ax: Axes | None = None) -> Axes:
    """Draw the average accuracy on the tasks learned so far, after each task, one line per method.

    A method with several matrices, one per seed, has a line at the mean and a band from the lowest seed to the highest.

    :param runs: a matrix, or one matrix per seed, by the name of the method.
    :param ax: axes to draw into; default a new figure.
    :returns: the axes.
    :raises ValueError: if there is no method, a method has no matrix, or the matrices are not of the same tasks.
    :raises ImportError: without matplotlib.

    Example::

        >>> matrix = AccuracyMatrix.empty(["first", "second"]).with_row(0, [0.9]).with_row(1, [0.6, 0.8])
        >>> ax = plot_average_accuracy({"radial": matrix})
        >>> ax.lines[0].get_ydata()
        array([0.9, 0.7])
    """
    matrices = _by_method(runs)
    ax = new_axes((5.0, 3.2), ax)
    from matplotlib.ticker import MaxNLocator  # Here matplotlib is known to be installed.

    for method, seeds, color, marker in styled("runs", matrices, list):
        averages = torch.stack([matrix.average_by_task for matrix in seeds])
        learned = range(1, averages.shape[1] + 1)
        ax.plot(learned, averages.mean(0), color=color, marker=marker, label=method, **LINE)
        if len(seeds) > 1:
            ax.fill_between(learned, averages.amin(0), averages.amax(0), color=color, alpha=0.2, linewidth=0)
    ax.set(xlabel="Tasks learned", ylabel="Average accuracy")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return ax


def plot_final_accuracy(runs: Runs, ax: Axes | None = None) -> Axes:
    """Draw the accuracy on each task after learning the last one, one line per method.

    With several seeds, bars reach from the lowest to the highest. The arguments are those of
    :func:`plot_average_accuracy`.

    :returns: the axes.
    :raises ValueError: as there, and if the last task of a matrix is not learned.

    Example::

        >>> matrix = AccuracyMatrix.empty(["first", "second"]).with_row(0, [0.9]).with_row(1, [0.6, 0.8])
        >>> ax = plot_final_accuracy({"radial": matrix})
        >>> ax.lines[0].get_ydata()
        array([0.6, 0.8])
    """
    matrices = _by_method(runs)
    ax = new_axes((5.0, 3.2), ax)
    for index, (method, seeds, color, marker) in enumerate(styled("runs", matrices, list)):
        last = torch.stack([matrix.values[-1] for matrix in seeds])
        if last.isnan().any():
            raise ValueError(f"runs: {method!r} must hold matrices whose last task is learned, got one where it is not")
        places, mean = torch.arange(last.shape[1]) + DODGE * (index - (len(matrices) - 1) / 2), last.mean(0)
        reach = torch.stack([mean - last.amin(0), last.amax(0) - mean]).clamp_min(0).numpy() if len(seeds) > 1 else None
        style = {**LINE, "elinewidth": 1, "capsize": 2, "color": color, "marker": marker, "label": method}
        ax.errorbar(places.numpy(), mean.numpy(), yerr=reach, **style)
    names = next(iter(matrices.values()))[0].names
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_ylabel("Accuracy after the last task")
    ax.legend(frameon=False)
    return ax


def _by_method(runs: Runs) -> dict[str, list[AccuracyMatrix]]:
    """The matrices of each method, all of the same tasks, or a ValueError."""
    check_types(Mapping, runs=runs)
    if not runs:
        raise ValueError("runs must hold at least one method, got none")
    matrices = {
        method: check_items(AccuracyMatrix, f"runs[{method!r}]", run if isinstance(run, list | tuple) else [run])
        for method, run in runs.items()
    }
    if empty := [method for method, seeds in matrices.items() if not seeds]:
        raise ValueError(f"runs: {empty[0]!r} must hold at least one matrix, got none")
    first, *others = (matrix.names for seeds in matrices.values() for matrix in seeds)
    if other := next((names for names in others if names != first), None):
        raise ValueError(f"runs must be of the same tasks, got {first} and {other}")
    return matrices
