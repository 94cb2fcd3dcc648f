# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Test networks on unseen data: another kind of image, and rotated, blurred, noisy and low-contrast images.

python -m benchmarks.uncertainty.shift
"""

from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, with_error
from benchmarks.uncertainty._comparison import (
    CANDIDATES,
    SCORES,
    SMALL,
    Study,
    bare,
    choices,
    compared,
    described,
    images_of,
    load,
    score_table,
    scores,
    style_of,
    tested_methods,
)
from benchmarks.uncertainty._corruptions import ANGLES, CORRUPTIONS, NUM_STRENGTHS, corrupted, turned
from benchmarks.uncertainty._methods import (
    DEEP_ENSEMBLE,
    MEAN_FIELD,
    METHODS,
    NATURAL_MEAN_FIELD,
    NATURAL_RADIAL,
    PLAIN,
    POSTHOC,
    RADIAL,
    RADIAL_ENSEMBLE,
    SGD,
    TEMPERATURE,
    TRUNCATED,
    TWEAKS,
    Setting,
    Trained,
)
from pyro_radial.uncertainty import auroc
from pyro_radial.uncertainty.metrics import fpr_at_tpr

__all__ = ["claims", "draw", "report", "run"]

FASHION, DIGITS = "fashion_mnist", "mnist"
TURNED = "turned"
UNCERTAINTIES = {"entropy": "entropy", "mutual_information": "mutual information"}
UNSEEN = {
    f"{score}_{name}": f"{label}, {word}"
    for score, label in (("auroc", "AUROC"), ("fpr", "FPR at 95 % TPR"))
    for name, word in UNCERTAINTIES.items()
}


class Size(NamedTuple):
    """How much is trained and tested."""

    train: int = 10_000
    validation: int = 2_000
    #: Familiar test images, and as many unseen ones.
    test: int = 5_000
    #: Test images that are changed.
    changed: int = 1_000
    hidden: int = 200
    num_candidates: int = 4
    setting: Setting = Setting(epochs=20, num_samples=32)


SIZES = {
    "default": Size(),
    "small": Size(120, 60, 40, 20, 10, 1, SMALL),
}


_BY_NATURAL_GRADIENT = tuple(
    {"lr": lr, "hess_init": curvature, "prior_stddev": stddev}
    for lr, curvature, stddev in ((0.2, 1.0, 0.1), (0.2, 5.0, 0.1), (0.2, 1.0, 0.3), (0.1, 1.0, 0.1))
)
#: Four settings of each method by SGD or natural gradients too.
WITH_OTHERS = CANDIDATES | {
    SGD: tuple({"rate": rate, "prior_stddev": stddev} for rate in (0.2, 0.1) for stddev in (0.1, 0.05)),
    NATURAL_MEAN_FIELD: _BY_NATURAL_GRADIENT,
    NATURAL_RADIAL: _BY_NATURAL_GRADIENT,
}
#: Where two seeds must do.
FEW = {TWEAKS: 2, TRUNCATED: 2}


def make_net(hidden: int, dropout: float) -> nn.Module:
    """A perceptron with two hidden layers, with dropout after each."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (784, hidden):
        layers += [nn.Linear(inputs, hidden), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(hidden, 10))


def judge(data_dir: Path | None, size: Size, learned: Trained, name: str) -> Row:
    """On test images as they are, on those of another kind, and on changed ones by strength or angle."""
    images = images_of(name, data_dir)
    x, y = images.test(size.test)
    familiar = learned.predict(x)
    row = scores(familiar, y)
    if name == DIGITS:
        changed = {TURNED: [partial(turned, degrees=angle) for angle in ANGLES[1:]]}
    else:
        # Units are those of the data trained on.
        unseen = learned.predict(images(images_of(DIGITS, data_dir).data.test_images[: size.test]))
        row |= detection(familiar, unseen)
        changed = {
            kind: [partial(corrupted, kind=kind, strength=1 + number) for number in range(NUM_STRENGTHS)]
            for kind in CORRUPTIONS
        }
    pixels, labels = images.data.test_images[: size.changed], y[: size.changed]
    as_they_are = scores(learned.predict(images(pixels)), labels)
    for kind, changes in changed.items():
        found = [as_they_are, *(scores(learned.predict(images(change(pixels))), labels) for change in changes)]
        row[kind] = {name: [round(one[name], 5) for one in found] for name in SCORES}
    return row


