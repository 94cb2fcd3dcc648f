# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Bayesian linear regression in five batches, where the exact posterior after each batch is known.

y = x w + noise with ten weights, prior N(0, 1), noise of 0.5 and 40 rows a batch, with features that are independent or
correlated (0.6 between any two). For each chain: the root mean square error of the posterior mean and the mean ratio
of standard deviations, both in units of the exact posterior's own, and the same for one guide on all batches at once,
which is what a perfect chain of that family would reach.

    python benchmarks/sequential_regression.py
"""

import argparse
from functools import partial
from pathlib import Path

import pyro
import torch
from common import RESULTS, Job, Row, Table, compute_all
from continual_runs import METHODS, make_chain
from matplotlib.figure import Figure
from torch import Tensor, nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel, fit
from pyro_radial.nn import likelihoods

NUM_WEIGHTS, NUM_BATCHES, ROWS, NOISE = 10, 5, 40, 0.5
# Full batches: first fast, then with little noise left.
PHASES = ((600, 2e-2), (300, 2e-3))
DESIGNS = {"independent": 0.0, "correlated": 0.6}


def data(design: str, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs ``[batches, rows, weights]`` and targets ``[batches, rows, 1]``."""
    generator = torch.Generator().manual_seed(seed)
    noise = partial(torch.randn, generator=generator)
    common = noise(NUM_BATCHES, ROWS, 1)
    rho = DESIGNS[design]
    x = (1 - rho) ** 0.5 * noise(NUM_BATCHES, ROWS, NUM_WEIGHTS) + rho**0.5 * common
    return x, x @ noise(NUM_WEIGHTS, 1) + NOISE * noise(NUM_BATCHES, ROWS, 1)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviations of the posterior given all these rows."""
    x, y = x.reshape(-1, NUM_WEIGHTS).double(), y.reshape(-1, 1).double()
    precision = torch.eye(NUM_WEIGHTS).double() + x.T @ x / NOISE**2
    covariance = precision.inverse()
    return (covariance @ x.T @ y / NOISE**2).squeeze(-1), covariance.diagonal().sqrt()


def chained(method: str, x: Tensor, y: Tensor) -> list[Row]:
    """How far the chain is from the exact posterior after each batch."""
    net = nn.Linear(NUM_WEIGHTS, 1, bias=False)
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(ROWS, scale=NOISE))
    chain = make_chain(method, model)
    rows = []
    for number in range(len(x)):
        model.likelihood.num_data = len(x[number])
        guide = chain.guide(AutoMeanField if method == "mean field" else AutoRadial)
        for steps, learning_rate in PHASES:
            fit(
                chain,
                guide,
                (x[number], y[number]),
                epochs=steps,
                batch_size=len(x[number]),
                optim=partial(torch.optim.Adam, lr=learning_rate),
                loss=RadialELBO(8, vectorize_particles=True, strict_kl=True),
                progress=False,
            )
        law = guide.posterior()["weight"]
        mean, stddev = exact(x[: number + 1], y[: number + 1])
        error = (law.mean.squeeze(0) - mean) / stddev
        ratio = law.variance.sqrt().squeeze(0) / stddev
        rows.append({"error": float(error.square().mean().sqrt()), "ratio": float(ratio.mean())})
        chain.advance(guide)
    return rows


def score(method: str, design: str, seed: int) -> Row:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    x, y = data(design, seed)
    chain = chained(method, x, y)
    at_once = chained(method, x.reshape(1, -1, NUM_WEIGHTS), y.reshape(1, -1, 1))[0]
    return {
        "mean_error": [round(row["error"], 4) for row in chain],
        "stddev_ratio": [round(row["ratio"], 4) for row in chain],
        "mean_error_at_once": at_once["error"],
        "stddev_ratio_at_once": at_once["ratio"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--output", type=Path, default=RESULTS / "sequential_regression.json")
    args = parser.parse_args()
    setting = {"torch": torch.__version__, "weights": NUM_WEIGHTS, "rows": ROWS, "noise": NOISE, "phases": PHASES}
    table = Table(args.output, {**setting, "phases": [list(phase) for phase in PHASES]})
    jobs = [
        Job({"design": design, "method": method, "seed": seed}, score, (method, design, seed))
        for design in DESIGNS
        for method in METHODS
        for seed in range(args.seeds)
    ]
    rows = compute_all(table, jobs, args.workers, args.threads)
    figure = Figure(figsize=(9, 4), layout="constrained", dpi=150)
    for design, ax in zip(DESIGNS, figure.subplots(1, 2, sharey=True), strict=True):
        for method in METHODS:
            own = [row for row in rows if (row["design"], row["method"]) == (design, method)]
            errors = torch.tensor([row["mean_error"] for row in own]).mean(0)
            ratios = torch.tensor([row["stddev_ratio"] for row in own]).mean(0)
            ax.plot(range(1, NUM_BATCHES + 1), errors.tolist(), marker="o", label=method)
            print(f"{design:12s} {method:18s} error {errors[-1]:.3f}  ratio of deviations {ratios[-1]:.3f}")
        ax.set(title=f"{design} features", xlabel="batches learned", xticks=range(1, NUM_BATCHES + 1), yscale="log")
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("error of the mean, in exact posterior deviations")
    figure.axes[1].legend(frameon=False)
    figure.savefig(args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
