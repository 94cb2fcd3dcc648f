# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Check the coverage of conformal sets and intervals on ten random splits of real data, and compare their sizes.

python -m benchmarks.uncertainty.conformal --data-dir DIR
"""

import itertools
import math
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.stats import betabinom
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    flat_images,
    main,
    markdown_table,
    paired,
    with_error,
)
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FitOptions, RadialELBO, SupervisedModel, fit
from pyro_radial.infer import SampledNetwork
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import ConformalIntervals, ConformalSets

__all__ = ["claims", "draw", "report", "run"]

PLAIN, MEAN_FIELD, RADIAL = METHODS = ("plain", "mean field", "radial")
IMAGES = "fashion_mnist"
LEVEL = 0.9
#: For classes and for real targets.
SCORES = {True: ("lac", "aps"), False: ("quantile", "normalized")}
#: Standard deviations of the prior, the best of which is used, for each method.
PRIORS = (3.0, 1.0, 0.3, 0.1, 0.05)
#: The most standard errors between a mean coverage and the expected one. One of 18 is outside by chance in 5 %.
BOUND = 3.0


class Size(NamedTuple):
    """How rows are split, and how long a network trains."""

    train: int
    calibration: int
    test: int
    hidden: tuple[int, ...]
    steps: int
    batch_size: int
    rate: float

    @property
    def covered(self) -> Any:
        """The distribution of the number of test rows that one split covers, whatever the scores are."""
        rank = math.ceil((self.calibration + 1) * LEVEL - 1e-9)
        return betabinom(self.test, rank, self.calibration + 1 - rank)


SIZES: dict[str, dict[str, Size]] = {
    "default": {
        IMAGES: Size(3_000, 1_000, 5_000, (200, 200), 800, 128, 1e-3),
        "concrete": Size(500, 265, 265, (50,), 2_000, 64, 5e-3),
        "kin8nm": Size(2_000, 1_000, 5_192, (50,), 2_000, 64, 5e-3),
    },
    "small": {IMAGES: Size(60, 40, 40, (10,), 4, 32, 1e-2), "yacht": Size(20, 12, 8, (5,), 4, 10, 1e-2)},
}


def run(
    output: Path, *, data_dir: Path, form: Form = "default", seeds: int = 10, workers: int = 2, threads: int = 1
) -> None:
    """Train three methods on random splits of images and of two UCI sets; calibrate, and test on the other rows.

    Each method has five settings, the standard deviations of its prior. The best NLL on the calibration rows of the
    split with seed 0 chooses one for each set of data; that split is used for nothing else. Posteriors start at a
    standard deviation of 0.03, and the learning rate of their scales is ten times that of the means.
    """
    sizes = SIZES[form]
    setting = {"torch": torch.__version__, "threads": threads, "level": LEVEL, "num_samples": 64}
    results = Results(output, setting | {name: list(size) for name, size in sizes.items()})
    priors, splits = (PRIORS, seeds) if form == "default" else (PRIORS[:2], 2)
    for name, method in itertools.product(sizes, METHODS):
        own: Any = (data_dir, name, sizes[name], method)
        keys = {"data": name, "method": method}
        choices = [Job({"use": "choice", **keys, "prior": prior}, measured, (*own, prior, 0)) for prior in priors]
        compute_all(results, choices, workers, threads)
        prior = chosen_prior(results, name, method)
        seeds_of_table = range(FIRST_SEED, FIRST_SEED + splits)
        tests = [Job({"use": "test", **keys, "seed": seed}, measured, (*own, prior, seed)) for seed in seeds_of_table]
        compute_all(results, tests, workers, threads)


def chosen_prior(results: Results, name: str, method: str) -> float:
    rows = results.where(use="choice", data=name, method=method)
    return float(min(rows, key=lambda row: row["nll"])["prior"])


def measured(data_dir: Path, name: str, size: Size, method: str, prior: float, seed: int) -> Row:
    """The NLL, of the calibration rows for seed 0; for other seeds also the covered test rows and the mean sizes."""
    train, (x_held_out, y_held_out), (x, y) = parts(data_dir, name, size, seed)
    # The same draws for all rows: rows that other draws predict are not exchangeable with these.
    network = trained(name, size, method, prior, train, seed)
    held_out = network.predict(x_held_out)
    if seed == 0:
        return {"nll": -float(held_out.log_prob(y_held_out).mean())}
    test = network.predict(x)
    row: Row = {"nll": -float(test.log_prob(y).mean())}
    for score in SCORES[name == IMAGES]:
        if name == IMAGES:
            sets = ConformalSets.fit(held_out, y_held_out, LEVEL, score)(test)
            covered, sizes = sets.gather(-1, y[:, None]), sets.sum(-1).double()
        else:
            lower, upper = ConformalIntervals.fit(held_out, y_held_out, LEVEL, score)(test)
            covered, sizes = (lower <= y) & (y <= upper), upper - lower
        row |= {f"covered_{score}": int(covered.sum()), f"size_{score}": float(sizes.mean())}
    return row


def parts(data_dir: Path, name: str, size: Size, seed: int) -> list[Pair]:
    """Random rows to train on, to calibrate with and to test; real data are standardized by the first."""
    if name == IMAGES:
        x, y = (torch.cat(both) for both in zip(*flat_images(name, data_dir), strict=True))
    else:
        file = np.load(data_dir / "uci" / f"{name}.npz")
        rows = torch.tensor(file["data"], dtype=torch.float32)
        x, y = rows[:, file["feature_columns"]], rows[:, [int(file["target_column"])]]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, held_out, test, _ = order.split([*size[:3], len(x) - sum(size[:3])])
    if name != IMAGES:
        x, y = ((part - part[train].mean(0)) / part[train].std(0).clamp_min(1e-6) for part in (x, y))
    return [(x[index], y[index]) for index in (train, held_out, test)]


def trained(name: str, size: Size, method: str, prior: float, train: Pair, seed: int) -> SampledNetwork:
    torch.manual_seed(seed)
    widths = (train[0].shape[1], *size.hidden, 10 if name == IMAGES else 1)
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    likelihood: Any = likelihoods.Categorical() if name == IMAGES else likelihoods.Gaussian(scale=0.5, learn_scale=True)
    model = SupervisedModel(BayesianModule(nn.Sequential(*layers[:-1]), prior=dist.Normal(0.0, prior)), likelihood)
    guide: Any
    if method == PLAIN:
        guide = AutoMeanField(model, families={".": families.Delta()})
    else:
        guide = (AutoRadial if method == RADIAL else AutoMeanField)(model, init_stddev=0.03)
    epochs = max(1, size.steps // -(-len(train[1]) // size.batch_size))
    fit(
        model,
        guide,
        train,
        epochs=epochs,
        batch_size=size.batch_size,
        optim=pyro.optim.Adam(lambda name: {"lr": size.rate * (10 if "scales" in name else 1)}),
        scheduler=partial(CosineAnnealingLR, T_max=epochs),
        loss=RadialELBO(strict_kl=True),
        options=FitOptions(compile=size.steps > 100),
        seed=seed,
        progress=False,
    )
    return SampledNetwork(model, guide, 1 if method == PLAIN else 64)


def cases(results: Results) -> list[tuple[str, str, Size]]:
    """Each data set with each score."""
    names = results.distinct("data")
    return [(name, score, Size(*results.setting[name])) for name in names for score in SCORES[name == IMAGES]]


def by_method(results: Results, name: str, kind: str) -> dict[str, list[Any]]:
    return {method: results.values(kind, use="test", data=name, method=method) for method in METHODS}


def distance(covered: list[int], size: Size) -> float:
    """The standard errors between the mean coverage and the expected one."""
    return float((mean(covered) - size.covered.mean()) / size.covered.std() * len(covered) ** 0.5)


def claims(results: Results) -> list[Claim]:
    """Compare coverages with the theory, and sizes between methods."""
    found = []
    for name, score, size in cases(results):
        sizes, covered = by_method(results, name, f"size_{score}"), by_method(results, name, f"covered_{score}")
        off = {method: distance(counts, size) for method, counts in covered.items()}
        numbers = ", ".join(f"{method} {value:+.1f}" for method, value in off.items())
        text = f"Conformal, {name}, {score}: mean coverages are within {BOUND:g} standard errors of the expected one"
        seeds = str(len(sizes[RADIAL]))
        found.append(Claim(text, "", numbers, seeds, all(abs(value) <= BOUND for value in off.values())))
        difference = paired(sizes[RADIAL], sizes[PLAIN])
        text = f"Conformal, {name}, {score}: {'sets' if name == IMAGES else 'intervals'} of radial are on average "
        numbers = f"{with_error(sizes[RADIAL], 3)} against {with_error(sizes[PLAIN], 3)}"
        found.append(Claim(f"{text}no larger than the plain network's", "", numbers, seeds, mean(difference) <= 0))
    return found


def report(results: Results) -> str:
    """Report coverage, size and NLL by data, score and method."""
    lines = []
    for name, score, size in cases(results):
        sizes, nll = by_method(results, name, f"size_{score}"), by_method(results, name, "nll")
        for method, covered in by_method(results, name, f"covered_{score}").items():
            line = [
                f"{method}, prior {chosen_prior(results, name, method):g}",
                with_error([100 * count / size.test for count in covered], 2),
                f"{distance(covered, size):+.1f}",
                with_error(sizes[method], 3),
                "" if method == PLAIN else with_error(paired(sizes[method], sizes[PLAIN]), 3),
                with_error(nll[method], 3),
            ]
            lines.append([f"{name}, {score}", *line])
    headings = ["", "", "coverage, %", "distance", "size", "size less plain", "NLL"]
    return f"""### Conformal prediction

