# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a small LeNet on Fashion-MNIST with each method, in the setting of a published comparison.

python -m benchmarks.uncertainty.lenet5
"""

import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import mean

import torch

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, medians, paired, with_error
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
    of_shared_seeds,
    score_table,
)
from benchmarks.uncertainty._lenet import lenet
from benchmarks.uncertainty._methods import (
    ADAMW,
    MEAN_FIELD,
    NATURAL_ENSEMBLE,
    NATURAL_MEAN_FIELD,
    NATURAL_RADIAL,
    NATURAL_ROWS,
    ONE_WIDTH_MEAN_FIELD,
    ONE_WIDTH_RADIAL,
    PREDICTIVE_MEAN_FIELD,
    PREDICTIVE_RADIAL,
    RADIAL,
    SGD,
    SGD_DROPOUT,
    SGD_ENSEMBLE,
    SGD_LAPLACE,
    SGD_TEMPERATURE,
    Task,
    Trained,
    scores,
    train,
)
from pyro_radial.uncertainty import auroc
from tutorials import image_sets

METHODS = (
    PREDICTIVE_RADIAL,
    PREDICTIVE_MEAN_FIELD,
    NATURAL_RADIAL,
    SGD,
    SGD_TEMPERATURE,
    NATURAL_MEAN_FIELD,
    NATURAL_ENSEMBLE,
    SGD_ENSEMBLE,
    SGD_LAPLACE,
    ADAMW,
    NATURAL_ROWS,
    RADIAL,
    MEAN_FIELD,
    SGD_DROPOUT,
    ONE_WIDTH_RADIAL,
    ONE_WIDTH_MEAN_FIELD,
)
#: Some have fewer seeds than are asked for, to save time. Zero stands for a method tried on validation rows alone.
SEEDS = {
    PREDICTIVE_RADIAL: 5,
    PREDICTIVE_MEAN_FIELD: 5,
    ADAMW: 5,
    NATURAL_ROWS: 3,
    ONE_WIDTH_RADIAL: 0,
    ONE_WIDTH_MEAN_FIELD: 0,
}
#: Whose predictions are timed; others take as long as one of these.
TIMED = (SGD, SGD_LAPLACE, SGD_DROPOUT, SGD_ENSEMBLE, MEAN_FIELD, NATURAL_RADIAL, NATURAL_ENSEMBLE)
#: NLL, accuracy in percent and calibration error: AdamW with early stopping, and IVON.
PUBLISHED = {"AdamW": (0.294, 90.0, 0.026), "IVON": (0.258, 91.1, 0.013)}
_LENGTHS = (20, 40, 60, 100)
_BY_ADAM = (
    {"init_stddev": 0.01, "prior_stddev": 0.1, "epochs": 40},
    {"init_stddev": 0.01, "prior_stddev": 0.1, "epochs": 100},
    {"init_stddev": 0.03, "prior_stddev": 0.1, "scale_rate": 0.01, "epochs": 40},
)
_BY_NATURAL_GRADIENT = (
    {"rate": 0.2, "hess_init": 0.5, "prior_stddev": 0.1},
    {"rate": 0.2, "hess_init": 0.2, "prior_stddev": 0.1},
    {"rate": 0.2, "hess_init": 0.1, "prior_stddev": 0.1},
    {"rate": 0.1, "hess_init": 0.1, "prior_stddev": 0.1},
    {"rate": 0.1, "hess_init": 0.2, "prior_stddev": 0.1},
    {"rate": 0.2, "hess_init": 0.2, "prior_stddev": 1.0},
    {"rate": 0.2, "hess_init": 0.5, "prior_stddev": 0.1, "hess_rate": 1e-4},
    {"rate": 0.1, "hess_init": 0.5, "prior_stddev": 0.1},
)
#: The start that validation rows chose, kept.
_ONE_WIDTH = {"rate": 0.2, "hess_init": 0.2, "hess_rate": 1e-9, "prior_stddev": 0.1}
#: As many for the plain network, dropout and mean field as for radial posteriors; by Adam both posteriors have three.
CANDIDATES = {
    # No width or rate is given; as many epochs as the best plain network trains for.
    PREDICTIVE_RADIAL: ({"epochs": 40},),
    PREDICTIVE_MEAN_FIELD: ({"epochs": 40},),
    NATURAL_RADIAL: _BY_NATURAL_GRADIENT,
    NATURAL_MEAN_FIELD: _BY_NATURAL_GRADIENT,
    SGD: (
        *({"rate": 0.2, "prior_stddev": 0.1, "epochs": epochs} for epochs in _LENGTHS),
        {"rate": 0.1, "prior_stddev": 0.1, "epochs": 40},
        {"rate": 0.04, "prior_stddev": 0.1, "epochs": 40},
        {"rate": 0.2, "prior_stddev": 0.05, "epochs": 40},
        {"rate": 0.1, "prior_stddev": 0.1, "epochs": 100},
    ),
    ADAMW: tuple({"rate": 1e-3, "weight_decay": decay, "epochs": 20} for decay in (0.01, 0.1, 1.0)),
    SGD_DROPOUT: (
        *(
            {"rate": 0.1, "prior_stddev": 0.1, "epochs": epochs, "dropout": share}
            for epochs, share in ((40, 0.1), (40, 0.2), (100, 0.1), (100, 0.2), (100, 0.3))
        ),
        {"rate": 0.2, "prior_stddev": 0.1, "epochs": 100, "dropout": 0.2},
        {"rate": 0.04, "prior_stddev": 0.1, "epochs": 100, "dropout": 0.2},
        {"rate": 0.1, "prior_stddev": 0.05, "epochs": 100, "dropout": 0.2},
    ),
    MEAN_FIELD: _BY_ADAM,
    RADIAL: _BY_ADAM,
    ONE_WIDTH_RADIAL: (_ONE_WIDTH,),
    ONE_WIDTH_MEAN_FIELD: (_ONE_WIDTH,),
}
SMALL_CANDIDATES = {name: ({**own[0], "epochs": 8, "prior_stddev": 1.0},) for name, own in CANDIDATES.items()}
#: In so short a run the usual rate diverges with some seeds.
SMALL_CANDIDATES[ONE_WIDTH_MEAN_FIELD][0]["rate"] = 0.02


SIZES = {
    "default": Size(seeds=10),
    "small": Size(400, 60, 40, 1, 2, replace(SMALL, best_epoch=True)),
}


@cache
def others(data_dir: Path | None, count: int | None) -> torch.Tensor:
    """Test images of MNIST in units of Fashion-MNIST."""
    return images_of(data_dir)(image_sets.load("mnist", data_dir).test_images[:count])


def judge(data_dir: Path | None, size: Size, learned: Trained) -> Row:
    x, y = images_of(data_dir).test(size.test)
    inside, outside = learned.predict(x), learned.predict(others(data_dir, size.test))
    detected = auroc(inside.entropy, outside.entropy)
    return scores(inside, y) | {"auroc_mnist": float(detected)}


def prediction_times(data_dir: Path | None, size: Size) -> list[Row]:
    """CPU milliseconds to predict 1,000 images, by method, in turns; a few images suffice to train for that."""
    x, y = images_of(data_dir).train
    few = (x[:256], y[:256])
    setting = replace(size.setting, epochs=1, compile=False, best_epoch=False, warm_up=0.0)
    steps = {}
    for method in TIMED:
        learned = train(method, Task(lenet, few, few, setting, 0))
        steps[method] = partial(learned.predict, x[:1000])
    return [{"milliseconds": value} for value in medians(steps, 5).values()]


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 10,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """Train each network on 54,000 images; those of each five seeds also form an ensemble.

    The setting of each method is the best of its candidates at full length by the NLL of 6,000 other images, with seed
    0. All methods keep the epoch with the lowest NLL of these images. The seeds in the table start at 10.
    """
    size = SIZES[form]
    study = Study(
        lenet,
        partial(load, data_dir, size),
        partial(judge, data_dir, size),
        size.setting,
        METHODS,
        CANDIDATES if form == "default" else SMALL_CANDIDATES,
        size.num_candidates,
        seeds_of=SEEDS,
    )
    results = Results(output, {"torch": torch.__version__, "threads": threads, **described(size)})
    study.compute(results, seeds if form == "default" else size.seeds, workers, threads)
    torch.set_num_threads(threads)
    results.add_all([{"use": "time", "method": method} for method in TIMED], partial(prediction_times, data_dir, size))


#: A score of one method lower than that of another.
PAIRS = (
    ("nll", NATURAL_RADIAL, SGD),
    ("nll", NATURAL_RADIAL, SGD_DROPOUT),
    ("nll", RADIAL, MEAN_FIELD),
    ("nll", PREDICTIVE_RADIAL, SGD),
    ("nll", PREDICTIVE_RADIAL, NATURAL_RADIAL),
)
#: The most that the mean NLL of radial posteriors is to be.
TARGET = 0.245


def claims(results: Results) -> list[Claim]:
    """Compare with a target, the published results, and plain networks trained as well."""
    values = results.values("nll", use="test", method=NATURAL_RADIAL)
    text = f"LeNet, Fashion-MNIST: the NLL of {NATURAL_RADIAL} is at most {TARGET}"
    published = f"{PUBLISHED['IVON'][0]:.3f}"
    reached = Claim(text, published, with_error(values, 4), str(len(values)), mean(values) <= TARGET)
    return [reached, *compared_pairs(results, "LeNet, Fashion-MNIST", PAIRS)]


def described_widths(results: Results) -> str:
    """How far widths moved, and the loss that they led to."""
    rows = [row for row in results.where(use="test", method=NATURAL_RADIAL) if "loss" in row]
    factor = math.exp(mean(row["width_change"] for row in rows))
    loss = with_error([row["loss"] for row in rows], 2)
    return (
        f"For {NATURAL_RADIAL}, widths end {factor:.2f} times away from their start, and the loss of the last epoch "
        f"is {loss} nats for each image ({len(rows)} seeds)."
    )


def described_spread(results: Results) -> str:
    """Say how much widths differ within a tensor."""
    rows = results.where(use="test", method=NATURAL_MEAN_FIELD)
    found = [row["width_spread"] for row in rows if "width_spread" in row]
    if not found:
        return ""
    return (
        "Widths that stay near a chosen start differ little: the standard deviation of their logarithms within a "
        f"tensor is {mean(found):.3f} (mean field, {len(found)} seeds)."
    )


#: The optimizer and what it was asked for, the kind of rows, and the two methods.
RADIAL_AND_MEAN_FIELD = (
    ("natural gradient", "test", NATURAL_RADIAL, NATURAL_MEAN_FIELD),
    ("Adam", "test", RADIAL, MEAN_FIELD),
    ("predictive widths", "test", PREDICTIVE_RADIAL, PREDICTIVE_MEAN_FIELD),
    ("natural gradient", "choice", NATURAL_RADIAL, NATURAL_MEAN_FIELD),
    ("natural gradient, one width for all weights", "choice", ONE_WIDTH_RADIAL, ONE_WIDTH_MEAN_FIELD),
)


def radial_and_mean_field(results: Results) -> str:
    """Make a table of the NLL of both with the same seeds; of the rows of a choice, the lowest counts."""
    lines = []
    for optimizer, use, *methods in RADIAL_AND_MEAN_FIELD:
        values = of_shared_seeds(results, use, "nll", methods)
        rows = "test" if use == "test" else "validation"
        numbers = [with_error(own, 4) for own in (*values, paired(*values))]
        lines.append([optimizer, rows, str(len(values[0])), *numbers])
    return markdown_table(["", "rows", "seeds", "radial", "mean field", "difference"], lines)


def report(results: Results) -> str:
    """Report scores by method, with the published ones."""
    size = results.setting
    columns = SCORES | {"auroc_mnist": "AUROC, MNIST", "seconds": "seconds"}
    table = score_table(results, columns)
    counts = counted(results)
    milliseconds = {row["method"]: row["milliseconds"] for row in results.where(use="time")}
    plain_time = milliseconds[SGD]
    times = ", ".join(f"{name} {value / plain_time:.1f}" for name, value in milliseconds.items() if name != SGD)
    published = "; ".join(
        f"{name} NLL {nll:.3f}, accuracy {accuracy / 100:.3f}, ECE {error:.3f}"
        for name, (nll, accuracy, error) in PUBLISHED.items()
    )
    return f"""### LeNet on Fashion-MNIST

