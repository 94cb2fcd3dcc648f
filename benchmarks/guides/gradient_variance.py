# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure how much the first gradients of a 3 x 3 convolution vary with the noise of the weights.

python -m benchmarks.guides.gradient_variance
"""

import itertools
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.common import Claim, Form, Job, Pair, Results, Row, compute_all, flat_images, main, markdown_table
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.nn import likelihoods

__all__ = ["claims", "draw", "report", "run"]

# By name: the guide, and what its scales start by. A normal's scale is its standard deviation.
MEAN_FIELD, SAME_SCALE, SAME_STDDEV = "mean field", "radial, same sigma", "radial, same standard deviation"
GUIDES = {
    MEAN_FIELD: (AutoMeanField, "init_stddev"),
    SAME_SCALE: (AutoRadial, "init_scale"),
    SAME_STDDEV: (AutoRadial, "init_stddev"),
}
COLORS = {MEAN_FIELD: "#D55E00", SAME_SCALE: "#0072B2", SAME_STDDEV: "#56B4E9"}
#: The convolution whose gradients are compared; another one follows it.
SITE = "2.weight"


class Size(NamedTuple):
    """Channels, scales, gradients for each variance, and rows of the batch."""

    channels: tuple[int, ...] = (32, 64, 128)
    scales: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 0.55, 1.0)
    gradients: int = 48
    rows: int = 16


SIZES = {"default": Size(), "small": Size((4, 8), (0.1, 1.0), 4, 4)}


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 3,
    workers: int = 1,
    threads: int = 1,
) -> None:
    """Measure the variance of gradients over the noise of the weights, before any training.

    The gradient is that of the mean negative log-likelihood of one batch of Fashion-MNIST. The network has a
    convolution that turns 28 x 28 pixels into 7 x 7 positions of C channels, two 3 x 3 convolutions of C channels, and
    a linear layer on the mean over positions. All weights are drawn, from one scale everywhere. The variances are those
    of the gradient with respect to the means of the first 3 x 3 convolution, summed over its 9 C² weights. The KL is in
    closed form, so its gradient has no noise. A seed determines the network and the batch.
    """
    size = SIZES[form]
    (x, y), _ = flat_images("fashion_mnist", data_dir)
    results = Results(output, {"torch": torch.__version__, **size._asdict()})
    jobs = [
        Job(
            {"channels": channels, "scale": scale, "guide": guide, "seed": seed},
            variance,
            (batch_of((x, y), seed, size.rows), channels, scale, guide, seed, size.gradients),
        )
        for seed, channels in itertools.product(range(seeds if form == "default" else 1), size.channels)
        for scale, guide in itertools.product(size.scales, GUIDES)
    ]
    compute_all(results, jobs, workers, threads)


def batch_of(data: Pair, seed: int, rows: int) -> Pair:
    chosen = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))[:rows]
    return data[0][chosen].reshape(rows, 1, 28, 28), data[1][chosen]


def variance(batch: Pair, channels: int, scale: float, name: str, seed: int, number: int) -> Row:
    """The summed variance, and the squared norm of the mean gradient."""
    torch.manual_seed(seed)
    model = SupervisedModel(BayesianModule(network(channels)), likelihoods.Categorical(num_data=len(batch[0])))
    make, start = GUIDES[name]
    guide = make(model, **{start: scale})
    guide.setup(*batch)
    # Without the KL, which adds the same to every gradient.
    loss = RadialELBO(kl_weight=0.0)(model, guide)
    parameter = guide.get_parameter(f"locs.{SITE}")
    total = torch.zeros(2, *parameter.shape, dtype=torch.float64)
    for _ in range(number):
        (gradient,) = torch.autograd.grad(loss(*batch) / len(batch[0]), [parameter])
        total += torch.stack([gradient, gradient.double().square()])
    first, second = total / number
    spread = (second - first.square()).sum() * number / (number - 1)
    return {"log10_variance": float(spread.log10()), "log10_mean_square": float(first.square().sum().log10())}


def network(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 4, stride=4),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )


def log_ratios(results: Results, guide: str, channels: int, scale: float) -> list[float]:
    """The logarithm to base ten of mean field's variance over that of another guide, by seed."""
    at = {"channels": channels, "scale": scale}
    ours, other = (results.values("log10_variance", guide=g, **at) for g in (MEAN_FIELD, guide))
    return [a - b for a, b in zip(ours, other, strict=True)]


