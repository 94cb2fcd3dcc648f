# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a residual network with batch norm on Fashion-MNIST, by natural gradients and as a plain network.

python -m benchmarks.uncertainty.residual_net
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import Form, Results, Row, main
from benchmarks.uncertainty._augmentation import shifted_and_mirrored
from benchmarks.uncertainty._comparison import (
    SCORES,
    SMALL,
    Study,
    candidates_table,
    choices,
    counted,
    described,
    images_of,
    load,
    score_table,
)
from benchmarks.uncertainty._methods import (
    NATURAL_MEAN_FIELD,
    NATURAL_RADIAL,
    PREDICTIVE_RADIAL,
    SGD,
    SGD_ENSEMBLE,
    SGD_TEMPERATURE,
    Setting,
    Trained,
    scores,
)
from benchmarks.uncertainty._residual_net import residual_net

METHODS = (PREDICTIVE_RADIAL, NATURAL_RADIAL, SGD, SGD_TEMPERATURE, SGD_ENSEMBLE, NATURAL_MEAN_FIELD)
#: Widths that start narrower than in the first line take the same steps of means: the rate is twice the curvature.
_BY_NATURAL_GRADIENT = (
    {"rate": 0.4, "hess_init": 0.2, "prior_stddev": 0.1},
    {"rate": 1.0, "hess_init": 0.5, "prior_stddev": 0.3},
    {"rate": 1.0, "hess_init": 0.5, "prior_stddev": 0.3, "others_rate": 0.2},
    {"rate": 1.0, "hess_init": 0.5, "prior_stddev": 0.3, "others_rate": 0.2, "draws": 2},
    {"rate": 1.0, "hess_init": 0.5, "prior_stddev": 1.0, "others_rate": 0.2, "prior_by_layer": True},
    {"rate": 2.0, "hess_init": 1.0, "prior_stddev": 0.3, "others_rate": 0.2},
    {"rate": 0.18, "hess_init": 0.9, "prior_stddev": 0.3, "others_rate": 0.2},
    {"rate": 4.0, "hess_init": 2.0, "prior_stddev": 0.3, "others_rate": 0.2},
    {"rate": 4.0, "hess_init": 2.0, "prior_stddev": 0.3, "others_rate": 0.2, "epochs": 60},
    {"rate": 16.0, "hess_init": 8.0, "prior_stddev": 0.3, "others_rate": 0.2, "epochs": 60},
)
CANDIDATES = {
    # No width or rate is given; as many epochs as the best plain network trains for.
    PREDICTIVE_RADIAL: ({"epochs": 60},),
    NATURAL_RADIAL: _BY_NATURAL_GRADIENT,
    NATURAL_MEAN_FIELD: (*_BY_NATURAL_GRADIENT[:2], _BY_NATURAL_GRADIENT[-3]),
    SGD: (
        {"rate": 0.2, "prior_stddev": 0.1},
        {"rate": 0.2, "prior_stddev": 0.3},
        {"rate": 0.4, "prior_stddev": 0.3},
        {"rate": 0.1, "prior_stddev": 0.3},
        {"rate": 0.2, "prior_stddev": 1.0},
        {"rate": 0.2, "prior_stddev": 0.3, "epochs": 60},
    ),
}
#: To save time, and mean field is tried on validation rows alone.
SEEDS = {PREDICTIVE_RADIAL: 2, NATURAL_MEAN_FIELD: 0}
#: A wide prior, since few images say little against it.
SMALL_CANDIDATES = {name: ({**own[0], "prior_stddev": 1.0},) for name, own in CANDIDATES.items()}


class Size(NamedTuple):
    """The network, and how much is trained and tested."""

    #: Channels of the first stage, and blocks of each; the next stage has twice the channels and half the pixels.
    width: int = 8
    blocks: tuple[int, ...] = (1, 1, 1)
    train: int = 58_000
    validation: int = 2_000
    test: int | None = None
    num_candidates: int = 10
    seeds: int = 3
    setting: Setting = Setting(epochs=30, warm_up=0.05, best_epoch=True, num_samples=64, num_members=3)


SIZES = {
    "default": Size(),
    "small": Size(8, (1, 1), 240, 60, 40, 1, 2, replace(SMALL, epochs=8)),
}


def judge(data_dir: Path | None, size: Size, learned: Trained) -> Row:
    x, y = images_of(data_dir).test(size.test)
    return scores(learned.predict(x), y)


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 3,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """Train each network once on 58,000 images that are shifted and mirrored at random.

    The setting of each method is the best of its candidates at full length by the NLL of 2,000 other images, with seed
    0. All methods keep the epoch with the lowest NLL of these images. The seeds in the table start at 10.
    """
    size = SIZES[form]
    study = Study(
        partial(residual_net, size.width, size.blocks),
        partial(load, data_dir, size),
        partial(judge, data_dir, size),
        size.setting,
        METHODS,
        CANDIDATES if form == "default" else SMALL_CANDIDATES,
        size.num_candidates,
        seeds_of=SEEDS,
        augment=shifted_and_mirrored,
    )
    weights = sum(parameter.numel() for parameter in residual_net(size.width, size.blocks, 0.0).parameters())
    setting = {"torch": torch.__version__, "threads": threads, "device": "cpu", "weights": weights}
    results = Results(output, setting | described(size))
    study.compute(results, seeds if form == "default" else size.seeds, workers, threads)


#: A score of one method lower than that of another.
def report(results: Results) -> str:
    """Report scores by method."""
    size = results.setting
    counts = counted(results)
    return f"""### A residual network

The network has a convolution that halves the image, followed by {sum(size["blocks"])} residual blocks. Each block has \
two convolutions with batch norm; the stages have \
{", ".join(str(size["width"] * 2**i) for i in range(len(size["blocks"])))} channels, with {size["weights"]:,} weights \
in all. Networks train on {size["train"]:,} images in batches of {size["batch_size"]}, for {size["epochs"]} epochs \
unless the setting says otherwise (`python -m benchmarks.uncertainty.residual_net`). Each image is shifted by up to \
two pixels and mirrored at random. Rates rise in the first 5 % of the steps and then fall to zero along a cosine. \
Every method keeps the epoch with the lowest NLL of {size["validation"]:,} other images. Normalization layers have no \
posterior. They train by Adam at 0.001, or by SGD if a setting names its rate, `others_rate`. "Predictive widths" are \
found by `fit` with the other images, under the prior `FanIn(2**0.5)`. Numbers are means and \
standard errors over seeds: {counts}. The {size["num_members"]} members of an ensemble are the single networks of \
{size["num_members"]} seeds. Seconds are the training time on one core, summed over all members of an ensemble.

Each method uses the best of up to {size["num_candidates"]} settings by the NLL of these other images, at full length \
and with another seed: {choices(results)}. `prior_by_layer` is a prior with the width of He's start in each layer; \
`draws` are those of a step; a rate of 0.2 times `hess_init` is IVON's published one, two times is that of SGD with \
momentum. The validation NLL of all candidates:

{candidates_table(results)}

The scores on the test images:

{score_table(results, SCORES | {"width_change": "mean change of log widths", "seconds": "seconds"})}"""


if __name__ == "__main__":
    main(run, report)
