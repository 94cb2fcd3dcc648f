# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train networks under priors known only by draws, and compare them with the prior and its nearest normal.

python -m benchmarks.functional.implicit
"""

import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Job,
    Pair,
    Results,
    Row,
    SizedForm,
    compute_all,
    is_below,
    main,
    markdown_table,
    paired,
    with_error,
)
from benchmarks.functional._conditional import conditional_draws, normal_draws
from benchmarks.functional._training import NUM_SAMPLES, function_draws, network, rounded, spread_kinks, train
from pyro_radial import BayesianModule, FunctionalELBO, SupervisedModel
from pyro_radial.functional import (
    FunctionPrior,
    GaussianProcess,
    LinearizedKL,
    PiecewiseConstant,
    PiecewiseLinear,
    SteinKL,
    Sum,
    UniformBox,
)
from pyro_radial.nn import likelihoods

__all__ = ["claims", "draw", "report", "run"]

#: Cost of a run; the page shows it as long as there are no results.
NEEDS = "forty minutes of one core"

SCORES = {"error": "error", "stddev": "standard deviation", "coverage": "coverage"}
PLACES = {"beside data": "beside data", "gap": "in the gap"}
PRIORS: dict[str, type[PiecewiseConstant] | type[PiecewiseLinear]] = {
    "steps": PiecewiseConstant,
    "pieces": PiecewiseLinear,
}
PRIOR, EXACT, NORMAL = "prior", "exact", "nearest normal"
BUMPS, LINEARIZED, STEIN = NETWORKS = ("LinearizedKL, bumps", "LinearizedKL, tanh", "SteinKL, tanh")
METHODS = (PRIOR, EXACT, NORMAL, *NETWORKS)
NOISE, NUM_POINTS, GRID, SHOWN = 0.02, 40, 201, 8
# Units that change over a tenth of the domain; at PyTorch's start they are nearly linear on [0, 1].
STEEPNESS = 10.0
# Bumps of a third of the domain to a sixtieth, as many of each power.
SCALES = (3.0, 60.0)
# Draws for the likelihood alone, where the divergence is in closed form.
FEW_FUNCTIONS = 8
DEFAULT: Row = {
    "steps": 3_000,
    "hidden": {BUMPS: [200], LINEARIZED: [50, 50], STEIN: [50, 50]},
    "functions": {BUMPS: FEW_FUNCTIONS, LINEARIZED: FEW_FUNCTIONS, STEIN: 150},
    "lr": {BUMPS: 0.015, LINEARIZED: 0.015, STEIN: 3e-3},
    # Of all weights. From 0.01 the standard deviations in the gap stay far below the errors.
    "init_stddev": {BUMPS: 0.1, LINEARIZED: 0.1, STEIN: 0.05},
    "rates": [[0.4, 1.0], [0.3, 0.3], [0.3, 0.05]],
}
FORMS: dict[str, Row] = {
    "default": DEFAULT,
    "small": DEFAULT | {"steps": 4, "functions": {BUMPS: 2, LINEARIZED: 2, STEIN: 90}},
    "paper": DEFAULT | {"steps": 20_000, "functions": {BUMPS: 8, LINEARIZED: 8, STEIN: 500}},
}


class Bump(nn.Module):
    """A unit that is zero far from a point; steps and straight pieces are sums of such, of all widths."""

    def forward(self, x: Tensor) -> Tensor:
        return (-x.square()).exp()


def white_noise(stddev: float) -> GaussianProcess:
    """A process of independent values."""
    return GaussianProcess(lambda a, b: a.new_zeros(len(a), len(b)), noise=stddev)


def run(output: Path, *, form: SizedForm = "default", seeds: int = 3, workers: int = 2) -> None:
    """Draw a function from the prior, observe 20 points in [0, 0.2] and 20 in [0.8, 1], and train networks.

    The noise is 0.02. Networks should find what the prior allows in the gap. ``SteinKL`` estimates both scores, that of
    the prior from 1,000 draws; ``LinearizedKL`` takes the moments of as many draws. Both distributions include the
    noise of 0.02. ``tanh`` is a network of 2 x 50 units that change over about a tenth of the domain. ``bumps`` is a
    network of 200 units exp(-z^2), with widths from a third of the domain to a sixtieth. Schauder's series of a
    Brownian bridge motivates bumps: in such series the coefficients of rough functions are nearly independent, and a
    factorized posterior can represent that.

    ``exact`` takes draws of the prior given the data, exact up to a grid of change points. ``nearest normal`` takes
    draws of the normal distribution with the moments of the prior (from 20,000 draws), the best that ``LinearizedKL``
    can reach. ``prior`` is the prior itself, with 10,000 draws.

    Scores compare with the true function, beside the data and in the gap: the root mean square error of the mean, the
    mean standard deviation, and the share of the true function within two standard deviations.

    Settings were chosen with seeds 0 and 1.
    """
    setting = {"torch": torch.__version__, **FORMS[form], "num_points": NUM_POINTS}
    results = Results(output, setting)
    jobs = []
    for seed, kind, method in itertools.product(range(1 if form == "small" else seeds), PRIORS, METHODS):
        keys = {"prior": kind, "method": method, "seed": FIRST_SEED + seed}
        jobs.append(Job(keys, score, (kind, method, FIRST_SEED + seed, form, results.checkpoint(*keys.values()))))
    compute_all(results, jobs, workers)


def score(kind: str, method: str, seed: int, form: str, checkpoint: Path) -> Row:
    """The scores of the posterior of one run, and what is drawn of it."""
    pyro.set_rng_seed(seed)
    prior, start = PRIORS[kind](), time.process_time()
    sides = 0.2 * torch.rand(40, 1)
    x, grid = torch.cat([sides[:20], 0.8 + sides[20:]]), torch.linspace(0.0, 1.0, GRID)[:, None]
    values = prior.sample(torch.cat([x, grid]), 1)[0]
    y, truth = values[:40] + NOISE * torch.randn(40, 1), values[40:].squeeze(-1).double()
    if method == PRIOR:
        draws = prior.sample(grid, 20 * NUM_SAMPLES[form]).squeeze(-1).double()
    elif method == EXACT:
        draws = conditional_draws(prior, (x, y), NOISE, grid, NUM_SAMPLES[form])
    elif method == NORMAL:
        draws = normal_draws(prior, (x, y), NOISE, grid, NUM_SAMPLES[form])
    else:
        draws = of_network(prior, (x, y), method, grid, form, checkpoint)
    row = scores(draws, truth) | {"seconds": round(time.process_time() - start, 1)}
    curves = {"draws": [rounded(draw) for draw in draws[:SHOWN]], "truth": rounded(truth)}
    return row | curves | {"x": rounded(x.squeeze(-1)), "y": rounded(y.squeeze(-1))}


def of_network(prior: FunctionPrior, rows: Pair, method: str, grid: Tensor, form: str, checkpoint: Path) -> Tensor:
    """Draws of a network trained under the prior."""
    setting, own = FORMS[form], {key: value[method] for key, value in FORMS[form].items() if isinstance(value, dict)}
    model = make_model(method, own["hidden"])
    noisy, box = Sum([prior, white_noise(NOISE)]), UniformBox([0.0], [1.0], NUM_POINTS)
    divergence: Any = SteinKL(num_prior_samples=1_000) if method == STEIN else LinearizedKL()

    def make_loss(kl_weight: Callable[[int], float]) -> FunctionalELBO:
        return FunctionalELBO(noisy, box, divergence=divergence, num_functions=own["functions"], kl_weight=kl_weight)

    training = {"steps": setting["steps"], "rates": setting["rates"], "batch_size": 40, "checkpoint": checkpoint}
    guide = train(model, rows, make_loss, lr=own["lr"], init_stddev=own["init_stddev"], **training)
    return function_draws(model, guide, grid, NUM_SAMPLES[form])


@torch.no_grad()
def make_model(method: str, hidden: list[int]) -> SupervisedModel:
    net = network(1, hidden, Bump if method == BUMPS else nn.Tanh)
    weight = net[0].weight
    if method == BUMPS:
        low, high = SCALES
        weight.copy_(low * (math.log(high / low) * torch.rand_like(weight)).exp())
        spread_kinks(net, -0.02, 1.02)
    else:
        weight.mul_(STEEPNESS)
        spread_kinks(net, 0.0, 1.0)
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=40, scale=NOISE))


def scores(draws: Tensor, truth: Tensor) -> Row:
    """Of draws ``[S, N]`` on the grid, on both sides and between."""
    mean, stddev = draws.mean(0), draws.std(0)
    grid = torch.linspace(0.0, 1.0, GRID)
    between = (grid > 0.2) & (grid < 0.8)
    row = {}
    for place, where in (("beside data", ~between), ("gap", between)):
        gap = (mean - truth)[where]
        row[f"error, {place}"] = float(gap.square().mean().sqrt())
        row[f"stddev, {place}"] = float(stddev[where].mean())
        row[f"coverage, {place}"] = float((gap.abs() < 2.0 * stddev[where]).double().mean())
    return row


def claims(results: Results) -> list[Claim]:
    """Check that the posterior is uncertain where it should be, at no larger error."""
    found = []
    for kind in results.distinct("prior"):
        ours = results.values("coverage, gap", prior=kind, method=BUMPS)
        text = (
            f"Implicit prior of {kind}, `LinearizedKL` and bumps: 2 standard deviations cover the function in the gap"
        )
        numbers = with_error([100.0 * share for share in ours], 0) + " %"
        found.append(Claim(text, "above 80 %", numbers, str(len(ours)), mean(ours) > 0.8))
        errors = [results.values("error, gap", prior=kind, method=method) for method in (BUMPS, STEIN)]
        text = f"Implicit prior of {kind}: the error in the gap is no larger with bumps than with `SteinKL` and tanh"
        numbers = " against ".join(with_error(error, 3) for error in errors)
        found.append(Claim(text, "", numbers, str(len(ours)), not is_below(paired(errors[1], errors[0]))))
    return found


def report(results: Results) -> str:
    """Report scores beside the data and in the gap."""
    lines = []
    for kind, method in itertools.product(results.distinct("prior"), METHODS):
        keys = [f"{score}, {place}" for place in PLACES for score in SCORES]
        cells = (with_error(results.values(key, prior=kind, method=method), 3) for key in keys)
        seconds = mean(results.values("seconds", prior=kind, method=method))
        lines.append([f"{kind}, {method}", *cells, f"{seconds:.0f}"])
    headings = [f"{score}, {place}" for place in PLACES.values() for score in SCORES.values()]
    setting = results.setting
    return f"""### Implicit priors and exact posteriors

