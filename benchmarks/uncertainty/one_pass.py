# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare predictions of one pass, by means and variances, with 64 draws and with the network of mean weights.

python -m benchmarks.uncertainty.one_pass --data-dir DIR
"""

import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    main,
    markdown_table,
    medians,
    perceptron,
    uci_split,
    with_error,
)
from benchmarks.uncertainty._adult import encoded_adult
from benchmarks.uncertainty._comparison import images_of
from benchmarks.uncertainty._lenet import lenet
from benchmarks.uncertainty._residual_net import residual_net
from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.infer import Prediction
from pyro_radial.nn import likelihoods

LENET, RESIDUAL, ADULT = "LeNet, Fashion-MNIST", "residual network, Fashion-MNIST", "108-100-100-2, adult"
MEAN_WEIGHTS, DRAWS, ONE_PASS = WAYS = "mean weights", "64 draws", "one pass"
#: A width for each weight, before any training: only the time of its pass is of interest.
BY_WEIGHT = "one pass, a width for each weight"


class Size(NamedTuple):
    """Epochs by network, training and test rows at most, timed rows, rounds of timing and seeds."""

    epochs: dict[str, int]
    train: int | None = None
    test: int | None = None
    timed: int = 4_000
    rounds: int = 3
    seeds: int = 1


SIZES = {
    "default": Size({LENET: 6, RESIDUAL: 3, "concrete": 100, ADULT: 4}),
    "small": Size({LENET: 1, RESIDUAL: 1, "yacht": 1}, 200, 20, 20, 1),
}


def run(output: Path, *, data_dir: Path, form: Form = "default", workers: int = 1, threads: int = 1) -> None:
    """Train each network once by ``fit``, with one width for each tensor, and predict its test rows in three ways.

    Times are CPU times of predictions of 4,000 rows, in turns, and count passes of the plain network over them.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    jobs: list[Job] = []
    for seed in range(FIRST_SEED, FIRST_SEED + size.seeds):
        for network in size.epochs:
            jobs.append(Job({"network": network, "seed": seed}, compare, (data_dir, network, seed, size)))
    compute_all(results, jobs, workers, threads)


def compare(data_dir: Path, network: str, seed: int, size: Size) -> Row:
    """Train a network, and return the NLL and the time of each prediction."""
    (x, y), (test_x, test_y) = (
        (inputs[:number], targets[:number])
        for (inputs, targets), number in zip(load(data_dir, network, seed), (size.train, size.test), strict=True)
    )
    torch.manual_seed(seed)
    model = make(network, x)
    guide = AutoRadial(model, widths="predictive")
    start = time.process_time()
    fit(model, guide, (x, y), epochs=size.epochs[network], seed=seed, progress=False)
    seconds = time.process_time() - start
    torch.manual_seed(seed)
    draws = predict(model, guide, test_x)
    net = model.bnn.to_module(guide.median()).eval()
    with torch.no_grad():
        plain = Prediction(net(test_x).unsqueeze(0), model.likelihood, first_noise(draws))
    predictions = {MEAN_WEIGHTS: plain, DRAWS: draws, ONE_PASS: predict(model, guide, test_x, method="propagate")}
    row: Row = {f"nll, {way}": -float(prediction.log_prob(test_y).mean()) for way, prediction in predictions.items()}
    row |= prediction_times(network, net, model, guide, repeated(test_x, size.timed), size.rounds)
    return row | {"seconds": seconds}


def repeated(x: Tensor, rows: int) -> Tensor:
    """Return so many rows of inputs, again from the first one after the last."""
    return x[torch.arange(rows) % len(x)]


def first_noise(draws: Prediction) -> dict[str, Tensor]:
    return {argument: values[:1] for argument, values in draws.noise.items()}


