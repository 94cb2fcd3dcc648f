# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Choose a scale, without training, for a network that was trained too long on Fashion-MNIST.

python -m benchmarks.uncertainty.posthoc
"""

import statistics
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
from benchmarks.uncertainty._comparison import part
from benchmarks.uncertainty._overfitted import dense, residual, trained
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import calibrate_scales, last_layer_laplace
from pyro_radial.infer.posthoc.calibrate_scales import _golden_section
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import (
    TemperatureScaling,
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
)

__all__ = ["claims", "draw", "report", "run"]

PLAIN, LAPLACE = "no noise", "last-layer Laplace"
GUIDES = {"radial": AutoRadial, "mean field": AutoMeanField}
# By name: the guide. The names are those of the rows that are saved.
METHODS = {"radial, constant": "radial", "mean field, constant": "mean field"}
# Tried and removed, with their code in this commit: other relative scales, and a number for each site.
REMOVED, COMMIT = (
    (
        *(
            "radial, constant, by site",
            "radial, radius",
            "radial, norm",
            "radial, singular values",
            "radial, activations",
        ),
        *("radial, curvature", "mean field, constant, by site", "mean field, curvature"),
    ),
    "802762c",
)
ALL = [PLAIN, *METHODS, LAPLACE]
# The same networks with more draws: all weights of a site share one radius, so few draws cost radial posteriors more.
MANY = 128
WITH_MANY = {f"{method}, {MANY} draws": guide for method, guide in METHODS.items()}
# In one pass: one number for the logits, and the integral over the last layer's normal logits by a formula.
TEMPERATURE, PROBIT = "temperature", "last-layer Laplace, probit"
IN_ONE_PASS = (TEMPERATURE, PROBIT)
# The search of a radial scale for a network with batch norm, with more validation rows, beside one on all rows.
SEARCH, SEEDS_OF_SEARCH = "search, batch norm", 2
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
    "small": Size(200, 50, 50, 10, 2, 2, {"num_samples": 2}),
}


def run(
    output: Path, *, form: Form = "default", data_dir: Path | None = None, seeds: int = 5, threads: int = 1
) -> None:
    """Train one network per seed with Adam (1e-3) on 10,000 images, choose scales on 2,000 others, test 32 draws."""
    torch.set_num_threads(threads)
    size = SIZES[form]
    train, test = flat_images("fashion_mnist", data_dir)
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    for seed in range(seeds if form == "default" else 1):
        keys = [{"method": method, "seed": seed} for method in ALL]
        results.add_all(keys, partial(score, train, test, seed, size))
        keys = [{"method": method, "seed": seed} for method in WITH_MANY]
        results.add_all(keys, partial(score_with_many, train, test, seed, size))
        keys = [{"method": method, "seed": seed} for method in IN_ONE_PASS]
        results.add_all(keys, partial(score_in_one_pass, train, test, seed, size))
    for seed in range(min(seeds, SEEDS_OF_SEARCH) if form == "default" else 1):
        results.add({"method": SEARCH, "seed": seed}, partial(searched, train, seed, size))


def score(train: Pair, test: Pair, seed: int, size: Size) -> list[Row]:
    """All methods with the network of one seed."""
    torch.manual_seed(seed)
    fitted, held_out = part(train, 0, size.train), part(train, size.train, size.train + size.validation)
    start = time.process_time()
    net = trained(dense(size.hidden), fitted, size.epochs, seed)
    with torch.no_grad():
        rows = [scores(net(test[0][: size.test]).softmax(-1), test, size) | {"seconds": time.process_time() - start}]
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=size.train))
    rows += [posthoc(model, net, guide, fitted, held_out, test, size) for guide in METHODS.values()]
    start = time.process_time()
    laplace = last_layer_laplace(model, net, fitted)
    seconds = time.process_time() - start
    return [*rows, tested(model, laplace, test, size) | {"seconds": seconds}]


def score_with_many(train: Pair, test: Pair, seed: int, size: Size) -> list[Row]:
    """The methods that are tested with many draws, with the same network."""
    torch.manual_seed(seed)
    fitted, held_out = part(train, 0, size.train), part(train, size.train, size.train + size.validation)
    net = trained(dense(size.hidden), fitted, size.epochs, seed)
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=size.train))
    many = size._replace(num_samples=MANY)
    return [posthoc(model, net, guide, fitted, held_out, test, many) for guide in WITH_MANY.values()]


def score_in_one_pass(train: Pair, test: Pair, seed: int, size: Size) -> list[Row]:
    """The methods without draws, with the same network."""
    torch.manual_seed(seed)
    fitted, held_out = part(train, 0, size.train), part(train, size.train, size.train + size.validation)
    net = trained(dense(size.hidden), fitted, size.epochs, seed)
    likelihood = likelihoods.Categorical(num_data=size.train)
    x = test[0][: size.test]
    with torch.no_grad():
        logits, on_held_out = net(x), net(held_out[0])
    start = time.process_time()
    scaling = TemperatureScaling.fit(Prediction(on_held_out.unsqueeze(0), likelihood), held_out[1])
    rows = [scores((logits / scaling.temperature).softmax(-1), test, size) | {"seconds": time.process_time() - start}]
    model = SupervisedModel(BayesianModule(net), likelihood)
    start = time.process_time()
    laplace = last_layer_laplace(model, net, fitted)
    seconds = time.process_time() - start
    return [*rows, scores(predict(model, laplace, x, method="probit").mean, test, size) | {"seconds": seconds}]


def posthoc(
    model: SupervisedModel, net: nn.Module, kind: str, fitted: Pair, held_out: Pair, test: Pair, size: Size
) -> Row:
    guide = GUIDES[kind](model)
    guide.setup(*part(fitted, 0, 2))
    guide.load_means(net.state_dict())
    start = time.process_time()
    search = calibrate_scales(model, guide, held_out, progress=False, **size.options)
    seconds = time.process_time() - start
    return tested(model, guide, test, size) | {
        "seconds": seconds,
        "curve": {"numbers": list(search.tried), "nll": list(search.tried.values())},
        "number": search.number,
        "validation_nll": search.nll,
        "plain_validation_nll": search.plain_nll,
    }


def searched(train: Pair, seed: int, size: Size) -> Row:
    """CPU time and NLL of the search, and of one that sees every number on all validation rows with the same noise."""
    torch.manual_seed(seed)
    fitted, (x, y) = part(train, 0, size.train // 2), part(train, size.train, size.train + 2 * size.validation)
    net = trained(residual(), fitted, size.epochs, seed).eval()
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=size.train // 2))
    guide = AutoRadial(model)
    guide.setup(*part(fitted, 0, 2))
    defaults = {"low": 1e-4, "high": 10.0, "num_samples": 16} | size.options
    num_samples = defaults.pop("num_samples")

    def nll_of_all(number: float) -> float:
        guide.set_stddevs({name: torch.full_like(mean, number) for name, mean in guide.loc_scale_means().items()})
        torch.manual_seed(0)
        return -float(predict(model, guide, x, num_samples).log_prob(y).mean())

    start = time.process_time()
    search = calibrate_scales(model, guide, (x, y), progress=False, **size.options)
    middle = time.process_time()
    with torch.no_grad():
        tried = _golden_section(nll_of_all, *defaults.values())
    seconds, of_all = middle - start, time.process_time() - middle
    return {
        "seconds": seconds,
        "seconds_of_all": of_all,
        "ratio": of_all / seconds,
        "validation_nll": search.nll,
        "validation_nll_of_all": min(tried.values()),
        "plain_validation_nll": search.plain_nll,
        "number": search.number,
        "curve": {"numbers": list(search.tried), "nll": list(search.tried.values())},
        "curve_of_all": {"numbers": list(tried), "nll": list(tried.values())},
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
    (
        "one radial scale has a lower NLL than one mean-field scale, at 32 draws",
        "nll",
        "radial, constant",
        "mean field, constant",
    ),
    ("one radial scale has a lower NLL than one mean-field scale, at 128 draws", "nll", *WITH_MANY),
    ("one radial scale has a lower NLL than a last-layer Laplace approximation", "nll", "radial, constant", LAPLACE),
    ("one radial scale has a lower NLL than a temperature", "nll", "radial, constant", TEMPERATURE),
    ("the probit has a lower NLL than 32 draws of a last-layer Laplace approximation", "nll", PROBIT, LAPLACE),
)


def claims(results: Results) -> list[Claim]:
    """Compare methods network by network."""
    seeds = str(len(results.distinct("seed")))
    found = []
    for text, name, lower, higher in CLAIMS:
        ours, theirs = (results.values(name, method=method) for method in (lower, higher))
        difference = paired(ours, theirs)
        numbers = f"{with_error(ours, 3)} against {with_error(theirs, 3)}, difference {with_error(difference, 4)}"
        found.append(Claim(f"A network trained too long: {text}", "", numbers, seeds, is_below(difference)))
    return found


def report(results: Results) -> str:
    """Report scores by method."""
    digits = {"seconds": 1}
    lines = [
        [method, *(with_error(results.values(name, method=method), digits.get(name, 4)) for name in SCORES)]
        for method in (*ALL, *IN_ONE_PASS, *WITH_MANY)
    ]
    return f"""### A scale for a trained network

