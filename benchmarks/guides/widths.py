# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare widths that follow predictions with those of the ELBO, and with plain networks, from 200 rows to 30,000.

python -m benchmarks.guides.widths --data-dir DIR
"""

import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
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
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.infer import FitOptions
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.training.fit import ADAM_RATE, MOMENTUM, MOST_NORM, SGD_RATE
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import TemperatureScaling

PREDICTIVE, PREDICTIVE_NORMAL = "radial, predictive widths", "mean field, predictive widths"
ELBO, PLAIN, TEMPERATURE, DROPOUT = "radial, ELBO widths", "plain network", "plain, temperature", "MC dropout"
METHODS = (PREDICTIVE, PREDICTIVE_NORMAL, ELBO, PLAIN, TEMPERATURE, DROPOUT)
SETS = (README, QUICKSTART, *UCI, ADULT, FEW_IMAGES, SOME_IMAGES, DEEP_PERCEPTRON)
RATE = 0.1
#: The aim: how far predictive widths may be behind the better of ELBO widths and the plain network.
MOST_BEHIND = 0.005


class Size(NamedTuple):
    """The sets, test rows, steps in general and for 30,000 images, seeds in general and for these."""

    sets: tuple[str, ...] = SETS
    test: int = 10_000
    steps: int = 2_000
    steps_for_many: int = 4_700
    seeds: int = 3
    seeds_for_many: int = 2


SIZES = {"default": Size(), "small": Size((README, "yacht"), 40, 20, 20, 2, 2)}


def run(output: Path, *, data_dir: Path, form: Form = "default", workers: int = 2, threads: int = 1) -> None:
    """Train each network by each method, and score test rows that no choice saw.

    Nothing is chosen for a set: ``fit``'s defaults under the default prior. A plain network is the mode under that
    prior by the optimizer that means with predictive widths have. Temperature and dropout start from the same network.
    All but ELBO widths hold a tenth of their rows out: for the widths, the best epoch, or the temperature.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    jobs: list[Job] = []
    for name in size.sets:
        for seed in range(size.seeds_for_many if name == DEEP_PERCEPTRON else size.seeds):
            for method in METHODS:
                if method == TEMPERATURE and name in UCI:
                    continue
                keys = {"data": name, "method": method, "seed": FIRST_SEED + seed}
                jobs.append(Job(keys, one, (name, method, FIRST_SEED + seed, size, data_dir)))
    compute_all(results, jobs, workers, threads)


def one(name: str, method: str, seed: int, size: Size, data_dir: Path) -> Row:
    """Train one network, and score its predictions."""
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
    data, (test_x, test_y) = data_of(name, size.test, data_dir, split=seed)
    torch.manual_seed(seed)
    net = network_of(name, data[0].shape[-1], dropout=RATE if method == DROPOUT else 0.0)
    has_classes = data[1].dtype == torch.long
    likelihood: Any = likelihoods.Categorical() if has_classes else likelihoods.Gaussian(learn_scale=True)
    model = SupervisedModel(BayesianModule(net), likelihood)
    guides: dict[str, Any] = {
        PREDICTIVE: lambda: AutoRadial(model, widths="predictive"),
        PREDICTIVE_NORMAL: lambda: AutoMeanField(model, widths="predictive"),
        ELBO: lambda: AutoRadial(model),
    }
    is_plain = method not in guides
    guide = AutoMeanField(model, families={"": families.Delta()}) if is_plain else guides[method]()
    batch = 32 if name == QUICKSTART else 128
    steps = size.steps_for_many if name == DEEP_PERCEPTRON else size.steps
    settings = {"epochs": max(1, round(steps * batch / len(data[0]))), "batch_size": batch, "seed": seed}
    start = time.process_time()
    held_out = None
    if is_plain:
        held_out = train_plain(model, guide, data, **settings)
    else:
        optim: Any = {"optim": partial(Adam, lr=0.03), "scheduler": "cosine"} if method == ELBO else {}
        fit(model, guide, data, progress=False, **optim, **settings)
    torch.manual_seed(seed)
    draws = partial(predict, model, guide, num_samples=1 if is_plain else 64)
    if method == DROPOUT:
        draws = partial(predict, model, guide, num_samples=64, dropout=True)
    prediction = draws(test_x)
    nll = -float(prediction.log_prob(test_y).mean())
    if method == TEMPERATURE and held_out is not None:
        logits, labels = draws(held_out[0]), held_out[1]
        # If all these rows are right, no temperature is best, and the network stays as it is.
        if not bool((logits.mean.argmax(-1) == labels).all()):
            probabilities = TemperatureScaling.fit(logits, labels)(prediction)
            nll = -float(probabilities.gather(-1, test_y[:, None]).log().mean())
    return {"nll": nll, "seconds": time.process_time() - start}


def train_plain(model: Any, guide: Any, data: Pair, epochs: int, batch_size: int, seed: int) -> Pair:
    """Train on nine tenths of the rows, return to the epoch that predicts the others best, and return these others."""
    number = len(data[0]) // 10
    held_out = data[0][:number], data[1][:number]
    training = data[0][number:], data[1][number:]
    optim, options = partial(Adam, lr=ADAM_RATE), FitOptions()
    if data[1].dtype == torch.long:
        rows = len(training[0])
        optim = partial(SGD, lr=SGD_RATE / rows, momentum=MOMENTUM)
        options = FitOptions(clip_norm=MOST_NORM * rows)
    settings: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "progress": False}
    fit(model, guide, training, validation=held_out, optim=optim, scheduler="cosine", options=options, **settings)
    return held_out


def values_of(results: Results, method: str, name: str, score: str = "nll") -> list[float]:
    """Return a score of all seeds; an empty list where a method was not tried."""
    return results.values(score, method=method, data=name)


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


def report(results: Results) -> str:
    """Report the NLL and the seconds by set and method."""
    tables = []
    for score, digits in (("nll", 3), ("seconds", 0)):
        lines = []
        for name in results.setting["sets"]:
            columns = [values_of(results, method, name, score) for method in METHODS]
            line = [name, *(with_error(values, digits) if values else "-" for values in columns)]
            if score == "nll":
                difference, _ = behind(results, name)
                line.append(with_error(difference, digits))
            lines.append(line)
        last = ["behind"] if score == "nll" else []
        tables.append(markdown_table([score, *METHODS, *last], lines))
    setting = results.setting
    return f"""### Widths by predictions or by the ELBO

Twelve sets of rows, {setting["steps"]:,} steps, {setting["steps_for_many"]:,} for 30,000 images, by `fit`'s defaults \
under the default prior; nothing was chosen (`python -m benchmarks.guides.widths --data-dir DIR`). Adult has 4,000 \
rows. Targets of UCI sets are standardized, and their noise is learned. All but ELBO widths hold a tenth of the rows \
out. ELBO widths train by Adam at 0.03, a rate that falls to zero; plain networks as the means of predictive widths. \
Test rows, {setting["seeds"]} seeds, {setting["seeds_for_many"]} for 30,000 images. "Behind" compares radial with \
predictive widths and the better of ELBO widths and the plain network.

{(chr(10) * 2).join(tables)}"""


if __name__ == "__main__":
    main(run, report)
