# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network trained too long on Fashion-MNIST, and scales for it that are chosen without training.

python -m benchmarks.uncertainty.posthoc
"""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.common import (
    Claim,
    Form,
    Pair,
    Results,
    Row,
    flat_images,
    is_below,
    main,
    markdown_table,
    paired,
    with_error,
)
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import ScaleCurve, ScaleSearch, calibrate_scales, last_layer_laplace
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import accuracy, expected_calibration_error, negative_log_likelihood
from pyro_radial.uncertainty.scale_plots import plot_scale_search

__all__ = ["claims", "draw", "report", "run"]

PLAIN, LAPLACE = "no noise", "last-layer Laplace"
GUIDES = {"radial": AutoRadial, "mean field": AutoMeanField}
WITH_DATA = ("activations", "curvature")
# By name: the guide, the strategy, and sweeps over the sites.
METHODS = {
    "radial, constant": ("radial", "constant", 0),
    "radial, constant, by site": ("radial", "constant", 1),
    "radial, radius": ("radial", "radius", 0),
    "radial, norm": ("radial", "norm", 0),
    "radial, singular values": ("radial", "singular_values", 0),
    "radial, activations": ("radial", "activations", 0),
    "radial, curvature": ("radial", "curvature", 0),
    "mean field, constant": ("mean field", "constant", 0),
    "mean field, constant, by site": ("mean field", "constant", 1),
    "mean field, curvature": ("mean field", "curvature", 0),
}
ALL = [PLAIN, *METHODS, LAPLACE]
# The same with more draws of the same networks: one radius is shared by all weights of a site, so that few draws cost
# radial posteriors more.
MANY = 128
WITH_MANY = {f"{method}, {MANY} draws": METHODS[method] for method in ("radial, constant", "mean field, constant")}
SCORES = {"accuracy": "test accuracy", "nll": "NLL", "calibration_error": "ECE", "seconds": "seconds"}


class Size(NamedTuple):
    """How much is trained, searched and tested."""

    train: int = 10_000
    validation: int = 2_000
    test: int | None = None
    hidden: int = 200
    epochs: int = 30
    num_samples: int = 32
    options: Mapping[str, int] = {}


SIZES = {
    "default": Size(),
    "small": Size(200, 50, 50, 10, 2, 2, {"num_grid": 4, "num_refinements": 1, "num_samples": 2}),
}


def run(
    output: Path, *, form: Form = "default", data_dir: Path | None = None, seeds: int = 5, threads: int = 1
) -> None:
    """One network for each seed, by Adam (1e-3) on 10,000 images; 2,000 others choose scales; 32 draws are tested."""
    torch.set_num_threads(threads)
    size = SIZES[form]
    train, test = flat_images("fashion_mnist", data_dir)
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    for seed in range(seeds if form == "default" else 1):
        keys = [{"method": method, "seed": seed} for method in ALL]
        results.add_all(keys, partial(score, train, test, seed, size))
        keys = [{"method": method, "seed": seed} for method in WITH_MANY]
        results.add_all(keys, partial(score_with_many, train, test, seed, size))


def score(train: Pair, test: Pair, seed: int, size: Size) -> list[Row]:
    """All methods with the network of one seed."""
    torch.manual_seed(seed)
    fitted, held_out = part(train, 0, size.train), part(train, size.train, size.train + size.validation)
    start = time.process_time()
    net = trained(fitted, seed, size)
    with torch.no_grad():
        rows = [scores(net(test[0][: size.test]).softmax(-1), test, size) | {"seconds": time.process_time() - start}]
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(size.train))
    for guide, strategy, sweeps in METHODS.values():
        rows.append(posthoc(model, net, guide, strategy, sweeps, fitted, held_out, test, size))
    start = time.process_time()
    laplace = last_layer_laplace(model, net, fitted)
    seconds = time.process_time() - start
    return [*rows, tested(model, laplace, test, size) | {"seconds": seconds}]


def score_with_many(train: Pair, test: Pair, seed: int, size: Size) -> list[Row]:
    """The methods that are tested with many draws, with the same network."""
    torch.manual_seed(seed)
    fitted, held_out = part(train, 0, size.train), part(train, size.train, size.train + size.validation)
    net = trained(fitted, seed, size)
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(size.train))
    many = size._replace(num_samples=MANY)
    return [posthoc(model, net, *method, fitted, held_out, test, many) for method in WITH_MANY.values()]


def part(data: Pair, start: int, stop: int) -> Pair:
    return data[0][start:stop], data[1][start:stop]


def trained(data: Pair, seed: int, size: Size) -> nn.Module:
    """A plain network, trained until it is too sure of itself."""
    x, y = data
    width = size.hidden
    net = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(size.epochs):
        for index in torch.randperm(len(x), generator=generator).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            optimizer.step()
    return net


def posthoc(
    model: SupervisedModel,
    net: nn.Module,
    kind: str,
    strategy: Any,
    sweeps: int,
    fitted: Pair,
    held_out: Pair,
    test: Pair,
    size: Size,
) -> Row:
    guide = GUIDES[kind](model)
    guide.setup(*part(fitted, 0, 2))
    guide.load_means(net.state_dict())
    data = fitted if strategy in WITH_DATA else None
    start = time.process_time()
    search = calibrate_scales(model, guide, held_out, strategy, data=data, site_sweeps=sweeps, **size.options)
    seconds = time.process_time() - start
    curve = {name: getattr(search.curve, name).tolist() for name in ("numbers", "nll", "standard_error")}
    return tested(model, guide, test, size) | {
        "seconds": seconds,
        "curve": curve,
        "numbers": search.numbers,
        "validation_nll": search.nll,
        "plain_validation_nll": search.plain_nll,
        "evaluations": search.evaluations,
    }


def tested(model: SupervisedModel, guide: Any, test: Pair, size: Size) -> Row:
    return scores(predict(model, guide, test[0][: size.test], size.num_samples).mean, test, size)


def scores(probabilities: torch.Tensor, test: Pair, size: Size) -> Row:
    labels = test[1][: size.test]
    return {
        "accuracy": float(accuracy(probabilities, labels)),
        "nll": float(negative_log_likelihood(probabilities, labels)),
        "calibration_error": float(expected_calibration_error(probabilities, labels)),
    }


# What is claimed: the scores of one method lower than those of another.
CLAIMS = (
    ("one radial scale, chosen without training, lowers the NLL", "nll", "radial, constant", PLAIN),
    ("one radial scale lowers the calibration error", "calibration_error", "radial, constant", PLAIN),
    ("a number for each site has a lower NLL than one for all", "nll", "radial, constant, by site", "radial, constant"),
    ("scales by curvature have a lower NLL than one for all", "nll", "radial, curvature", "radial, constant"),
    (
        "one radial scale has a lower NLL than one of mean field, at 32 draws",
        "nll",
        "radial, constant",
        "mean field, constant",
    ),
    ("one radial scale has a lower NLL than one of mean field, at 128 draws", "nll", *WITH_MANY),
    ("one radial scale has a lower NLL than a last-layer Laplace approximation", "nll", "radial, constant", LAPLACE),
)


def claims(results: Results) -> list[Claim]:
    """Methods against each other, network by network."""
    seeds = str(len(results.distinct("seed")))
    found = []
    for text, name, lower, higher in CLAIMS:
        ours, theirs = (results.values(name, method=method) for method in (lower, higher))
        difference = paired(ours, theirs)
        numbers = f"{with_error(ours, 3)} against {with_error(theirs, 3)}, difference {with_error(difference, 4)}"
        found.append(Claim(f"A net trained too long: {text}", "", numbers, seeds, is_below(difference)))
    return found


def report(results: Results) -> str:
    """Scores by method."""
    digits = {"seconds": 1}
    lines = [
        [method, *(with_error(results.values(name, method=method), digits.get(name, 4)) for name in SCORES)]
        for method in results.distinct("method")
    ]
    return f"""### Scales for a trained network

