# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare radial-directional, radial and mean-field posteriors on UCI regression, with one hidden layer of 50.

python -m benchmarks.guides.uci_regression --data-dir DIR
"""

import itertools
import math
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import (
    REGRESSION,
    Claim,
    Job,
    Results,
    Row,
    SizedForm,
    compute_all,
    main,
    markdown_table,
    paired,
    perceptron,
    uci_split,
    with_error,
)
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    SupervisedModel,
    TermsELBO,
    fit,
    predict,
)
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn, RadialDirectionalPrior

SETS = ("boston", "concrete", "energy", "power", "wine", "yacht")
DIRECTIONAL, RADIAL, MEAN_FIELD = METHODS = ("radial-directional", "radial", "mean field")
NUM_SAMPLES = 100
# One setting for every method and set, so that none is tuned more than another.
SETTING: dict[str, Any] = {
    "grouping": "row",
    "shared_concentration": False,
    "init_mean_cosine": 0.999,
    "hidden": 50,
    "batch_size": 100,
    "max_steps": 2_000,
    "learning_rate": 5e-3,
}
PAPER: dict[str, Any] = {
    "grouping": "double",
    "shared_concentration": True,
    "init_mean_cosine": 0.9,
    "hidden": 50,
    "batch_size": 5,
    "epochs": 400,
    "learning_rate": 1e-3,
}
FORMS = {"default": SETTING, "small": SETTING | {"max_steps": 20}, "paper": PAPER}
# As published on the same splits: RMSE and log-likelihood of variational matrix Gaussians (Louizos and Welling, 2016).
VMG = {
    "boston": (2.70, -2.46),
    "concrete": (4.89, -3.01),
    "energy": (0.54, -1.06),
    "power": (4.04, -2.82),
    "wine": (0.63, -0.95),
    "yacht": (0.71, -1.30),
}
# RMSE of mean field and of a radial posterior in table 2 of Farquhar, Osborne and Gal (2020), on splits of their own.
RADIAL_BNN = {
    "boston": (3.42, 3.36),
    "concrete": (5.71, 5.62),
    "energy": (0.81, 0.66),
    "power": (4.02, 4.04),
    "wine": (0.65, 0.64),
    "yacht": (1.75, 1.86),
}


def run(output: Path, *, data_dir: Path, form: SizedForm = "default", seeds: int = 20, workers: int = 2) -> None:
    """Train every method on the standard splits, with batches of 100 and at most 2,000 steps; noise is learned.

    Inputs and targets are standardized by the training rows, and results are in the units of the targets. They are the
    RMSE of the predictive mean, and the log of the predictive density, which is averaged over draws first and then over
    test points. (In the table of Oh, Adamczewski and Park, 2019, these two are swapped.) The radial-directional
    posterior has a direction and a radius for each row of the first layer, each with its own concentration, and normals
    in the second layer. Theirs has rows and columns and one concentration, batches of 5 and 400 epochs (``--paper``).
    On a tenth of the training rows of yacht, that setting had learned far less after as many steps.
    """
    setting = FORMS[form]
    results = Results(output, {"torch": torch.__version__, "num_samples": NUM_SAMPLES, **setting})
    names, splits = (("yacht",), 1) if form == "small" else (SETS, seeds)
    jobs = [
        Job({"data": name, "split": split, "method": method}, score, (data_dir, name, split, method, setting))
        for split, name, method in itertools.product(range(splits), names, METHODS)
    ]
    compute_all(results, jobs, workers)


def score(data_dir: Path, name: str, split: int, method: str, setting: Row) -> Row:
    data = uci_split(data_dir, name, split)
    x, y = data["train"]
    torch.manual_seed(split)
    model, guide = make(method, x, setting)
    steps_per_epoch = -(-len(x) // setting["batch_size"])
    epochs = setting.get("epochs") or setting["max_steps"] // steps_per_epoch
    fit(
        model,
        guide,
        (x, y),
        epochs=epochs,
        batch_size=setting["batch_size"],
        optim=partial(torch.optim.Adam, lr=setting["learning_rate"]),
        loss=TermsELBO(strict_kl=True),
        seed=split,
        progress=False,
    )
    x_test, y_test = data["test"]
    torch.manual_seed(split)
    draws = predict(model, guide, x_test, num_samples=NUM_SAMPLES)
    unit = data["unit"]
    return {
        "rmse": float((draws.mean - y_test).square().mean().sqrt()) * unit,
        # A density of standardized targets is per standardized unit.
        "log_likelihood": float(draws.log_prob(y_test).mean()) - math.log(unit),
        "steps": epochs * steps_per_epoch,
    }


def make(method: str, x: Tensor, setting: Row) -> tuple[SupervisedModel, nn.Module]:
    net = perceptron((x.shape[1], setting["hidden"], 1))
    prior = RadialDirectionalPrior({"0.weight": setting["grouping"]}) if method == DIRECTIONAL else FanIn()
    likelihood = likelihoods.Gaussian(num_data=len(x), scale=0.5, learn_scale=True)
    model = SupervisedModel(BayesianModule(net, prior), likelihood)
    if method == DIRECTIONAL:
        chosen = {key: setting[key] for key in ("shared_concentration", "init_mean_cosine")}
        return model, AutoRadialDirectional(model, **chosen)
    return model, (AutoRadial if method == RADIAL else AutoMeanField)(model)


def claims(results: Results) -> list[Claim]:
    """Compare radial with mean field."""
    splits, names = str(len(results.distinct("split"))), results.distinct("data")
    better = sum(radial < mean_field for mean_field, radial in (RADIAL_BNN[name] for name in names))
    ours = [mean(results.values("rmse", data=n, method=RADIAL)) for n in names]
    theirs = [mean(results.values("rmse", data=n, method=MEAN_FIELD)) for n in names]
    number = sum(difference < 0 for difference in paired(ours, theirs))
    text = "UCI: a radial posterior has a lower RMSE than mean field on most sets"
    numbers = (f"{count} of {len(names)}" for count in (better, number))
    return [Claim(text, *numbers, splits, number > len(names) / 2)]


def differences(results: Results, name: str, data: str, ours: str, theirs: str = MEAN_FIELD) -> list[float]:
    """Of the same splits, our method less another."""
    return paired(*(results.values(name, data=data, method=method) for method in (ours, theirs)))


def report(results: Results) -> str:
    """Report both results on every set, by method."""
    lines, setting = [], results.setting
    for data in results.distinct("data"):
        for (name, title), published in zip(REGRESSION.items(), VMG[data], strict=True):
            cells = [results.values(name, data=data, method=method) for method in METHODS]
            cells.append(differences(results, name, data, DIRECTIONAL))
            lines.append([f"{data}, {title}", *(with_error(values, 3) for values in cells), f"{published:.2f}"])
    steps = f"at most {max(results.values('steps')):,} steps"
    return f"""### UCI regression

Networks have one hidden layer of {setting["hidden"]} and train on {len(results.distinct("split"))} standard splits. \
Every method takes batches of {setting["batch_size"]} and {steps} per split, of Adam at \
{setting["learning_rate"]:g}, which was not chosen on these sets. Numbers are means and standard errors in the units \
of the targets. The difference is paired: radial-directional minus mean field. VMG is as published (Louizos and \
Welling, 2016), with its own, longer budget (`python -m benchmarks.guides.uci_regression --data-dir DIR`).

{markdown_table(["", *METHODS, "difference", "VMG"], lines)}"""


if __name__ == "__main__":
    main(run, report)
