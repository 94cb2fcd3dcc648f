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
    tested_rows,
)
from benchmarks.continual._chains import (
    Keeping,
    learn,
    row_keys,
    split_fashion_mnist,
)
from pyro_radial.continual import plot_average_accuracy

__all__ = ["claims", "draw", "report", "run"]

HEADS = ("multi", "single")
#: Accuracy in percent with several heads.
PUBLISHED = {"with a coreset": 99.05, "without": 99.17}
#: The best of a single head before functions were kept, with 200 labels a task.
LABELS_BEFORE = 80.3


DEFAULT = Size((784, 200, 200, 200, 200), num_tasks=5, num_samples=32, learned_rows=10_600, batch_size=256)
SIZES = {"default": DEFAULT, "small": DEFAULT.small(40)}


def cells(size: Size, heads: str) -> dict[str, Cell]:
    """By name, for several heads or one."""
    epochs, weights = (20, [20.0]) if heads == "multi" else (10, [20.0, 200.0])
    # Without a KL of weights both forms of a chain are one.
    setting = size.setting(epochs, init_stddev=0.01, later_kl=0.0)
    return {"functions": Cell([setting], [Keeping("functions", size.coreset, weight, 200) for weight in weights])}


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 1,
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
        lines = list(cells(size, heads).values())
        compute_cells(results, lines, partial(job, heads), number, workers, threads, heads=heads)


def of(results: Results, heads: str, name: str, method: str) -> list[Row]:
    """The tested rows of a method in a cell."""
    size = next(size for size in SIZES.values() if results.where(coreset=size.coreset))
    return tested_rows(results, cells(size, heads)[name], method, heads=heads)


def average(rows: Sequence[Row]) -> float:
    return 100.0 * mean(row["average_accuracy"] for row in rows)


def claims(results: Results) -> list[Claim]:
    """Against the strongest published results with several heads, and our own with one."""
    found = []
    for method in METHODS:
        rows = of(results, "multi", "functions", method)
        found.append(
            Claim(
                f"Split Fashion-MNIST, a head a task, 200 inputs kept: the function chain, {method}, reaches 99.0 %",
                f"{PUBLISHED['with a coreset']} (S-FSVI)",
                percent(rows, "average_accuracy"),
                str(len(rows)),
                average(rows) >= 99.0,
            )
        )
    for method in METHODS:
        rows = of(results, "single", "functions", method)
        found.append(
            Claim(
                f"Split Fashion-MNIST, one head, 200 inputs kept: {method} remembers more than {LABELS_BEFORE} %, what "
                "200 rows with labels gave",
                "",
                percent(rows, "average_accuracy"),
                str(len(rows)),
                average(rows) > LABELS_BEFORE,
            )
        )
    return found


def report(results: Results) -> str:
    """Accuracies by method and what is kept, for both kinds of heads."""
    return f"""### Split Fashion-MNIST, functions kept

The same five tasks of two classes, 784-200-200-200-200, batches of 256 (\
`python -m benchmarks.continual.split_fashion_functions`); percent, mean and standard error over seeds that no choice \
was made on, and the median CPU seconds of a run on one thread. 'kept' is what is kept of each task: inputs at which \
functions are held, with the weight of their KL. With one head the validation tenth chose it with seed 0. \
S-FSVI has {PUBLISHED["with a coreset"]} with a coreset and {PUBLISHED["without"]} without, in another network.

A head for each task:

{accuracy_table(results, heads="multi")}

{results.plot("Accuracy with a head for each task", "multi_head")}

One head for all ten classes, of which each task has two:

{accuracy_table(results, heads="single")}

{results.plot("Accuracy with a single head", "single_head")}"""


def draw(results: Results) -> None:
    """Average accuracy after each task, for both kinds of heads."""
    for heads in HEADS:
        runs: dict[str, list[Any]] = {}
        for row in results.where(heads=heads, measured_on="test"):
            names = [f"classes {2 * task}, {2 * task + 1}" for task in range(len(row["values"]))]
            kept = "nothing kept" if row["use"] == "nothing" else row["use"]
            local = ", local noise" if row["noise"] == "local" else ""
            runs.setdefault(f"{row['method']}, {kept}{local}", []).append(as_matrix(row, names))
        figure = Figure(figsize=(7.5, 4.5), layout="constrained", dpi=130)
        plot_average_accuracy(runs, figure.subplots()).set_title(f"Split Fashion-MNIST, {heads} head")
        results.save_plot(figure, f"{heads}_head")


if __name__ == "__main__":
    main(run, report, draw)