Sets of classes and intervals at a level of {100 * LEVEL:g} %, on random splits of the rows (`python -m \
benchmarks.uncertainty.conformal --data-dir DIR`; `--help` describes the choice of settings). If no scores are equal, \
the number of covered test rows of a split has a beta-binomial distribution, whatever the method. The distance is that \
of the mean coverage from the expected one, in its standard errors under this distribution. A size is the number of \
classes in a set, or the width of an interval in standard deviations of the target. Numbers with ± are means and \
standard errors over splits; differences are paired. Plain networks are trained with a prior too, as a point.

{markdown_table(headings, lines)}

{results.plot("Coverage of each split with 95 % of the theory, and sizes over those of the plain network")}"""


def draw(results: Results) -> None:
    """The coverage of each split over 95 % of the theory, and the size relative to that of the plain network."""
    found = cases(results)
    figure = Figure(figsize=(10, 1.5 * len(found)), layout="constrained", dpi=110)
    for (name, score, size), (left, right) in zip(found, figure.subplots(len(found), 2), strict=True):
        left.axvspan(*100 * size.covered.ppf([0.025, 0.975]) / size.test, color="0.9", zorder=0)
        sizes, covered = by_method(results, name, f"size_{score}"), by_method(results, name, f"covered_{score}")
        for place, (method, color) in enumerate(zip(METHODS, ("0.4", "#D55E00", "#0072B2"), strict=True)):
            ratios = [a / b for a, b in zip(sizes[method], sizes[PLAIN], strict=True)]
            for ax, values in ((left, [100 * count / size.test for count in covered[method]]), (right, ratios)):
                ax.plot(values, [-place] * len(values), "o", color=color, alpha=0.6, markersize=4)
        left.set(yticks=[0, -1, -2], yticklabels=METHODS, xlabel="covered, %", title=f"{name}, {score}")
        right.axvline(1.0, color="0.6", lw=1)
        right.set(yticks=[], xlabel="size over that of the plain network")
        for ax in (left, right):
            ax.set_ylim(-2.5, 0.5)
            ax.spines[["top", "right"]].set_visible(False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