Networks of 784-200-200-10 train on 10,000 images of Fashion-MNIST for 30 epochs of Adam at 1e-3. Numbers are means \
and standard errors over {len(results.distinct("seed"))} networks (`python -m benchmarks.uncertainty.posthoc`). One \
scale for all weights is chosen by the NLL of 2,000 other images, with 16 draws. Nothing else is chosen; \
the last-layer Laplace approximation sets its prior by marginal likelihood. Tests use 10,000 images and 32 draws; the \
temperature, which the same 2,000 images choose, and the probit need one pass. We added the rows with {MANY} draws and \
those with one pass after seeing the others. Seconds are the time of the search on one core, or of the training \
without noise.

{markdown_table(["", *SCORES.values()], lines)}
{search_time(results)}
{removed(results)}
{results.plot("Validation NLL by scale, and test NLL and calibration error by method")}"""


def search_time(results: Results) -> str:
    """Report how long the search takes beside one on all rows, if it is among the results."""
    rows = results.where(method=SEARCH)
    if not rows:
        return ""
    seconds, of_all = (with_error([row[name] for row in rows], 1) for name in ("seconds", "seconds_of_all"))
    apart = max(abs(row["validation_nll"] - row["validation_nll_of_all"]) for row in rows)
    return f"""
With more than 1,024 validation rows, all of them see only the best few numbers. For {len(rows)} residual networks \
with batch norm, trained on 5,000 images, and 4,000 validation rows, the search takes {seconds} seconds on one core. \
With all rows for every number it takes {of_all}, {with_error([row["ratio"] for row in rows], 1)} times as long. The \
two NLLs differ by at most {apart:.5f}.
"""


def removed(results: Results) -> str:
    """Report what else was tried, if it is among the results."""
    nll = {method: results.values("nll", method=method) for method in REMOVED}
    nll = {method: values for method, values in nll.items() if values}
    if not nll:
        return ""
    best, worst = (choose(nll, key=lambda method: statistics.fmean(nll[method])) for choose in (min, max))
    return f"""
