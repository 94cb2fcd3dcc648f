# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare networks with function-space Laplace posteriors with their Gaussian process on splits of UCI sets.

python -m benchmarks.functional.uci_laplace --data-dir DIR
"""

import time
import warnings
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.common import (
    Claim,
    Form,
    Job,
    Results,
    Row,
    compute_all,
    main,
    markdown_table,
    perceptron,
    uci_split,
    with_error,
)
from benchmarks.functional._regression import LEVEL, SMALL_SETS, exact_prediction, kept_prior, of_normal, shuffled
from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.functional import GaussianProcess, PosteriorProcess, function_space_laplace, init_to_prior
from pyro_radial.nn import likelihoods

#: Three seeds take six hours of one core.
SPLITS, SEEDS = 20, 1
LAPLACE, EXACT = "function-space Laplace", "exact process"
#: The least difference from the exact process on a split.
LEAST_SPLIT = -0.5
DEFAULT: Row = {
    "hidden": [50, 50],
    "activation": "SiLU",
    "most_points": 300,
    "num_steps": 100,
    "most_calls": 4,
    "prior_noise": 0.001,
    "prior_points": 500,
    "prior_steps": 1_000,
}
SMALL: Row = {"hidden": [10], "most_points": 40, "num_steps": 3, "most_calls": 2, "prior_steps": 10}
FORMS = {"default": DEFAULT, "small": DEFAULT | SMALL}


def run(
    output: Path, *, data_dir: Path, form: Form = "default", splits: int = SPLITS, seeds: int = SEEDS, workers: int = 2
) -> None:
    """Compare on the standard splits, standardized by the training rows; results are in the units of the targets.

    A Gaussian process with an RBF kernel and a length scale for each input is fitted to the training rows by marginal
    likelihood. It predicts by itself, and is the prior of a network of 2 x 50 SiLU units with the noise of the process.
    ``init_to_prior`` starts the network, and ``function_space_laplace`` finds its means and widths from all training
    rows. Its 300 points are where predictions are made, the test inputs without their targets, and training inputs.
    Where it warns that its steps have not ended, further calls continue from its guide, up to four in all. Both
    predict normal distributions in closed form. Seeds are those of the first weights; the process has none.

    Units, start and points were chosen on validation rows of the first split. Without the new inputs among the points,
    the network's own interpolation decides there, and single rows of yacht cost nats.
    """
    setting, one = FORMS[form], form == "small"
    results = Results(output, {"torch": torch.__version__, **setting})
    jobs = []
    for seed, split in product(range(1 if one else seeds), range(1 if one else splits)):
        for name, method in product(["yacht"] if one else SMALL_SETS, (LAPLACE, EXACT)):
            if method == LAPLACE or seed == 0:
                keys = {"data": name, "split": split, "method": method, "seed": seed}
                path = results.checkpoint(name, split, "prior")
                jobs.append(Job(keys, score, (data_dir, *keys.values(), setting, path)))
    compute_all(results, jobs, workers)


def score(data_dir: Path, name: str, split: int, method: str, seed: int, setting: Row, path: Path) -> Row:
    """Score a method on one split, with the seconds it takes, those of fitting the process included."""
    data = uci_split(data_dir, name, split)
    rows, test, unit = data["train"], data["test"], data["unit"]
    pyro.set_rng_seed(split)
    prior, seconds = kept_prior(rows, setting, path)
    pyro.set_rng_seed(seed)
    start = time.process_time()
    if method == EXACT:
        scored = exact_prediction(prior, rows, test)
    else:
        new = test[0]
        points = torch.cat([new, shuffled(rows)[0][: setting["most_points"] - len(new)]])
        net = perceptron((rows[0].shape[1], *setting["hidden"], 1), getattr(nn, setting["activation"]))
        process = GaussianProcess(prior.kernel, noise=setting["prior_noise"])
        likelihood = likelihoods.Gaussian(scale=float(prior.observation_noise), num_data=len(rows[0]))
        model = SupervisedModel(BayesianModule(init_to_prior(net, process, rows[0])), likelihood)
        guide: Any = net
        for _ in range(setting["most_calls"]):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                guide = function_space_laplace(model, guide, rows, process, points, num_steps=setting["num_steps"])
            if not any("nats above" in str(warning.message) for warning in warned):
                break
        f, variance = PosteriorProcess(model, guide.get_posterior()).marginals(new)
        scored = of_normal(f.double(), variance.double() + prior.observation_noise.square(), test[1])
    return {**scored.row(test[1], unit), "seconds": round(seconds + time.process_time() - start, 1)}


def differences(results: Results, data: str, measure: str = "log_likelihood") -> list[float]:
    """A measure less that of the exact process on each split, in the mean over seeds."""
    found = []
    for row in results.where(data=data, method=EXACT):
        ours = results.values(measure, data=data, method=LAPLACE, split=row["split"])
        found += [mean(ours) - row[measure]] if ours else []
    return found


def claims(results: Results) -> list[Claim]:
    """Stay close to the exact process on every split of every set."""
    names = results.distinct("data")
    number = str(min(len(results.where(data=data, method=LAPLACE)) for data in names))
    least = {data: min(differences(results, data)) for data in names}
    lowest = min(names, key=lambda data: least[data])
    text = "UCI: function-space Laplace against its exact process in log-likelihood, worst split"
    shown = f"{least[lowest]:.3f}, {lowest}"
    return [Claim(text, f"at least {LEAST_SPLIT}", shown, number, least[lowest] >= LEAST_SPLIT)]


def report(results: Results) -> str:
    """Report the scores of both, and their differences."""
    lines = []
    for data in results.distinct("data"):
        ours, exact = ({"data": data, "method": method} for method in (LAPLACE, EXACT))
        less = differences(results, data)
        cells = [with_error(results.values(m, **of), 3) for m in ("rmse", "log_likelihood") for of in (ours, exact)]
        covered = [with_error(results.values("coverage", **of), 3) for of in (ours, exact)]
        seconds = [f"{mean(results.values('seconds', **of)):.0f}" for of in (ours, exact)]
        number = f"{len(less)}, {len(results.where(**ours))}"
        lines.append([data, *cells, with_error(less, 3), f"{min(less):.3f}", *covered, *seconds, number])
    names = [f"{title}, {which}" for title in ("RMSE", "log-likelihood") for which in ("network", "process")]
    differ = ["difference", "worst split"]
    more = [f"{title}, {which}" for title in ("coverage", "seconds") for which in ("network", "process")]
    setting = results.setting
    hidden = setting["hidden"]
    return f"""### Function-space Laplace beside the exact process on UCI splits

