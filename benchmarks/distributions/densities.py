# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Densities of the distance from the mean and of one weight, in closed form and of draws.

python -m benchmarks.distributions.densities
"""

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyro.distributions as dist
import scipy
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import integrate, stats

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table
from benchmarks.distributions._plots import tidy
from pyro_radial.distributions import RadialNormal

__all__ = ["claims", "draw", "report", "run"]

#: The paper's layers: 10 weights in figures 8 and 9, and the 3 x 3 convolution of 64 channels of figure 1.
DIMS = {"default": (10, 36_864), "small": (10,)}
NUM_DRAWS = {"default": 20_000, "small": 500}
RADIAL, MEAN_FIELD = POSTERIORS = ("radial", "mean field")
COLORS = {RADIAL: "#0072B2", MEAN_FIELD: "#D55E00"}
NUM_BINS = 60
# Numbers drawn at once.
CHUNK = 2**24


def run(output: Path, *, form: Form = "default", threads: int = 1) -> None:
    """Draws of either posterior at mean zero and scale one, each draw's distance from the mean and its first weight."""
    torch.set_num_threads(threads)
    number = NUM_DRAWS[form]
    results = Results(output, {"torch": torch.__version__, "scipy": scipy.__version__, "num_draws": number})
    for dim, posterior in itertools.product(DIMS[form], POSTERIORS):
        keys = {"dim": dim, "posterior": posterior}
        results.add(keys, partial(compared, dim, posterior, number))


