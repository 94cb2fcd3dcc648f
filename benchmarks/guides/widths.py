# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare widths that follow predictions with those of the ELBO, and with plain networks, from 200 rows to 30,000.

python -m benchmarks.guides.widths --data-dir DIR
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam

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
    paired,
    with_error,
)
from benchmarks.guides._sets import (
    ADULT,
    DEEP_PERCEPTRON,
    FEW_IMAGES,
    QUICKSTART,
    README,
    SOME_IMAGES,
    UCI,
    data_of,
    network_of,
)
from benchmarks.uncertainty._comparison import images_of
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.infer import FitOptions, Prediction
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.training.fit import ADAM_RATE, MOMENTUM, MOST_NORM, SGD_RATE
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import TemperatureScaling, auroc, expected_calibration_error
from tutorials import image_sets

PREDICTIVE, PREDICTIVE_NORMAL = "radial, predictive widths", "mean field, predictive widths"
ELBO, PLAIN, TEMPERATURE, DROPOUT = "radial, ELBO widths", "plain network", "plain, temperature", "MC dropout"
METHODS = (PREDICTIVE, PREDICTIVE_NORMAL, ELBO, PLAIN, TEMPERATURE, DROPOUT)
#: Sets of clothes, on which digits are unknown inputs.
OF_FASHION = (FEW_IMAGES, SOME_IMAGES, DEEP_PERCEPTRON)
SETS = (README, QUICKSTART, *UCI, ADULT, FEW_IMAGES, SOME_IMAGES, DEEP_PERCEPTRON)
DROPOUT_RATE = 0.1
#: The aim: how far predictive widths may be behind the better of ELBO widths and the plain network.
MOST_BEHIND = 0.005


class Size(NamedTuple):
    """The sets, test rows, steps in general and for 30,000 images, seeds, and the rates of ELBO widths."""

    sets: tuple[str, ...] = SETS
    test: int = 10_000
    steps: int = 2_000
    steps_for_many: int = 4_700
    seeds: int = 5
    elbo_rates: tuple[float, ...] = (0.003, 0.01, 0.03)
    #: Of the sets that have fewer seeds, to save time.
    fewer_seeds: tuple[tuple[str, int], ...] = ((SOME_IMAGES, 3), (DEEP_PERCEPTRON, 2))


SIZES = {"default": Size(), "small": Size((README, "yacht"), 40, 20, 20, 2, (0.01, 0.03))}


