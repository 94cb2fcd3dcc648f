# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare the variance of gradients with local reparameterization and with drawn weights, by layer.

python -m benchmarks.guides.local_reparameterization
"""

import itertools
import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.common import Claim, Form, Pair, Results, Row, flat_images, main, markdown_table
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel, fit
from pyro_radial.nn import likelihoods
from pyro_radial.poutine import local_reparameterization

__all__ = ["claims", "draw", "report", "run"]

GUIDES = {"radial": AutoRadial, "radial by rows": partial(AutoRadial, event_dim=1), "normal": AutoMeanField}
NOISES = ("drawn", "local")
#: What the layers of the network are called, by their places in it.
LAYERS = {"0": "784-200", "2": "200-200", "4": "200-10"}
KINDS = {"locs": "means", "scales": "scales"}


class Size(NamedTuple):
    """Epochs before which gradients are compared, batches of rows, gradients on each, and rows in all."""

    epochs: tuple[int, ...] = (0, 3)
    batches: int = 4
    gradients: int = 64
    batch_size: int = 128
    rows: int | None = None


SIZES = {"default": Size(), "small": Size((0, 1), 2, 4, 20, 100)}


def run(
    output: Path, *, form: Form = "default", data_dir: Path | None = None, seeds: int = 2, threads: int = 1
) -> None:
    """Measure variances over the noise, on the same batches and parameters, summed over the elements of a layer."""
    torch.set_num_threads(threads)
    size = SIZES[form]
    (x, y), _ = flat_images("mnist", data_dir)
    train = x[: size.rows], y[: size.rows]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    for guide, seed in itertools.product(GUIDES, range(seeds if form == "default" else 1)):
        keys = [
            {"guide": guide, "seed": seed, "epochs": epochs, "noise": noise, "kind": kind, "layer": layer}
            for epochs, noise in itertools.product(size.epochs, NOISES)
            for kind, layer in itertools.product(KINDS.values(), LAYERS.values())
        ]
        results.add_all(keys, partial(variances, train, guide, seed, size))


def variances(train: Pair, name: str, seed: int, size: Size) -> list[Row]:
    """A row for each number of epochs, noise, kind of parameter and layer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=len(train[0])))
    guide = GUIDES[name](model)
    batches = [tuple(part[i] for part in train) for i in torch.randperm(len(train[0])).split(size.batch_size)]
    rows: list[Row] = []
    for before, epochs in zip((0, *size.epochs), size.epochs, strict=False):
        if epochs > before:
            settings = {"epochs": epochs - before, "batch_size": size.batch_size}
            fit(model, guide, train, seed=seed, progress=False, **settings)
        guide.setup(*batches[0])
        for noise in NOISES:
            module = RadialELBO()(model, local_reparameterization(guide) if noise == "local" else guide)
            found = [by_layer(module, dict(guide.named_parameters()), batch, size) for batch in batches[: size.batches]]
            rows += [
                {"variance": statistics.mean(one[kind, layer] for one in found)}
                for kind, layer in itertools.product(KINDS, LAYERS)
            ]
    return rows


def by_layer(module: nn.Module, parameters: dict[str, Any], batch: Any, size: Size) -> dict[tuple[str, str], float]:
    """The variance of the gradient on one batch, of the loss in nats for the whole data set."""
    sums = {name: torch.zeros(2, *parameter.shape, dtype=torch.float64) for name, parameter in parameters.items()}
    for _ in range(size.gradients):
        gradients = torch.autograd.grad(module(*batch), list(parameters.values()))
        for sum_, gradient in zip(sums.values(), gradients, strict=True):
            sum_ += torch.stack([gradient, gradient.square()])
    found = dict.fromkeys(itertools.product(KINDS, LAYERS), 0.0)
    for name, sum_ in sums.items():
        mean, square = sum_ / size.gradients
        kind, layer, _ = name.split(".", 2)
        found[kind, layer] += float((square - mean.square()).sum()) * size.gradients / (size.gradients - 1)
    return found


def ratios(results: Results, **keys: Any) -> list[float]:
    """The variance with drawn weights over that with local reparameterization, by seed."""
    drawn, local = (results.values("variance", noise=noise, **keys) for noise in NOISES)
    return [a / b for a, b in zip(drawn, local, strict=True)]


def claims(results: Results) -> list[Claim]:
    """Check each posterior in all layers."""
    found = []
    for guide in results.distinct("guide"):
        text = (
            f"Local reparameterization lowers the variance of the gradient in every layer of an MLP ({guide} posterior)"
        )
        values = [
            value
            for keys in itertools.product(results.distinct("epochs"), KINDS.values(), LAYERS.values())
            for value in ratios(results, guide=guide, **dict(zip(("epochs", "kind", "layer"), keys, strict=True)))
        ]
        seeds = str(len(results.distinct("seed")))
        found.append(
            Claim(text, "", f"by a factor of {min(values):.3g} to {max(values):.3g}", seeds, min(values) > 1.0)
        )
    return found


def report(results: Results) -> str:
    """Report factors by layer."""
    setting = results.setting
    columns = list(itertools.product(KINDS.values(), LAYERS.values()))
    lines = []
    for guide, epochs in results.distinct("guide", "epochs"):
        factors = [ratios(results, guide=guide, epochs=epochs, kind=kind, layer=layer) for kind, layer in columns]
        lines.append([guide, str(epochs), *(f"{statistics.mean(values):.3g}" for values in factors)])
    headings = ["posterior", "after epochs", *(f"{kind}, {layer}" for kind, layer in columns)]
    return f"""### Local reparameterization

The table shows how many times larger the variance of the gradient is with drawn weights than with local \
reparameterization. Mini-batches of {setting["batch_size"]} rows of MNIST and the parameters are held fixed; variances \
are summed over the weights and biases of a layer. Factors are means over {setting["batches"]} batches with \
{setting["gradients"]} gradients each, and over {len(results.distinct("seed"))} seeds (`python -m \
benchmarks.guides.local_reparameterization`).

{markdown_table(headings, lines)}

{results.plot("Variance of the gradient by layer")}"""


def draw(results: Results) -> None:
    """The variances themselves, by layer."""
    figure = Figure(figsize=(10, 4.5), layout="constrained", dpi=110)
    guides, stages = results.distinct("guide"), results.distinct("epochs")
    axes = figure.subplots(len(stages), len(guides), sharex=True, squeeze=False)
    for (epochs, guide), ax in zip(itertools.product(stages, guides), axes.flat, strict=True):
        for (noise, color), (kind, style) in itertools.product(
            zip(NOISES, ("#D55E00", "#0072B2"), strict=True), zip(KINDS.values(), ("o-", "s--"), strict=True)
        ):
            keys = {"guide": guide, "epochs": epochs, "noise": noise, "kind": kind}
            values = [statistics.mean(results.values("variance", layer=layer, **keys)) for layer in LAYERS.values()]
            ax.plot(list(LAYERS.values()), values, style, color=color, label=f"{kind}, {noise}")
        ax.set(yscale="log", title=f"{guide}, after {epochs} epochs")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("variance of the gradient")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
