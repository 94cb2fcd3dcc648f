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

import numpy as np
import pyro.distributions as dist
import torch
from sklearn.compose import make_column_transformer
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor, nn

from benchmarks.common import (
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    flat_images,
    main,
    markdown_table,
    perceptron,
    uci_split,
)
from benchmarks.uncertainty._adult import CATEGORIES, adult
from benchmarks.uncertainty._lenet import lenet
from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn
from tutorials import image_sets

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
PERCEPTRON, LENET, ALL_IMAGES = IMAGES = ("784-200x4-10", "LeNet", "LeNet, 54,000 images")
UCI = ("boston", "concrete", "energy", "power", "wine", "yacht")
README, QUICKSTART, ADULT = "first example", "quickstart", "adult"
SETS = (README, QUICKSTART, *UCI, ADULT, *IMAGES)


class Size(NamedTuple):
    """The sets, training images and rows of adult, rows to score, steps in general and for all images, and seeds."""

    sets: tuple[str, ...] = SETS
    images: int = 8_000
    adults: int = 4_000
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
    (x, y), (others_x, others_y) = data_of(name, size, data_dir)
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


def network_of(name: str, inputs: int) -> nn.Module:
    """Return the network for a set."""
    if name in (LENET, ALL_IMAGES):
        return lenet(0.0)
    if name == PERCEPTRON:
        return perceptron((784, 200, 200, 200, 200, 10))
    if name == QUICKSTART:
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
    outputs = 1 if name in UCI else 2
    return perceptron((inputs, 50, outputs) if name != ADULT else (inputs, 100, 100, outputs))


def data_of(name: str, size: Size, data_dir: Path) -> tuple[Pair, Pair]:
    """Return rows for the training and rows to score."""
    if name == README:
        x = torch.randn(500 + size.scored, 2)
        y = (x[:, 0] * x[:, 1] > 0).long()
        return (x[:500], y[:500]), (x[500:], y[500:])
    if name == QUICKSTART:
        digits = image_sets.load("digits")
        x = torch.cat([digits.train_images, digits.test_images])
        y = torch.cat([digits.train_labels, digits.test_labels])
        is_wrong = torch.rand(len(y)) < 0.2
        others = (y + torch.randint(1, 10, y.shape)) % 10
        return _parted(x, torch.where(is_wrong, others, y), 200, size.scored)
    if name in IMAGES:
        (x, y), _ = flat_images("fashion_mnist", data_dir)
        if name != PERCEPTRON:
            x = x.reshape(-1, 1, 28, 28).to(memory_format=torch.channels_last)
        return _parted(x, y, 54_000 if name == ALL_IMAGES else size.images, size.scored)
    if name == ADULT:
        table, labels = adult(data_dir, "data")
        numbers = [column for column in range(table.shape[1]) if column not in CATEGORIES]
        encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        columns = make_column_transformer((encoder, CATEGORIES), (StandardScaler(), numbers))
        encoded = torch.tensor(np.asarray(columns.fit_transform(table), dtype=np.float32))
        return _parted(encoded, torch.tensor(labels).long(), size.adults, size.scored)
    x, y = uci_split(data_dir, name, 0)["train"]
    number = len(x) // 5
    return _parted(x, y, len(x) - number, number)


def _parted(x: Tensor, y: Tensor, number: int, scored: int) -> tuple[Pair, Pair]:
    order = torch.randperm(len(x))
    first, others = order[:number], order[number : number + scored]
    return (x[first], y[first]), (x[others], y[others])


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
{results.setting["images"]:,} images of Fashion-MNIST, {results.setting["adults"]:,} rows of adult, four fifths of the \
training rows of UCI sets; about {results.setting["steps"]:,} steps by `fit`'s defaults, and \
{results.setting["steps_for_all"]:,} for 54,000 images. Targets of UCI sets are \
standardized. The last columns say how far a prior is behind the best of its set, in the mean and at worst.

{markdown_table(["prior", *names, "behind, mean", "at worst"], lines)}"""


if __name__ == "__main__":
    main(run, report)
