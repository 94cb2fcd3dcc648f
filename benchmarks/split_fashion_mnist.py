# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Split Fashion-MNIST, two classes a task, as in Farquhar, Osborne and Gal (2020), section 4.2 and appendix D.

An MLP of four hidden layers of 200, N(0, 1) as the first prior and then the previous posterior, He's start, Amsgrad at
1e-3, batches of 1024, 54,000 training images; the last tenth held out at random chooses each method's own setting on a
grid, with one seed. Unlike the paper, an epoch keeps its last, smaller batch.

    python benchmarks/split_fashion_mnist.py --data-dir DIR                 # a head for each task
    python benchmarks/split_fashion_mnist.py --data-dir DIR --single-head   # one head, with and without a coreset
    python benchmarks/split_fashion_mnist.py --data-dir DIR --small         # a minute, to see it run
"""

import argparse
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch
from common import RESULTS, Job, Row, Table, compute_all, flat_images
from continual_runs import METHODS, Setting, as_matrix, checkpoint_name, row_keys, run, summary
from matplotlib.figure import Figure

from pyro_radial.continual import Coreset, TaskStream, plot_average_accuracy, plot_final_accuracy, split_by_class

SIZES = (784, 200, 200, 200, 200)
# softplus(-6), where the paper starts sigma.
PAPER_SCALE = 0.00248
PAPER = {method: Setting(20, init_scale=PAPER_SCALE) for method in METHODS} | {
    "mean field": Setting(60, init_scale=PAPER_SCALE)
}
# Batches of a task of 10,800 images.
STEPS = 11
GRID = {
    "radial exact": [
        PAPER["radial exact"],
        *(Setting(60, init_stddev=stddev, event_dim=1) for stddev in (0.007, 0.01, 0.014)),
        Setting(120, init_stddev=0.01, event_dim=1),
        Setting(60, init_stddev=0.014, event_dim=1, reset_scales=True),
        *(Setting(60, init_stddev=stddev, event_dim=1, decay_over=60 * STEPS) for stddev in (0.01, 0.014, 0.018)),
        Setting(90, init_stddev=0.01, event_dim=1, decay_over=90 * STEPS),
    ],
    "radial published": [
        PAPER["radial published"],
        *(Setting(20, init_stddev=stddev, event_dim=1) for stddev in (0.005, 0.01)),
        Setting(60, init_stddev=0.01, event_dim=1),
    ],
    "radial normal": [
        PAPER["radial normal"],
        *(Setting(30, init_stddev=stddev, event_dim=1) for stddev in (0.005, 0.01)),
        Setting(60, init_stddev=0.005, event_dim=1),
    ],
    "mean field": [
        PAPER["mean field"],
        *(Setting(120, init_stddev=stddev) for stddev in (0.0015, PAPER_SCALE)),
        Setting(120, init_stddev=PAPER_SCALE, decay_over=120 * STEPS),
    ],
}
# The starts that are best with several heads; here the epochs are few, since each label pushes the others down.
SINGLE_GRID = {
    method: [
        Setting(epochs, init_stddev=PAPER_SCALE if method == "mean field" else 0.01, event_dim=1) for epochs in (5, 20)
    ]
    for method in METHODS
}
CORESET = Coreset(200, fit_options={"epochs": 60, "batch_size": 256})


@lru_cache
def stream(data_dir: str | None, multi_head: bool, small: bool) -> TaskStream:
    train, test = flat_images("fashion_mnist", data_dir)
    if small:
        train, test = ((x[:2000], y[:2000]) for x, y in (train, test))
    return split_by_class(train, test, multi_head=multi_head, validation_fraction=0.1)


def score(args: argparse.Namespace, method: str, setting: Setting, seed: int, part: str, coreset: int) -> Row:
    tasks = stream(args.data_dir, not args.single_head, args.small)
    name = checkpoint_name(args.output.stem, method, *asdict(setting).values(), seed, part, coreset)
    kept = CORESET if coreset else None
    num_samples = 4 if args.small else 32
    return run(tasks, SIZES, method, setting, seed, name, coreset=kept, measure_on=part, num_samples=num_samples)


def job(args: argparse.Namespace, method: str, setting: Setting, seed: int, part: str, coreset: int = 0) -> Job:
    return Job(row_keys(method, setting, seed, part, coreset), score, (args, method, setting, seed, part, coreset))


def ranked(table: Table, grid: dict[str, list[Setting]]) -> dict[str, list[Setting]]:
    """Each method's settings, those with the best average accuracy on the validation tenth first."""

    def accuracy(method: str, setting: Setting) -> float:
        row = table.find({"method": method, **asdict(setting), "measured_on": "validation", "coreset": 0})
        assert row is not None
        return row["average_accuracy"]

    return {
        method: sorted(settings, key=lambda s, m=method: accuracy(m, s), reverse=True)
        for method, settings in grid.items()
    }


