# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare how near natural gradients and Adam come to the best posterior, in as many steps.

python -m benchmarks.guides.optimizers
"""

import itertools
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Results,
    Row,
    compute_all,
    is_below,
    main,
    markdown_table,
    paired,
    with_error,
    without_advice_on_widths,
)
from benchmarks.guides._linear_regression import distances, regression
from pyro_radial import AutoMeanField, NaturalGradient, fit

NATURAL = "NaturalGradient()"
NOISE = 0.5


class Size(NamedTuple):
    """The features, with the correlation of any two, rows and batches, steps, Adam's rates and seeds."""

    features: tuple[tuple[int, float], ...] = ((4, 0.0), (50, 0.9))
    rows: tuple[tuple[int, int], ...] = ((200, 200), (10_000, 128))
    steps: tuple[int, ...] = (1_000, 3_000)
    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    seeds: int = 5


SIZES = {"default": Size(), "small": Size(((2, 0.0),), ((50, 50),), (20,), (0.01, 0.1), 2)}


def run(output: Path, *, form: Form = "default", workers: int = 2, threads: int = 1) -> None:
    """Train mean field on linear regressions, whose best posterior is known.

    Adam has the best of its rates for each problem and number of steps, which fall to zero along a cosine.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    seeds = range(FIRST_SEED, FIRST_SEED + size.seeds)
    jobs = []
    for seed, features, rows, steps in itertools.product(seeds, size.features, size.rows, size.steps):
        for optimizer in (NATURAL, *size.rates):
            problem = {"features": list(features), "rows": list(rows), "steps": steps}
            keys = problem | {"optimizer": optimizer, "seed": seed}
            jobs.append(Job(keys, one, (features, rows, steps, optimizer, seed)))
    compute_all(results, jobs, workers, threads)


def one(features: tuple[int, float], rows: tuple[int, int], steps: int, optimizer: str | float, seed: int) -> Row:
    """How far the trained posterior is from the best one of its family."""
    number, batch = rows
    x, y = data(*features, number, seed)
    model = regression(features[0], NOISE)
    guide = AutoMeanField(model)
    optim: Any = {"optim": NaturalGradient()}
    if optimizer != NATURAL:
        optim = {"optim": partial(torch.optim.Adam, lr=optimizer), "scheduler": "cosine"}
    epochs = round(steps / -(-number // batch))
    with without_advice_on_widths():
        fit(model, guide, (x, y), epochs=epochs, batch_size=batch, seed=seed, progress=False, **optim)
    means, widths = distances(guide, x, y, NOISE)
    return {"means": means, "widths": widths}


def data(features: int, correlation: float, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return rows of a linear regression with features of which any two have this correlation."""
    generator = torch.Generator().manual_seed(seed)
    own, common = (torch.randn(rows, columns, generator=generator) for columns in (features, 1))
    x = (1 - correlation) ** 0.5 * own + correlation**0.5 * common
    weight = torch.randn(features, 1, generator=generator)
    return x, x @ weight + NOISE * torch.randn(rows, 1, generator=generator)


def larger_distances(results: Results, keys: Row, optimizer: Any) -> list[float]:
    """The larger distance of means and widths by seed."""
    return [max(row["means"], row["widths"]) for row in results.where(**keys, optimizer=optimizer)]


def cells(results: Results) -> list[tuple[Row, list[float], list[float], float]]:
    """For each problem the distances by natural gradients and by the best Adam, and its rate."""
    found = []
    for features, rows, steps in itertools.product(*(results.setting[name] for name in ("features", "rows", "steps"))):
        keys = {"features": features, "rows": rows, "steps": steps}
        rate = min(results.setting["rates"], key=lambda rate: mean(larger_distances(results, keys, rate)))
        found.append((keys, larger_distances(results, keys, NATURAL), larger_distances(results, keys, rate), rate))
    return found


def claims(results: Results) -> list[Claim]:
    """Natural gradients need no rate and are nearer."""
    problems = cells(results)
    nearer = sum(is_below(paired(natural, adam)) for _, natural, adam, _ in problems)
    text = "Linear regressions: `NaturalGradient()` is nearer to the best posterior than Adam at its best rate on most"
    ours = f"{nearer} of {len(problems)}, by two errors"
    return [Claim(text, "", ours, str(results.setting["seeds"]), 2 * nearer > len(problems))]


def report(results: Results) -> str:
    """Report the distances by problem."""
    lines = []
    for keys, natural, adam, rate in cells(results):
        (features, correlation), (rows, batch) = keys["features"], keys["rows"]
        name = f"{features} features, correlation {correlation:g}; {rows:,} rows in batches of {batch}"
        difference = with_error(paired(natural, adam), 2)
        lines.append([name, f"{keys['steps']:,}", with_error(natural, 2), with_error(adam, 2), f"{rate:g}", difference])
    headings = ["linear regression", "steps", f"`{NATURAL}`", "Adam", "its rate", "difference"]
    return f"""### Natural gradients and Adam

How far mean field ends from the best posterior with independent weights, which is known for a linear regression \
(`python -m benchmarks.guides.optimizers`): the root mean square over weights of the error of a mean in standard \
deviations, or of the error of the logarithm of a width, whichever is larger. Adam has the best of \
{len(results.setting["rates"])} rates for each line; rates fall to zero. Means and standard errors over \
{results.setting["seeds"]} seeds.

{markdown_table(headings, lines)}"""


if __name__ == "__main__":
    main(run, report)