def prediction_times(network: str, net: nn.Module, model: Any, guide: Any, x: Tensor, rounds: int) -> Row:
    """Return the CPU time of each prediction, in passes of the plain network."""
    other_model = make(network, x)
    by_weight = AutoRadial(other_model)
    by_weight.setup(x, torch.zeros(len(x), 1) if isinstance(model.likelihood, likelihoods.Gaussian) else None)
    steps = {
        MEAN_WEIGHTS: torch.no_grad()(partial(net, x)),
        DRAWS: partial(predict, model, guide, x),
        ONE_PASS: partial(predict, model, guide, x, method="propagate"),
        BY_WEIGHT: partial(predict, other_model, by_weight, x, method="propagate"),
    }
    milliseconds = medians(steps, rounds, block=1)
    times = {f"passes, {way}": milliseconds[way] / milliseconds[MEAN_WEIGHTS] for way in (DRAWS, ONE_PASS, BY_WEIGHT)}
    return {"plain_milliseconds": milliseconds[MEAN_WEIGHTS], **times}


def make(network: str, x: Tensor) -> SupervisedModel:
    """Return the model of a network."""
    nets = {
        LENET: partial(lenet, 0.0),
        RESIDUAL: partial(residual_net, 8, (1, 1, 1), 0.0),
        ADULT: partial(perceptron, (x.shape[1], 100, 100, 2)),
    }
    if network in nets:
        return SupervisedModel(BayesianModule(nets[network]()), likelihoods.Categorical())
    net = perceptron((x.shape[1], 50, 50, 1))
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(scale=0.5, learn_scale=True))


def load(data_dir: Path, network: str, seed: int) -> tuple[Pair, Pair]:
    """Return training and test rows; those of a regression are a standard split, all of them standardized."""
    if network in (LENET, RESIDUAL):
        return images_of(data_dir).train, images_of(data_dir).test()
    if network == ADULT:
        return encoded_adult(data_dir)
    rows = uci_split(data_dir, network, seed)
    return rows["train"], rows["test"]


def claims(results: Results) -> list[Claim]:
    """One pass is as good as 64 draws on LeNet, and takes three plain passes at most on every network."""
    lost = [row[f"nll, {ONE_PASS}"] - row[f"nll, {DRAWS}"] for row in results.where(network=LENET)]
    slowest = max(results.rows, key=lambda row: row[f"passes, {ONE_PASS}"])
    return [
        Claim(
            "LeNet, Fashion-MNIST: the NLL of one pass by means and variances is at most 0.005 above that of 64 draws",
            "",
            with_error(lost, 4),
            str(len(lost)),
            mean(lost) <= 0.005,
        ),
        Claim(
            "A prediction in one pass takes at most three plain passes, slowest of four networks",
            "2.3",
            f"{slowest[f'passes, {ONE_PASS}']:.1f} ({slowest['network']})",
            "1",
            slowest[f"passes, {ONE_PASS}"] <= 3.0,
        ),
    ]


def report(results: Results) -> str:
    """Report the NLL of the three predictions of each network, and the times of two of them."""
    lines = []
    for network in results.distinct("network"):
        rows = results.where(network=network)
        cells = [with_error([row[f"nll, {way}"] for row in rows], 4) for way in WAYS]
        cells += [with_error([row[f"passes, {way}"] for row in rows], 1) for way in (DRAWS, ONE_PASS, BY_WEIGHT)]
        lines.append([network, *cells, f"{mean(row['plain_milliseconds'] for row in rows):.1f}"])
    headings = ["", *(f"NLL, {way}" for way in WAYS), *(f"passes, {way}" for way in (DRAWS, ONE_PASS, BY_WEIGHT))]
    epochs = ", ".join(f"{network} {number}" for network, number in results.setting["epochs"].items())
    seeds = "one seed" if results.setting["seeds"] == 1 else f"{results.setting['seeds']} seeds"
    return f"""### Predictions in one pass

`predict(model, guide, x, method="propagate")` beside 64 draws and the network of mean weights, for radial posteriors \
with one width for each tensor, trained by `fit` with nothing chosen, {seeds} \
(`python -m benchmarks.uncertainty.one_pass --data-dir DIR`). Training is short; epochs: {epochs}. Times are CPU \
times for {results.setting["timed"]:,} rows, in passes of the plain network over them, which take the \
milliseconds of the last column; a posterior with a width for each weight needs a product more in each layer. The \
target of concrete is standardized.

{markdown_table([*headings, "a plain pass, ms"], lines)}"""


if __name__ == "__main__":
    main(run, report)