def draw(path: Path, runs: dict[tuple[str, str], list[Row]], names: tuple[str, ...], title: str) -> None:
    """Two pictures for each kind of run, of all methods."""
    kinds = list(dict.fromkeys(kind for _, kind in runs))
    figure = Figure(figsize=(11, 4 * len(kinds)), layout="constrained", dpi=110)
    for row, kind in enumerate(kinds):
        matrices = {m: [as_matrix(r, names) for r in rows] for (m, k), rows in runs.items() if k == kind}
        left, right = (figure.add_subplot(len(kinds), 2, 2 * row + column) for column in (1, 2))
        plot_average_accuracy(matrices, left).set_title(kind)
        plot_final_accuracy(matrices, right).get_legend().remove()
    figure.suptitle(title)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--single-head", action="store_true")
    parser.add_argument("--small", action="store_true", help="1,800 images, 3 epochs, one setting, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    heads = "single_head" if args.single_head else "multi_head"
    args.output = args.output or RESULTS / f"split_fashion_mnist_{heads}{'_small' if args.small else ''}.json"
    grid, paper, seeds = (SINGLE_GRID if args.single_head else GRID), PAPER, range(args.seeds)
    if args.small:
        paper = {method: Setting(3, init_stddev=0.01, event_dim=1) for method in METHODS}
        grid, seeds = {method: [setting, setting] for method, setting in paper.items()}, range(1)
    table = Table(args.output, {"torch": torch.__version__, "workers": args.workers, "threads": args.threads})

    def compute(jobs: list[Job]) -> list[Row]:
        return compute_all(table, jobs, args.workers, args.threads)

    compute([job(args, method, setting, 0, "validation") for method in METHODS for setting in grid[method]])
    best = ranked(table, grid)
    if args.single_head:
        kinds = {0: "no coreset", CORESET.size: f"a coreset of {CORESET.size} rows a task"}
        wanted = {(m, kind): (m, best[m][0], coreset) for coreset, kind in kinds.items() for m in METHODS}
    else:
        wanted = {(m, "the paper's setting"): (m, paper[m], 0) for m in METHODS}
        wanted |= {(m, "its best setting by validation"): (m, best[m][0], 0) for m in METHODS}
        # Within the standard error of 6,000 validation images, 0.13 percent, of the first.
        runner_up = "radial exact, runner-up"
        wanted[runner_up, "its best setting by validation"] = ("radial exact", best["radial exact"][1], 0)
    labelled = [
        (label, job(args, method, setting, seed, "test", coreset))
        for seed in seeds
        for label, (method, setting, coreset) in wanted.items()
    ]
    rows = compute([j for _, j in labelled])
    runs = {label: [row for (name, _), row in zip(labelled, rows, strict=True) if name == label] for label in wanted}
    for label, own in runs.items():
        print(summary(own, ", ".join(label)), wanted[label][1])
    names = stream(args.data_dir, not args.single_head, args.small).names
    draw(args.output.with_suffix(".png"), runs, names, f"Split Fashion-MNIST, {heads.replace('_', ' ')}")


if __name__ == "__main__":
    main()
