# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a residual network with batch norm on all 60,000 images of Fashion-MNIST with every method.

python -m benchmarks.uncertainty.residual_net
python -m benchmarks.uncertainty.residual_net --paper --device cuda
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import relu

from benchmarks.common import Claim, Pair, Results, Row, SizedForm, main
from benchmarks.uncertainty._comparison import (
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
    style_of,
    tested_methods,
)
from benchmarks.uncertainty._methods import (
    DEEP_ENSEMBLE,
    DROPOUT,
    IVON,
    LAPLACE,
    MEAN_FIELD,
    METHODS,
    PLAIN,
    POSTHOC,
    RADIAL,
    RADIAL_ENSEMBLE,
    TEMPERATURE,
    TRUNCATED,
    TWEAKS,
    Setting,
    Trained,
)

__all__ = ["claims", "draw", "report", "run"]

NAME = "fashion_mnist"


class Size(NamedTuple):
    """The network, and how much is trained and tested."""

    #: Channels of the first stage, and blocks of each; the next stage has twice the channels and half the pixels.
    width: int = 8
    blocks: tuple[int, ...] = (1, 1, 1)
    validation: int = 2_000
    train: int | None = None
    test: int | None = None
    #: Training images for each choice.
    choice: int = 10_000
    num_candidates: int = 4
    seeds: int = 3
    setting: Setting = Setting(epochs=7, num_samples=32, num_members=3)


#: Where two seeds must do.
FEW = dict.fromkeys((DROPOUT, LAPLACE, MEAN_FIELD, TWEAKS, TRUNCATED, IVON), 2)
SIZES = {
    "default": Size(),
    # Running statistics take some steps.
    "small": Size(8, (1, 1), 60, 64, 40, 64, 1, 2, replace(SMALL, epochs=6)),
    # ResNet-18, of 11 million weights; draws and members as in the paper's table 1.
    "paper": Size(64, (2, 2, 2, 2), seeds=6, setting=Setting(epochs=60, num_samples=16, num_members=3)),
}


class Block(nn.Module):
    """Two convolutions with batch norm, beside the identity or a convolution of single pixels."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.beside = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else None
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y if self.dropout is None else self.dropout(y)))
        return relu(y + (x if self.beside is None else self.beside(x)))


def residual_net(width: int, blocks: tuple[int, ...], device: str, dropout: float) -> nn.Module:
    """Stages of blocks, then the mean over pixels and a linear layer; the first convolution halves the image.

    Source: He, Zhang, Ren and Sun (2016), "Deep Residual Learning for Image Recognition". Dropout, if any, is where
    Zagoruyko and Komodakis (2016), "Wide Residual Networks" have it, between the convolutions of a block.
    """
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            outputs = width * 2**stage
            layers.append(Block(inputs, outputs, 2 if stage and not block else 1, dropout))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)).to(device)


@cache
def images_of(data_dir: Path | None) -> Standardized:
    return Standardized(NAME, data_dir)


@cache
def load(data_dir: Path | None, size: Size, device: str, name: str) -> tuple[Pair, Pair]:
    """All on the device, where the networks are."""
    x, y = images_of(data_dir).train
    return split((x.to(device), y.to(device)), size.validation, size.train)


def judge(data_dir: Path | None, size: Size, device: str, learned: Trained, name: str) -> Row:
    x, y = images_of(data_dir).test(size.test)
    return scores(learned.predict(x.to(device)), y)


def run(
    output: Path,
    *,
    form: SizedForm = "default",
    data_dir: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    seeds: int = 3,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """Train each network once, with Adam on 58,000 images; those of three seeds also form an ensemble.

    The setting of each method is the best of four by the NLL of the other 2,000 images, after training on 10,000 with
    seed 0. The seeds in the table start at 10. ``--paper`` trains ResNet-18, for a GPU: give it one worker.
    """
    size = SIZES[form]
    study = Study(
        partial(residual_net, size.width, size.blocks, device),
        partial(load, data_dir, size, device),
        partial(judge, data_dir, size, device),
        (NAME,),
        size.setting,
        tuple(METHODS),
        size.num_candidates,
        size.choice,
        shares=True,
        seeds_of=FEW if form == "default" else {},
    )
    weights = sum(parameter.numel() for parameter in residual_net(size.width, size.blocks, "cpu", 0.0).parameters())
    setting = {"torch": torch.__version__, "threads": threads, "device": device, "weights": weights}
    results = Results(output, setting | described(size))
    study.compute(results, seeds if form == "default" else size.seeds, workers, threads)


#: A score of one method lower than that of another.
CLAIMS = (
    ("nll", RADIAL, PLAIN),
    ("nll", RADIAL, MEAN_FIELD),
    ("calibration_error", RADIAL, PLAIN),
    ("nll", POSTHOC, TEMPERATURE),
    ("nll", RADIAL_ENSEMBLE, DEEP_ENSEMBLE),
)


def claims(results: Results) -> list[Claim]:
    """Compare radial posteriors with what they would replace, network by network."""
    found = []
    for name, ours, theirs in CLAIMS:
        pair = [results.values(name, use="test", method=method) for method in (ours, theirs)]
        # Seeds that both have: the first.
        count = min(map(len, pair))
        text = f"A residual network on Fashion-MNIST: the {SCORES[name]} of {ours} is below that of {theirs}"
        found.append(compared(text, *(values[:count] for values in pair)))
    return found


def report(results: Results) -> str:
    """Report scores by method."""
    size = results.setting
    counts = ", ".join(
        f"{len(results.where(use='test', method=method))} {method}" for method in tested_methods(results)
    )
    digits = {"accuracy": 4, "nll": 4, "calibration_error": 4, "seconds": 0}
    return f"""### A residual network

