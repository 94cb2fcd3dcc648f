# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL to a radial distribution: how far one call is from its mean, and its mean from independent references.

python -m benchmarks.distributions.radial_kl
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyro
import torch
from matplotlib.figure import Figure
from scipy.special import digamma, gammaln
from torch.distributions import Independent, Normal, kl_divergence

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table
from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.kl_formulas.shared import num_directions

__all__ = ["claims", "draw", "report", "run"]

RATIOS = ("0.1", "1", "10", "0.1 to 10", "within 12 %")
DISTANCES = (0.0, 0.1, 1.0, 10.0)
SHIFTS = ("random", "along the largest ratio")
FLOOR = 100.0
STEP = 0.2


class Size(NamedTuple):
    """By dimension, independent calls of a case, and how many distributions with random ratios are tried."""

    calls: dict[int, int]
    distributions: dict[int, int]
    ratios: tuple[str, ...] = RATIOS
    distances: tuple[float, ...] = DISTANCES
    # Of the Monte Carlo references.
    plain_draws: int = 4_000_000


DEFAULT = Size(
    {2: 200, 5: 200, 20: 200, 200: 1000, 2000: 400, 157_000: 24}, {2: 20, 5: 20, 20: 20, 200: 20, 2000: 5, 157_000: 1}
)
SIZES = {"default": DEFAULT, "small": Size({2: 20, 20: 20}, {2: 2, 20: 2}, RATIOS[2:4], DISTANCES[1:3], 200_000)}
DIRECTION_DRAWS = {200: 100_000, 2000: 20_000, 157_000: 2000}


def run(output: Path, *, form: Form = "default") -> None:
    """For radial and normal q, from 2 to 157,000 dimensions, against references that share no code with the estimate.

    A row has the standard deviation of one call as a fraction of max(KL, 100 nats), the largest of several random
    distributions; the same for one direction, from which the number of directions is chosen; and ``z``, how many
    standard errors the mean of the calls is from the reference, for one of the distributions. Where the noise is far
    below any use (1e-6 nats) it is very skewed, and z exceeds 3 more often than that of a normal variable. References:

    * normal q, and radial q at equal means: an integral over one variable;
    * radial q with proportional scales: an integral over the angle between direction and shift around that one;
    * otherwise plain Monte Carlo for D <= 20, and above that Monte Carlo over directions with the radius integrated.
    """
    torch.set_num_threads(1)
    size = SIZES[form]
    setting = {
        "torch": torch.__version__,
        "threads": 1,
        "dtype": "float64",
        "calls": {str(dim): calls for dim, calls in size.calls.items()},
        "distributions": {str(dim): number for dim, number in size.distributions.items()},
        "percent_of": f"max(KL, {FLOOR:g} nats)",
    }
    results = Results(output, setting)
    cases = itertools.product(("radial", "normal"), size.calls, size.ratios, size.distances, SHIFTS)
    for q, dim, ratio, distance, shift in cases:
        if distance or shift == SHIFTS[0]:
            keys = {"q": q, "dim": dim, "ratio": ratio, "distance": distance, "shift": shift}
            results.add(keys, partial(measure, size, keys))


def measure(size: Size, keys: Row) -> Row:
    case = Case(**keys)
    calls = size.calls[case.dim]
    reference, error = case.reference(size.plain_draws)
    values = case.estimates(calls)
    bias = float(values.mean()) - reference
    rounding = 1e-13 * case.dim + 1e-14 * abs(reference)
    row: Row = {
        "kl": reference,
        "reference_error": error,
        "bias_percent": 100.0 * bias / max(reference, FLOOR),
        "z": float(abs(bias) / np.sqrt(values.var(ddof=1) / len(values) + error**2 + rounding**2)),
        "least": float(values.min()),
        "directions": num_directions(case.dim),
    }
    tried = [values]
    if not case.proportional:
        tried += [Case(**keys, number=number).estimates(calls) for number in range(1, size.distributions[case.dim])]
    row["sd_percent"] = max(100.0 * float(v.std(ddof=1)) / max(float(v.mean()), FLOOR) for v in tried)
    # Directions are independent, and a call is the mean of theirs.
    row["sd_percent_of_one_direction"] = row["sd_percent"] * row["directions"] ** 0.5
    return row