def detection(familiar: Any, unseen: Any) -> Row:
    """How well unseen images are told apart; a single draw has no mutual information."""
    row = {}
    for name in UNCERTAINTIES if len(familiar.samples) > 1 else ["entropy"]:
        pair: list[Tensor] = [getattr(prediction, name) for prediction in (familiar, unseen)]
        row[f"auroc_{name}"], row[f"fpr_{name}"] = auroc(*pair), fpr_at_tpr(*pair)
    return row


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 3,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """Train 784-200-200-10 on 10,000 images of Fashion-MNIST and of MNIST, for 20 epochs, by Adam if not said.

    The setting of each method is the best of four by the NLL of 2,000 other images of Fashion-MNIST, with seed 0. The
    seeds in the table start at 10.
    """
    size = SIZES[form]
    study = Study(
        partial(make_net, size.hidden),
        partial(load, data_dir, size),
        partial(judge, data_dir, size),
        (FASHION, DIGITS),
        size.setting,
        (*METHODS, SGD, NATURAL_MEAN_FIELD, NATURAL_RADIAL),
        size.num_candidates,
        seeds_of=FEW,
        settings_of=WITH_OTHERS,
    )
    results = Results(output, {"torch": torch.__version__, "threads": threads, **described(size)})
    study.compute(results, seeds if form == "default" else 1, workers, threads)


def over(row: Row, kind: str, name: str) -> float:
    """A score's mean over the strengths of a corruption, or the angles from 15 to 180 degrees."""
    return mean(row[kind][name][1:])


def values(results: Results, data: str, method: str, kinds: tuple[str, ...], name: str) -> list[float]:
    """By seed, the mean over these kinds of change."""
    rows = results.where(use="test", data=data, method=method)
    return [mean(over(row, kind, name) for kind in kinds) for row in rows]


#: What is claimed of unseen images: a score of one method higher (a rate lower) than that of another.
UNSEEN_CLAIMS = (
    ("auroc_entropy", RADIAL, PLAIN),
    ("auroc_entropy", RADIAL, MEAN_FIELD),
    ("auroc_mutual_information", RADIAL, MEAN_FIELD),
    ("auroc_mutual_information", RADIAL_ENSEMBLE, DEEP_ENSEMBLE),
    ("fpr_mutual_information", RADIAL_ENSEMBLE, DEEP_ENSEMBLE),
    ("auroc_entropy", POSTHOC, TEMPERATURE),
    ("auroc_entropy", NATURAL_RADIAL, SGD),
    ("auroc_entropy", NATURAL_RADIAL, RADIAL),
)
#: And of changed ones: a score lower.
CHANGED_CLAIMS = (
    ("nll", RADIAL, PLAIN),
    ("nll", RADIAL, MEAN_FIELD),
    ("calibration_error", RADIAL, MEAN_FIELD),
    ("nll", RADIAL_ENSEMBLE, DEEP_ENSEMBLE),
    ("nll", POSTHOC, TEMPERATURE),
    ("nll", NATURAL_RADIAL, SGD),
    ("nll", NATURAL_RADIAL, RADIAL),
)
CHANGED = {
    "Fashion-MNIST with blur, noise and low contrast": (FASHION, tuple(CORRUPTIONS)),
    "Rotated MNIST": (DIGITS, (TURNED,)),
}


