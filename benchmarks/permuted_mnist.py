# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Permuted MNIST: ten tasks, one head, two hidden layers of 100, with and without a coreset of 200 rows a task.

N(0, 1) as the first prior and then the previous posterior, He's start, Amsgrad at 1e-3; the same number of epochs for
all methods. A tenth of the training images, held out at random, chooses where each method's scales start, on the first
three tasks with one seed.

    python benchmarks/permuted_mnist.py --data-dir DIR
    python benchmarks/permuted_mnist.py --data-dir DIR --small    # a minute, to see it run
"""

import argparse
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch
from common import RESULTS, Job, Row, Table, compute_all, flat_images
from continual_runs import Setting, as_matrix, checkpoint_name, row_keys, run, summary
from matplotlib.figure import Figure

from pyro_radial.continual import Coreset, TaskStream, permuted, plot_average_accuracy

SIZES = (784, 100, 100)
METHODS = ("radial exact", "radial normal", "mean field")
NUM_TASKS, NUM_CHOOSING = 10, 3
CORESET = Coreset(200, fit_options={"epochs": 30, "batch_size": 512})


def grid(method: str, epochs: int) -> list[Setting]:
    starts = (0.003, 0.01, 0.03) if method == "mean field" else (0.01, 0.02, 0.04)
    radius_dim = None if method == "mean field" else 1
    return [Setting(epochs, init_stddev=start, event_dim=radius_dim, batch_size=512) for start in starts]


@lru_cache
def stream(data_dir: str | None, small: bool) -> TaskStream:
    train, test = flat_images("mnist", data_dir)
    if small:
        train, test = ((x[:2000], y[:2000]) for x, y in (train, test))
    return permuted(train, test, NUM_TASKS, validation_fraction=0.1)


def score(args: argparse.Namespace, method: str, setting: Setting, seed: int, part: str, coreset: int) -> Row:
    tasks = stream(args.data_dir, args.small)
    if part == "validation":
        tasks = tasks[:NUM_CHOOSING]
    name = checkpoint_name(args.output.stem, method, *asdict(setting).values(), seed, part, coreset)
    kept = CORESET if coreset else None
    return run(
        tasks, SIZES, method, setting, seed, name, coreset=kept, measure_on=part, num_samples=4 if args.small else 10
    )


def job(args: argparse.Namespace, method: str, setting: Setting, seed: int, part: str, coreset: int = 0) -> Job:
    return Job(row_keys(method, setting, seed, part, coreset), score, (args, method, setting, seed, part, coreset))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--small", action="store_true", help="1,800 images, 1 epoch, one seed")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.small:
        args.epochs, args.seeds = 1, 1
    args.output = args.output or RESULTS / f"permuted_mnist{'_small' if args.small else ''}.json"
    table = Table(args.output, {"torch": torch.__version__, "workers": args.workers, "threads": args.threads})

    def compute(jobs: list[Job]) -> list[Row]:
        return compute_all(table, jobs, args.workers, args.threads)

    runs: dict[str, list[Row]] = {}
    settings = {method: grid(method, args.epochs) for method in METHODS}
    rows = compute([job(args, m, s, 0, "validation") for m in METHODS for s in settings[m]])
    best: dict[str, tuple[float, Setting]] = {}
    for (method, setting), row in zip(((m, s) for m in METHODS for s in settings[m]), rows, strict=True):
        if method not in best or row["average_accuracy"] > best[method][0]:
            best[method] = row["average_accuracy"], setting
    labels = [(f"{m}{', coreset' if c else ''}", m, c) for c in (0, CORESET.size) for m in METHODS]
    jobs = [job(args, m, best[m][1], seed, "test", c) for seed in range(args.seeds) for _, m, c in labels]
    rows = compute(jobs)
    for number, (label, method, _) in enumerate(labels):
        runs[label] = rows[number :: len(labels)]
        print(summary(runs[label], label), best[method][1])
    names = stream(args.data_dir, args.small).names
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    ax = plot_average_accuracy({k: [as_matrix(row, names) for row in v] for k, v in runs.items()}, figure.subplots())
    ax.set_title("Permuted MNIST")
    figure.savefig(args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
