# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks under priors that are known by draws alone: steps, and straight pieces (Sun et al., 2019, figure 3).

python -m benchmarks.functional.implicit
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.common import Claim, Job, Results, Row, SizedForm, compute_all, main, markdown_table, with_error
from benchmarks.functional._training import NUM_SAMPLES, function_draws, network, rounded, spread_kinks, train
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

__all__ = ["claims", "draw", "report", "run"]

SCORES = {"error": "error", "stddev": "standard deviation", "coverage": "coverage"}
PLACES = {"beside data": "beside data", "gap": "in the gap"}
PRIORS: dict[str, type[FunctionPrior]] = {"steps": PiecewiseConstant, "pieces": PiecewiseLinear}
NOISE, NUM_POINTS, GRID, SHOWN = 0.02, 40, 201, 8
# Units that change over a tenth of the domain; at PyTorch's start they are nearly linear on [0, 1].
STEEPNESS = 10.0
# Of all weights. From 0.01 the standard deviations in the gap stay far below the errors.
INIT_STDDEV = 0.05
FORMS: dict[str, Row] = {
    "default": {"steps": 2_000, "functions": 150, "lr": 3e-3},
    "small": {"steps": 4, "functions": 90, "lr": 3e-3},
    "paper": {"steps": 20_000, "functions": 500, "lr": 3e-3},
}


def white_noise(stddev: float) -> GaussianProcess:
    """A process of independent values."""
    return GaussianProcess(lambda a, b: a.new_zeros(len(a), len(b)), noise=stddev)


def run(output: Path, *, form: SizedForm = "default", seeds: int = 3, workers: int = 2) -> None:
    """Each run draws a function from the prior, and 20 points of it in [0, 0.2] and 20 in [0.8, 1] with noise of 0.02.

    A network with tanh units is to find what the prior allows between them. Both scores are estimated, the prior's from
    1,000 draws of it; both distributions carry noise of 0.02. Measured against the true function, beside the data and
    in the gap: the root mean square error of the mean, the mean standard deviation, and the share of the true function
    within two standard deviations. ``prior`` is the prior itself, by 10,000 draws.
    """
    setting = {"torch": torch.__version__, **FORMS[form], "num_points": NUM_POINTS, "init_stddev": INIT_STDDEV}
    results = Results(output, setting)
    jobs = [
        Job({"prior": kind, "seed": seed}, score, (kind, seed, form, results.checkpoint(kind, seed)))
        for seed, kind in itertools.product(range(1 if form == "small" else seeds), PRIORS)
    ]
    compute_all(results, jobs, workers)


def score(kind: str, seed: int, form: str, checkpoint: Path) -> Row:
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

    training = {key: setting[key] for key in ("steps", "lr")}
    guide = train(model, (x, y), make_loss, **training, batch_size=40, checkpoint=checkpoint, init_stddev=INIT_STDDEV)
    draws = function_draws(model, guide, grid, NUM_SAMPLES[form])
    row = scores("posterior", draws, truth) | scores(
        "prior", prior.sample(grid, 20 * NUM_SAMPLES[form]).squeeze(-1).double(), truth
    )
    curves = {"draws": [rounded(draw) for draw in draws[:SHOWN]], "truth": rounded(truth)}
    return row | curves | {"x": rounded(x.squeeze(-1)), "y": rounded(y.squeeze(-1))}


@torch.no_grad()
def make_model() -> SupervisedModel:
    net = spread_kinks(network(1, (100, 100), nn.Tanh), 0.0, 1.0)
    for part in (net[0].weight, net[0].bias):
        part.mul_(STEEPNESS)
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(40, scale=NOISE))


def scores(name: str, draws: Tensor, truth: Tensor) -> Row:
    """Of draws ``[S, N]`` on the grid, on both sides and between."""
    mean, stddev = draws.mean(0), draws.std(0)
    grid = torch.linspace(0.0, 1.0, GRID)
    between = (grid > 0.2) & (grid < 0.8)
    row = {}
    for place, where in (("beside data", ~between), ("gap", between)):
        gap = (mean - truth)[where]
        row[f"{name} error, {place}"] = float(gap.square().mean().sqrt())
        row[f"{name} stddev, {place}"] = float(stddev[where].mean())
        row[f"{name} coverage, {place}"] = float((gap.abs() < 2.0 * stddev[where]).double().mean())
    return row


def claims(results: Results) -> list[Claim]:
    """The posterior knows what it does not know."""
    found = []
    for kind in results.distinct("prior"):
        shares = results.values("posterior coverage, gap", prior=kind)
        text = f"Implicit prior of {kind}: 95 % of the true function in the gap are within two standard deviations"
        numbers = with_error([100.0 * share for share in shares], 0) + " %"
        found.append(Claim(text, "figure 3, no numbers", numbers, str(len(shares)), mean(shares) >= 0.95))
    return found


def report(results: Results) -> str:
    """Scores beside the data and in the gap."""
    lines = []
    for kind in results.distinct("prior"):
        for name in ("posterior", "prior"):
            keys = [f"{name} {score}, {place}" for place in PLACES for score in SCORES]
            lines.append([f"{kind}, {name}", *(with_error(results.values(key, prior=kind), 3) for key in keys)])
    headings = [f"{score}, {place}" for place in PLACES.values() for score in SCORES.values()]
    return f"""### Implicit priors

Priors known by draws alone, random steps and random straight pieces on [0, 1]: 20 data on [0, 0.2] and on [0.8, 1] of \
a function of the prior, {results.setting["steps"]:,} steps, 2 x 100 tanh units, `SteinKL`. Error of the mean against \
the true function, standard deviation, share of the true function within two of them; mean and standard error of \
{len(results.distinct("seed"))} runs (`python -m benchmarks.functional.implicit`).

{markdown_table(["", *headings], lines)}

{results.plot("Posteriors under implicit priors")}"""


def draw(results: Results) -> None:
    """Draws of each prior, and of the posterior of each run."""
    runs = len(results.distinct("seed"))
    figure = Figure(figsize=(3.0 * (runs + 1), 4.4), layout="constrained", dpi=110)
    grid = torch.linspace(0.0, 1.0, GRID)
    for kind, line in zip(PRIORS, figure.subplots(len(PRIORS), runs + 1, sharey="row"), strict=True):
        torch.manual_seed(1)
        line[0].plot(grid, PRIORS[kind]().sample(grid[:, None], 4).squeeze(-1).T, lw=1)
        line[0].set(title="prior", ylabel=kind)
        for row in results.where(prior=kind):
            ax = line[1 + row["seed"]]
            for function in row["draws"]:
                ax.plot(grid, function, color="tab:blue", lw=0.7)
            ax.plot(grid, row["truth"], color="black", lw=1, ls="--")
            ax.plot(row["x"], row["y"], ".", color="black", ms=3)
            ax.set_title(f"posterior, run {row['seed'] + 1}")
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