def claims(results: Results) -> list[Claim]:
    """Compare radial posteriors with what they would replace, seed by seed."""
    found = []
    for name, ours, theirs in UNSEEN_CLAIMS:
        pair = [results.values(name, use="test", data=FASHION, method=method) for method in (ours, theirs)]
        is_area = name.startswith("auroc")
        above = "above" if is_area else "below"
        text = f"MNIST unseen by Fashion-MNIST networks ({UNSEEN[name]}): {ours} is {above} {theirs}"
        found.append(compared(text, *pair, higher_is_better=is_area))
    for what, (data, kinds) in CHANGED.items():
        for name, ours, theirs in CHANGED_CLAIMS:
            pair = [values(results, data, method, kinds, name) for method in (ours, theirs)]
            found.append(compared(f"{what}: the {SCORES[name]} of {ours} is below that of {theirs}", *pair))
    return found


def report(results: Results) -> str:
    """Report scores by method on familiar, unseen and changed images."""
    size = results.setting
    strengths = "; ".join(
        f"{kind} {', '.join(f'{strength:g}' for strength in corruption.strengths)} ({corruption.unit})"
        for kind, corruption in CORRUPTIONS.items()
    )
    changed = {}
    for kind, data in [*((kind, FASHION) for kind in CORRUPTIONS), (TURNED, DIGITS)]:
        changed |= {f"{kind}, {SCORES[name]}": (data, kind, name) for name in ("accuracy", "nll", "calibration_error")}
    lines = [
        [
            method,
            *(
                with_error(values(results, data, method, (kind,), name), 2 if name == "nll" else 3)
                for data, kind, name in changed.values()
            ),
        ]
        for method in tested_methods(results)
    ]
    seeds = len(set(results.values("seed", use="test")))
    return f"""### Shifted data

A perceptron 784-{size["hidden"]}-{size["hidden"]}-10 trains on {size["train"]:,} images for {size["epochs"]} epochs \
with a rate that falls to zero along a cosine (`python -m benchmarks.uncertainty.shift`). This is the same for all \
methods and for each of {size["num_members"]} members of an ensemble. Where the name of a method says nothing else, \
the optimizer is Adam. Numbers are means and standard errors over {seeds} seeds. Each method uses the best of \
{size["num_candidates"]} settings by the NLL of \
{size["validation"]:,} other images of Fashion-MNIST, with another seed: {choices(results)}. Truncated mean field uses \
the setting of mean field. Posteriors have {size["num_samples"]} draws, which the members of an ensemble share.

To fit the budget, we use {size["train"]:,} of 60,000 training images, {size["num_members"]} members instead of ten, \
{seeds} seeds (two for mean field with tweaks or truncated), and {size["changed"]:,} of 10,000 test images for each \
change. Seconds are the training time on one core.

Networks of Fashion-MNIST, tested on MNIST as unseen data, with {size["test"]:,} test images of each. A single draw \
has no mutual information:

{score_table(results, SCORES | UNSEEN | {"seconds": "seconds"}, {"seconds": 0}, data=FASHION)}

Changed images of Fashion-MNIST, mean over five strengths: {strengths}. Rotated MNIST ("{TURNED}"), mean over 15, 30, \
..., 180 degrees.

{markdown_table(["", *changed], lines)}

{results.plot("Accuracy, NLL and calibration error by strength and by angle, a line for each method")}"""


def draw(results: Results) -> None:
    """A row for each score, a column for each change, a line for each method."""
    figure = Figure(figsize=(12, 8), layout="constrained", dpi=110)
    kinds = {kind: (FASHION, range(NUM_STRENGTHS + 1), "strength") for kind in CORRUPTIONS}
    kinds[TURNED] = (DIGITS, ANGLES, "degrees")
    grid = figure.subplots(len(SCORES), len(kinds), sharex="col")
    for axes, (name, label) in zip(grid, SCORES.items(), strict=True):
        for ax, (kind, (data, places, unit)) in zip(axes, kinds.items(), strict=True):
            ax.set_xlabel(unit if name == "calibration_error" else "")
            for method in tested_methods(results):
                rows = results.where(use="test", data=data, method=method)
                line = [mean(at) for at in zip(*(row[kind][name] for row in rows), strict=True)]
                bare(ax).plot(places, line, label=method, **style_of(method))
            if name == "accuracy":
                ax.set_title(f"{'MNIST' if data == DIGITS else 'Fashion-MNIST'}, {kind}")
        axes[0].set_ylabel(label)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