def factor(results: Results, guide: str, channels: int, scale: float) -> float:
    """The geometric mean of the factors of all seeds."""
    return float(10 ** mean(log_ratios(results, guide, channels, scale)))


def large_scales(results: Results) -> list[float]:
    """Where the paper's figure has the variance of mean field explode."""
    return [scale for scale in sorted(results.distinct("scale")) if scale >= 0.3]


def claims(results: Results) -> list[Claim]:
    """Compare radial with mean field at equal sigma, as published, and at equal standard deviation."""
    seeds, channels = str(len(results.distinct("seed"))), sorted(results.distinct("channels"))
    scales, found = large_scales(results), []
    span = f"sigma {scales[0]:g} to {scales[-1]:g}"
    table = [[factor(results, SAME_SCALE, c, scale) for c in channels] for scale in scales]
    text = (
        f"A 3 x 3 convolution of {channels[-1]} channels, {span}: at equal sigma gradients vary less with radial noise"
    )
    least, most = (f(row[-1] for row in table) for f in (min, max))
    found.append(
        Claim(
            f"{text} (Radial paper, figure 6)", "lower", f"by a factor of {least:.1e} to {most:.1e}", seeds, least > 1
        )
    )
    numbers = "; ".join(
        f"{' → '.join(f'{value:.1e}' for value in row)} at {s:g}" for s, row in zip(scales, table, strict=True)
    )
    rises = all(a < b for row in table for a, b in itertools.pairwise(row))
    text = f"The factor at equal sigma grows with the layer, from {channels[0]} to {channels[-1]} channels"
    found.append(Claim(text, "grows", numbers, seeds, rises))
    fair = [factor(results, SAME_STDDEV, channels[-1], scale) for scale in sorted(results.distinct("scale"))]
    text = "The same convolution: at every equal standard deviation gradients vary less with radial noise"
    found.append(Claim(text, "", f"by a factor of {min(fair):.2f} to {max(fair):.2f}", seeds, min(fair) > 1))
    return found


def report(results: Results) -> str:
    """Report variances by width, guide and scale, and the two factors."""
    scales, lines = sorted(results.distinct("scale")), []
    for channels in sorted(results.distinct("channels")):
        for guide in GUIDES:
            values = [results.values("log10_variance", channels=channels, scale=s, guide=guide) for s in scales]
            lines.append([f"{channels}, {guide}", *(f"{10 ** mean(v):.1e}" for v in values)])
        for guide in (SAME_SCALE, SAME_STDDEV):
            cells = (f"{factor(results, guide, channels, scale):.3g}" for scale in scales)
            lines.append([f"{channels}, mean field over {guide}", *cells])
    size = results.setting
    return f"""### Variance of the first gradients

The table shows how much the gradient with respect to the means of a 3 x 3 convolution varies before training. The \
variance is summed over its weights. Data are one batch of {size["rows"]} rows of Fashion-MNIST; all weights are drawn \
from one scale. Numbers come from {size["gradients"]} gradients and are geometric means over \
{len(results.distinct("seed"))} networks (`python -m benchmarks.guides.gradient_variance`). The Radial paper shows the \
same in figure 6, for 512 channels and without numbers.

At equal sigma, as published, a weight of a radial posterior has 1/√D of the standard deviation of mean field, with D \
= 9 C² weights. The factor shows this difference. The comparison at equal standard deviation of each weight is one of \
posteriors that a normal prior wants to be equally wide: the KL of either to a unit normal is smallest at a standard \
deviation of one.

{markdown_table(["channels", *(f"{scale:g}" for scale in scales)], lines)}

{results.plot("Variance of the gradient by scale")}"""


def draw(results: Results) -> None:
    """Variances against the scale, a panel for each width."""
    widths, scales = sorted(results.distinct("channels")), sorted(results.distinct("scale"))
    figure = Figure(figsize=(10, 3.4), layout="constrained", dpi=110)
    axes = figure.subplots(1, len(widths), sharey=True, squeeze=False)[0]
    for channels, ax in zip(widths, axes, strict=True):
        for guide, color in COLORS.items():
            values = [results.values("log10_variance", channels=channels, scale=s, guide=guide) for s in scales]
            ax.plot(scales, [10 ** mean(v) for v in values], "o-", ms=4, color=color, label=guide)
            for seed_values in zip(*values, strict=True):
                ax.plot(scales, [10**v for v in seed_values], color=color, lw=0.5, alpha=0.5)
        ax.set(xscale="log", yscale="log", title=f"{channels} channels", xlabel="sigma, or standard deviation")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("variance of the gradient")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
