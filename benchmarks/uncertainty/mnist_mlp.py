# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a 784-200-200-10 network on MNIST with each method, by the protocol of the small LeNet.

python -m benchmarks.uncertainty.mnist_mlp
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.common import Claim, Form, Results, Row, main
from benchmarks.uncertainty._comparison import (
    SCORES,
    SMALL,
    Size,
    Study,
    candidates_table,
    choices,
    compared_pairs,
    counted,
    described,
    draw_by_method,
    images_of,
    load,
    score_table,
    scores,
)
from benchmarks.uncertainty._methods import (
    ADAMW,
    MEAN_FIELD,
    NATURAL_MEAN_FIELD,
    NATURAL_RADIAL,
    RADIAL,
    SGD,
    SGD_TEMPERATURE,
    Setting,
    Trained,
)
from benchmarks.uncertainty._overfitted import dense

__all__ = ["claims", "draw", "report", "run"]

METHODS = (NATURAL_RADIAL, NATURAL_MEAN_FIELD, RADIAL, MEAN_FIELD, SGD, SGD_TEMPERATURE, ADAMW)
_BY_NATURAL_GRADIENT = (
    {"rate": 0.2, "hess_init": 0.5, "prior_stddev": 0.1},
    {"rate": 0.1, "hess_init": 0.5, "prior_stddev": 0.1},
    {"rate": 0.2, "hess_init": 0.1, "prior_stddev": 0.1},
)
_BY_ADAM = (
    {"init_stddev": 0.01, "prior_stddev": 0.1},
    {"init_stddev": 0.03, "prior_stddev": 0.1, "scale_rate": 0.01},
    {"init_stddev": 0.01, "prior_stddev": 1.0},
)
CANDIDATES = {
    NATURAL_RADIAL: _BY_NATURAL_GRADIENT,
    NATURAL_MEAN_FIELD: _BY_NATURAL_GRADIENT,
    RADIAL: _BY_ADAM,
    MEAN_FIELD: _BY_ADAM,
    SGD: (
        {"rate": 0.2, "prior_stddev": 0.1},
        {"rate": 0.1, "prior_stddev": 0.1},
        {"rate": 0.2, "prior_stddev": 0.1, "epochs": 10},
    ),
    ADAMW: tuple({"rate": 1e-3, "weight_decay": decay} for decay in (0.01, 0.1, 1.0)),
}
SMALL_CANDIDATES = {name: ({**own[0], "epochs": 8, "prior_stddev": 1.0},) for name, own in CANDIDATES.items()}
SIZES = {
    "default": Size(num_candidates=3, setting=Setting(epochs=20, warm_up=0.05, best_epoch=True, num_samples=64)),
    "small": Size(400, 60, 40, 1, 2, replace(SMALL, best_epoch=True)),
}


def judge(data_dir: Path | None, size: Size, learned: Trained, name: str) -> Row:
    x, y = images_of("mnist", data_dir).test(size.test)
    return scores(learned.predict(x), y)


def network(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Flatten(), dense(200))


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 5,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """Choose each method's setting by the NLL of 6,000 images with seed 0; the seeds in the table start at 10."""
    size = SIZES[form]
    study = Study(
        network,
        partial(load, data_dir, size),
        partial(judge, data_dir, size),
        ("mnist",),
        size.setting,
        METHODS,
        size.num_candidates,
        seeds_of=dict.fromkeys((NATURAL_MEAN_FIELD, RADIAL, MEAN_FIELD, ADAMW), 3),
        settings_of=CANDIDATES if form == "default" else SMALL_CANDIDATES,
    )
    results = Results(output, {"torch": torch.__version__, "threads": threads, **described(size)})
    study.compute(results, seeds if form == "default" else size.seeds, workers, threads)


#: A score of one method lower than that of another.
PAIRS = (
    ("nll", NATURAL_RADIAL, SGD),
    ("nll", NATURAL_RADIAL, SGD_TEMPERATURE),
    ("nll", NATURAL_RADIAL, NATURAL_MEAN_FIELD),
    ("nll", NATURAL_RADIAL, RADIAL),
    ("nll", RADIAL, SGD),
    ("calibration_error", NATURAL_RADIAL, SGD),
)


def claims(results: Results) -> list[Claim]:
    """Compare with plain networks trained as well."""
    return compared_pairs(results, "MNIST", PAIRS)


def report(results: Results) -> str:
    """Report scores by method."""
    size = results.setting
    return f"""### A dense network on MNIST

784-200-200-10 on {size["train"]:,} images of MNIST, by the protocol of [LeNet](#uncertainty.lenet5): at most \
{size["epochs"]} epochs, with the epoch of the lowest NLL of {size["validation"]:,} other images \
(`python -m benchmarks.uncertainty.mnist_mlp`). Numbers are means and standard errors over seeds: {counted(results)}. \
Seconds are the training time on one core.

Each method uses the best of its settings by the NLL of these other images, with another seed: {choices(results)}. The \
validation NLL of all candidates:

{candidates_table(results)}

{score_table(results, SCORES | {"seconds": "seconds"})}

A plain network, trained as long and at its best epoch, is ahead of every posterior here.

{results.plot("NLL and calibration error of each network")}"""


def draw(results: Results) -> None:
    """NLL and calibration error by method."""
    results.save_plot(draw_by_method(results))


if __name__ == "__main__":
    main(run, report, draw)
