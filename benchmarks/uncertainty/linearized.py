# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Predict in one pass, by the linearized network, or with draws of the weights: scores and time.

python -m benchmarks.uncertainty.linearized
"""

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common import (
    Claim,
    Form,
    Pair,
    Results,
    Row,
    flat_images,
    main,
    markdown_table,
    medians,
    paired,
    with_error,
)
from benchmarks.uncertainty._comparison import part
from benchmarks.uncertainty._overfitted import dense, lenet, trained
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import calibrate_scales
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import expected_calibration_error, negative_log_likelihood

__all__ = ["claims", "compared", "draw", "report", "run"]

GUIDES = {"radial": AutoRadial, "mean field": AutoMeanField}
DENSE, LENET = "784-200-200-10", "LeNet, 44,426 weights"
# The guides of each network.
NETWORKS = {DENSE: ("radial", "mean field"), LENET: ("radial",)}
ONE_PASS, OWN, FEW, MANY = "linearized", "linearized, own scale", "32 draws", "128 draws"
METHODS: dict[str, dict[str, Any]] = {
    ONE_PASS: {"method": "linearized"},
    FEW: {"num_samples": 32},
    MANY: {"num_samples": 128},
}
ALL = (ONE_PASS, OWN, FEW, MANY)
# The scale that draws chose times these is tried for linearized predictions.
FACTORS = tuple(10 ** (-place / 10) for place in range(8))
SCORES = {"nll": "NLL", "calibration_error": "ECE", "seconds": "seconds", "passes": "passes"}
# Rows in a pass of the plain network, as in ``predict``.
ROWS = 1024
MOST_PASSES = 8
# LeNet takes longer.
SEEDS_OF_LENET = 2


class Size(NamedTuple):
    """How much is trained, searched, tested and timed."""

    train: int = 10_000
    validation: int = 2_000
    test: int | None = None
    hidden: int = 200
    epochs: int = 30
    rounds: int = 3
    search: dict[str, int] = {}


SIZES = {
    "default": Size(),
    "small": Size(200, 50, 50, 10, 2, 1, {"num_samples": 2}),
}


def run(
    output: Path, *, form: Form = "default", data_dir: Path | None = None, seeds: int = 5, threads: int = 1
) -> None:
    """Train plain networks with Adam on 10,000 images, choose one scale on 2,000 others, predict all test images."""
    torch.set_num_threads(threads)
    size = SIZES[form]
    train, test = flat_images("fashion_mnist", data_dir)
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    for network, guides in NETWORKS.items():
        for seed in range((seeds if network == DENSE else min(seeds, SEEDS_OF_LENET)) if form == "default" else 1):
            keys = [{"network": network, "guide": g, "method": m, "seed": seed} for g in guides for m in ALL]
            results.add_all(keys, partial(score, network, train, test, seed, size))


def score(network: str, train: Pair, test: Pair, seed: int, size: Size) -> list[Row]:
    """All guides and methods with the network of one seed."""
    torch.manual_seed(seed)
    fitted, held_out = part(train, 0, size.train), part(train, size.train, size.train + size.validation)
    net = trained(dense(size.hidden) if network == DENSE else lenet(), fitted, size.epochs, seed)
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=size.train))
    rows: list[Row] = []
    for name in NETWORKS[network]:
        guide = GUIDES[name](model)
        guide.setup(*part(fitted, 0, 2))
        guide.load_means(net.state_dict())
        number = calibrate_scales(model, guide, held_out, progress=False, **size.search).number
        x, y = test[0][: size.test], test[1][: size.test]
        by_method = compared(model, guide, x, y, size.rounds)
        own = with_own_scale(model, guide, number, held_out, x, y) | {
            name: by_method[ONE_PASS][name] for name in ("seconds", "passes")
        }
        rows += [own if method == OWN else by_method[method] for method in ALL]
    return rows


def with_own_scale(model: SupervisedModel, guide: Any, number: float, held_out: Pair, x: Tensor, y: Tensor) -> Row:
    """Scores of linearized predictions with the scale that is best for them on the validation rows."""

    def at(factor: float, inputs: Tensor) -> Tensor:
        guide.set_stddevs({name: torch.full_like(p.mean, factor * number) for name, p in guide.posterior().items()})
        return predict(model, guide, inputs, method="linearized").mean

    nll = {factor: float(negative_log_likelihood(at(factor, held_out[0]), held_out[1])) for factor in FACTORS}
    best = min(nll, key=nll.__getitem__)
    return scores(at(best, x), y) | {"factor": best}


def scores(probabilities: Tensor, y: Tensor) -> Row:
    return {
        "nll": float(negative_log_likelihood(probabilities, y)),
        "calibration_error": float(expected_calibration_error(probabilities, y)),
    }


def compared(model: SupervisedModel, guide: Any, x: Tensor, y: Tensor, rounds: int) -> dict[str, Row]:
    """Scores of all methods for any guide of a classifier, and the CPU time of ``predict`` beside a plain pass."""
    net = model.bnn.to_module(guide.median()).eval()

    @torch.no_grad()
    def plain() -> None:
        for rows in x.split(ROWS):
            net(rows)

    one_pass = partial(predict, model, guide, x, **METHODS[ONE_PASS])
    milliseconds = medians({"plain": plain, ONE_PASS: one_pass}, rounds, block=1)
    found: dict[str, Row] = {}
    for name, options in METHODS.items():
        start = time.process_time()
        prediction = predict(model, guide, x, **options)
        # Draws of weights take long: once is enough.
        seconds = 1e-3 * milliseconds[name] if name in milliseconds else time.process_time() - start
        times = {"seconds": seconds, "passes": 1e3 * seconds / milliseconds["plain"]}
        found[name] = scores(prediction.mean, y) | times
    return found


def claims(results: Results) -> list[Claim]:
    """Compare with draws network by network, and count passes."""
    found = []
    for network, guide in cases(results):
        keys = {"network": network, "guide": guide}
        seeds = str(len(results.where(**keys, method=ONE_PASS)))
        for method, what in ((ONE_PASS, "One linearized pass"), (OWN, "With a scale of its own it")):
            ours, theirs = (results.values("nll", **keys, method=name) for name in (method, FEW))
            difference = paired(ours, theirs)
            numbers = f"{with_error(ours, 4)} against {with_error(theirs, 4)}, difference {with_error(difference, 4)}"
            text = f"{what} has an NLL no higher than 32 draws ({network}, {guide})"
            found.append(Claim(text, "", numbers, seeds, statistics.fmean(difference) <= 0))
        passes = results.values("passes", **keys, method=ONE_PASS)
        text = f"It costs at most {MOST_PASSES} passes of the plain network ({network}, {guide})"
        found.append(Claim(text, "", with_error(passes, 1), seeds, max(passes) <= MOST_PASSES))
    return found


def cases(results: Results) -> list[tuple[str, str]]:
    return [(network, guide) for network in results.distinct("network") for guide in NETWORKS[network]]


def report(results: Results) -> str:
    """Report scores and times by network, guide and method."""
    digits = {"seconds": 2, "passes": 1}
    lines = [
        [
            network,
            guide,
            method,
            *(
                with_error(results.values(name, network=network, guide=guide, method=method), digits.get(name, 4))
                for name in SCORES
            ),
        ]
        for network, guide in cases(results)
        for method in ALL
    ]
    numbers = " and ".join(
        f"{len(results.where(network=n, guide=g, method=FEW))} ({n}, {g})" for n, g in cases(results)
    )
    return f"""### Predictions from one linearized pass