def run(output: Path, *, data_dir: Path, form: Form = "default", workers: int = 2, threads: int = 1) -> None:
    """Train each network by each method, and score test rows that no choice saw.

    ``fit``'s defaults train under the default prior, and nothing is chosen for a set. The exception is Adam's rate for
    ELBO widths: rows beside the training rows choose it, with seed 0. A plain network is the mode under that prior by
    the optimizer that means with predictive widths have. Temperature and dropout start from the same network. All but
    ELBO widths hold a tenth of their rows out: for the widths, the best epoch, or the temperature.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    choices: list[Job] = []
    for name, rate in itertools.product(size.sets, size.elbo_rates):
        keys = {"use": "choice", "data": name, "method": ELBO, "rate": rate, "seed": 0}
        choices.append(Job(keys, one, (name, ELBO, 0, rate, size, data_dir, False)))
    compute_all(results, choices, workers, threads)
    tests: list[Job] = []
    for name, number, method in itertools.product(size.sets, range(size.seeds), METHODS):
        seed = FIRST_SEED + number
        is_needed = number < dict(size.fewer_seeds).get(name, size.seeds)
        if is_needed and (method != TEMPERATURE or name not in UCI):
            keys = {"use": "test", "data": name, "method": method, "seed": seed}
            tests.append(Job(keys, one, (name, method, seed, rate_of(results, name), size, data_dir, True)))
    compute_all(results, tests, workers, threads)


def rate_of(results: Results, name: str) -> float:
    """Return the rate of ELBO widths with the lowest NLL of validation rows."""
    chosen: float = min(results.where(use="choice", data=name), key=lambda row: row["nll"])["rate"]
    return chosen


def one(name: str, method: str, seed: int, rate: float, size: Size, data_dir: Path, on_test_rows: bool) -> Row:
    """Train one network, and score its predictions.

    :param rate: Adam's, for ELBO widths.
    :param on_test_rows: whether to score test rows, and not rows beside the training rows.
    """
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
    data, (x, y) = data_of(name, size.test, data_dir, split=seed if on_test_rows else None)
    start = time.process_time()
    prediction = train(name, method, seed, rate, size, data)
    row = {"seconds": time.process_time() - start}
    torch.manual_seed(seed)
    inside = prediction(x)
    row["nll"] = -float(inside.log_prob(y).mean())
    if y.dtype == torch.long:
        row["calibration_error"] = float(expected_calibration_error(inside.mean, y))
    if name in OF_FASHION:
        row["auroc_mnist"] = float(auroc(inside.entropy, prediction(digits(data_dir, len(x))).entropy))
    return row


def train(name: str, method: str, seed: int, rate: float, size: Size, data: Pair) -> Callable[[Tensor], Prediction]:
    """Train one network, and return what predicts for inputs."""
    torch.manual_seed(seed)
    net = network_of(name, data[0].shape[-1], dropout=DROPOUT_RATE if method == DROPOUT else 0.0)
    has_classes = data[1].dtype == torch.long
    likelihood: Any = likelihoods.Categorical() if has_classes else likelihoods.Gaussian(learn_scale=True)
    model = SupervisedModel(BayesianModule(net), likelihood)
    batch = 32 if name == QUICKSTART else 128
    steps = size.steps_for_many if name == DEEP_PERCEPTRON else size.steps
    settings: dict[str, Any] = {"epochs": max(1, round(steps * batch / len(data[0]))), "batch_size": batch}
    settings |= {"seed": seed, "progress": False}
    guides: dict[str, Any] = {
        PREDICTIVE: lambda: AutoRadial(model, widths="predictive"),
        PREDICTIVE_NORMAL: lambda: AutoMeanField(model, widths="predictive"),
        ELBO: lambda: AutoRadial(model),
    }
    if method in guides:
        guide = guides[method]()
        optim: Any = {"optim": partial(Adam, lr=rate), "scheduler": "cosine"} if method == ELBO else {}
        fit(model, guide, data, **optim, **settings)
        return partial(predict, model, guide, num_samples=64)
    guide = AutoMeanField(model, families={"": families.Delta()})
    held_out = train_plain(model, guide, data, **settings)
    if method == DROPOUT:
        return partial(predict, model, guide, num_samples=64, dropout=True)
    single = partial(predict, model, guide, num_samples=1)
    if method == PLAIN:
        return single
    logits, labels = single(held_out[0]), held_out[1]
    # If all these rows are right, no temperature is best, and the network stays as it is.
    if bool((logits.mean.argmax(-1) == labels).all()):
        return single
    temperature = TemperatureScaling.fit(logits, labels).temperature

    def scaled(inputs: Tensor) -> Prediction:
        of_draws = single(inputs)
        return replace(of_draws, samples=of_draws.samples / temperature)

    return scaled


def digits(data_dir: Path, number: int) -> Tensor:
    """Return test images of MNIST in the units of the clothes that the networks train on."""
    return images_of(data_dir)(image_sets.load("mnist", data_dir).test_images[:number]).flatten(1)


def train_plain(model: Any, guide: Any, data: Pair, **settings: Any) -> Pair:
    """Train on nine tenths of the rows, return to the epoch that predicts the others best, and return these others."""
    number = len(data[0]) // 10
    held_out = data[0][:number], data[1][:number]
    training = data[0][number:], data[1][number:]
    optim, options = partial(Adam, lr=ADAM_RATE), FitOptions()
    if data[1].dtype == torch.long:
        rows = len(training[0])
        optim = partial(SGD, lr=SGD_RATE / rows, momentum=MOMENTUM)
        options = FitOptions(clip_norm=MOST_NORM * rows)
    fit(model, guide, training, validation=held_out, optim=optim, scheduler="cosine", options=options, **settings)
    return held_out


def values_of(results: Results, method: str, name: str, score: str = "nll") -> list[float]:
    """Return a score of all seeds that have it; an empty list where a method was not tried."""
    rows = results.where(use="test", method=method, data=name)
    return [row[score] for row in rows if score in row]


def behind(results: Results, name: str) -> tuple[list[float], str]:
    """Return by how much predictive widths are behind the better of ELBO widths and the plain network, and its name."""
    best = min((ELBO, PLAIN), key=lambda method: mean(values_of(results, method, name)))
    return paired(values_of(results, PREDICTIVE, name), values_of(results, best, name)), best


def claims(results: Results) -> list[Claim]:
    """Predictive widths are not far behind the better of the others anywhere."""
    names = results.setting["sets"]
    worst = max(names, key=lambda name: mean(behind(results, name)[0]))
    difference, best = behind(results, worst)
    return [
        Claim(
            f"Worst of {len(names)} sets: predictive widths are at most {MOST_BEHIND} nats behind the better of ELBO "
            "widths and the plain network",
            "",
            f"{with_error(difference, 3)} ({worst}, {best})",
            str(len(difference)),
            mean(difference) <= MOST_BEHIND,
        )
    ]


#: Scores in the order of their tables, with their headings and digits.
SCORES = {
    "nll": ("NLL", 3),
    "calibration_error": ("calibration error", 3),
    "auroc_mnist": ("AUROC, MNIST", 3),
    "seconds": ("seconds", 0),
}


def report(results: Results) -> str:
    """Report scores and seconds by set and method."""
    tables = []
    for score, (heading, digits) in SCORES.items():
        lines = []
        for name in results.setting["sets"]:
            if not any(score in row for row in results.where(use="test", data=name)):
                continue
            columns = [values_of(results, method, name, score) for method in METHODS]
            line = [name, *(with_error(values, digits) if values else "-" for values in columns)]
            if score == "nll":
                difference, _ = behind(results, name)
                line.append(with_error(difference, digits))
            lines.append(line)
        last = ["behind"] if score == "nll" else []
        if lines:
            tables.append(markdown_table([heading, *METHODS, *last], lines))
    setting = results.setting
    fewer = ", ".join(f"{seeds} for {name}" for name, seeds in setting["fewer_seeds"])
    rates = setting["elbo_rates"]
    choices = []
    for name in setting["sets"]:
        rows = [results.where(use="choice", data=name, rate=rate)[0] for rate in rates]
        choices.append([name, *(f"{row['nll']:.3f}" for row in rows)])
    return f"""### Widths by predictions or by the ELBO

Twelve sets of rows, {setting["steps"]:,} steps, {setting["steps_for_many"]:,} for 30,000 images, by `fit`'s defaults \
under the default prior (`python -m benchmarks.guides.widths --data-dir DIR`). Adult has 4,000 rows. Targets of UCI \
sets are standardized, and their noise is learned. All but ELBO widths hold a tenth of the rows out. ELBO widths train \
by Adam at a rate that falls to zero from the best of {", ".join(f"{rate:g}" for rate in rates)}; rows beside the \
training rows chose it (last table). Nothing else was chosen. Plain networks train as the means of \
predictive widths. Test rows, {setting["seeds"]} seeds; {fewer}. "Behind" \
compares radial with predictive widths and the better of ELBO widths and the plain network. The calibration error is \
that of classes. Unknown inputs are images of MNIST, found by the entropy of predictions. Seconds are CPU seconds of \
one training on one core of a busy machine; on adult, on 30,000 images but for ELBO widths, and with the first three \
seeds of UCI sets they include the prediction.

{(chr(10) * 2).join(tables)}

NLL of the rows that chose Adam's rate for ELBO widths, one seed:

{markdown_table(["", *(f"{rate:g}" for rate in rates)], choices)}"""


if __name__ == "__main__":
    main(run, report)
