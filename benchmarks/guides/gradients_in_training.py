# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Follow accuracy, the terms of the loss, the variance of gradients and the distance of draws through training.

python -m benchmarks.guides.gradients_in_training
"""

import itertools
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.common import (
    Claim,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    flat_images,
    main,
    markdown_table,
    paired,
    with_error,
)
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FitOptions, RadialELBO, SupervisedModel, fit
from pyro_radial.infer.training.fit import FitResult
from pyro_radial.nn import likelihoods

__all__ = ["claims", "draw", "report", "run"]

MEAN_FIELD, SAME_SCALE, SAME_STDDEV = "mean field", "radial, same sigma", "radial, same standard deviation"
GUIDES = {
    MEAN_FIELD: (AutoMeanField, "init_stddev"),
    SAME_SCALE: (AutoRadial, "init_scale"),
    SAME_STDDEV: (AutoRadial, "init_stddev"),
}
COLORS = {MEAN_FIELD: "#D55E00", SAME_SCALE: "#0072B2", SAME_STDDEV: "#56B4E9"}
# softplus(-6), which is the paper's start in appendix D.
INIT = 0.00248
RATES = {"locs": 1e-3, "scales": 1e-2}
MEASURES = {
    "accuracy": "training accuracy",
    "nll": "NLL",
    "kl": "KL",
    "gradient_variance": "variance of the gradient",
    "distance": "distance from the mean",
    "scale": "mean sigma",
}


class Size(NamedTuple):
    """What is trained, for how long, and how often and on how much it is measured."""

    rows: int = 2_000
    hidden: int = 100
    epochs: int = 60
    every: int = 5
    batch_size: int = 64
    num_particles: int = 4
    gradients: int = 32
    draws: int = 16


SIZES = {"default": Size(), "small": Size(100, 8, 2, 1, 50, 2, 3, 2)}


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 1,
    workers: int = 1,
    threads: int = 1,
) -> None:
    """Train 784-100-100-10 on 2,000 images of Fashion-MNIST with a unit normal prior, and measure gradients.

    Batches have 64 rows and steps 4 draws, as in the paper. Adam has a rate of 1e-3 for means and 1e-2 for scales, so
    that scales reach their optimum within 60 epochs. The paper trains a convolutional network for 500 epochs at 1e-4.
    All scales start at sigma 0.0025, or at that standard deviation.

    After each fifth epoch, measurements on the training data give: the accuracy of single draws, as a mean of 16; the
    two terms of the loss per row; the variance over the noise of the gradient of one batch's mean negative
    log-likelihood, summed over the weights of the first layer; and the distance of draws from the mean of all weights.
    """
    size = SIZES[form]
    (x, y), _ = flat_images("fashion_mnist", data_dir)
    train = x[: size.rows], y[: size.rows]
    common = {"torch": torch.__version__, "init": INIT, "rates": RATES, **size._asdict()}
    results = Results(output, common)
    jobs = [
        Job({"guide": guide, "seed": seed}, curves, (train, guide, seed, size))
        for seed, guide in itertools.product(range(seeds if form == "default" else 1), GUIDES)
    ]
    compute_all(results, jobs, workers, threads)


def curves(train: Pair, name: str, seed: int, size: Size) -> Row:
    """Each measure by epoch."""
    torch.manual_seed(seed)
    hidden = size.hidden
    net = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=len(train[0])))
    make, start = GUIDES[name]
    guide = make(model, **{start: INIT})
    batch = train[0][: size.batch_size], train[1][: size.batch_size]
    guide.setup(*batch)
    found: dict[str, list[float]] = {name: [] for name in ("epoch", *MEASURES)}

    def measure(record: dict[str, float]) -> None:
        if (record["epoch"] + 1) % size.every == 0:
            own = measured(model, guide, train, batch, size)
            for key, value in {"epoch": record["epoch"] + 1, "nll": record["nll"], "kl": record["kl"], **own}.items():
                found[key].append(float(f"{value:.4g}"))

    trained(model, guide, train, seed, size, measure)
    return found


def trained(model: Any, guide: Any, train: Pair, seed: int, size: Size, callback: Any) -> FitResult:
    return fit(
        model,
        guide,
        train,
        epochs=size.epochs,
        batch_size=size.batch_size,
        optim=pyro.optim.Adam(rate_of),
        loss=RadialELBO(size.num_particles, vectorize_particles=True, max_plate_nesting=1, strict_kl=True),
        options=FitOptions(compile=size.rows > 1_000),
        seed=seed,
        progress=False,
        callback=callback,
    )


def rate_of(name: str) -> dict[str, float]:
    """Of a parameter of the guide."""
    return {"lr": RATES["scales" if "scales" in name else "locs"]}


def measured(model: SupervisedModel, guide: Any, train: Pair, batch: Pair, size: Size) -> dict[str, float]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.no_grad():
            posterior = guide.posterior()
            accuracy, squares = 0.0, 0.0
            for _ in range(size.draws):
                weights = {site: own.sample() for site, own in posterior.items()}
                outputs = pyro.poutine.condition(model.bnn, data=weights)(train[0])
                accuracy += float((outputs.argmax(-1) == train[1]).float().mean()) / size.draws
                squares += sum(float((weights[s] - own.mean).square().sum()) for s, own in posterior.items())
            scales = torch.cat([torch.as_tensor(leaf_scale(own)).flatten() for own in posterior.values()])
        return {
            "accuracy": accuracy,
            "gradient_variance": gradient_variance(model, guide, batch, size.gradients),
            "distance": (squares / size.draws) ** 0.5,
            "scale": float(scales.mean()),
        }


def leaf_scale(own: Any) -> torch.Tensor:
    """Sigma of every weight, of a radial normal or of independent normals."""
    return torch.as_tensor(getattr(own, "scale", None) if hasattr(own, "scale") else own.base_dist.scale)


def gradient_variance(model: SupervisedModel, guide: Any, batch: Pair, number: int) -> float:
    loss = RadialELBO(kl_weight=0.0)(model, guide)
    parameter = guide.get_parameter("locs.0.weight")
    # Of the mean over the rows: the plate counts each as many times as the data are larger than the batch.
    share = 1.0 / model.likelihood.num_data
    first = second = torch.zeros_like(parameter, dtype=torch.float64)
    for _ in range(number):
        (gradient,) = torch.autograd.grad(share * loss(*batch), [parameter])
        first, second = first + gradient, second + gradient.double().square()
    return float(((second - first.square() / number) / (number - 1)).sum())


def ends(results: Results, name: str, guide: str, of: str = "last") -> list[float]:
    """A measure at the end of each training, or where it was best."""
    return [max(values) if of == "best" else values[-1] for values in results.values(name, guide=guide)]


def claims(results: Results) -> list[Claim]:
    """Check what figures 7 and 8 show of mean field, and whether radial posteriors avoid it."""
    seeds = str(len(results.distinct("seed")))
    found = []
    for guide, wanted in ((MEAN_FIELD, True), (SAME_SCALE, False), (SAME_STDDEV, False)):
        best, last = (ends(results, "accuracy", guide, of) for of in ("best", "last"))
        falls = paired(best, last)
        word = "falls by more than a point" if wanted else "stays within a point of its best"
        text = f"Training with learned scales ({guide}): the training accuracy {word} (Radial paper, figure 7)"
        numbers = f"best {with_error(best, 3)}, last {with_error(last, 3)}"
        found.append(Claim(text, "falls" if wanted else "stays", numbers, seeds, (mean(falls) > 0.01) == wanted))
    for guide in (SAME_SCALE, SAME_STDDEV):
        ratios = [
            a / b for a, b in zip(ends(results, "distance", MEAN_FIELD), ends(results, "distance", guide), strict=True)
        ]
        text = f"Training with learned scales: draws end farther from the mean with mean field than with {guide}"
        found.append(
            Claim(
                text,
                "about 100 times (first version, figure 8)",
                f"{with_error(ratios, 1)} times",
                seeds,
                mean(ratios) > 1,
            )
        )
        for title, peak in (("when mean field varies most", True), ("at the end", False)):
            values = variances(results, guide, peak)
            text = f"Training with learned scales, {title}: gradients vary more with mean field than with {guide}"
            numbers = f"{with_error(values, 2)} times"
            found.append(Claim(text, "sharply more (figure 7)", numbers, seeds, mean(values) > 1))
    return found


def variances(results: Results, guide: str, peak: bool) -> list[float]:
    """Mean field's variance over that of another guide, by seed, at the last epoch or where mean field's is largest."""
    found = []
    for own, other in zip(*(results.values("gradient_variance", guide=g) for g in (MEAN_FIELD, guide)), strict=True):
        at = own.index(max(own)) if peak else -1
        found.append(own[at] / other[at])
    return found


def report(results: Results) -> str:
    """Report each measure at the end of training."""
    size = results.setting
    lines = [[guide, with_error(ends(results, "accuracy", guide, "best"), 3)] for guide in results.distinct("guide")]
    for line in lines:
        line += [f"{mean(ends(results, name, line[0])):.3g}" for name in MEASURES]
    return f"""### Gradients through training