Networks train on 58,000 images of Fashion-MNIST. They have a convolution that halves the image, followed by \
{sum(size["blocks"])} residual blocks. Each block has two convolutions with batch norm; the stages have \
{", ".join(str(size["width"] * 2**i) for i in range(len(size["blocks"])))} channels, with {size["weights"]:,} weights \
in all. All networks train for {size["epochs"]} epochs of Adam, in batches of {size["batch_size"]}, with a rate that \
falls from {size["rate"]:g} to zero along a cosine (`python -m benchmarks.uncertainty.residual_net`). Normalization \
layers have no posterior and train as usual. Numbers are means and standard errors over seeds: {counts}. The \
{size["num_members"]} members of an ensemble are the single networks of {size["num_members"]} seeds; they share its \
{size["num_samples"]} draws.

Each method uses the best of {size["num_candidates"]} settings by the NLL of the other {size["validation"]:,} images, \
for networks trained on {size["choice"]:,} with another seed: {choices(results)}. Seconds are the training time on one \
core, summed over all members of an ensemble. To fit the budget, we use {size["epochs"]} epochs, {size["width"]} \
channels, two or three seeds and no augmentation. `--paper --device cuda` is ResNet-18 for 60 epochs, which we have \
not run.

{score_table(results, SCORES | {"seconds": "seconds"}, digits)}

{results.plot("NLL and calibration error against accuracy, a dot for each network or ensemble")}"""


def draw(results: Results) -> None:
    """Two scores against accuracy."""
    figure = Figure(figsize=(10, 4.4), layout="constrained", dpi=110)
    axes = figure.subplots(1, 2)
    for ax, name in zip(axes, ("nll", "calibration_error"), strict=True):
        for method in tested_methods(results):
            rows = results.where(use="test", method=method)
            style = style_of(method)
            marker = {"-": "o", ":": "^", "--": "s"}[style["linestyle"]]
            points = [[row[key] for row in rows] for key in ("accuracy", name)]
            bare(ax).plot(*points, marker, color=style["color"], label=method, alpha=0.8)
        ax.set(xlabel=SCORES["accuracy"], ylabel=f"test {SCORES[name]}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
