# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a residual network on 5,000 images of Fashion-MNIST, of all its classes and of eight.

python -m benchmarks.uncertainty.few_images
"""

from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import Claim, Form, Pair, Results, Row, main
from benchmarks.data.augmentation import shifted_and_mirrored
from benchmarks.uncertainty._comparison import (
    SCORES,
    SMALL,
    Study,
    candidates_table,
    choices,
    compared_methods,
    counted,
    described,
    draw_by_method,
    images_of,
    score_table,
    scores,
    split,
)
from benchmarks.uncertainty._methods import (
    NATURAL_MEAN_FIELD,
    NATURAL_RADIAL,
    SGD,
    SGD_ENSEMBLE,
    SGD_TEMPERATURE,
    Setting,
    Trained,
)
from benchmarks.uncertainty._networks import residual_net
from pyro_radial.uncertainty import auroc

__all__ = ["claims", "draw", "report", "run"]

ALL, EIGHT = "ten classes", "eight classes"
#: Classes of which no image is seen in training: bags and ankle boots.
FIRST_UNSEEN = 8
METHODS = (NATURAL_RADIAL, NATURAL_MEAN_FIELD, SGD, SGD_TEMPERATURE, SGD_ENSEMBLE)
_BY_NATURAL_GRADIENT = (
    {"rate": 2.0, "hess_init": 2.0, "prior_stddev": 0.3},
    {"rate": 5.0, "hess_init": 5.0, "prior_stddev": 0.3},
    {"rate": 2.0, "hess_init": 2.0, "prior_stddev": 1.0},
    {"rate": 1.0, "hess_init": 0.5, "prior_stddev": 0.1},
    {"rate": 2.0, "hess_init": 1.0, "prior_stddev": 0.1},
    {"rate": 2.0, "hess_init": 2.0, "prior_stddev": 0.1},
    {"rate": 5.0, "hess_init": 5.0, "prior_stddev": 0.1},
    {"rate": 10.0, "hess_init": 10.0, "prior_stddev": 0.1},
)
#: As many for the plain network as for radial posteriors.
CANDIDATES = {
    NATURAL_RADIAL: _BY_NATURAL_GRADIENT,
    NATURAL_MEAN_FIELD: _BY_NATURAL_GRADIENT[:3],
    SGD: (
        {"rate": 0.2, "prior_stddev": 0.1},
        {"rate": 0.1, "prior_stddev": 0.1},
        {"rate": 0.2, "prior_stddev": 0.3},
        {"rate": 0.1, "prior_stddev": 0.3},
        {"rate": 0.05, "prior_stddev": 0.3},
        {"rate": 0.1, "prior_stddev": 0.3, "epochs": 50},
        {"rate": 0.2, "prior_stddev": 1.0},
        {"rate": 0.1, "prior_stddev": 1.0},
    ),
}


class Size(NamedTuple):
    """How much is trained and tested."""

    width: int = 8
    blocks: tuple[int, ...] = (1, 1, 1)
    train: int = 5_000
    validation: int = 2_000
    test: int | None = None
    num_candidates: int = 8
    seeds: int = 5
    setting: Setting = Setting(epochs=100, warm_up=0.05, best_epoch=True, num_samples=64, num_members=3)


SIZES = {"default": Size(), "small": Size(8, (1, 1), 64, 60, 40, 1, 2, SMALL)}


def kept(data: Pair, name: str) -> Pair:
    """The rows of the classes that are trained."""
    known = data[1] < FIRST_UNSEEN if name == EIGHT else torch.ones_like(data[1], dtype=torch.bool)
    return data[0][known], data[1][known]


@cache
def load(data_dir: Path | None, size: Size, name: str) -> tuple[Pair, Pair]:
    train, validation = split(images_of("fashion_mnist", data_dir).train, size.validation)
    x, y = kept(train, name)
    return (x[: size.train], y[: size.train]), kept(validation, name)


def judge(data_dir: Path | None, size: Size, learned: Trained, name: str) -> Row:
    images, labels = images_of("fashion_mnist", data_dir).test(size.test)
    x, y = kept((images, labels), name)
    inside = learned.predict(x)
    if name == ALL:
        return scores(inside, y)
    outside = learned.predict(images[labels >= FIRST_UNSEEN])
    return scores(inside, y) | {"auroc_unseen": float(auroc(inside.entropy, outside.entropy))}


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 5,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """Train each network once on 5,000 images that are shifted and mirrored at random.

    The setting of each method is the best of its candidates on all classes, at full length, by the NLL of 2,000 other
    images, with seed 0. All methods keep the epoch with the lowest NLL of these images. The seeds in the table start at
    10.
    """
    size = SIZES[form]
    study = Study(
        partial(residual_net, size.width, size.blocks, "cpu"),
        partial(load, data_dir, size),
        partial(judge, data_dir, size),
        (ALL, EIGHT),
        size.setting,
        METHODS,
        size.num_candidates,
        shares=True,
        settings_of=CANDIDATES,
        augment=shifted_and_mirrored,
    )
    results = Results(output, {"torch": torch.__version__, "threads": threads, **described(size)})
    study.compute(results, seeds if form == "default" else size.seeds, workers, threads)


#: A score of one method better than that of another, and whether higher is better.
PAIRS = (
    (ALL, "nll", NATURAL_RADIAL, SGD),
    (ALL, "nll", NATURAL_RADIAL, SGD_TEMPERATURE),
    (ALL, "nll", NATURAL_RADIAL, NATURAL_MEAN_FIELD),
    (ALL, "calibration_error", NATURAL_RADIAL, SGD),
    (EIGHT, "auroc_unseen", NATURAL_RADIAL, SGD),
)


def claims(results: Results) -> list[Claim]:
    """Compare radial posteriors with the plain network, seed by seed."""
    found: list[Claim] = []
    for data, name, ours, theirs in PAIRS:
        higher = name == "auroc_unseen"
        label = "AUROC of unseen classes" if higher else SCORES[name]
        of = f"A residual network on 5,000 images of {data}"
        found += compared_methods(results, of, label, name, ours, theirs, higher_is_better=higher, data=data)
    return found


def report(results: Results) -> str:
    """Report scores by method, on all classes and on eight."""
    size = results.setting
    counts = counted(results, data=ALL)
    there = {row["data"] for row in results.where(use="test")}
    eight = (
        f"""