The network has 44,426 weights. All networks train on {size["train"]:,} images in batches of {size["batch_size"]}, \
for {size["epochs"]} epochs or the number of epochs that was chosen. Rates rise in the first 5 % of the steps and then \
fall to zero along a cosine (`python -m benchmarks.uncertainty.lenet5`). Every method keeps the epoch with the lowest \
NLL of {size["validation"]:,} other images. Numbers are means and standard errors over seeds: {counts}. The \
{size["num_members"]} members of an ensemble are the single networks of {size["num_members"]} seeds; they share its \
{size["num_samples"]} draws. Seconds are the training time on one core, summed over all members of an ensemble.

Natural gradients are those of Shen et al. (2024), as `benchmarks/_published_rule.py` has them. They keep widths near \
a start that is chosen. {described_widths(results)} "Predictive widths" are found by `fit` with these other images, \
under the prior `FanIn(2**0.5)`.

Each method uses the best of up to {size["num_candidates"]} settings by the NLL of these other images, at full length \
with another seed: {choices(results)}. The validation NLL of all candidates:

{candidates_table(results)}

Published for this network and these sizes, with 100 epochs: {published}. The networks of
[uncertainty-baselines](https://github.com/google/uncertainty-baselines) have nine times as many weights as its page \
says, because all convolutions pad; so we do not compare with its table.

{table}

The NLL of radial and of mean field, with the same seeds; the settings were chosen on the validation rows. \
{described_spread(results)}

{radial_and_mean_field(results)}

A prediction of 1,000 images, in times that of the plain network, which takes {plain_time:.0f} ms: {times}.

{results.plot("NLL and calibration error of each network, and published NLL")}"""


def draw(results: Results) -> None:
    """NLL and calibration error by method."""
    published = {title: value for title, (value, *_) in PUBLISHED.items()}
    results.save_plot(draw_by_method(results, published))


if __name__ == "__main__":
    main(run, report, draw)