Fashion-MNIST, 784-200-200-10, 30 epochs of Adam at 1e-3 on 10,000 images; {len(results.distinct("seed"))} networks, \
mean and standard error (`python -m benchmarks.uncertainty.posthoc`). Scales are chosen by the NLL of 2,000 other \
images over 24 passes of 16 draws, 48 more for a number for each of 6 sites (by site); nothing else is chosen, and the \
last-layer Laplace approximation takes its prior from the evidence. 10,000 test images, 32 draws; the rows of {MANY} \
draws were added after the others had been seen. Seconds are those of one core for the search alone, without noise \
those of the training.

{markdown_table(["", *SCORES.values()], lines)}

{results.plot("Validation NLL against the searched number, and test NLL and calibration error by method")}"""


def draw(results: Results) -> None:
    """The curves of the first network's radial searches, and two scores of every network."""
    figure = Figure(figsize=(10, 3.8), layout="constrained", dpi=110)
    methods = results.distinct("method")
    left, *right = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    curves = [method for method, (guide, _, sweeps) in METHODS.items() if guide == "radial" and not sweeps]
    plot_scale_search({m.partition(", ")[2]: search_of(results.where(method=m)[0]) for m in curves}, left)
    left.set_title("Radial, first network")
    for name, ax in zip(("nll", "calibration_error"), right, strict=True):
        for place, method in enumerate(reversed(methods)):
            values = results.values(name, method=method)
            ax.plot(values, [place] * len(values), "o", color="#0072B2", alpha=0.6, markersize=4)
        names = list(reversed(methods)) if ax is right[0] else [""] * len(methods)
        ax.set(yticks=range(len(methods)), yticklabels=names, title=f"Test {SCORES[name]}")
        ax.locator_params(axis="x", nbins=3)
    for ax in (left, *right):
        ax.spines[["top", "right"]].set_visible(False)
    results.save_plot(figure)


def search_of(row: Row) -> ScaleSearch:
    """The search that a row has saved."""
    curve = ScaleCurve(**{name: torch.tensor(values) for name, values in row["curve"].items()})
    own = row["validation_nll"], float("nan"), row["plain_validation_nll"], row["evaluations"], row["seconds"]
    return ScaleSearch(curve, {}, row["numbers"], *own)


if __name__ == "__main__":
    main(run, report, draw)
