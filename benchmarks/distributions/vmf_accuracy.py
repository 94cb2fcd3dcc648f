# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The numbers of the von Mises-Fisher distribution beside those of Oh, Adamczewski and Park (2019), and the truth.

python -m benchmarks.distributions.vmf_accuracy
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mpmath as mp
import numpy as np
import scipy
import torch
from matplotlib.figure import Figure
from scipy.special import gammaln, ive

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table
from pyro_radial.distributions.numerics import log_sphere_area
from pyro_radial.distributions.vmf.functions import log_mean_exp_cosine, mean_cosine

DIMS = (2, 3, 5, 10, 20, 50, 72, 100, 200, 500, 1000, 4608, 10_000, 48_000, 100_000)
# Theirs, nu = 100 and nu = 500, and one of the low ones.
SHOWN_DIMS = (10, 200, 1000)
LISTED_DIMS = (2, 5, 10, 50, 100, 500, 4608, 100_000)
# Dimensions, and concentrations in each power of ten.
SIZES: dict[str, tuple[tuple[int, ...], int]] = {"default": (DIMS, 8), "small": (SHOWN_DIMS, 1)}
PUBLISHED_GAP = math.exp(-10.0)
BOUNDS = ("theorem 1", "theorem 2")
DIGITS = 40


def run(output: Path, *, form: Form = "default") -> None:
    """Figures 5 and 9 of "Radial and Directional Posteriors for Bayesian Neural Networks".

    5 has the bounds on the Bessel ratio A = I_nu / I_(nu-1), nu = m/2, which is the mean cosine in m dimensions; 9 has
    log I_(m/2-1), here within the log of the density's constant, log C. The truth is a series of positive terms, in 40
    digits. A row for each m has the largest errors over concentrations from 1e-6 to 1e6, and two rows the least m at
    which the gap between the bounds is below e^-10, as published "even in low dimensions", and below 1e-10. ``ive`` is
    that of scipy.special.
    """
    torch.set_num_threads(1)
    dims, per_decade = SIZES[form]
    versions = {"torch": torch.__version__, "scipy": scipy.__version__, "mpmath": mp.__version__}
    setting = versions | {"threads": 1, "digits": DIGITS, "kappa": [1e-6, 1e6], "per_decade": per_decade}
    results = Results(output, setting)
    for dim in dims:
        results.add({"dim": dim}, partial(measure, dim, per_decade))
    for name, gap in (("e^-10", PUBLISHED_GAP), ("1e-10", 1e-10)):
        results.add({"gap_at_every_kappa_below": name}, partial(least_dim, gap))


@mp.workdps(DIGITS)
def truth(concentration: float, dim: int) -> tuple[Any, Any]:
    """L = log 0F1(; m/2; kappa^2 / 4) and its derivative A, by the series of 0F1 from its largest term outwards."""
    kappa, nu = mp.mpf(concentration), mp.mpf(dim) / 2 - 1
    x = kappa**2 / 4
    peak = int(mp.floor((mp.sqrt(nu**2 + 4 * x) - nu) / 2))
    total, moment = mp.mpf(1), mp.mpf(peak)
    for indices, step in ((count(peak + 1), 1), (range(peak, 0, -1), -1)):
        term = mp.mpf(1)
        for k in indices:
            ratio = x / (k * (nu + k))
            term = term * ratio if step == 1 else term / ratio
            total += term
            moment += term * (k if step == 1 else k - 1)
            if term < mp.eps * total / 100:
                break
    largest = peak * mp.log(x) - mp.loggamma(peak + 1) - mp.loggamma(nu + peak + 1) + mp.loggamma(nu + 1)
    # d/dkappa of kappa^(2k) is 2k / kappa times it.
    return largest + mp.log(total), 2 / kappa * moment / total


def bounds(theorem: str, nu: Any, z: Any) -> tuple[Any, Any]:
    """Lower and upper bound on I_nu(z) / I_(nu-1)(z), in the arithmetic of ``z``.

    Theorem 1 is theorem 3 of their supplement; the mean of the two bounds is what they take for the ratio.
    """
    if theorem == "theorem 2":
        lower = z / (nu - 0.5 + ((nu + 0.5) ** 2 + z**2) ** 0.5)
        return lower, z / (nu - 1 + ((nu + 1) ** 2 + z**2) ** 0.5)
    both = []
    for alpha in (2, 0):
        lam = nu + (alpha - 1) / 2
        delta = nu - 0.5 + lam / (2 * (lam**2 + z**2) ** 0.5)
        both.append(z / (delta + (delta**2 + z**2) ** 0.5))
    return both[0], both[1]


