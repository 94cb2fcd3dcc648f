# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Bayesian linear regression in five batches, where the exact posterior after each batch is known.

python -m benchmarks.continual.sequential_regression
"""

import itertools
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.common import Claim, Form, Job, Results, Row, compute_all, main, markdown_table
from benchmarks.continual._chains import METHODS, make_chain
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel, fit
from pyro_radial.nn import likelihoods

__all__ = ["claims", "draw", "report", "run"]

NUM_WEIGHTS, ROWS, NOISE = 10, 40, 0.5
LOCAL, CLOSED = ", local noise", "mean field, closed form"
#: Chains that are trained, with drawn weights and with local noise, and the best that the last can be.
CHAINS = (*METHODS, f"radial normal{LOCAL}", f"mean field{LOCAL}", CLOSED)
DESIGNS = {"independent": 0.0, "correlated": 0.6}
Phases = tuple[tuple[int, float], ...]


class Size(NamedTuple):
    """Batches of data, and steps on each with their rates: first fast, then with little noise left."""

    batches: int = 5
    phases: Phases = ((600, 2e-2), (300, 2e-3))


SIZES = {"default": Size(), "small": Size(2, ((10, 2e-2),))}


def run(output: Path, *, form: Form = "default", seeds: int = 3, workers: int = 2, threads: int = 1) -> None:
    """Of y = x w + noise with ten weights, prior N(0, 1), noise of 0.5 and 40 rows a batch.

    Features are independent or correlated (0.6 between any two). For each chain: the root mean square error of the
    posterior mean and the mean ratio of standard deviations, both in units of the exact posterior's own, and the same
    for one guide on all batches at once, which is what a perfect chain of that family would reach. The best chain of
    normals is known: each has the exact mean under the prior before it, and variances from the diagonal of the
    precision; the best radial ones, in the normal form, have the same.
    """
    size = SIZES[form]
    setting = {"torch": torch.__version__, "weights": NUM_WEIGHTS, "rows": ROWS, "noise": NOISE, "phases": size.phases}
    results = Results(output, setting)
    jobs = [
        Job({"design": design, "method": method, "seed": seed}, score, (method, design, seed, size))
        for design, method, seed in itertools.product(DESIGNS, CHAINS, range(seeds if form == "default" else 1))
    ]
    compute_all(results, jobs, workers, threads)


def data(design: str, seed: int, num_batches: int) -> tuple[Tensor, Tensor]:
    """Inputs ``[batches, rows, weights]`` and targets ``[batches, rows, 1]``."""
    generator = torch.Generator().manual_seed(seed)
    noise = partial(torch.randn, generator=generator)
    common = noise(num_batches, ROWS, 1)
    rho = DESIGNS[design]
    x = (1 - rho) ** 0.5 * noise(num_batches, ROWS, NUM_WEIGHTS) + rho**0.5 * common
    return x, x @ noise(NUM_WEIGHTS, 1) + NOISE * noise(num_batches, ROWS, 1)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviations of the posterior given all these rows."""
    x, y = x.reshape(-1, NUM_WEIGHTS).double(), y.reshape(-1, 1).double()
    precision = torch.eye(NUM_WEIGHTS).double() + x.T @ x / NOISE**2
    covariance = precision.inverse()
    return (covariance @ x.T @ y / NOISE**2).squeeze(-1), covariance.diagonal().sqrt()


def chained(method: str, x: Tensor, y: Tensor, *, phases: Phases) -> list[Row]:
    """How far the chain is from the exact posterior after each batch."""
    net = nn.Linear(NUM_WEIGHTS, 1, bias=False)
    family, noise = method.removesuffix(LOCAL), "local" if method.endswith(LOCAL) else "weights"
    model = SupervisedModel(
        BayesianModule(net), likelihoods.Gaussian(num_data=ROWS, scale=NOISE), local_reparameterization=noise == "local"
    )
    chain = make_chain(family, model)
    rows = []
    for number in range(len(x)):
        model.likelihood.num_data = len(x[number])
        guide = chain.guide(AutoMeanField if family == "mean field" else AutoRadial)
        for steps, learning_rate in phases:
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
        posterior = guide.posterior()["weight"]
        found = posterior.mean.squeeze(0), posterior.variance.sqrt().squeeze(0)
        rows.append(compared(*found, x[: number + 1], y[: number + 1]))
        chain.advance(guide)
    return rows


def compared(mean: Tensor, stddev: Tensor, x: Tensor, y: Tensor) -> Row:
    """With the exact posterior given all these rows."""
    exact_mean, exact_stddev = exact(x, y)
    error, ratio = (mean - exact_mean) / exact_stddev, stddev / exact_stddev
    return {"error": float(error.square().mean().sqrt()), "ratio": float(ratio.mean())}