class Case:
    """Two distributions, q at ratio and shift from p, in the units of p."""

    def __init__(self, q: str, dim: int, ratio: str, distance: float, shift: str, number: int = 0) -> None:
        # Two cases share no random number.
        places = RATIOS.index(ratio), DISTANCES.index(distance), SHIFTS.index(shift)
        self.seed = [*places, dim, int(q == "radial"), number]
        rng = np.random.default_rng([0, *self.seed])
        self.radial, self.dim = q == "radial", dim
        powers = {"0.1 to 10": rng.uniform(-1.0, 1.0, dim), "within 12 %": rng.uniform(-0.05, 0.05, dim)}
        self.ratio = 10.0 ** powers[ratio] if ratio in powers else np.full(dim, float(ratio))
        self.proportional = ratio not in powers
        vector = rng.standard_normal(dim)
        if shift != "random":
            vector = np.eye(1, dim, int(self.ratio.argmax()))[0]
        self.shift = distance * vector / np.linalg.norm(vector)
        self.center, self.unit = rng.standard_normal(dim), rng.uniform(0.5, 2.0, dim)

    def estimates(self, calls: int) -> np.ndarray:
        """Independent calls: rows of a batch have directions of their own."""
        loc, scale, center, unit = (
            torch.tensor(array)
            for array in (self.center + self.unit * self.shift, self.unit * self.ratio, self.center, self.unit)
        )
        # Rounding in the line above must not separate equal means.
        loc = torch.where(torch.tensor(self.shift) == 0, center, loc).repeat(calls, 1)
        q = RadialNormal(loc, scale) if self.radial else Independent(Normal(loc, scale), 1)
        seed = int(np.random.SeedSequence([1, *self.seed]).generate_state(1)[0])
        # As many directions as a call for one distribution alone takes.
        with pyro.settings.context(radial_kl_seed=seed, radial_kl_directions=num_directions(self.dim)):
            return kl_divergence(q, RadialNormal(center, unit)).numpy()

    def kl(self, mean_log_distance: float) -> float:
        """The KL, given the one term of it that has no closed form."""
        dim, log_two = self.dim, np.log(2.0)
        area = log_two + 0.5 * dim * np.log(np.pi) - gammaln(0.5 * dim)
        if self.radial:
            entropy = area + 0.5 * np.log(0.5 * np.pi) + 0.5 - 0.5 * (dim - 1) * (np.euler_gamma + log_two)
        else:
            entropy = 0.5 * dim * (1.0 + log_two + np.log(np.pi))
        mean_square = (self.ratio**2).sum() / (dim if self.radial else 1) + (self.shift**2).sum()
        cross = area + 0.5 * np.log(0.5 * np.pi) + 0.5 * mean_square + (dim - 1) * mean_log_distance
        return float(cross - entropy - np.log(self.ratio).sum())

    def reference(self, plain_draws: int) -> tuple[float, float]:
        """The KL and the standard error of it."""
        value, error = self._mean_log_distance(plain_draws)
        return self.kl(value), (self.dim - 1) * error

    def _mean_log_distance(self, plain_draws: int) -> tuple[float, float]:
        squared, distance = self.ratio**2, np.linalg.norm(self.shift)
        if not self.radial or distance == 0.0:
            mean_log_square = log_of_quadratic_form(squared, self.shift)
            if self.radial:
                mean_log_square -= digamma(0.5 * self.dim) + np.log(2.0) + np.euler_gamma + np.log(2.0)
            return 0.5 * mean_log_square, 0.0
        if self.proportional:
            return 0.5 * log_over_angles(squared[0], distance, self.dim), 0.0
        rng = np.random.default_rng([2, *self.seed])
        values = self._plain(rng, plain_draws) if self.dim <= 20 else self._over_directions(rng)
        return float(values.mean()), float(values.std() / len(values) ** 0.5)

    def _plain(self, rng: np.random.Generator, draws: int) -> np.ndarray:
        parts = []
        for _ in range(draws // 200_000):
            noise = rng.standard_normal((200_000, self.dim))
            noise *= rng.standard_normal((200_000, 1)) / np.linalg.norm(noise, axis=1, keepdims=True)
            parts.append(np.log(np.linalg.norm(self.ratio * noise + self.shift, axis=1)))
        return np.concatenate(parts)

    def _over_directions(self, rng: np.random.Generator) -> np.ndarray:
        parts, chunk = [], max(1, 4_000_000 // self.dim)
        for start in range(0, DIRECTION_DRAWS[self.dim], chunk):
            noise = rng.standard_normal((min(chunk, DIRECTION_DRAWS[self.dim] - start), self.dim))
            square = (noise**2).sum(1)
            along = noise @ (self.ratio * self.shift)
            parts.append(np.stack([noise**2 @ self.ratio**2 / square, along**2 / square]))
        a, b_squared = np.concatenate(parts, 1)
        c = (self.shift**2).sum()
        return 0.5 * log_over_radius(a, c, np.maximum(a * c - b_squared, 0.0))


def integral(transform: np.ndarray, s: np.ndarray) -> np.ndarray:
    """E log X from its Laplace transform on a grid of logarithms, where the trapezoid rule converges exponentially."""
    return STEP * (np.exp(-s) - transform).sum(-1)


def grid(first_scale: float, last: float) -> np.ndarray:
    """Points s from where the integrand is below 1e-18 to ``last``."""
    return np.exp(np.arange(np.log(1e-18 / (1.0 + first_scale)), np.log(max(last, 50.0)) + STEP, STEP))


def log_of_quadratic_form(a: np.ndarray, d: np.ndarray) -> float:
    """E log sum (sqrt(a) x + d)^2 for standard normal x."""

    def log_transform(s: float) -> float:
        spread = 1.0 + 2.0 * a * s
        return float(-0.5 * np.log1p(2.0 * a * s).sum() - (s * d**2 / spread).sum())

    low, high = -60.0, 100.0
    while high - low > 0.5:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if log_transform(np.exp(middle)) < -42.0 else (middle, high)
    s = grid(a.sum() + (d**2).sum(), np.exp(high))
    return float(integral(np.exp([log_transform(point) for point in s]), s))


def log_over_radius(a: np.ndarray, c: float, gap: np.ndarray) -> np.ndarray:
    """E log (a r^2 + 2 b r + c) for standard normal r, with gap = a c - b^2."""
    s = grid(float(a.max()) + c, 1e36 / float(a.min()))
    parts = []
    for i in range(0, len(a), 2000):
        spread = 1.0 + 2.0 * a[i : i + 2000, None] * s
        # In this form nothing cancels.
        exponent = -s * (c + 2.0 * s * gap[i : i + 2000, None]) / spread
        parts.append(integral(np.exp(exponent) / np.sqrt(spread), s))
    return np.concatenate(parts)


def log_over_angles(a: float, distance: float, dim: int) -> float:
    """E log of the squared distance for equal ratios, over the angle between direction and shift."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    # The density is that of sin^(D-2); beyond 12 of its standard deviations nothing is left.
    sine = np.cos(nodes * min(0.5 * np.pi, 12.0 / dim**0.5))
    log_density = (dim - 2) * np.log(sine)
    weights = weights * np.exp(log_density - log_density.max())
    c = distance**2
    return float(weights @ log_over_radius(np.full(len(sine), a), c, a * c * sine**2) / weights.sum())


def worst(value: Callable[[Row], float], among: list[Row]) -> str:
    """The largest value with where it is."""
    row = max(among, key=value)
    where = ", ".join(f"{name} {row[name]}" for name in ("q", "dim", "ratio", "distance", "shift"))
    return f"{value(row):.3f} ({where})"


def far_off(rows: list[Row]) -> list[Row]:
    """Those whose mean is further than 3 standard errors from the reference."""
    return [row for row in rows if row["z"] > 3.0]


def claims(results: Results) -> list[Claim]:
    """Check that the estimate has no bias and little noise."""
    rows = results.rows
    biased = [row for row in far_off(rows) if abs(row["bias_percent"]) > 1e-3]
    noise = max(row["sd_percent"] for row in rows)
    beyond = f"{len(biased)} of {len(rows)} means are off by more than 3 standard errors and 0.001 %"
    calls = f"{min(results.setting['calls'].values())} to {max(results.setting['calls'].values()):,} calls"
    return [
        Claim("The estimated KL to a radial prior is unbiased", "", beyond, calls, not biased),
        Claim(
            "The standard deviation of one call is below 1 % of max(KL, 100 nats)",
            "",
            f"{noise:.2f} % at most",
            calls,
            noise < 1.0,
        ),
    ]


def report(results: Results) -> str:
    """Report the noise by dimension, and the errors of the means."""
    rows, dims = results.rows, sorted(results.distinct("dim"))
    lines = [
        [q, *(f"{max(results.values('sd_percent', q=q, dim=dim)):.3f}" for dim in dims)] for q in results.distinct("q")
    ]
    error = worst(lambda row: 100.0 * row["reference_error"] / max(row["kl"], FLOOR), rows)
    return f"""### The one KL that is estimated

Only the KL to a radial prior is estimated (`python -m benchmarks.distributions.radial_kl`). The table shows the \
largest standard deviation of one call, in percent of max(KL, 100 nats), over distances from 0 to 10 and scale ratios \
from 0.1 to 10, constant and varying. We compare means with references that share no code with the library: \
{len(far_off(rows))} of {len(rows)} means are off by more than 3 standard errors, the worst by \
{max(row["z"] for row in rows):.1f}. The largest bias in percent is \
{worst(lambda row: abs(row["bias_percent"]), rows)}; the largest standard error of a reference is {error}.

{markdown_table(["from", *(f"D = {dim:,}" for dim in dims)], lines)}

{results.plot("Noise of one call by dimension")}"""


def draw(results: Results) -> None:
    """The noise of every case by dimension."""
    figure = Figure(figsize=(6, 3.2), layout="constrained", dpi=110)
    ax = figure.subplots()
    for q, color, factor in (("radial", "#D55E00", 0.92), ("normal", "#0072B2", 1.08)):
        rows = [row for row in results.where(q=q) if row["sd_percent"] > 0]
        ax.plot(
            [factor * row["dim"] for row in rows], [row["sd_percent"] for row in rows], ".", color=color, label=f"{q} q"
        )
    ax.axhline(1.0, color="0.6", lw=1)
    ax.set(xscale="log", yscale="log", xlabel="D", ylabel="standard deviation of one call, %")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