def log_bessel_piecewise(nu: float, z: np.ndarray, printed: bool) -> np.ndarray:
    """Eq. 44 as printed, or with the mean of the two exponents of eq. 38 and the switch of the published code."""
    eta = (nu + (0.5 if printed else 1.5)) / (2 * (nu + 1))
    low = nu * np.log(z) + eta * z - (eta + nu) * math.log(2.0) - gammaln(nu + 1)
    return np.where(z < (nu if printed else 2 * nu), low, z - 0.5 * np.log(2 * math.pi * z))


def log_bessel_series(nu: float, z: np.ndarray) -> np.ndarray:
    """Eq. 45, with the mean of the bounds of theorem 1 for each ratio."""
    base = nu - math.floor(nu)
    orders = base + np.arange(1, math.floor(nu) + 1)[:, None]
    return np.log(ive(base, z)) + z + np.log(sum(bounds("theorem 1", orders, z)) / 2).sum(0)


@mp.workdps(DIGITS)
def distance(value: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The distance in exact arithmetic, NaN where ``value`` is not finite."""
    finite = np.isfinite(value.astype(float))
    return np.where(finite, abs(np.where(finite, value, 0) - exact).astype(float), np.nan)


@dataclass
class Errors:
    """Over concentrations in one dimension; what is not finite is NaN."""

    kappa: np.ndarray
    gap: dict[str, np.ndarray]  # between the bounds on A
    ratio: dict[str, np.ndarray]  # relative error of A
    log_constant: dict[str, np.ndarray]  # absolute error of log C, in nats
    size: np.ndarray  # of log C: the sum of its two terms' sizes


@mp.workdps(DIGITS)
def errors(dim: int, per_decade: int) -> Errors:
    kappa = np.logspace(-6, 6, 12 * per_decade + 1)
    exact, mean = np.array([truth(float(k), dim) for k in kappa]).T
    half = mp.mpf(dim) / 2
    at_zero = mp.loggamma(half) - half * mp.log(mp.pi) - mp.log(2)
    between = {theorem: bounds(theorem, half, kappa.astype(object) * mp.mpf(1)) for theorem in BOUNDS}
    tensor, nu = torch.tensor(kappa), dim / 2 - 1
    # Where ive underflows, its logarithm and its ratio do not exist.
    with np.errstate(all="ignore"):
        ratio: dict[str, Any] = {theorem: (low + high) / 2 for theorem, (low, high) in between.items()}
        ratio |= {"ive": ive(nu + 1, kappa) / ive(nu, kappa), "library": mean_cosine(tensor, dim).numpy()}
        log_bessel = {
            "piecewise, printed": log_bessel_piecewise(nu, kappa, printed=True),
            "piecewise, published code": log_bessel_piecewise(nu, kappa, printed=False),
            "log-ratio series": log_bessel_series(nu, kappa),
            "ive": np.log(ive(nu, kappa)) + kappa,
        }
    constant = {name: nu * np.log(kappa) - dim / 2 * math.log(2 * math.pi) - v for name, v in log_bessel.items()}
    constant["library"] = (-log_mean_exp_cosine(tensor, dim) - log_sphere_area(dim)).numpy()
    return Errors(
        kappa=kappa,
        gap={name: (high - mean).astype(float) + (mean - low).astype(float) for name, (low, high) in between.items()},
        ratio={name: distance(value, mean) / mean.astype(float) for name, value in ratio.items()},
        log_constant={name: distance(value, at_zero - exact) for name, value in constant.items()},
        size=(abs(at_zero) + exact).astype(float),
    )


def short(value: float) -> float:
    return float(f"{value:.3g}")


def largest(by_method: dict[str, np.ndarray]) -> Row:
    return {name: None if np.isnan(v).all() else short(np.nanmax(v)) for name, v in by_method.items()}


def measure(dim: int, per_decade: int) -> Row:
    e = errors(dim, per_decade)
    gap = e.gap
    return {
        "gap": largest(gap),
        "gap_times_dim_squared": short(gap["theorem 1"].max() * dim**2),
        "gap_largest_at_kappa_over_dim": short(e.kappa[gap["theorem 1"].argmax()] / dim),
        "percent_of_kappa_with_gap_below_published": short(100 * (gap["theorem 1"] < PUBLISHED_GAP).mean()),
        "relative_error_of_ratio": largest(e.ratio),
        "error_of_log_constant": largest(e.log_constant),
        "error_of_log_constant_over_its_terms": largest({name: v / e.size for name, v in e.log_constant.items()}),
        "percent_of_kappa_with_finite_ive": short(100 * np.isfinite(e.log_constant["ive"]).mean()),
    }


def least_dim(gap: float) -> Row:
    """The least m from which on the bounds of theorem 1 are closer than ``gap`` at every concentration."""
    low, high = 2, 10**6
    while high - low > 1:
        middle = (low + high) // 2
        lower, upper = bounds("theorem 1", middle / 2, middle * np.logspace(-3, 3, 2001))
        low, high = (low, middle) if (upper - lower).max() < gap else (middle, high)
    return {"least_dim": high}


def claims(results: Results) -> list[Claim]:
    """Check the claim in the docstring of ``VonMisesFisherStable``."""
    rows = [row for row in results.rows if "gap" in row]
    worst = max(
        max(row["relative_error_of_ratio"]["library"], row["error_of_log_constant_over_its_terms"]["library"])
        for row in rows
    )
    dims = [row["dim"] for row in rows]
    return [
        Claim(
            f"Mean cosine and log constant are exact to rounding (1e-14) in {min(dims)} to {max(dims):,} dimensions",
            "",
            f"relative error of {worst:.2g} at most",
            "",
            worst < 1e-14,
        ),
    ]


def report(results: Results) -> str:
    """Report the largest errors in each dimension."""
    lines = []
    for row in results.rows:
        if row.get("dim") in LISTED_DIMS:
            ratio, constant = row["relative_error_of_ratio"], row["error_of_log_constant"]
            cells = [row["gap"]["theorem 1"], ratio["theorem 1"], ratio["library"]]
            cells += [constant["piecewise, published code"], row["error_of_log_constant_over_its_terms"]["library"]]
            lines.append([f"{row['dim']:,}", *(f"{v:.3g}" for v in (*cells, row["percent_of_kappa_with_finite_ive"]))])
    headings = ["m", "gap of theorem 1", "error of its mean", "error here", "piecewise log C, nats", "log C here"]
    (crossing,) = results.values("least_dim", gap_at_every_kappa_below="e^-10")
    return f"""### Accuracy of the von Mises-Fisher distribution

Errors of the ratio A of Bessel functions and of the log normalizer C of the von Mises-Fisher distribution, against \
{DIGITS} digits (`python -m benchmarks.distributions.vmf_accuracy`). The table shows the largest over concentrations \
from 1e-6 to 1e6: the gap between the published bounds on A, the relative errors of their mean and of the library; the \
error of the published log C in nats, and that of the library relative to its terms; and how often `scipy.special.ive` \
is finite. The published claim that the gap is below e^-10 even in low dimensions holds from m = {crossing} on.

{markdown_table([*headings, "% finite by scipy"], lines)}

{results.plot("The gap between the bounds, and errors of log C, by dimension")}"""


def draw(results: Results) -> None:
    """The largest gap between the bounds, and the largest error of log C by each method, by dimension."""
    rows = [row for row in results.rows if "gap" in row]
    dims = [row["dim"] for row in rows]
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=110)
    axes = figure.subplots(1, 2)
    names = {"gap": "upper less lower bound on A", "error_of_log_constant": "error of log C, nats"}
    for ax, (column, title) in zip(axes, names.items(), strict=True):
        for method in rows[0][column]:
            values = [math.nan if row[column][method] is None else row[column][method] for row in rows]
            ax.loglog(dims, values, marker="o", ms=3, label=method)
        ax.set(title=title, xlabel="m")
        ax.legend(frameon=False, fontsize=8)
    axes[0].axhline(PUBLISHED_GAP, color="0.5", lw=1)
    axes[1].get_legend().set_loc((0.5, 0.2))
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