Networks of {len(hidden)} x {hidden[0]} {setting["activation"]} units under a Gaussian process that was fitted to the \
training rows, and that process itself, on the twenty standard splits. `init_to_prior` starts a network, and \
`function_space_laplace`, with the test inputs among its points, needs no other training. Numbers are means and \
standard errors over splits, in the units of the targets; the last column has the number of splits and of networks. \
Differences are in log-likelihood. Coverage is that of {100 * LEVEL:.0f} % intervals. Seconds are on one thread and \
include fitting the process (`python -m benchmarks.functional.uci_laplace --data-dir DIR`; `--help` describes the \
setting). There is one network for each split; for more there was no time.

{markdown_table(["", *names, *differ, *more, "splits, networks"], lines)}

{results.plot("Log-likelihoods minus that of the exact process, a dot for each split")}"""


def draw(results: Results) -> None:
    """Log-likelihoods less that of the exact process, by split."""
    names = results.distinct("data")
    figure = Figure(figsize=(7, 1.0 + 0.4 * len(names)), layout="constrained", dpi=110)
    ax = figure.subplots()
    for place, data in enumerate(names):
        less = differences(results, data)
        ax.plot(less, [place] * len(less), "o", ms=4, color="#D55E00", alpha=0.6)
        ax.plot([mean(less)], [place], "k|", ms=14)
    ax.axvline(0.0, color="0.6", lw=1)
    ax.set(xlabel="log-likelihood less the exact process's, nats", yticks=range(len(names)), yticklabels=names)
    ax.set_ylim(-0.5, len(names) - 0.5)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
