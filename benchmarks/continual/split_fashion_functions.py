# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Split Fashion-MNIST with functions kept: a head a task, or one head for all ten classes.

python -m benchmarks.continual.split_fashion_functions
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.common import Claim, Form, Job, Results, Row, main
from benchmarks.continual._cells import (
    METHODS,
    Cell,
    Size,
    accuracy_table,
    as_matrix,
    compute_cells,
    percent,
    supported,
    tested_rows,
)
from benchmarks.continual._chains import (
    Keeping,
    learn,
    row_keys,
    split_fashion_mnist,
)
from pyro_radial.continual.plots import plot_average_accuracy

__all__ = ["claims", "draw", "report", "run"]

HEADS = ("multi", "single")
#: Accuracy in percent with several heads.
PUBLISHED = {"with a coreset": 99.05, "without": 99.17}
SAME_NETWORK = 98.50
#: The best of a single head before functions were kept, with 200 labels a task.
LABELS_BEFORE = 80.3

DEFAULT = Size((784, 200, 200, 200, 200), num_tasks=5, num_samples=32, learned_rows=10_600, batch_size=256)
SIZES = {"default": DEFAULT, "small": DEFAULT.small(40)}


def cells(size: Size, heads: str) -> Cell:
    """For several heads or one."""
    # Without a KL of weights both forms of a chain are one.
    epochs, weights = (20, (20.0,)) if heads == "multi" else (10, (20.0, 200.0))
    keepings = [Keeping("functions", size.coreset, weight, 200) for weight in weights]
    return Cell([size.setting(epochs, init_stddev=0.01, later_kl=0.0)], keepings)


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 5,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """An MLP of four hidden layers of 200, He's start, Amsgrad, batches of 256, 54,000 training images.

    The last tenth held out at random chooses each method's own setting with seed 0; the table's seeds start at 10.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads})

    def job(heads: str, *run_of: Any) -> Job:
        keys = {"heads": heads, **row_keys(*run_of)}
        tasks = partial(split_fashion_mnist, data_dir, size.rows, size.num_tasks, heads)
        checkpoint = results.checkpoint(*keys.values())
        return Job(keys, learn, (tasks, size.sizes, size.num_samples, {}, *run_of, checkpoint))

    number = seeds if form == "default" else 1
    for heads in HEADS:
        compute_cells(results, [cells(size, heads)], partial(job, heads), number, workers, threads, heads=heads)


def of(results: Results, heads: str, method: str) -> list[Row]:
    """The tested rows of a method in a cell."""
    size = next(size for size in SIZES.values() if results.where(coreset=size.coreset))
    return tested_rows(results, cells(size, heads), method, heads=heads)


def average(rows: Sequence[Row]) -> float:
    return 100.0 * mean(row["average_accuracy"] for row in rows)


def claims(results: Results) -> list[Claim]:
    """Compare with the strongest published results with several heads, and with ours with labels."""

    def above(text: str, published: str, rows: list[Row], least: float) -> Claim:
        ours = percent(rows, "average_accuracy")
        return Claim(f"Split Fashion-MNIST, {text}", published, ours, str(len(rows)), average(rows) >= least)

    several = [
        above(
            f"one head per task, 200 inputs kept: the chain with functions ({method}) reaches 99.0 %",
            f"{PUBLISHED['with a coreset']} (S-FSVI)",
            of(results, "multi", method),
            99.0,
        )
        for method in METHODS
    ]
    single = [
        above(
            f"one head, 200 inputs kept: {method} is above {LABELS_BEFORE} %, our earlier result with 200 labels",
            "",
            of(results, "single", method),
            LABELS_BEFORE,
        )
        for method in METHODS
    ]
    return supported([*several, *single])


def report(results: Results) -> str:
    """Report accuracies by method and by what is kept, for both kinds of heads."""
    return f"""### Split Fashion-MNIST, functions kept

Five tasks of two classes each, as below, with 784-200-200-200-200 and batches of 256 (\
`python -m benchmarks.continual.split_fashion_functions`). Accuracies are in percent, mean and standard error over \
test seeds; seconds are median CPU seconds of a run on one thread. "kept" says what is kept of each task: inputs at \
which functions are compared, with the weight of their KL. With one head, the validation tenth chose the settings with \
seed 0.

With a head for each task and 200 inputs kept, a network of four layers of 200 (radial normal) ends at \
{percent(of(results, "multi", METHODS[1]), "average_accuracy")} % after 20 epochs a task. S-FSVI has \
{SAME_NETWORK} with the same network and 60 epochs, {PUBLISHED["with a coreset"]} with its best network and a \
coreset, and {PUBLISHED["without"]} with 256-256 and functions held at the current batch in place of a coreset.

One head for each task:

{accuracy_table(results, heads="multi")}

{results.plot("Accuracy with a head for each task", "multi_head")}

A single head for all ten classes; each task has two of them:

{accuracy_table(results, heads="single")}

{results.plot("Accuracy with a single head", "single_head")}"""


def draw(results: Results) -> None:
    """Average accuracy after each task, for both kinds of heads."""
    for heads in HEADS:
        runs: dict[str, list[Any]] = {}
        for row in results.where(heads=heads, measured_on="test"):
            names = [f"classes {2 * task}, {2 * task + 1}" for task in range(len(row["values"]))]
            runs.setdefault(row["method"], []).append(as_matrix(row, names))
        figure = Figure(figsize=(7.5, 4.5), layout="constrained", dpi=130)
        plot_average_accuracy(runs, figure.subplots()).set_title(f"Split Fashion-MNIST, {heads} head")
        results.save_plot(figure, f"{heads}_head")


if __name__ == "__main__":
    main(run, report, draw)