The experiment repeats figure 7 of the Radial paper and figure 8 of its first version on a small network: \
{size["rows"]:,} images of Fashion-MNIST, 784-{size["hidden"]}-{size["hidden"]}-10 and a unit normal prior. It runs \
for {size["epochs"]} epochs of Adam at {size["rates"]["locs"]:g} for means and {size["rates"]["scales"]:g} for scales, \
which start at sigma {size["init"]:g} (or at that standard deviation). Batches have {size["batch_size"]} rows, with \
{size["num_particles"]} draws per step. Numbers are means over {len(results.distinct("seed"))} seed(s) at the end \
(`python -m benchmarks.guides.gradients_in_training`). Accuracy is that of single draws on the training data; NLL and \
KL are in nats per row. The variance is that of the gradient of one batch's mean NLL, summed over the first layer.

Mean field behaves as the paper shows: its scales grow to those of the prior, and accuracy falls with the noise. \
Radial posteriors avoid this within the time of the experiment. The prior pulls their sigma to √D, but scales move \
slowly toward so large a value; their KL at the end shows how far away they still are. Their variance keeps growing, \
while that of mean field falls again once its network no longer fits.

{markdown_table(["", "best accuracy", *MEASURES.values()], lines)}

{results.plot("Measures by epoch")}"""


def draw(results: Results) -> None:
    """Each measure by epoch, a line for each seed."""
    figure = Figure(figsize=(10, 5.4), layout="constrained", dpi=110)
    axes = figure.subplots(2, 3, sharex=True).flat
    for (name, title), ax in zip(MEASURES.items(), axes, strict=True):
        for guide, color in COLORS.items():
            for place, row in enumerate(results.where(guide=guide)):
                ax.plot(row["epoch"], row[name], color=color, lw=1, label=guide if place == 0 else None)
        ax.set(title=title, yscale="linear" if name == "accuracy" else "log")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[3:]:
        ax.set_xlabel("epoch")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
