# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draw the accuracies of several methods, each with several seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pyro_radial.continual.measures import AccuracyMatrix

Runs = Mapping[str, Sequence[AccuracyMatrix]]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP"
DODGE = 0.1  # between methods, in tasks, so that their bars do not hide each other


def style_of(index: int, method: str) -> dict[str, Any]:
    """How the line of a method looks."""
    color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
    return {"color": color, "marker": marker, "markersize": 4.5, "linewidth": 1.5, "label": method}


def plot_average_accuracy(runs: Runs, ax: Axes) -> Axes:
    """Draw the average accuracy on the tasks learned so far: the mean over seeds, and a band of all seeds."""
    for index, (method, seeds) in enumerate(runs.items()):
        averages = torch.stack([matrix.average_by_task for matrix in seeds])
        learned = range(1, averages.shape[1] + 1)
        style = style_of(index, method)
        ax.plot(learned, averages.mean(0), **style)
        if len(seeds) > 1:
            low, high = averages.amin(0), averages.amax(0)
            ax.fill_between(learned, low, high, color=style["color"], alpha=0.2, linewidth=0)
    ax.set(xlabel="Tasks learned", ylabel="Average accuracy")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return ax


def plot_final_accuracy(runs: Runs, ax: Axes) -> Axes:
    """Draw the accuracy on each task after learning the last one, with bars that reach over all seeds."""
    for index, (method, seeds) in enumerate(runs.items()):
        last = torch.stack([matrix.values[-1] for matrix in seeds])
        mean = last.mean(0)
        places = torch.arange(last.shape[1]) + DODGE * (index - (len(runs) - 1) / 2)
        reach = torch.stack([mean - last.amin(0), last.amax(0) - mean]).clamp_min(0)
        style = style_of(index, method)
        bars = reach.numpy() if len(seeds) > 1 else None
        ax.errorbar(places.numpy(), mean.numpy(), yerr=bars, elinewidth=1, capsize=2, **style)
    names = next(iter(runs.values()))[0].names
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_ylabel("Accuracy after the last task")
    ax.legend(frameon=False)
    return ax