The priors are known only by draws: random steps and random straight pieces on [0, 1]. We draw a function from the \
prior and observe 20 points of it on each of [0, 0.2] and [0.8, 1]. Networks train for {setting["steps"]:,} steps; \
they have a layer of 200 bumps of all widths or 2 x 50 tanh units. "exact" is the prior given the data, exact up to a \
grid; "nearest normal" is the nearest normal distribution given the data; "prior" is the prior itself. The table gives \
the error of the mean against the true function, the standard deviation, and the share of the true function within two \
standard deviations (coverage). Seconds are on one thread. All are means and standard errors of \
{len(results.distinct("seed"))} runs (`python -m benchmarks.functional.implicit`).

{markdown_table(["", *headings, "seconds"], lines)}

{results.plot("Posteriors under implicit priors")}"""


def draw(results: Results) -> None:
    """Draws of each prior, and of the posteriors of the first run."""
    figure = Figure(figsize=(3.0 * len(METHODS), 4.4), layout="constrained", dpi=110)
    grid = torch.linspace(0.0, 1.0, GRID)
    kinds = results.distinct("prior")
    axes = figure.subplots(len(kinds), len(METHODS), sharey="row", squeeze=False)
    for (line, kind), (column, method) in itertools.product(enumerate(kinds), enumerate(METHODS)):
        ax, row = axes[line, column], results.where(prior=kind, method=method)[0]
        for function in row["draws"]:
            ax.plot(grid, function, color="tab:blue", lw=0.7)
        if method != PRIOR:
            ax.plot(grid, row["truth"], color="black", lw=1, ls="--")
            ax.plot(row["x"], row["y"], ".", color="black", ms=3)
        ax.set(title=method, ylabel=kind if column == 0 else None)
        ax.spines[["top", "right"]].set_visible(False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