def compared(dim: int, posterior: str, number: int) -> Row:
    """How far draws are from the closed forms (Kolmogorov and Smirnov), and their histograms."""
    torch.manual_seed(dim)
    one = torch.ones(dim)
    distribution = RadialNormal(0 * one, one) if posterior == RADIAL else dist.Normal(0 * one, one).to_event(1)
    parts = [distribution.sample((len(part),)) for part in range_chunks(number, max(1, CHUNK // dim))]
    distances = torch.cat([part.norm(dim=-1) for part in parts]).double().numpy()
    weights = torch.cat([part[:, 0] for part in parts]).double().numpy()
    stddev = stddev_of(dim, posterior)
    row: Row = {"mean_distance": float(distances.mean()), "beyond_three": float(np.mean(abs(weights) > 3 * stddev))}
    for name, values, cdf, (low, high) in (
        ("distance", distances, radius_of(dim, posterior).cdf, span_of_radius(dim, posterior)),
        ("weight", weights, partial(marginal_cdf, dim, posterior), (-4 * stddev, 4 * stddev)),
    ):
        counts, edges = np.histogram(values, NUM_BINS, (low, high))
        row[f"{name}_gap"] = float(stats.ks_1samp(values, cdf).statistic)
        row[f"{name}_edges"] = edges.tolist()
        row[f"{name}_histogram"] = (counts / (len(values) * np.diff(edges))).tolist()
    return row


def range_chunks(number: int, size: int) -> list[range]:
    return [range(start, min(start + size, number)) for start in range(0, number, size)]


def stddev_of(dim: int, posterior: str) -> float:
    """The standard deviation of one weight at scale one."""
    return dim**-0.5 if posterior == RADIAL else 1.0


def radius_of(dim: int, posterior: str) -> "stats.rv_frozen":
    """The distribution of the distance from the mean: half-normal, or chi with D degrees of freedom."""
    return stats.halfnorm() if posterior == RADIAL else stats.chi(dim)


def span_of_radius(dim: int, posterior: str) -> tuple[float, float]:
    """Where all distances are but for one in a million."""
    radius = radius_of(dim, posterior)
    return float(radius.ppf(0.0 if posterior == RADIAL else 5e-7)), float(radius.ppf(1 - 1e-6))


def over_radii(dim: int, given: Callable[[np.ndarray], np.ndarray]) -> float:
    """The mean of a function of a half-normal radius."""
    return float(integrate.quad(lambda r: 2 * stats.norm.pdf(r) * given(r), 0.0, 40.0, points=(0.01, 0.1, 1, 5))[0])


def marginal_pdf(dim: int, posterior: str, at: np.ndarray) -> np.ndarray:
    r"""The density of one weight: of a radial posterior :math:`E_r[p(x / r) / r]`, with the density of a coordinate of
    a uniform direction, :math:`p(t) \propto (1 - t^2)^{(D-3)/2}`.
    """
    if posterior == MEAN_FIELD:
        return stats.norm.pdf(at)
    log_constant = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - 0.5 * math.log(math.pi)

    def density(x: float) -> float:
        # Over t = log r, where the integrand is smooth.
        def integrand(t: float) -> float:
            share = min((x / math.exp(t)) ** 2, 1 - 1e-16)
            return 2 * stats.norm.pdf(math.exp(t)) * math.exp(log_constant + 0.5 * (dim - 3) * math.log1p(-share))

        low = math.log(abs(x))
        turn = min(max(low + 0.5 * math.log(dim), low), 3.5)
        return float(integrate.quad(integrand, low, 3.7, points=(turn, min(max(0.0, low), 3.7)), limit=400)[0])

    return np.array([density(float(x)) for x in np.atleast_1d(at)])


def marginal_cdf(dim: int, posterior: str, at: np.ndarray) -> np.ndarray:
    """Its distribution function; that of a radial posterior is interpolated between Gauss-Legendre sums."""
    if posterior == MEAN_FIELD:
        return stats.norm.cdf(at)
    grid, within = within_of(dim)
    return 0.5 + 0.5 * np.sign(at) * np.interp(np.abs(at), np.r_[0.0, grid], np.r_[0.0, within])


@cache
def within_of(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances from the mean, and the probabilities that one weight of a radial posterior is within them."""
    nodes, weights = np.polynomial.legendre.leggauss(2_000)
    radii, weights = 4.5 * (nodes + 1), 4.5 * weights * 2 * stats.norm.pdf(4.5 * (nodes + 1))
    grid = np.geomspace(1e-5, 9.0, 2_000)
    return grid, stats.beta(0.5, 0.5 * (dim - 1)).cdf(np.minimum((grid[:, None] / radii) ** 2, 1.0)) @ weights


def tail_beyond(dim: int, posterior: str, at: float) -> float:
    """The probability that one weight is farther than this from its mean."""
    return float(2 * (1 - marginal_cdf(dim, posterior, np.array([at]))[0]))


def claims(results: Results) -> list[Claim]:
    """Check draws against closed forms, the radius of the soap bubble, and the tails of one weight in two ways."""
    number = results.setting["num_draws"]
    # With draws from the right distribution, the gap is larger with probability 0.001.
    bound = 1.95 / number**0.5
    gaps = [value for name in ("distance_gap", "weight_gap") for value in results.values(name)]
    text = (
        "Draws of radial and mean-field posteriors follow the closed-form densities of the distance and of one weight"
    )
    numbers = f"largest gap {max(gaps):.4f}, bound {bound:.4f}"
    found = [Claim(text, "", numbers, f"{number:,} draws", max(gaps) < bound)]
    for dim in results.distinct("dim"):
        ratio = results.values("mean_distance", dim=dim, posterior=MEAN_FIELD)[0] / math.sqrt(dim - 1)
        text = f"Mean field, {dim:,} weights: draws lie in a shell at sigma √(D-1) (Radial paper, figures 1 and 8)"
        found.append(Claim(text, "1", f"{ratio:.3f} times that", f"{number:,} draws", abs(ratio - 1) < 0.05))
    dim = min(results.distinct("dim"))
    normal = tail_beyond(dim, MEAN_FIELD, 3.0)
    for text, at in (("sigma", 3.0), ("standard deviation", 3 * dim**-0.5)):
        tail = tail_beyond(dim, RADIAL, at)
        text = f"One weight of {dim} has lighter tails than under mean field, at equal {text} (Radial paper, figure 9)"
        numbers = f"beyond three of these {tail:.1e} against {normal:.1e}"
        found.append(Claim(text, "lighter", numbers, "closed form", tail < normal))
    return found


def report(results: Results) -> str:
    """Report distances and tails, in closed form and of draws."""
    lines = []
    for dim, posterior in results.distinct("dim", "posterior"):
        (row,), radius = results.where(dim=dim, posterior=posterior), radius_of(dim, posterior)
        stddev = stddev_of(dim, posterior)
        mode = 0.0 if posterior == RADIAL else math.sqrt(dim - 1)
        cells = [f"{mode:.2f}", f"{radius.mean():.3f}", f"{row['mean_distance']:.3f}", f"{stddev:.4f}"]
        cells += [f"{tail_beyond(dim, posterior, 3 * stddev):.5f}", f"{row['beyond_three']:.5f}"]
        lines.append([f"{dim:,}, {posterior}", *cells, f"{row['distance_gap']:.4f}", f"{row['weight_gap']:.4f}"])
    headings = ["weights, posterior", "likeliest distance", "mean distance", "of draws", "standard deviation"]
    headings += ["beyond three of these", "of draws", "gap, distance", "gap, weight"]
    return f"""### Densities of a layer

The distance of a draw from the mean, and one of its weights, at sigma = 1: closed forms and \
{results.setting["num_draws"]:,} draws (`python -m benchmarks.distributions.densities`; figures 1, 8 and 9 of the \
Radial paper). A gap is the largest difference between two distribution functions. With D weights, the distance under \
mean field has a chi distribution with D degrees of freedom, a shell at √(D-1). Under a radial posterior it is \
half-normal for any D. One weight of a radial posterior has 1/√D of the standard deviation. Relative to that standard \
deviation it has a sharper peak and *heavier* tails (its kurtosis is 9D/(D+2), a normal's is 3). Its tails are \
lighter, as the paper says, only at equal sigma.

{markdown_table(headings, lines)}

{results.plot("Densities of the distance from the mean and of one weight")}"""


def draw(results: Results) -> None:
    """Lines are closed forms, steps are draws: distances (figure 1), what makes the shell (8), and one weight (9)."""
    dims = results.distinct("dim")
    figure = Figure(figsize=(11, 5.6), layout="constrained", dpi=110)
    axes = figure.subplots(2, 3, squeeze=False)
    for (left, _, right), dim in zip(axes, dims, strict=False):
        for posterior in POSTERIORS:
            low, high = span_of_radius(dim, posterior)
            at = np.linspace(low, high, 400)
            shown(left, results, "distance", dim, posterior, at, radius_of(dim, posterior).pdf(at))
        left.set(title=f"distance from the mean, D = {dim:,}", xlabel="distance / sigma", ylabel="density")
        for posterior in POSTERIORS:
            at = np.linspace(-4, 4, 160) * stddev_of(dim, RADIAL)
            shown(right, results, "weight", dim, posterior, at, marginal_pdf(dim, posterior, at), RADIAL)
        same = stats.norm.pdf(at, scale=stddev_of(dim, RADIAL))
        right.plot(at, same, "--", color=COLORS[MEAN_FIELD], lw=1, label="mean field, same standard deviation")
        right.set(title=f"one weight of {dim:,}", xlabel="weight / sigma", yscale="log", ylim=(same.min() / 3, None))
    shell(axes[0, 1], dims[0])
    axes[1, 1].set_axis_off()
    axes[1, 1].legend(*axes[0, 2].get_legend_handles_labels(), loc="center", frameon=False)
    for ax in axes[len(dims) :].flat:
        ax.set_axis_off()
    results.save_plot(tidy(figure, axes.flat))


def shown(
    ax: Axes,
    results: Results,
    name: str,
    dim: int,
    posterior: str,
    at: np.ndarray,
    density: np.ndarray,
    steps_of: str | None = None,
) -> None:
    """A closed density, and the histogram of the draws."""
    ax.plot(at, density, color=COLORS[posterior], label=posterior)
    (row,) = results.where(dim=dim, posterior=posterior)
    if steps_of in (None, posterior):
        style: dict[str, Any] = {"color": COLORS[posterior], "alpha": 0.3, "label": f"{posterior}, draws"}
        ax.stairs(row[f"{name}_histogram"], row[f"{name}_edges"], fill=True, **style)


def shell(ax: Axes, dim: int) -> None:
    """The two factors of the density of the distance, and their product."""
    r = np.linspace(1e-3, 6, 400)
    volume, normal = r ** (dim - 1), np.exp(-(r**2) / 2)
    for values, color, label in (
        (volume, "#009E73", "volume, $r^{D-1}$"),
        (normal, "#CC79A7", "normal, $e^{-r^2/2}$"),
        (volume * normal, "#D55E00", "product"),
    ):
        ax.plot(r, values / values.max(), color=color, label=label)
    ax.set(title=f"mean field, D = {dim}, each over its largest", xlabel="distance / sigma", ylim=(0, 1.5))
    ax.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)


if __name__ == "__main__":
    main(run, report, draw)
