# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a deep network with a wide and a narrow prior by the default natural gradient, and by Adam.

python -m benchmarks.guides.deep_network
"""

import itertools
import math
import statistics
import warnings
from pathlib import Path
from typing import NamedTuple

import pyro.distributions as dist
import torch

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Results,
    Row,
    compute_all,
    flat_images,
    main,
    markdown_table,
    perceptron,
    with_error,
)
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, NaturalGradient, SupervisedModel, fit, predict
from pyro_radial.infer.optim.joint import DEFAULT_OPTIM
from pyro_radial.nn import likelihoods

NATURAL, ADAM = "NaturalGradient()", "Adam at 0.001"
OPTIMS = {NATURAL: NaturalGradient(), ADAM: DEFAULT_OPTIM}
GUIDES = {"radial": AutoRadial, "mean field": AutoMeanField}
PRIORS = (1.0, 0.1)


class Size(NamedTuple):
    """Images, hidden layers, epochs and seeds."""

    train: int = 30_000
    test: int = 10_000
    hidden: tuple[int, ...] = (200, 200, 200, 200)
    epochs: tuple[int, ...] = (4,)
    seeds: int = 3


SIZES = {"default": Size(), "small": Size(64, 40, (8,), (1,), 2)}


def run(
    output: Path, *, form: Form = "default", data_dir: Path | None = None, workers: int = 2, threads: int = 1
) -> None:
    """Train a 784-200x4-10 network on 30,000 images of Fashion-MNIST in batches of 128, with no other setting."""
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, **size._asdict()})
    cells = itertools.product(size.epochs, PRIORS, GUIDES, OPTIMS, range(FIRST_SEED, FIRST_SEED + size.seeds))
    jobs = [
        Job(
            {"epochs": epochs, "prior": prior, "guide": guide, "method": method, "seed": seed},
            trained,
            (size, data_dir, epochs, prior, guide, method, seed),
        )
        for epochs, prior, guide, method, seed in cells
    ]
    compute_all(results, jobs, workers, threads)


def trained(size: Size, data_dir: Path | None, epochs: int, prior: float, guide: str, method: str, seed: int) -> Row:
    """The loss of the last epoch and its parts, in nats for each image, and scores on test images."""
    (x, y), (test_x, test_y) = flat_images("fashion_mnist", data_dir)
    torch.manual_seed(seed)
    net = BayesianModule(perceptron((x.shape[1], *size.hidden, 10)), prior=dist.Normal(0.0, prior))
    model = SupervisedModel(net, likelihoods.Categorical())
    made = GUIDES[guide](model)
    rows = x[: size.train], y[: size.train]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        history = fit(model, made, rows, epochs=epochs, batch_size=128, optim=OPTIMS[method], progress=False).history
    prediction = predict(model, made, test_x[: size.test], num_samples=16)
    labels = test_y[: size.test]
    accuracy = float((prediction.mean.argmax(-1) == labels).float().mean())
    nll = -float(prediction.log_prob(labels).mean())
    return {"loss": history[-1]["loss"], "train_nll": history[-1]["nll"], "nll": nll, "accuracy": accuracy}


def claims(results: Results) -> list[Claim]:
    """Compare losses cell by cell."""
    ratios = []
    for epochs, prior, guide in results.distinct("epochs", "prior", "guide"):
        ours, theirs = (
            statistics.mean(results.values("loss", epochs=epochs, prior=prior, guide=guide, method=method))
            for method in (NATURAL, ADAM)
        )
        ratios.append(ours / theirs)
    return [
        Claim(
            "In a deep network NaturalGradient() ends at a lower loss than Adam, for each prior, guide and length",
            "",
            f"{min(ratios):.2f} to {max(ratios):.2f} of Adam's",
            str(results.setting["seeds"]),
            all(math.isfinite(ratio) and ratio < 1.0 for ratio in ratios),
        )
    ]


def report(results: Results) -> str:
    """Report losses and scores."""
    size = results.setting
    lines = []
    for epochs, prior, guide, method in results.distinct("epochs", "prior", "guide", "method"):
        keys = {"epochs": epochs, "prior": prior, "guide": guide, "method": method}
        scores = [with_error(results.values(name, **keys), 3) for name in ("loss", "train_nll", "nll", "accuracy")]
        lines.append([str(epochs), f"N(0, {prior:g}²)", guide, method, *scores])
    columns = ("epochs", "prior", "guide", "optimizer", "loss", "of it likelihood", "test NLL", "test accuracy")
    return f"""### A deep network

A network with hidden layers of {", ".join(map(str, size["hidden"]))} units trains on {size["train"]:,} images of \
Fashion-MNIST in batches of 128 (`python -m benchmarks.guides.deep_network`). Losses are in nats for each image, the \
mean of the last epoch. Nothing was chosen on other images. Numbers are means and standard errors over \
{size["seeds"]} seeds.

{markdown_table(columns, lines)}"""


if __name__ == "__main__":
    main(run, report)
