# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How far estimated scores are from true ones, at the draws that they are estimated from and at new ones.

Laws: normal with unit covariance; normal as values of a smooth Gaussian process at D points (a Gaussian kernel of
length 0.5 on [-1, 1] plus noise of deviation 0.1); two normal modes four deviations apart in one direction; Student's
t with 5 degrees of freedom. ``error`` is the norm of the difference over that of the true score, ``slope`` the inner
product of both over the true one's square: below 1, the entropy's force is too weak, and a fit comes out too narrow.
``published`` is the spectral Stein estimator with the settings and the habits of the code for functional networks: a
width for each coordinate, threshold 0.99 without the eigenvalue that crosses it, no ridge.

    python benchmarks/score_estimators.py            # about a minute
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from common import RESULTS, Row, Table
from torch import Tensor

from pyro_radial.functional.scores import GaussianMoments, SpectralStein, Stein

NORMAL_DIMS, OTHER_DIMS = (10, 25, 60), (10, 25)
DRAWS = (100, 500)
SEEDS = 3
Score = Callable[[Tensor], Tensor]


def published(samples: Tensor, at: Tensor | None = None) -> Tensor:
    """The spectral Stein gradient estimator as in published code."""
    num_samples, dim = samples.shape
    rows, columns = torch.triu_indices(num_samples, num_samples, 1)
    width = (samples[rows] - samples[columns]).abs().median(0).values * dim**0.5
    scaled = samples / width
    kernel = (-0.5 * torch.cdist(scaled, scaled).square()).exp()
    slope = (samples * kernel.sum(-1, keepdim=True) - kernel @ samples) / width.square()
    eigenvalues, vectors = torch.linalg.eigh(kernel)
    share = eigenvalues.flip(0).cumsum(0) / eigenvalues.sum()
    count = int((share < 0.99).sum())
    eigenvalues, vectors = eigenvalues[-count:], vectors[:, -count:]
    if at is not None:
        kernel = (-0.5 * torch.cdist(at / width, scaled).square()).exp()
    return -kernel @ (vectors / eigenvalues.square()) @ (vectors.mT @ slope)


ESTIMATORS = {
    "published": published,
    "SpectralStein()": SpectralStein(),
    "Stein()": Stein(),
    "GaussianMoments()": GaussianMoments(),
    "GaussianMoments('oas')": GaussianMoments("oas"),
}


def normal(covariance: Tensor) -> tuple[Score, Callable[[int], Tensor]]:
    factor = torch.linalg.cholesky(covariance)
    precision = torch.cholesky_inverse(factor)
    return lambda f: -f @ precision, lambda count: torch.randn(count, len(factor)) @ factor.mT


def smooth_covariance(dim: int) -> Tensor:
    x = torch.linspace(-1.0, 1.0, dim)
    return (-0.5 * ((x[:, None] - x) / 0.5).square()).exp() + 0.01 * torch.eye(dim)


def two_modes(dim: int) -> tuple[Score, Callable[[int], Tensor]]:
    mode = 2.0 * torch.eye(dim)[0]
    return (
        lambda f: mode * (f @ mode).tanh()[:, None] - f,
        lambda count: torch.randn(count, dim) + mode * torch.randn(count, 1).sign(),
    )


def student(dim: int, degrees: float = 5.0) -> tuple[Score, Callable[[int], Tensor]]:
    radius = torch.distributions.Chi2(degrees)
    return (
        lambda f: -(degrees + dim) * f / (degrees + f.square().sum(-1, keepdim=True)),
        lambda count: torch.randn(count, dim) / (radius.sample((count, 1)) / degrees).sqrt(),
    )


LAWS = {
    "white": lambda dim: normal(torch.eye(dim)),
    "smooth": lambda dim: normal(smooth_covariance(dim)),
    "two modes": two_modes,
    "student": student,
}


def measure(law: str, dim: int, draws: int, estimator: str) -> Row:
    score, sample = LAWS[law](dim)
    row: Row = {}
    for place in ("at draws", "elsewhere"):
        errors, slopes = [], []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            samples = sample(draws)
            at = None if place == "at draws" else sample(draws)
            truth = score(samples if at is None else at)
            estimate = ESTIMATORS[estimator](samples, at)
            errors.append((estimate - truth).norm() / truth.norm())
            slopes.append((estimate * truth).sum() / truth.square().sum())
        row[f"error {place}"] = float(torch.stack(errors).mean())
        row[f"slope {place}"] = float(torch.stack(slopes).mean())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "score_estimators.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.double)
    table = Table(args.output, {"torch": torch.__version__, "dtype": "float64", "seeds": SEEDS})
    cases = [
        *itertools.product(("white", "smooth"), NORMAL_DIMS),
        *itertools.product(("two modes", "student"), OTHER_DIMS),
    ]
    for (law, dim), draws, estimator in itertools.product(cases, DRAWS, ESTIMATORS):
        keys = {"law": law, "dim": dim, "draws": draws, "estimator": estimator}
        table.add(keys, lambda k=keys: measure(**k))
    summarise(table)


def summarise(table: Table) -> None:
    """Means over the cases of a kind: of the error, and of the slope at the draws, which a loss uses."""
    for kind, laws in (("normal", ("white", "smooth")), ("other", ("two modes", "student"))):
        for estimator in ESTIMATORS:
            rows = [row for row in table.rows if row["law"] in laws and row["estimator"] == estimator]
            means = {k: sum(row[k] for row in rows) / len(rows) for k in rows[0] if k.startswith(("error", "slope"))}
            print(f"{kind:8}{estimator:24}" + "  ".join(f"{name} {value:.2f}" for name, value in means.items()))


if __name__ == "__main__":
    main()