Tried and removed: scales by the size, norm, singular values, activations or curvature of each site, and a number for \
each site. Their NLLs range from {with_error(nll[best], 4)} ({best}) to {with_error(nll[worst], 4)} ({worst}). None \
was better by more than chance. Commit {COMMIT} has the code.
"""


def draw(results: Results) -> None:
    """The search for the first network with batch norm, and two scores of every other network."""
    figure = Figure(figsize=(10, 3.8), layout="constrained", dpi=110)
    left, *right = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    row = results.where(method=SEARCH)[0]
    plain, lowest = row["plain_validation_nll"], row["validation_nll"]
    left.axhline(plain, color="0.55", linestyle="--", linewidth=1, label="no noise")
    left.plot(*row["curve_of_all"].values(), ".-", color="#0072B2", label="all rows for every number")
    left.plot(*row["curve"].values(), "o", color="#D55E00", fillstyle="none", label="numbers that all rows see")
    left.set(xscale="log", ylim=(lowest - 0.1 * (plain - lowest), plain + 0.25 * (plain - lowest)))
    left.set(xlabel="Standard deviation", ylabel="Validation NLL (nats per row)", title="First network with batch norm")
    left.legend(frameon=False, fontsize="small", loc="center right")
    methods = [*ALL, *IN_ONE_PASS, *WITH_MANY]
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


if __name__ == "__main__":
    main(run, report, draw)
