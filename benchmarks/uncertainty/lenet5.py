# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train LeNet-5 on MNIST and Fashion-MNIST, and compare with the published results of a collection of baselines.

python -m benchmarks.uncertainty.lenet5
"""

from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.common import Claim, Form, Pair, Results, Row, main, with_error
from benchmarks.uncertainty._comparison import (
    ENSEMBLES,
    SCORES,
    SMALL,
    Standardized,
    Study,
    bare,
    choices,
    compared,
    described,
    score_table,
    scores,
    split,
    tested_methods,
)
from benchmarks.uncertainty._methods import (
    DEEP_ENSEMBLE,
    MEAN_FIELD,
    PLAIN,
    POSTHOC,
    RADIAL,
    RADIAL_ENSEMBLE,
    TEMPERATURE,
    Setting,
    Trained,
)

__all__ = ["claims", "draw", "report", "run"]

DATA = {"fashion_mnist": "Fashion-MNIST", "mnist": "MNIST"}
METHODS = (PLAIN, TEMPERATURE, MEAN_FIELD, RADIAL, POSTHOC, DEEP_ENSEMBLE, RADIAL_ENSEMBLE)
#: NLL, accuracy in percent and calibration error, where they have one, of uncertainty-baselines.
ONE, TEN, VI, REFINED = "deterministic", "ensemble of ten", "variational", "refined variational"
PUBLISHED = {
    "fashion_mnist": {
        ONE: (0.321, 91.0, None),
        TEN: (0.200, 93.2, 0.010),
        VI: (0.292, 89.5, 0.011),
        REFINED: (0.259, 90.6, 0.011),
    },
    "mnist": {
        ONE: (0.037, 99.1, None),
        TEN: (0.016, 99.4, 0.005),
        VI: (0.048, 98.5, 0.010),
        REFINED: (0.034, 99.0, 0.010),
    },
}


class Size(NamedTuple):
    """How much is trained and tested."""

    train: int = 50_000
    validation: int = 2_000
    test: int | None = None
    #: Of them, for each choice.
    choice: int = 10_000
    num_candidates: int = 4
    seeds: int = 5
    setting: Setting = Setting(epochs=6, num_samples=40, num_members=5)


SIZES = {
    "default": Size(),
    "small": Size(120, 60, 40, 120, 1, 2, SMALL),
}


def lenet5(dropout: float) -> nn.Module:
    """Of 61,706 weights, as LeCun et al. (1998) have it but for ReLU and maxima in the place of means."""
    if dropout:
        raise ValueError(f"dropout must be zero, for none is compared here, got {dropout}")
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


@cache
def images_of(name: str, data_dir: Path | None) -> Standardized:
    return Standardized(name, data_dir)


def load(data_dir: Path | None, size: Size, name: str) -> tuple[Pair, Pair]:
    return split(images_of(name, data_dir).train, size.validation, size.train)


def judge(data_dir: Path | None, size: Size, learned: Trained, name: str) -> Row:
    x, y = images_of(name, data_dir).test(size.test)
    return scores(learned.predict(x), y)


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 5,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """Train each network once, with Adam on 50,000 images; those of five seeds also form an ensemble.

    The setting of each method is the best of four by the NLL of 2,000 other images of Fashion-MNIST, after training on
    10,000 images with seed 0. The seeds in the table start at 10.
    """
    size = SIZES[form]
    study = Study(
        lenet5,
        partial(load, data_dir, size),
        partial(judge, data_dir, size),
        tuple(DATA),
        size.setting,
        METHODS,
        size.num_candidates,
        size.choice,
        shares=True,
        seeds_of={POSTHOC: 1},
    )
    results = Results(output, {"torch": torch.__version__, "threads": threads, **described(size)})
    study.compute(results, seeds if form == "default" else size.seeds, workers, threads)


def nll(results: Results, data: str, method: str) -> list[float]:
    return results.values("nll", use="test", data=data, method=method)


def claims(results: Results) -> list[Claim]:
    """Compare with the published results, and radial posteriors with what they would replace."""
    found = []
    for data, label in DATA.items():
        published = PUBLISHED[data]
        for ours, theirs in ((RADIAL, VI), (RADIAL, REFINED), (POSTHOC, REFINED), (RADIAL_ENSEMBLE, TEN)):
            values = nll(results, data, ours)
            found.append(
                Claim(
                    f"LeNet-5, {label}: the NLL of {ours} is at most that of the published {theirs}",
                    f"{published[theirs][0]:.3f}",
                    with_error(values, 3),
                    str(len(values)),
                    mean(values) <= published[theirs][0],
                )
            )
        for ours, theirs in (
            (RADIAL, PLAIN),
            (RADIAL, MEAN_FIELD),
            (POSTHOC, TEMPERATURE),
            (RADIAL_ENSEMBLE, DEEP_ENSEMBLE),
        ):
            pair = nll(results, data, ours), nll(results, data, theirs)
            # Seeds that both have: the first.
            count = min(map(len, pair))
            text = f"LeNet-5, {label}: the NLL of {ours} is below that of {theirs}"
            found.append(compared(text, *(values[:count] for values in pair)))
    return found


def report(results: Results) -> str:
    """Report scores by method, with the published ones."""
    size = results.setting
    tables = "\n\n".join(
        f"{label}. Published: {in_words(data)}.\n\n"
        f"{score_table(results, SCORES | {'seconds': 'seconds'}, {'accuracy': 4, 'nll': 4, 'seconds': 0}, data=data)}"
        for data, label in DATA.items()
    )
    counts = ", ".join(
        f"{len(results.where(use='test', data='mnist', method=method))} {method}" for method in tested_methods(results)
    )
    return f"""### LeNet-5

