# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure how often networks learn, with random settings (figure 4 of the Radial paper) and with single changes.

python -m benchmarks.uncertainty.robustness
"""

import math
import re
import time
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.functional import avg_pool2d, softplus

from benchmarks.common import FIRST_SEED, Claim, Form, Job, Pair, Results, Row, compute_all, main, markdown_table
from benchmarks.uncertainty._fundus import fundus
from benchmarks.uncertainty._methods import (
    MEAN_FIELD,
    NARROW,
    NATURAL_MEAN_FIELD,
    NATURAL_RADIAL,
    RADIAL,
    Setting,
    measures,
    train,
)
from benchmarks.uncertainty._networks import VGG4, vgg

__all__ = ["claims", "draw", "report", "run"]

METHODS = (MEAN_FIELD, NARROW, RADIAL, NATURAL_MEAN_FIELD, NATURAL_RADIAL)
COLORS = dict(zip(METHODS, ("#D55E00", "#009E73", "#0072B2", "#E69F00", "#56B4E9"), strict=True))
FOLDS = 3
#: What has barely learned has an AUC below the first, what is good one from the second.
CHANCE, GOOD = 0.6, 0.75
#: The NLL from which on a guide does not work: that of the share of referable images alone is 0.69.
WORKS = 0.62
# The paper's choices; rates ten times its own, for trainings of some hundred steps.
RATES = {"sgd": (0.1, 0.01, 0.001), "amsgrad": (0.01, 0.001, 0.0001)}
DECAYS = {"sgd": (1.0, 0.98, 0.96), "amsgrad": (1.0,)}
BATCH_SIZES = (16, 32, 64, 128, 256)
PARTICLES = (1, 2, 4)
RHOS = (-6.0, -4.0, -2.0, 0.0)
#: Times the rate of scales: the rate at which natural gradients average curvatures.
HESS_RATE = 1e-3
DEPTHS = {2: ((1, 1), (1, 2)), 4: VGG4, 7: ((2, 1), (2, 2), (3, 4))}
NOT_FINITE = re.compile(r"\bnan\b|infinit|finite|invalid values", re.IGNORECASE)
Cell = dict[str, float]


class Size(NamedTuple):
    """How much is drawn and trained."""

    configurations: int = 40
    folds: int = FOLDS
    epochs: int = 8
    width: int = 16
    num_samples: int = 16
    seeds: int = 2
    rhos: tuple[float, ...] = RHOS
    scale_rates: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    priors: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    depths: tuple[int, ...] = tuple(DEPTHS)
    widths: tuple[int, ...] = (8, 16, 32)


SIZES = {"default": Size(), "small": Size(2, 1, 1, 2, 2, 1, (-4.0,), (1e-2,), (1.0,), (2,), (2, 3))}


def run(
    output: Path, *, form: Form = "default", data_dir: Path | None = None, workers: int = 1, threads: int = 1
) -> None:
    """Cross-validate random settings, then test grids around one setting on test images."""
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    jobs = [
        Job({"part": "random", "method": name, "number": number}, cross_validated, (data_dir, size, name, number))
        for number in range(size.configurations)
        for name in METHODS
    ]
    for part, cells in grids(size).items():
        for cell, name, seed in product(cells, METHODS, range(FIRST_SEED, FIRST_SEED + size.seeds)):
            keys = {"part": part, **cell, "method": name, "seed": seed}
            jobs.append(Job(keys, tested, (data_dir, size, name, cell, seed)))
    compute_all(results, jobs, workers, threads)


def grids(size: Size) -> Mapping[str, list[Cell]]:
    """What is changed, and to what, by the name of the study."""
    return {
        "scales": [{"rho": rho, "scale_rate": rate} for rho in size.rhos for rate in size.scale_rates],
        "prior": [{"prior_stddev": stddev} for stddev in size.priors],
        "network": [{"depth": depth, "width": width} for depth in size.depths for width in size.widths],
    }


def configuration(size: Size, number: int) -> Setting:
    """A random setting out of the paper's choices."""
    generator = torch.Generator().manual_seed(number)

    def one_of(choices: tuple[Any, ...]) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    optimizer = one_of(tuple(RATES))
    return Setting(
        epochs=size.epochs,
        optimizer=optimizer,
        rate=one_of(RATES[optimizer]),
        decay=one_of(DECAYS[optimizer]),
        batch_size=one_of(BATCH_SIZES),
        num_particles=one_of(PARTICLES),
        init_scale=sigma(one_of(RHOS)),
        pretrain_epochs=1 if size.epochs > 1 else 0,
        num_samples=size.num_samples,
        hess_init=None,
        lr=one_of(RATES["sgd"]),
        compile=False,
    )