The same settings with {size["train"]:,} images of eight classes. The AUROC tells apart test images of these classes \
and of the other two, bags and ankle boots, by the entropy of the prediction:

{score_table(results, SCORES | {"auroc_unseen": "AUROC, unseen classes"}, data=EIGHT)}"""
        if EIGHT in there
        else ""
    )
    return f"""### A residual network on 5,000 images

The [residual network](#a-residual-network) trains on {size["train"]:,} images of Fashion-MNIST in batches of \
{size["batch_size"]}, for {size["epochs"]} epochs or the number of epochs that was chosen \
(`python -m benchmarks.uncertainty.few_images`). Each image is shifted by up to two pixels and mirrored at random. \
Rates rise in the first 5 % of the steps and then fall to zero along a cosine. Every method keeps the epoch with the \
lowest NLL of {size["validation"]:,} other images. Numbers are means and standard errors over seeds: {counts}. The \
members of an ensemble are the single networks of {size["num_members"]} seeds. Seconds are the training time on one \
core.

Each method uses the best of up to {size["num_candidates"]} settings by the NLL of these other images, at full length \
and with another seed: {choices(results)}. The validation NLL of all candidates:

{candidates_table(results)}

The scores on the test images:

{score_table(results, SCORES | {"seconds": "seconds"}, data=ALL)}{eight}

{results.plot("NLL and calibration error of each network on all classes and on eight")}"""


def draw(results: Results) -> None:
    """NLL and calibration error by method."""
    results.save_plot(draw_by_method(results))


if __name__ == "__main__":
    main(run, report, draw)