def closed(x: Tensor, y: Tensor) -> list[Row]:
    """The same of the best chain of normals."""
    x, y = x.double(), y.double()
    mean, precision = torch.zeros(NUM_WEIGHTS).double(), torch.ones(NUM_WEIGHTS).double()
    rows = []
    for number, (inputs, targets) in enumerate(zip(x, y.squeeze(-1), strict=True)):
        full = precision.diag() + inputs.T @ inputs / NOISE**2
        mean = torch.linalg.solve(full, precision * mean + inputs.T @ targets / NOISE**2)
        precision = full.diagonal()
        rows.append(compared(mean, precision.rsqrt(), x[: number + 1], y[: number + 1]))
    return rows


def score(method: str, design: str, seed: int, size: Size) -> Row:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    x, y = data(design, seed, size.batches)
    learn = closed if method == CLOSED else partial(chained, method, phases=size.phases)
    chain = learn(x, y)
    at_once = learn(x.reshape(1, -1, NUM_WEIGHTS), y.reshape(1, -1, 1))[0]
    return {
        "mean_error": [round(row["error"], 4) for row in chain],
        "stddev_ratio": [round(row["ratio"], 4) for row in chain],
        "mean_error_at_once": at_once["error"],
        "stddev_ratio_at_once": at_once["ratio"],
    }


def last(results: Results, name: str, **keys: str) -> float:
    """A result of the chain after the last batch, the mean over seeds."""
    return mean(values[-1] for values in results.values(name, **keys))


def claims(results: Results) -> list[Claim]:
    """Check what the README says about exact chains and chains of normals."""
    seeds = str(len(results.distinct("seed")))
    errors = {
        method: [last(results, "mean_error", method=method, design=design) for design in DESIGNS] for method in CHAINS
    }

    def claim(method: str, text: str, holds: Callable[[float, float], bool], other: str = "mean field") -> Claim:
        pairs = list(zip(errors[method], errors[other], strict=True))
        numbers = ", ".join(f"{ours:.2f} against {theirs:.2f}" for ours, theirs in pairs)
        return Claim(text, "", numbers, seeds, all(holds(*pair) for pair in pairs))

    return [
        claim(
            "radial exact",
            "Linear regression: a chain of exact radial posteriors ends farther from the exact posterior than mean "
            "field",
            operator.gt,
        ),
        claim(
            "radial normal",
            "Linear regression: a radial chain of normals ends as close to the exact posterior as mean field",
            operator.le,
        ),
        *(
            claim(
                method,
                f"Linear regression: the error of a chain of normals ({method}) is within 0.1 of the closed form",
                lambda ours, best: abs(ours - best) < 0.1,
                CLOSED,
            )
            for method in CHAINS
            if method.endswith(LOCAL)
        ),
    ]


def report(results: Results) -> str:
    """Report errors and standard deviations by chain."""
    lines = []
    for design, method in results.distinct("design", "method"):
        keys = {"design": design, "method": method}
        chain = [last(results, name, **keys) for name in ("mean_error", "stddev_ratio")]
        at_once = [mean(results.values(f"{name}_at_once", **keys)) for name in ("mean_error", "stddev_ratio")]
        lines.append([f"{method}, {design}", *(f"{value:.2f}" for value in (*chain, *at_once))])
    headings = ["error", "standard deviations", "error at once", "standard deviations at once"]
    return f"""### Sequential linear regression

Bayesian linear regression in five batches, where the exact posterior is known \
(`python -m benchmarks.continual.sequential_regression`). "error" is the root mean square error of the chain's mean, \
in standard deviations of the exact posterior. "standard deviations" are those of the chain divided by the exact ones. \
"at once" is one guide trained on all batches together. Training draws weights unless the method names local noise \
(local reparameterization). The closed form is the best chain of normals. Means of \
{len(results.distinct("seed"))} seeds.

{markdown_table(["method, features", *headings], lines)}

{results.plot("Error of the mean by batch")}"""


def draw(results: Results) -> None:
    """Errors after each batch."""
    figure = Figure(figsize=(11, 4), layout="constrained", dpi=150)
    for design, ax in zip(DESIGNS, figure.subplots(1, 2, sharey=True), strict=True):
        for method in CHAINS:
            errors = torch.tensor(results.values("mean_error", design=design, method=method)).mean(0)
            style = {"color": "0.2", "ls": "--"} if method == CLOSED else {"marker": "o", "ms": 4}
            ax.plot(range(1, len(errors) + 1), errors.tolist(), label=method, **style)
        ax.set(title=f"{design} features", xlabel="batches learned", xticks=range(1, len(errors) + 1))
        # The best first posterior has the exact mean.
        ax.set_yscale("log", nonpositive="mask")
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("error of the mean, in exact standard deviations")
    figure.legend(*figure.axes[1].get_legend_handles_labels(), loc="outside right center", frameon=False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