LeNet-5 with ReLU and max pooling has 61,706 weights. All networks train on {size["train"]:,} images for \
{size["epochs"]} epochs of Adam, in batches of {size["batch_size"]}, with a rate that falls from {size["rate"]:g} to \
zero along a cosine (`python -m benchmarks.uncertainty.lenet5`). Numbers are means and standard errors over seeds: \
{counts}. The {size["num_members"]} members of an ensemble are the single networks of {size["num_members"]} seeds; \
they share its {size["num_samples"]} draws.

Each method uses the best of {size["num_candidates"]} settings by the NLL of {size["validation"]:,} other images of \
Fashion-MNIST, for networks trained on {size["choice"]:,} images with another seed: {choices(results)}. Seconds are \
the training time on one core, summed over all members of an ensemble.

The published results are those of [uncertainty-baselines](https://github.com/google/uncertainty-baselines). Their \
networks train on 50,000 images for 25 epochs, and variational networks for 153. Their table gives 60 thousand \
weights, like ours, but their code pads all convolutions. With padding there are 545,546 weights, so their network may \
be larger. To fit the budget, we train for {size["epochs"]} epochs and use ensembles of {size["num_members"]} instead \
of ten.

{tables}

{results.plot("NLL and calibration error of each network, and published NLL")}"""


def in_words(data: str) -> str:
    """Describe the published results."""
    return "; ".join(
        f"{name} NLL {nll:.3f}, accuracy {accuracy / 100:.3f}{'' if error is None else f', ECE {error:.3f}'}"
        for name, (nll, accuracy, error) in PUBLISHED[data].items()
    )


def draw(results: Results) -> None:
    """NLL and calibration error by method, a dot for each network or ensemble."""
    figure = Figure(figsize=(10, 5.6), layout="constrained", dpi=110)
    methods = list(reversed(tested_methods(results)))
    for axes, (data, label) in zip(figure.subplots(len(DATA), 2), DATA.items(), strict=True):
        for ax, name in zip(axes, ("nll", "calibration_error"), strict=True):
            for place, method in enumerate(methods):
                values = results.values(name, use="test", data=data, method=method)
                color = "#D55E00" if method in ENSEMBLES else "#0072B2"
                ax.plot(values, [place] * len(values), "o", color=color, alpha=0.6, markersize=4)
            if name == "nll":
                for title, (value, *_) in PUBLISHED[data].items():
                    ax.axvline(value, color="0.6", linewidth=0.8)
                    ax.text(value, len(methods) - 0.4, title, rotation=30, fontsize=6, color="0.4")
            names = methods if name == "nll" else [""] * len(methods)
            ax.set(yticks=range(len(methods)), yticklabels=names, xlabel=f"{label}, test {SCORES[name]}")
            bare(ax)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
