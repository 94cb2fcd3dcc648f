# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare posteriors of the last layer: trained in closed form, trained by draws, and Laplace's approximation.

python -m benchmarks.uncertainty.last_layer --data-dir DIR
"""

import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Results,
    Row,
    compute_all,
    flat_images,
    is_below,
    main,
    markdown_table,
    paired,
    uci_split,
    with_error,
)
from benchmarks.uncertainty._comparison import split
from pyro_radial import AutoMeanField, BayesianModule, RadialELBO, SupervisedModel, fit, predict
from pyro_radial.infer import LastLayerELBO, last_layer_laplace
from pyro_radial.infer.autoguide import AutoCorrelated, families
from pyro_radial.nn import likelihoods

__all__ = ["claims", "draw", "report", "run"]

POINT, MEAN_FIELD, LAPLACE, CLOSED = METHODS = ("point", "mean field", "Laplace", "closed form")
IMAGES = "fashion_mnist"


class Size(NamedTuple):
    """Rows to train on and to choose the epoch with, and the network."""

    train: int
    validation: int
    hidden: tuple[int, ...]
    epochs: int
    rate: float
    rank: int | None


SIZES = {
    "default": {
        "concrete": Size(827, 100, (50,), 100, 5e-3, None),
        IMAGES: Size(3_000, 1_000, (200, 200), 20, 1e-3, 20),
    },
    "small": {"yacht": Size(20, 5, (4,), 1, 5e-3, None), IMAGES: Size(60, 20, (8,), 1, 1e-3, 5)},
}


def run(
    output: Path, *, data_dir: Path, form: Form = "default", seeds: int = 3, workers: int = 2, threads: int = 1
) -> None:
    """Train networks with a random last layer under a prior of N(0, 1), and all other layers as points.

    All take the same steps of Adam; the best epoch by the validation NLL is kept. ``point`` has its last layer at the
    MAP, ``mean field`` trains ``AutoMeanField`` by draws, and ``closed form`` trains ``AutoCorrelated`` by
    ``LastLayerELBO``, for images with rank 20. ``Laplace`` is ``last_layer_laplace`` of ``point``, with the precision
    of its prior chosen by evidence. Posteriors predict by 256 draws of ``method="linearized"``. No setting was chosen
    by a result.
    """
    sizes = SIZES[form]
    setting = {"torch": torch.__version__, "threads": threads, "num_samples": 256}
    results = Results(output, setting | {name: list(size) for name, size in sizes.items()})
    numbers = range(FIRST_SEED, FIRST_SEED + seeds) if form == "default" else range(2)
    compute_all(
        results,
        [
            Job({"data": name, "method": method, "seed": seed}, measured, (data_dir, name, size, method, seed))
            for name, size in sizes.items()
            for seed in numbers
            for method in METHODS
        ],
        workers,
        threads,
    )


def measured(data_dir: Path, name: str, size: Size, method: str, seed: int) -> Row:
    """The test NLL, the error (of images in percent), and the seconds of training."""
    if name == IMAGES:
        whole, (x, y) = flat_images(name, data_dir)
    else:
        table = uci_split(data_dir, name, seed % 10)
        whole, (x, y) = table["train"], table["test"]
    order = torch.randperm(len(whole[1]), generator=torch.Generator().manual_seed(seed))
    train, validation = split((whole[0][order], whole[1][order]), size.validation, size.train)
    torch.manual_seed(seed)
    widths = (x.shape[1], *size.hidden, 10 if name == IMAGES else 1)
    net = nn.Sequential(*[part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())][:-1])
    likelihood: Any = likelihoods.Categorical() if name == IMAGES else likelihoods.Gaussian(scale=0.5, learn_scale=True)
    bnn = BayesianModule(net, prior=dist.Normal(0.0, 1.0), select=rf"^{len(net) - 1}\.")
    model = SupervisedModel(bnn, likelihood)
    guide: Any = AutoMeanField(model)
    if method == CLOSED:
        guide = AutoCorrelated(model, rank=size.rank)
    elif method != MEAN_FIELD:
        guide = AutoMeanField(model, families={".": families.Delta()})
    start = time.process_time()
    fit(
        model,
        guide,
        train,
        epochs=size.epochs,
        batch_size=64,
        optim=lambda parameters: torch.optim.Adam(parameters, lr=size.rate),
        loss=LastLayerELBO() if method == CLOSED else RadialELBO(),
        validation=validation,
        seed=seed,
        progress=False,
    )
    if method == LAPLACE:
        guide = last_layer_laplace(model, guide, train)
    seconds = time.process_time() - start
    found = predict(model, guide, x, 1) if method == POINT else predict(model, guide, x, 256, method="linearized")
    if name == IMAGES:
        error = 100 * (found.mean.argmax(-1) != y).double().mean()
    else:
        error = (found.mean - y).square().mean().sqrt()
    return {"nll": -float(found.log_prob(y).mean()), "error": float(error), "seconds": seconds}


def claims(results: Results) -> list[Claim]:
    """Compare the NLL of the closed form with the others, run by run."""
    found = []
    for name, other in itertools.product(results.distinct("data"), (MEAN_FIELD, LAPLACE)):
        ours, theirs = (results.values("nll", data=name, method=method) for method in (CLOSED, other))
        numbers = f"{with_error(ours, 3)} against {with_error(theirs, 3)}"
        text = f"A random last layer, {name}: the closed form has a lower NLL than {other}"
        found.append(Claim(text, "", numbers, str(len(ours)), is_below(paired(ours, theirs))))
    return found


def report(results: Results) -> str:
    """Report scores by data and method."""
    lines = []
    for name, method in itertools.product(results.distinct("data"), METHODS):
        nll, error, seconds = (results.values(kind, data=name, method=method) for kind in ("nll", "error", "seconds"))
        less = with_error(paired(nll, results.values("nll", data=name, method=POINT)), 3)
        first = with_error(nll, 3), "" if method == POINT else less
        lines.append([name, method, *first, with_error(error, 2), with_error(seconds, 0)])
    headings = ["", "", "NLL", "NLL less point", "RMSE, or % wrong", "seconds"]
    return f"""### Posteriors of the last layer

Networks with a random last layer (`python -m benchmarks.uncertainty.last_layer --data-dir DIR`; `--help` describes \
the methods), on splits of concrete, whose target is standardized, and on 3,000 images of Fashion-MNIST. Means and \
standard errors over {len(results.distinct("seed"))} splits or seeds; differences are paired. Seconds are CPU time of \
training.

{markdown_table(headings, lines)}

{results.plot("NLL of each split or seed, less that of the point")}"""


def draw(results: Results) -> None:
    """The NLLs of all runs, less that of the point."""
    names = results.distinct("data")
    figure = Figure(figsize=(10, 2.2), layout="constrained", dpi=110)
    for name, ax in zip(names, figure.subplots(1, len(names)), strict=True):
        point = results.values("nll", data=name, method=POINT)
        for place, method in enumerate(METHODS[1:]):
            values = paired(results.values("nll", data=name, method=method), point)
            ax.plot(values, [-place] * len(values), "o", color="#0072B2", alpha=0.6, markersize=4)
        ax.axvline(0.0, color="0.6", lw=1)
        ax.set(
            yticks=[0, -1, -2], yticklabels=METHODS[1:], ylim=(-2.5, 0.5), title=name, xlabel="NLL less that of point"
        )
        ax.spines[["top", "right"]].set_visible(False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
