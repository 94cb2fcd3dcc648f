# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare priors under predictive widths, on rows of images, of tables and of curves that no training sees.

python -m benchmarks.guides.priors --data-dir DIR
"""

import itertools
import math
import time
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch

from benchmarks.common import Form, Job, Results, Row, compute_all, main, markdown_table
from benchmarks.guides._sets import (
    ADULT,
    ALL_IMAGES,
    LENET,
    PERCEPTRON,
    QUICKSTART,
    README,
    ROWS,
    UCI,
    data_of,
    network_of,
)
from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn

PRIORS: dict[str, Any] = {
    "N(0, 1)": dist.Normal(0.0, 1.0),
    "N(0, 0.3²)": dist.Normal(0.0, 0.3),
    "N(0, 0.1²)": dist.Normal(0.0, 0.1),
    "FanIn(1)": FanIn(),
    "FanIn(1.41)": FanIn(math.sqrt(2.0)),
    "FanIn(2)": FanIn(2.0),
    "FanIn(3)": FanIn(3.0),
}
#: Those that are tried on all images; fewer, to save time.
ON_ALL_IMAGES = ("N(0, 1)", "N(0, 0.3²)", "FanIn(1.41)")
SETS = (README, QUICKSTART, *UCI, ADULT, PERCEPTRON, LENET, ALL_IMAGES)


class Size(NamedTuple):
    """The sets, rows to score, steps in general and for all images, and seeds."""

    sets: tuple[str, ...] = SETS
    scored: int = 5_000
    steps: int = 3_600
    steps_for_all: int = 17_000
    seeds: int = 1


SIZES = {"default": Size(), "small": Size((README, "yacht"), scored=40, steps=20)}


def run(output: Path, *, data_dir: Path, form: Form = "default", workers: int = 2, threads: int = 1) -> None:
    """Train each network under each prior with ``fit``'s defaults, and score rows beside the training rows.

    No row of a test is used. The first example is the README's, with 500 rows; the quickstart has 200 digits of 8 x 8
    pixels, of which one label in five is wrong, and trains for 2,100 steps. A fifth of the training rows of
    each UCI set's first split is scored, and the noise is learned.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    jobs = []
    for seed, name, prior in itertools.product(range(size.seeds), size.sets, PRIORS):
        if name == ALL_IMAGES and prior not in ON_ALL_IMAGES:
            continue
        jobs.append(Job({"data": name, "prior": prior, "seed": seed}, one, (name, prior, seed, size, data_dir)))
    compute_all(results, jobs, workers, threads)


def one(name: str, prior: str, seed: int, size: Size, data_dir: Path) -> Row:
    """Train one network, and return the negative log density of the rows that are scored."""
    torch.manual_seed(seed)
    (x, y), (others_x, others_y) = data_of(name, size.scored, data_dir)
    torch.manual_seed(seed)
    likelihood: Any = likelihoods.Categorical() if y.dtype == torch.long else likelihoods.Gaussian(learn_scale=True)
    bnn = BayesianModule(network_of(name, x.shape[-1]), PRIORS[prior])
    model = SupervisedModel(bnn, likelihood)
    guide = AutoRadial(model, widths="predictive")
    start = time.process_time()
    steps = size.steps_for_all if name == ALL_IMAGES else size.steps
    batch = 32 if name == QUICKSTART else 128
    epochs = 300 if name == QUICKSTART else max(1, round(steps * 128 / len(x)))
    fit(model, guide, (x, y), epochs=epochs, batch_size=batch, seed=seed, progress=False)
    seconds = time.process_time() - start
    torch.manual_seed(seed)
    draws = predict(model, guide, others_x, num_samples=64)
    return {"nll": -float(draws.log_prob(others_y).mean()), "seconds": seconds}


def scores(results: Results, prior: str) -> dict[str, float]:
    """The mean NLL under a prior by set; sets where it was not tried are left out."""
    rows = {name: results.values("nll", data=name, prior=prior) for name in results.distinct("data")}
    return {name: mean(values) for name, values in rows.items() if values}


def report(results: Results) -> str:
    """Report the NLL by set and prior."""
    scores_of = {prior: scores(results, prior) for prior in PRIORS}
    names = results.distinct("data")
    best = {name: min(own[name] for own in scores_of.values() if name in own) for name in names}
    lines = []
    for prior, own in scores_of.items():
        gaps = [value - best[name] for name, value in own.items()]
        cells = (f"{own[name]:.3f}" if name in own else "-" for name in names)
        lines.append([prior, *cells, f"{mean(gaps):.3f}", f"{max(gaps):.3f}"])
    number = results.setting["seeds"]
    seeds = "one seed" if number == 1 else f"{number} seeds"
    return f"""### Priors under predictive widths

NLL of rows that no training sees, {seeds} (`python -m benchmarks.guides.priors --data-dir DIR`): \
{ROWS[LENET]:,} images of Fashion-MNIST, {ROWS[ADULT]:,} rows of adult, four fifths of the \
training rows of UCI sets; about {results.setting["steps"]:,} steps by `fit`'s defaults, and \
{results.setting["steps_for_all"]:,} for 54,000 images. Targets of UCI sets are \
standardized. The last columns say how far a prior is behind the best of its set, in the mean and at worst.

{markdown_table(["prior", *names, "behind, mean", "at worst"], lines)}"""


if __name__ == "__main__":
    main(run, report)
