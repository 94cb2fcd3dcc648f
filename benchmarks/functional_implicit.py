# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks under priors that are known by draws alone: steps, and straight pieces (Sun et al., 2019, figure 3).

Each run draws a function from the prior, and 20 points of it in [0, 0.2] and 20 in [0.8, 1] with noise of 0.02; a
network with tanh units is to find what the prior allows between them. Both scores are estimated, the prior's from
1,000 draws of it; both laws carry noise of 0.02. Measured against the true function, beside the data and in the gap:
the root mean square error of the mean, the mean standard deviation, and the share of the true function within two
standard deviations. ``prior`` is the prior itself, by 10,000 draws.

    python benchmarks/functional_implicit.py            # 2 layers of 100, 2,000 steps, three runs of each prior
    python benchmarks/functional_implicit.py --small    # a few steps
    python benchmarks/functional_implicit.py --paper    # 20,000 steps with 500 functions
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import pyro
import torch
from common import Job, Row, Table, compute_all, form_of, mean_and_error
from functional_runs import function_draws, network, rounded, spread_kinks, train
from matplotlib.figure import Figure
from torch import Tensor, nn

from pyro_radial import BayesianModule, FunctionalELBO, SupervisedModel
from pyro_radial.functional import (
    FunctionPrior,
    GaussianProcess,
    PiecewiseConstant,
    PiecewiseLinear,
    SteinKL,
    Sum,
    UniformBox,
)
from pyro_radial.nn import likelihoods

PRIORS: dict[str, type[FunctionPrior]] = {"steps": PiecewiseConstant, "pieces": PiecewiseLinear}
NOISE, NUM_POINTS, GRID, SHOWN = 0.02, 40, 201, 8
# Units that change over a tenth of the domain; at PyTorch's start they are nearly linear on [0, 1].
STEEPNESS = 10.0
# Of all weights. From 0.01 the deviations in the gap stay far below the errors.
INIT_SCALE = 0.05
FORMS: dict[str, Row] = {
    "default": {"steps": 2_000, "functions": 150, "lr": 3e-3},
    "small": {"steps": 30, "functions": 100, "lr": 3e-3},
    "paper": {"steps": 20_000, "functions": 500, "lr": 3e-3},
}


def white_noise(stddev: float) -> GaussianProcess:
    """A process of independent values."""
    return GaussianProcess(lambda a, b: a.new_zeros(len(a), len(b)), noise=stddev)


def run(kind: str, seed: int, form: str) -> Row:
    """The scores of the posterior of one run, and what is drawn of it."""
    setting = FORMS[form]
    pyro.set_rng_seed(seed)
    prior = PRIORS[kind]()
    sides = 0.2 * torch.rand(40, 1)
    x, grid = torch.cat([sides[:20], 0.8 + sides[20:]]), torch.linspace(0.0, 1.0, GRID)[:, None]
    values = prior.sample(torch.cat([x, grid]), 1)[0]
    y, truth = values[:40] + NOISE * torch.randn(40, 1), values[40:].squeeze(-1).double()
    model = make_model()
    noisy = Sum([prior, white_noise(NOISE)])
    box = UniformBox([0.0], [1.0], NUM_POINTS)

    def make_loss(kl_weight: Callable[[int], float]) -> FunctionalELBO:
        divergence, functions = SteinKL(num_prior_samples=1_000), setting["functions"]
        return FunctionalELBO(noisy, box, divergence=divergence, num_functions=functions, kl_weight=kl_weight)

    checkpoint = f"functional_implicit_{form}_{kind}_{seed}"
    training = {key: setting[key] for key in ("steps", "lr")}
    guide = train(model, (x, y), make_loss, **training, batch_size=40, checkpoint=checkpoint, init_scale=INIT_SCALE)
    draws = function_draws(model, guide, grid)
    row = scores("posterior", draws, truth) | scores("prior", prior.sample(grid, 10_000).squeeze(-1).double(), truth)
    curves = {"draws": [rounded(draw) for draw in draws[:SHOWN]], "truth": rounded(truth)}
    return row | curves | {"x": rounded(x.squeeze(-1)), "y": rounded(y.squeeze(-1))}


@torch.no_grad()
def make_model() -> SupervisedModel:
    net = spread_kinks(network(1, (100, 100), nn.Tanh), 0.0, 1.0)
    for part in (net[0].weight, net[0].bias):
        part.mul_(STEEPNESS)
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(40, scale=NOISE))


def scores(law: str, draws: Tensor, truth: Tensor) -> Row:
    """Of draws ``[S, N]`` on the grid, on both sides and between."""
    mean, stddev = draws.mean(0), draws.std(0)
    grid = torch.linspace(0.0, 1.0, GRID)
    between = (grid > 0.2) & (grid < 0.8)
    row = {}
    for place, where in (("beside data", ~between), ("gap", between)):
        gap = (mean - truth)[where]
        row[f"{law} error, {place}"] = float(gap.square().mean().sqrt())
        row[f"{law} deviation, {place}"] = float(stddev[where].mean())
        row[f"{law} coverage, {place}"] = float((gap.abs() < 2.0 * stddev[where]).double().mean())
    return row


def picture(rows: list[Row], path: Path) -> None:
    """Draws of each prior, and of the posterior of each run."""
    runs = 1 + max(row["seed"] for row in rows)
    figure = Figure(figsize=(3.0 * (runs + 1), 4.4), layout="constrained", dpi=110)
    grid = torch.linspace(0.0, 1.0, GRID)
    for kind, line in zip(PRIORS, figure.subplots(len(PRIORS), runs + 1, sharey="row"), strict=True):
        torch.manual_seed(1)
        line[0].plot(grid, PRIORS[kind]().sample(grid[:, None], 4).squeeze(-1).T, lw=1)
        line[0].set(title="prior", ylabel=kind)
        for row in (row for row in rows if row["prior"] == kind):
            ax = line[1 + row["seed"]]
            for draw in row["draws"]:
                ax.plot(grid, draw, color="tab:blue", lw=0.7)
            ax.plot(grid, row["truth"], color="black", lw=1, ls="--")
            ax.plot(row["x"], row["y"], ".", color="black", ms=3)
            ax.set_title(f"posterior, run {row['seed'] + 1}")
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true")
    size.add_argument("--paper", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    form, output = form_of(args, "functional_implicit")
    table = Table(
        output, {"torch": torch.__version__, **FORMS[form], "num_points": NUM_POINTS, "init_scale": INIT_SCALE}
    )
    runs = 1 if form == "small" else 3
    jobs = [Job({"prior": kind, "seed": seed}, run, (kind, seed, form)) for seed in range(runs) for kind in PRIORS]
    rows = compute_all(table, jobs, args.workers, threads=1)
    for kind in PRIORS:
        own = [row for row in rows if row["prior"] == kind]
        for score in (key for key in own[0] if key.startswith(("posterior", "prior "))):
            print(f"{kind:8s} {score:34s} {mean_and_error([row[score] for row in own])}")
    picture(rows, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
