# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Learn permuted tasks of 2,000 rows by the recipes, in batches of several sizes.

python -m benchmarks.continual._few_rows --data-dir DIR
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.common import Form, Job, Pair, Results, Row, compute_all, flat_images, main, markdown_table, perceptron
from pyro_radial.continual import Task, TaskStream, recipes, train_stream

RECIPES = {"functions(200)": recipes.functions(200), "nothing_kept()": recipes.nothing_kept()}


class Size(NamedTuple):
    """Rows of a task, test rows, tasks, batches."""

    rows: int = 2_000
    test: int = 2_000
    tasks: int = 5
    batches: tuple[int, ...] = (512, 128, 64, 32)


SIZES = {"default": Size(), "small": Size(100, 20, 2, (64, 32))}


def run(output: Path, *, data_dir: Path, form: Form = "default", workers: int = 2, threads: int = 1) -> None:
    """Learn five tasks of MNIST, each with pixels in an order of its own, and measure all of them at the end."""
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    jobs = [
        Job({"recipe": name, "batch": batch, "seed": 0}, learn, (data_dir, size, name, batch, 0))
        for name in RECIPES
        for batch in size.batches
    ]
    compute_all(results, jobs, workers, threads)


def learn(data_dir: Path, size: Size, name: str, batch: int, seed: int) -> Row:
    """Learn the tasks, and return the mean accuracy and the steps of a task."""
    train, test = flat_images("mnist", data_dir)
    stream = permuted(train, test, size, seed)
    torch.manual_seed(seed)
    net = perceptron((784, 100, 100, 10))
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    recipe = replace(RECIPES[name], batch_size=batch, fewest_steps=0)
    matrix = train_stream(recipe.chain(net), stream, progress=False, seed=seed, **recipe.options)
    return {"accuracy": float(matrix.values[-1].mean()), "steps": recipe.epochs * -(-size.rows // batch)}


def permuted(train: Pair, test: Pair, size: Size, seed: int) -> TaskStream:
    """Return tasks of other rows, each with pixels in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for number in range(size.tasks):
        pixels = torch.randperm(784, generator=generator)
        rows = torch.randperm(len(train[0]), generator=generator)[: size.rows]
        own = train[0][rows][:, pixels], train[1][rows]
        tasks.append(Task(str(number), own, (test[0][: size.test][:, pixels], test[1][: size.test])))
    return TaskStream.of(tasks, num_outputs=10)


def report(results: Results) -> str:
    """Report the mean accuracy by recipe and batch."""
    lines = [[row["recipe"], str(row["batch"]), str(row["steps"]), f"{row['accuracy']:.3f}"] for row in results.rows]
    return markdown_table(["recipe", "batch", "steps of a task", "accuracy"], lines)


if __name__ == "__main__":
    main(run, report)
