# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train linear regressions, whose best posterior is exact, and count the warnings of `fit` that are missing or false.

python -m benchmarks.guides.arrival
"""

import math
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import FIRST_SEED, Claim, Form, Job, Results, Row, compute_all, main, markdown_table
from benchmarks.guides._linear_regression import distances, regression
from pyro_radial import AutoMeanField, NaturalGradient, fit
from pyro_radial.infer import FitOptions

#: Root mean squares over the weights of a run: of means in exact standard deviations, and of logarithms of widths.
MOST_MEAN_ERROR, MOST_WIDTH_ERROR = 0.2, 0.1
NOISE = 1.0
#: Within this factor of a limit, the noise of the estimates decides.
CLOSE = 1.3
ENDINGS = ("planned", "validation", "patience", "callback", "warm start")


class Size(NamedTuple):
    """The number of runs, and the least and the most of rows, steps, weights, learning rates and first widths."""

    runs: int = 300
    rows: tuple[int, int] = (20, 20_000)
    steps: tuple[int, int] = (100, 10_000)
    weights: tuple[int, int] = (2, 8)
    lr: tuple[float, float] = (0.05, 1.0)
    init_stddev: tuple[float, float] = (0.001, 1.0)


SIZES = {"default": Size(), "small": Size(runs=2, rows=(20, 40), steps=(20, 40))}


def run(output: Path, *, form: Form = "default", workers: int = 2, threads: int = 1) -> None:
    """Train 300 mean-field guides by `NaturalGradient`, and compare each with the exact optimum.

    The seed of a run decides its rows, batch size, steps, correlation of the features, and learning rate, and the
    starts of its widths and means. A fifth of the runs each ends as planned, returns the best of its epochs by
    validation rows, stops by patience, stops by a callback halfway, or starts where a run of a tenth of the steps
    ended. Nothing was chosen on these seeds.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    seeds = range(FIRST_SEED, FIRST_SEED + size.runs)
    compute_all(results, [Job({"seed": seed}, one, (seed, size)) for seed in seeds], workers, threads)


def one(seed: int, size: Size) -> Row:
    """Train one guide, and return its distance from the optimum and whether `fit` warned."""
    random = np.random.default_rng(seed)

    def between(least: float, most: float) -> float:
        return float(math.exp(random.uniform(math.log(least), math.log(most))))

    rows, steps = round(between(*size.rows)), round(between(*size.steps))
    batch_size = round(between(max(1.0, rows / steps), rows))
    weights = int(random.integers(size.weights[0], size.weights[1] + 1))
    # Most users keep the default rate.
    lr = between(*size.lr) if random.random() < 0.3 else size.lr[1]
    ending = ENDINGS[seed % len(ENDINGS)]
    features = random.normal(size=(2 * rows, weights)) + random.uniform(0, 2) * random.normal(size=(2 * rows, 1))
    target = features @ random.normal(size=(weights, 1)) + random.normal(size=(2 * rows, 1))
    x, y = (torch.tensor(values, dtype=torch.float32) for values in (features, target))
    model = regression(weights, NOISE)
    guide = AutoMeanField(model, init_stddev=between(*size.init_stddev))
    epochs = max(1, round(steps * batch_size / rows))
    arguments: dict[str, Any] = {"optim": NaturalGradient(lr=lr), "batch_size": batch_size, "progress": False}
    plan = dict(arguments)
    if ending in ("validation", "patience"):
        plan["validation"] = (x[rows:], y[rows:])
    if ending == "patience":
        plan["options"] = FitOptions(patience=max(1, epochs // 20))
    if ending == "callback":
        plan["callback"] = lambda record: record["epoch"] + 1 >= epochs // 2
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ending == "warm start":
            fit(model, guide, (x[:rows], y[:rows]), epochs=max(1, epochs // 10), seed=seed + 1000, **arguments)
            caught.clear()
        fit(model, guide, (x[:rows], y[:rows]), epochs=epochs, seed=seed, **plan)
    mean_error, width_error = distances(guide, x[:rows], y[:rows], NOISE)
    return {
        "ending": ending,
        "steps": steps,
        "mean_error": mean_error,
        "width_error": width_error,
        "warned": any("has not arrived" in str(warning.message) for warning in caught),
        "seconds": time.process_time() - start,
    }


def excess(row: Row) -> float:
    """How far a run is off, in units of the limits."""
    return float(max(row["mean_error"] / MOST_MEAN_ERROR, row["width_error"] / MOST_WIDTH_ERROR))


def counts(rows: list[Row]) -> dict[str, int]:
    """Count runs that are off, and warnings that are missing or false; "clearly" leaves out runs near the limits."""
    off = [row for row in rows if excess(row) > 1.0]
    right = [row for row in rows if excess(row) <= 1.0]
    return {
        "runs": len(rows),
        "off": len(off),
        "no warning": sum(not row["warned"] for row in off),
        "no warning, clearly off": sum(not row["warned"] and excess(row) > CLOSE for row in off),
        "right": len(right),
        "false alarm": sum(row["warned"] for row in right),
        "false alarm, clearly right": sum(row["warned"] and excess(row) < 1.0 / CLOSE for row in right),
    }


def claims(results: Results) -> list[Claim]:
    """A warning wherever a run is off, and few false alarms."""
    own = counts(results.rows)
    missing, false = own["no warning"], own["false alarm"]
    runs = str(own["runs"])
    return [
        Claim(
            "Regressions: a warning for each run that is off",
            "",
            f"{missing} of {own['off']} without",
            runs,
            missing == 0,
        ),
        Claim(
            "Regressions: at most 2 % of the runs that have arrived have a warning",
            "",
            f"{false} of {own['right']}",
            runs,
            false <= 0.02 * own["right"],
        ),
    ]


def report(results: Results) -> str:
    """Report the counts for each way to end."""
    groups = {"all": results.rows} | {ending: results.where(ending=ending) for ending in ENDINGS}
    table = {name: counts(rows) for name, rows in groups.items()}
    lines = [[name, *map(str, own.values())] for name, own in table.items()]
    size = results.setting
    return f"""### Warnings of a training that has not arrived

{size["runs"]} linear regressions, with {size["rows"][0]} to {size["rows"][1]:,} rows, {size["weights"][0]} to \
{size["weights"][1]} weights, {size["steps"][0]} to \
{size["steps"][1]:,} steps of `NaturalGradient`, and batches from one row to all \
(`python -m benchmarks.guides.arrival`). The seed of a run decides everything else. A run is off if the root mean \
square over its weights is above {MOST_MEAN_ERROR} exact standard deviations for means, or {MOST_WIDTH_ERROR} for the \
logarithm of widths. It is clearly off at {CLOSE} times the limits, and clearly right where the limits are {CLOSE} \
times as large.

{markdown_table(["the run", *table["all"]], lines)}"""


if __name__ == "__main__":
    main(run, report)
