# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Permuted MNIST: ten tasks, one head, two hidden layers of 100, with and without a coreset of 200 rows a task.

python -m benchmarks.continual.permuted_mnist
"""

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from benchmarks.common import Claim, Form, Job, Results, Row, compute_all, flat_images, main
from benchmarks.continual._chains import (
    Setting,
    accuracy_table,
    as_matrix,
    best_of,
    by_setting,
    learn,
    named,
    percent,
    row_keys,
)
from pyro_radial.continual import Coreset, TaskStream, permuted, plot_average_accuracy

__all__ = ["claims", "draw", "report", "run"]

METHODS = ("radial exact", "radial normal", "mean field")
# Average accuracy of S-FSVI, without and with a coreset of 200, in percent.
PUBLISHED = {0: 84.1, 200: 95.8}


class Size(NamedTuple):
    """How much is learned."""

    sizes: tuple[int, ...] = (784, 100, 100)
    epochs: int = 5
    num_tasks: int = 10
    num_choosing: int = 3
    num_samples: int = 10
    coreset: int = 200
    coreset_epochs: int = 30
    starts: int = 3
    rows: int | None = None
    batch_size: int = 512
    learning_rate: float = 1e-3


SIZES = {"default": Size(), "small": Size((784, 20), 1, 2, 2, 2, 20, 1, 1, 300, 64, 0.1)}


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 2,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """N(0, 1) as the first prior, then the previous posterior, He's start, Amsgrad at 1e-3; 5 epochs for all methods.

    A tenth of the training images, held out at random, chooses where each method's scales start, on the first three
    tasks with one seed.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "workers": workers, "threads": threads})

    def job(method: str, setting: Setting, seed: int, part: str, coreset: int = 0) -> Job:
        keys = row_keys(method, setting, seed, part, coreset)
        checkpoint = results.checkpoint(method, *asdict(setting).values(), seed, part, coreset)
        return Job(keys, score, (data_dir, form, method, setting, seed, part, coreset, checkpoint))

    grids = {method: grid(method, size)[: size.starts] for method in METHODS}
    choosing = [job(m, setting, 0, "validation") for m in METHODS for setting in grids[m]]
    compute_all(results, choosing, workers, threads)

    def accuracy(method: str, setting: Setting) -> float:
        row = results.find(row_keys(method, setting, 0, "validation", 0))
        assert row is not None
        return row["average_accuracy"]

    best = {method: max(settings, key=lambda s, m=method: accuracy(m, s)) for method, settings in grids.items()}
    jobs = [
        job(method, best[method], seed, "test", coreset)
        for seed in range(seeds if form == "default" else 1)
        for coreset in (0, size.coreset)
        for method in METHODS
    ]
    compute_all(results, jobs, workers, threads)


def grid(method: str, size: Size) -> list[Setting]:
    starts = (0.003, 0.01, 0.03) if method == "mean field" else (0.01, 0.02, 0.04)
    radius_dim = None if method == "mean field" else 1
    common = {"event_dim": radius_dim, "batch_size": size.batch_size, "learning_rate": size.learning_rate}
    return [Setting(size.epochs, init_stddev=start, **common) for start in starts]


@lru_cache
def stream(data_dir: Path | None, form: Form) -> TaskStream:
    size = SIZES[form]
    train, test = ((x[: size.rows], y[: size.rows]) for x, y in flat_images("mnist", data_dir))
    return permuted(train, test, size.num_tasks, validation_fraction=0.1)


def score(
    data_dir: Path | None,
    form: Form,
    method: str,
    setting: Setting,
    seed: int,
    part: str,
    coreset: int,
    checkpoint: Path,
) -> Row:
    size, tasks = SIZES[form], stream(data_dir, form)
    if part == "validation":
        tasks = tasks[: size.num_choosing]
    kept = Coreset(coreset, fit_options={"epochs": size.coreset_epochs, "batch_size": 512}) if coreset else None
    return learn(
        tasks,
        size.sizes,
        method,
        setting,
        seed,
        checkpoint,
        coreset=kept,
        measure_on=part,
        num_samples=size.num_samples,
    )


def claims(results: Results) -> list[Claim]:
    """Against the strongest published results."""
    found = []
    for coreset, published in PUBLISHED.items():
        method, rows = best_of(results, coreset=coreset)
        kept = f"with a coreset of {coreset}" if coreset else "without a coreset"
        text = f"Permuted MNIST {kept}: the best chain is as accurate as S-FSVI"
        ours = sum(row["average_accuracy"] for row in rows) / len(rows)
        numbers = f"{percent(rows, 'average_accuracy')} ({method})"
        found.append(Claim(text, f"{published:.1f}", numbers, str(len(rows)), 100.0 * ours >= published))
    return found


def report(results: Results) -> str:
    """Accuracies by method."""
    return f"""### Permuted MNIST

Permuted MNIST, ten tasks, one head, 784-100-100 (`python -m benchmarks.continual.permuted_mnist`). The strongest \
published results are those of S-FSVI, {PUBLISHED[200]} with a coreset of 200 and {PUBLISHED[0]} without.

{accuracy_table(results)}

{results.plot("Average accuracy by task")}"""


def draw(results: Results) -> None:
    """Average accuracy after each task."""
    runs = {}
    for (method, _, coreset), rows in by_setting(results).items():
        names = [f"permutation {number}" for number in range(len(rows[0]["values"]))]
        runs[named(method, coreset)] = [as_matrix(row, names) for row in rows]
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    plot_average_accuracy(runs, figure.subplots()).set_title("Permuted MNIST")
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