Plain networks train on 10,000 images of Fashion-MNIST for 30 epochs of Adam at 1e-3; one scale for all weights is \
chosen by the NLL of 2,000 other images. `predict(..., method="linearized")` then draws 64 logits for each of 10,000 \
test images from their joint normal distribution; "own scale" is the best of {len(FACTORS)} on the validation images \
for it. Numbers are means and standard errors over networks: {numbers} \
(`python -m benchmarks.uncertainty.linearized`). Seconds are the CPU time of `predict` on one core. Passes are its \
ratio to the plain network's forward passes of the same images, {ROWS} at a time.

{markdown_table(["network", "posterior", "", *SCORES.values()], lines)}

{results.plot("NLL and calibration error against the number of passes")}"""


def draw(results: Results) -> None:
    """Scores of every network against the cost."""
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=110)
    colors = dict(zip(cases(results), ("#0072B2", "#D55E00", "#009E73"), strict=False))
    for name, ax in zip(("nll", "calibration_error"), figure.subplots(1, 2), strict=True):
        for (network, guide), color in colors.items():
            for method, marker in zip(ALL, "oDs^", strict=True):
                keys = {"network": network, "guide": guide, "method": method}
                passes, values = results.values("passes", **keys), results.values(name, **keys)
                label = f"{network.partition(',')[0]}, {guide}: {method}"
                ax.plot(passes, values, marker, color=color, alpha=0.7, markersize=5, label=label)
        ax.axvline(MOST_PASSES, color="0.55", linestyle="--", linewidth=1)
        ax.set(xscale="log", xlabel="Passes", ylabel=f"Test {SCORES[name]}")
        ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