def sigma(rho: float) -> float:
    return float(softplus(torch.tensor(rho)))


def halved(pair: Pair) -> Pair:
    """Images of 14 x 14, as the paper halves its own for this."""
    return avg_pool2d(pair[0], 2), pair[1]


def scored(name: str, make_net: Any, fitted: Pair, unseen: Pair, setting: Setting, seed: int) -> Row:
    """Measures on unseen images; those of chance where the loss or the outputs are not finite."""
    start = time.process_time()
    chance = {"auc": 0.5, "nll": math.log(2), "accuracy": float(unseen[1].double().mean()), "diverged": True}
    try:
        prediction = train(name, make_net, fitted, unseen, setting, seed).predict(unseen[0])
        finite = bool(prediction.samples.isfinite().all())
        found = {**measures(prediction, unseen[1]), "diverged": False} if finite else chance
    except (FloatingPointError, ValueError) as error:
        # Distributions call what is not finite a wrong value.
        if NOT_FINITE.search(str(error)) is None:
            raise
        found = chance
    return {**found, "seconds": time.process_time() - start}


def cross_validated(data_dir: Path | None, size: Size, name: str, number: int) -> Row:
    """A random setting on each fold of the images for training and validation."""
    data = fundus(data_dir)
    x, y = (torch.cat(parts) for parts in zip(halved(data.train), halved(data.validation), strict=True))
    folds = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).chunk(FOLDS)
    setting, rows = configuration(size, number), []
    for fold in range(size.folds):
        fitted = torch.cat([folds[other] for other in range(FOLDS) if other != fold])
        unseen = folds[fold]
        net = partial(vgg, width=size.width, blocks=VGG4)
        rows.append(scored(name, net, (x[fitted], y[fitted]), (x[unseen], y[unseen]), setting, number))
    return {
        "auc": mean(row["auc"] for row in rows),
        "aucs": [round(row["auc"], 4) for row in rows],
        "diverged": sum(row["diverged"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        **{key: getattr(setting, key) for key in CHOSEN},
    }


CHOSEN = ("optimizer", "rate", "lr", "decay", "batch_size", "num_particles", "init_scale")


def tested(data_dir: Path | None, size: Size, name: str, cell: Cell, seed: int) -> Row:
    """One setting with something changed, on the test images."""
    data = fundus(data_dir)
    setting = Setting(
        epochs=size.epochs,
        batch_size=64,
        rate=0.01,
        scale_rate=cell.get("scale_rate", 0.01),
        lr=0.1,
        hess_init=None,
        hess_rate=HESS_RATE * cell.get("scale_rate", 0.01),
        prior_stddev=cell.get("prior_stddev", 1.0),
        init_scale=sigma(cell.get("rho", -2.0)),
        num_samples=size.num_samples,
        compile=False,
    )
    blocks = DEPTHS[int(cell.get("depth", 4))]
    net = partial(vgg, width=int(cell.get("width", size.width)), blocks=blocks)
    return scored(name, net, halved(data.train), halved(data.test), setting, seed)


def shares(results: Results, method: str, threshold: float) -> tuple[float, float]:
    """The share of settings with an AUC of at least so much, and its binomial standard error."""
    aucs = results.values("auc", part="random", method=method)
    share = mean(auc >= threshold for auc in aucs)
    return share, (share * (1 - share) / len(aucs)) ** 0.5


def cell_nll(results: Results, part: str, method: str, cell: Cell) -> float:
    return mean(row["nll"] for row in results.where(part=part, method=method, **cell))


def working(results: Results, method: str, part: str | None = None) -> tuple[int, int]:
    """In how many cells the mean NLL is below that from which on a guide does not work, and of how many."""
    cells = {name: own for name, own in grids(_size(results)).items() if part in (None, name)}
    values = [cell_nll(results, name, method, cell) for name, own in cells.items() for cell in own]
    return sum(value < WORKS for value in values), len(values)


def _size(results: Results) -> Size:
    saved = {name: results.setting[name] for name in Size._fields}
    return Size(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})


def claims(results: Results) -> list[Claim]:
    """Compare the share that learns, at the paper's sigma and at equal standard deviation, and the grids."""
    number = len(results.where(part="random", method=RADIAL))
    settings = f"{number} settings, {_size(results).folds} folds"
    good = {method: shares(results, method, GOOD) for method in METHODS}
    poor = {method: 1 - shares(results, method, CHANCE)[0] for method in METHODS}
    regions = {method: working(results, method) for method in METHODS}
    (radial, radial_error), (narrow, narrow_error) = good[RADIAL], good[NARROW]
    natural, natural_error = good[NATURAL_RADIAL]
    return [
        Claim(
            f"RetinaMNIST, random settings: radial reaches an AUC of {GOOD} at least twice as often as mean field",
            "44 % against 11 % (good AUCs)",
            f"{radial:.0%} against {good[MEAN_FIELD][0]:.0%}",
            settings,
            radial > 0 and radial >= 2 * good[MEAN_FIELD][0],
        ),
        Claim(
            f"RetinaMNIST, random settings: mean field fails an AUC of {CHANCE} at least twice as often as radial",
            "82 % against 39 %",
            f"{poor[MEAN_FIELD]:.0%} against {poor[RADIAL]:.0%}",
            settings,
            poor[MEAN_FIELD] > 0 and poor[MEAN_FIELD] >= 2 * poor[RADIAL],
        ),
        Claim(
            f"The same at equal standard deviations: radial reaches an AUC of {GOOD} more often than mean field",
            "",
            f"{radial:.0%} ± {radial_error:.0%} against {narrow:.0%} ± {narrow_error:.0%}",
            settings,
            radial - narrow > 2 * math.hypot(radial_error, narrow_error),
        ),
        Claim(
            "RetinaMNIST, one change at a time: radial works in more cells than mean field",
            "",
            " against ".join(f"{works} of {of}" for works, of in (regions[RADIAL], regions[MEAN_FIELD])),
            str(_size(results).seeds),
            regions[RADIAL] > regions[MEAN_FIELD],
        ),
        *(
            Claim(
                f"RetinaMNIST, random settings: {NATURAL_RADIAL} reaches an AUC of {GOOD} more often than {other}",
                "",
                f"{natural:.0%} ± {natural_error:.0%} against {good[other][0]:.0%} ± {good[other][1]:.0%}",
                settings,
                natural - good[other][0] > 2 * math.hypot(natural_error, good[other][1]),
            )
            for other in (RADIAL, NATURAL_MEAN_FIELD)
        ),
    ]


def report(results: Results) -> str:
    """Report shares by method and threshold, and the grids."""
    size = _size(results)
    thresholds = (0.55, CHANCE, 0.65, 0.7, GOOD, 0.8)
    table = [
        [method, *(_share(results, method, t) for t in thresholds), *_extremes(results, method)] for method in METHODS
    ]
    by_rho = [[method, *(_learned_at(results, method, rho) for rho in RHOS)] for method in METHODS]
    sections = []
    for part, (title, across) in TITLES.items():
        cells = grids(size)[part]
        lines = []
        for method in METHODS:
            works = str(working(results, method, part)[0])
            lines.append([method, works, *(_nll(results, part, method, cell) for cell in cells)])
        sections.append(f"{title}\n\n{markdown_table(['', 'works', *map(across, cells)], lines)}")
    more = "\n\n".join(sections)
    minutes = sum(results.values("seconds")) / 60
    return f"""### Robustness

The task is to tell grades from 2 up from lower grades on RetinaMNIST at 14 x 14 (`python -m \
benchmarks.uncertainty.robustness`). The network resembles VGG, with four convolutions from {size.width} channels up. \
The prior is N(0, 1), with the full KL. We try {size.configurations} random settings from the paper's choices: SGD \
with Nesterov momentum or Amsgrad, rates ten times the paper's, decay, batches of 16 to 256, 1 to 4 draws per step, \
and rho of -6, -4, -2 or 0. Each method gets the same settings and trains for {size.epochs} epochs, the first for the \
means only. The AUC is a mean over {size.folds} folds of the 1,200 training and validation images.

At a given sigma, a radial posterior has a standard deviation of sigma / sqrt(D) at each weight; "mean field, narrow" \
starts at that value. The table gives the share of settings that reach an AUC, with its binomial standard error:

{markdown_table(["", *(f"{t:g}" for t in thresholds), "best AUC", "diverged"], table)}

Share that reaches {GOOD:g}, by the start of the scales:

{markdown_table(["", *(f"rho {rho:g}" for rho in RHOS)], by_rho)}

Natural gradients have rates of 0.1, 0.01 or 0.001, and the same start, decay, batches and draws.

The next tables change one thing at a time in this setting: Adam at 0.01 with a rate that falls to zero, batches of \
64, a rate of 0.01 for scales, rho of -2, N(0, 1), and four convolutions from {size.width} channels up. Natural \
gradients have a rate of 0.1, and average curvatures at {HESS_RATE:g} times the rate of scales. Networks train \
for {size.epochs} epochs on the 1,080 training images without augmentation. The tables give the test NLL, mean of \
{size.seeds} seeds. A guide works if its NLL is below {WORKS:g}. Always predicting the share of referable images has \
an NLL of 0.69, which also counts for a training that diverges.

{more}

The budget is {minutes:.0f} minutes on one core in all. To fit it, we use {size.configurations} of the paper's 86 \
settings, images of 14 x 14 instead of 256 x 256, {size.epochs} epochs instead of 150, and no augmentation.

{results.plot("Share of settings that reach an AUC, and test NLL by start and rate of the scales")}"""


#: By study: what its table is called, and a column of it.
TITLES: dict[str, tuple[str, Any]] = {
    "scales": ("Start and rate of scales:", lambda cell: f"rho {cell['rho']:g}, rate {cell['scale_rate']:g}"),
    "prior": ("Standard deviation of the prior:", lambda cell: f"{cell['prior_stddev']:g}"),
    "network": ("Number of convolutions x channels of the first:", lambda cell: f"{cell['depth']} x {cell['width']}"),
}


def _share(results: Results, method: str, threshold: float) -> str:
    share, error = shares(results, method, threshold)
    return f"{share:.0%} ± {error:.0%}"


def _extremes(results: Results, method: str) -> list[str]:
    """The best area, and how many trainings diverged."""
    rows = results.where(part="random", method=method)
    return [f"{max(row['auc'] for row in rows):.3f}", str(sum(row["diverged"] for row in rows))]


def _learned_at(results: Results, method: str, rho: float) -> str:
    rows = results.where(part="random", method=method)
    own = [row["auc"] >= GOOD for row in rows if math.isclose(row["init_scale"], sigma(rho), rel_tol=1e-2)]
    return f"{sum(own)} of {len(own)}"


def _nll(results: Results, part: str, method: str, cell: Cell) -> str:
    value = cell_nll(results, part, method, cell)
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def draw(results: Results) -> None:
    """The curves of figure 4, and a map of start and rate for each method."""
    size = _size(results)
    figure = Figure(figsize=(16, 3.4), layout="constrained", dpi=110)
    left, *maps = figure.subplots(1, 1 + len(METHODS), width_ratios=(1.5, *(1 for _ in METHODS)))
    for method in METHODS:
        aucs = sorted(results.values("auc", part="random", method=method))
        places = [0.5 + 0.001 * step for step in range(401)]
        left.plot(places, [mean(auc >= place for auc in aucs) for place in places], label=method, color=COLORS[method])
    left.set(xlabel="AUC, mean of the folds", ylabel="Share of settings that reach it", ylim=(0, 1))
    left.legend(frameon=False, fontsize=8)
    left.spines[["top", "right"]].set_visible(False)
    for method, ax in zip(METHODS, maps, strict=True):
        values = [
            [cell_nll(results, "scales", method, {"rho": rho, "scale_rate": rate}) for rate in size.scale_rates]
            for rho in size.rhos
        ]
        ax.imshow(np.minimum(values, 1.0), vmin=0.5, vmax=1.0, cmap="viridis_r", aspect="auto")
        for (row, line), column in product(enumerate(values), range(len(size.scale_rates))):
            color = "black" if line[column] < 0.65 else "white"
            ax.text(column, row, f"{line[column]:.2f}", ha="center", va="center", color=color, fontsize=8)
        ax.set_title(method, fontsize=9)
        ax.set_xticks(range(len(size.scale_rates)), [f"{rate:g}" for rate in size.scale_rates])
        ax.set_yticks(range(len(size.rhos)), [f"{rho:g}" for rho in size.rhos])
        ax.set(xlabel="Rate of scales", ylabel="rho at the start" if ax is maps[0] else "")
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
