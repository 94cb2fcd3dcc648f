# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare networks under a Gaussian process prior with that process on five UCI sets (Sun et al., 2019).

python -m benchmarks.functional.uci --data-dir DIR
"""

import re
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn

from benchmarks.common import (
    REGRESSION,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    main,
    markdown_table,
    paired,
    perceptron,
    uci_split,
    with_error,
)
from benchmarks.functional._regression import LEVEL, SMALL_SETS, Scored, exact_prediction, kept_prior
from pyro_radial import (
    AutoMeanField,
    BayesianModule,
    FitOptions,
    FunctionalELBO,
    SupervisedModel,
    TermsELBO,
    fit,
    predict,
)
from pyro_radial.functional import BetweenRows, GaussianProcess, LinearizedKL
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn

FUNCTIONAL, MEAN_FIELD, EXACT = METHODS = ("functional", "mean field", "exact process")
MEASURES = REGRESSION | {"coverage": "coverage", "seconds": "seconds"}
# As published (Farquhar, Osborne and Gal, 2020, table 2): RMSE and log-likelihood of functional networks.
FBNN = {
    "boston": ("2.38 ± 0.10", "-2.30 ± 0.04"),
    "concrete": ("4.94 ± 0.18", "-3.10"),
    "energy": ("0.41", "-0.68"),
    "wine": ("0.67 ± 0.01", "-1.04"),
    "yacht": ("0.61 ± 0.07", "-1.03"),
}
DEFAULT: Row = {
    "hidden": [50, 50],
    "activation": "SiLU",
    "batch_size": 100,
    "divergence": "LinearizedKL",
    "measurement_points": "between rows",
    "num_points": 50,
    "num_functions": 8,
    "pretrain_epochs": 0,
    "steps": 4_000,
    "lr": 0.015,
    # Shares of the steps, each with what its rate is times.
    "rates": [[0.4, 1.0], [0.3, 0.3], [0.3, 0.05]],
    "init_stddev": 0.01,
    "prior_noise": 0.01,
    "init_noise": 0.5,
    "times_noise": 3.0,
    "noise_lr": 0.05,
    "weigh_up": 0.5,
    "prior_steps": 1_000,
    "prior_points": 500,
    "num_samples": 500,
}
FORMS: dict[str, Row] = {
    "default": DEFAULT,
    "small": DEFAULT | {"hidden": [10], "steps": 10, "prior_steps": 10, "num_points": 10, "num_samples": 10},
}
# The share of the steps in which the weight of the divergence rises to its own.
RAMP = 0.5
# The name of the noise in Pyro's store, with a number where the process has had others.
NOISE = re.compile(r"Gaussian(_\d+)?\.scale")


def run(output: Path, *, data_dir: Path, form: Form = "default", seeds: int = 10, workers: int = 2) -> None:
    """Train on the standard splits, standardized by the training rows; results are in the units of the targets.

    A Gaussian process with an RBF kernel and a length scale for each input is fitted to the training rows by marginal
    likelihood (Sun et al., 2019, section 5.2). It predicts by itself (``exact process``), and is the prior of a network
    of 2 x 50 SiLU units, as smooth as the process (theirs is 1 x 50 with ReLU). Batches have 100 rows, with 50 points
    on lines between training rows. The divergence is in closed form, for the linearized network. Its weight is the
    square root of N/B; the published weight is N/B.

    The noise is learned, at a constant rate of 0.05, and cannot fall below that of the process. It starts at three
    times as much, because it would otherwise be learned last. ``mean field`` has the same network, batches and steps;
    the prior variance of its weights is one over the number of inputs of a unit, and its noise starts at 0.5. Training
    takes 4,000 steps of Adam at 0.015, 0.0045 and 0.00075.

    Settings were chosen on a tenth of the training rows of the first split.
    """
    setting = FORMS[form]
    results = Results(output, {"torch": torch.__version__, **setting})
    jobs = []
    names = ["yacht"] if form == "small" else SMALL_SETS
    for split in range(1 if form == "small" else seeds):
        for name in names:
            for method in METHODS:
                checkpoint = results.checkpoint(name, split, method)
                arguments = (data_dir, name, split, method, setting, checkpoint)
                jobs.append(Job({"data": name, "split": split, "method": method}, score, arguments))
    compute_all(results, jobs, workers)


def score(data_dir: Path, name: str, split: int, method: str, setting: Row, checkpoint: Path) -> Row:
    """Score a method on one split, with the seconds it takes."""
    data = uci_split(data_dir, name, split)
    start, seconds, prior = time.process_time(), 0.0, None
    pyro.set_rng_seed(split)
    if method in (FUNCTIONAL, EXACT):
        prior, seconds = kept_prior(data["train"], setting, checkpoint.with_name(f"{name}_{split}_prior"))
        start = time.process_time()
        pyro.set_rng_seed(split)
    if method == EXACT:
        scored = exact_prediction(prior, data["train"], data["test"])
    else:
        model, guide = trained(data["train"], setting, prior, checkpoint)
        scored = of_network(model, guide, data["test"], setting["num_samples"])
    seconds += time.process_time() - start
    return {**scored.row(data["test"][1], data["unit"]), "seconds": round(seconds, 1)}


def of_network(model: SupervisedModel, guide: nn.Module, test: Pair, num_samples: int) -> Scored:
    x, y = test
    draws = predict(model, guide, x, num_samples=num_samples)
    low, high = draws.quantiles([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Scored(draws.mean, draws.log_prob(y), (low <= y) & (y <= high))


def trained(
    rows: Pair, setting: Row, prior: GaussianProcess | None, checkpoint: Path
) -> tuple[SupervisedModel, AutoMeanField]:
    """A network under a process that was fitted to the rows, or without one, under a prior on its weights."""
    x = rows[0]
    batch_size = min(setting["batch_size"], len(x))
    net = perceptron((x.shape[1], *setting["hidden"], 1), getattr(nn, setting["activation"]))
    make_loss: Callable[..., TermsELBO]
    kl_weight = 1.0
    if prior is not None:
        noise = noise_above(prior.observation_noise, setting["times_noise"], len(x))
        model = SupervisedModel(BayesianModule(net), noise)
        noisy = GaussianProcess(prior.kernel, noise=setting["prior_noise"])
        kl_weight = (len(x) / batch_size) ** setting["weigh_up"]
        points = BetweenRows(x, setting["num_points"])
        make_loss = partial(
            FunctionalELBO, noisy, points, divergence=LinearizedKL(), num_functions=setting["num_functions"]
        )
    else:
        likelihood = likelihoods.Gaussian(num_data=len(x), scale=setting["init_noise"], learn_scale=True)
        model = SupervisedModel(BayesianModule(net, FanIn()), likelihood)
        make_loss = partial(TermsELBO, 10, vectorize_particles=True, strict_kl=True)
    return model, train(model, rows, make_loss, setting, batch_size, kl_weight, checkpoint)


def noise_above(floor: Tensor, times: float, num_data: int) -> likelihoods.Gaussian:
    """A likelihood whose noise is learned from so many times a number, and stays above it."""
    likelihood = likelihoods.Gaussian(num_data=num_data, learn_scale=True)
    constraint = torch.distributions.constraints.greater_than(float(floor))
    likelihood.scale = PyroParam(torch.tensor(times * float(floor)), constraint)
    return likelihood


def train(
    model: SupervisedModel,
    data: Pair,
    make_loss: Callable[..., TermsELBO],
    setting: Row,
    batch_size: int,
    kl_weight: float,
    checkpoint: Path,
) -> AutoMeanField:
    """A mean-field guide, with the divergence weighed up at first and a lower rate later.

    The noise of a likelihood that learns it has a rate of its own, which does not fall.
    """
    guide = AutoMeanField(model, init_stddev=setting["init_stddev"])
    steps_per_epoch = -(-len(data[0]) // batch_size)
    epochs = max(1, setting["steps"] // steps_per_epoch)
    ramp = max(1, round(RAMP * epochs * steps_per_epoch))
    rates = setting["rates"]
    ends = [0, *(max(1, round(share * epochs)) for share in accumulate(share for share, _ in rates))]

    def weight_after(start: int, step: int) -> float:
        return kl_weight * min(1.0, (start + step + 1) / ramp)

    def rate_of(rate: float, name: str) -> dict[str, Any]:
        return {"lr": setting["noise_lr"] if NOISE.fullmatch(name) else rate}

    for number, ((start, end), (_, factor)) in enumerate(zip(pairwise(ends), rates, strict=True)):
        if end > start:
            fit(
                model,
                guide,
                data,
                epochs=end - start,
                batch_size=batch_size,
                optim=pyro.optim.Adam(partial(rate_of, factor * setting["lr"])),
                loss=make_loss(kl_weight=partial(weight_after, start * steps_per_epoch)),
                checkpoint=checkpoint.with_name(f"{checkpoint.name}_{number}.pt"),
                progress=False,
                options=FitOptions(checkpoint_every=500),
            )
    return guide


def table(results: Results) -> str:
    """Make a table of every measure on every set; differences are paired with the exact process."""
    lines = []
    for data in results.distinct("data"):
        for (name, title), theirs in zip(MEASURES.items(), (*FBNN[data], "", ""), strict=True):
            ours, *rest = (results.values(name, data=data, method=method) for method in METHODS)
            digits = 1 if name == "seconds" else 3
            cells = [with_error(values, digits) for values in (ours, *rest)]
            less = "" if name in ("coverage", "seconds") else with_error(paired(ours, rest[-1]), digits)
            lines.append([f"{data}, {title}", *cells, less, theirs, str(len(ours))])
    return markdown_table(["", *METHODS, f"functional less {EXACT}", "FBNN", "splits"], lines)


def report(results: Results) -> str:
    """Report all results on every set, by method."""
    setting = results.setting
    hidden = setting["hidden"]
    return f"""### UCI regression under functional priors

The prior of the functional network is a Gaussian process, fitted to the training rows by marginal likelihood. We \
compare a network of {len(hidden)} x {hidden[0]} {setting["activation"]} units with that process and with the same \
network under weight-space mean field. All use the standard splits. Networks train for {setting["steps"]:,} steps of \
Adam, with a rate that falls from {setting["lr"]:g}, on batches of {setting["batch_size"]} rows and \
{setting["num_points"]} points between rows, with `LinearizedKL`. Results are means and standard errors in the units \
of the targets; differences are paired. Coverage is that of 95 % intervals. Seconds are on one thread and include \
fitting the process and predicting. FBNN results are as published, with other splits and budgets (`python -m \
benchmarks.functional.uci --data-dir DIR`; `--help` describes how we chose the settings).

{table(results)}"""


if __name__ == "__main__":
    main(run, report)
