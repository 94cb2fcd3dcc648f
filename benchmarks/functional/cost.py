# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare the cost of a training step with FunctionalELBO with that of a step with a prior on weights.

python -m benchmarks.functional.cost
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from pyro.contrib.gp.kernels import RBF
from torch import Tensor, nn

from benchmarks.common import BLOCK, Claim, Form, Results, Row, Subjects, keep_pages, main, markdown_table, medians
from benchmarks.functional._training import network
from pyro_radial import AutoMeanField, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.functional import (
    BetweenRows,
    FunctionPrior,
    GaussianKL,
    GaussianProcess,
    LinearizedKL,
    PiecewiseLinear,
    RegularizedKL,
    SteinKL,
    UniformBox,
)
from pyro_radial.functional.elbo import Divergence, FunctionalELBO
from pyro_radial.nn import likelihoods

__all__ = ["claims", "draw", "report", "run"]

NUM_DATA = 20
BASE = (60, 100)
DRAWS = ((60, 50), (60, 200), (60, 400))
POINTS = ((30, 300), (60, 300), (120, 300), (240, 300))
WEIGHTS, LIKELIHOOD, DEFAULT = "weights", "likelihood", "SteinKL()"
LINEARIZED, WEIGHTS_BESIDE = "LinearizedKL()", "weights, 10 draws"
SOME_DATA, RECOMMENDED_POINTS = 25, (50, 100, 150, 250)


class Size(NamedTuple):
    """Points and draws: the base case, more draws at its points, more points at 300 draws; hidden units, and rounds."""

    shapes: tuple[tuple[int, int], ...] = (BASE, *DRAWS, *POINTS)
    width: int = 100
    rounds: int = 8


SIZES = {"default": Size(), "small": Size(((24, 30), (30, 40)), 10, 2)}


def run(output: Path, *, form: Form = "default") -> None:
    """Time training steps, each with the loss, its gradient and Adam, on 20 data, with the guide AutoMeanField.

    The network is 1-100-100-100-100-100-1 with ReLU. The functional loss has a UniformBox with further points, up to
    the number of points in the table. The unit is a step with RadialELBO on the same data, with as many draws at once
    and every KL in closed form. ``likelihood`` is that step without its KL, a lower limit for any loss with as many
    draws; ``over_likelihood`` uses it as the unit. ``divergence_ms`` is the time of the divergence alone, forward and
    backward, at fixed function values; ``share`` is its part of the step.

    The prior is a Gaussian process with noise. Only ``SteinKL(), implicit prior`` uses piecewise linear functions, and
    estimates their score from 500 draws. A case is left out if the divergence needs more draws than it has.

    ``LinearizedKL()`` needs no draws, so it has its own unit. The network is 13-50-50-1 with SiLU, with 25 data and the
    other points between rows. A step with 8 draws for the likelihood is compared with a step with RadialELBO and 10
    draws on the same data.

    All subjects take turns in one run. Only the CPU time of this one thread counts, so other programs on the machine
    have little influence. The allocator keeps its pages.
    """
    torch.set_num_threads(1)
    keep_pages()
    size = SIZES[form]
    setting = {"threads": 1, "rounds": size.rounds, "calls_per_round": BLOCK, "torch": torch.__version__}
    functional = [Case(name, *shape) for shape in size.shapes for name in divergences(*shape)]
    draws = sorted({case.draws for case in functional})
    units = [Case(name, NUM_DATA, number) for name in (LIKELIHOOD, WEIGHTS) for number in draws]
    cases = [*units, *functional]
    results = Results(output, setting)
    results.add_all([asdict(case) for case in cases], lambda: measure(units, functional, size))
    recommended = [asdict(case) for case in recommended_cases()]
    results.add_all(recommended, lambda: measure_recommended(size))


class LikelihoodAlone(RadialELBO):
    """The loss without its KL."""

    def _kls(self, run: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {}, {}


@dataclass(frozen=True)
class Case:
    """What is timed: a divergence by name, or one of the units."""

    subject: str
    points: int
    draws: int


def divergences(points: int, draws: int) -> dict[str, tuple[Divergence, FunctionPrior]]:
    """Those that can be estimated at so many points from so many draws, and the prior of each."""
    process = GaussianProcess(RBF(input_dim=1, lengthscale=torch.tensor(0.5)), noise=0.1)
    found: dict[str, tuple[Divergence, FunctionPrior]] = {"RegularizedKL(1e-3)": (RegularizedKL(1e-3), process)}
    if draws >= points + 3:
        found["GaussianKL()"] = (GaussianKL(), process)
        found["SteinKL()"] = (SteinKL(), process)
        found["SteinKL(), implicit prior"] = (SteinKL(), PiecewiseLinear(-1.0, 1.0))
    return found


def make_loss(case: Case) -> RadialELBO:
    if case.subject in (WEIGHTS, LIKELIHOOD):
        loss = RadialELBO if case.subject == WEIGHTS else LikelihoodAlone
        return loss(case.draws, vectorize_particles=True, strict_kl=True)
    divergence, prior = divergences(case.points, case.draws)[case.subject]
    box = UniformBox(-1.0, 1.0, case.points - NUM_DATA)
    return FunctionalELBO(prior, box, divergence=divergence, num_functions=case.draws)


def make_step(case: Case, width: int) -> Callable[[], None]:
    """A function that makes one training step."""
    pyro.set_rng_seed(0)
    net = network(1, (width,) * 5, nn.ReLU)
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=NUM_DATA, scale=0.1))
    loss = make_loss(case)(model, AutoMeanField(model))
    x = 2.0 * torch.rand(NUM_DATA, 1) - 1.0
    y = (4.0 * x).sin() + 0.1 * torch.randn(NUM_DATA, 1)
    return step_of(loss, x, y)


def step_of(loss: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    loss(x, y)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    return step


def make_divergence(case: Case) -> Callable[[], Any]:
    """A function that computes the divergence of fixed function values, and its gradient in them."""
    pyro.set_rng_seed(0)
    divergence, prior = divergences(case.points, case.draws)[case.subject]
    x = 2.0 * torch.rand(case.points, 1) - 1.0
    # As much like a network's values as draws of another Gaussian process are.
    f = GaussianProcess(RBF(input_dim=1), noise=0.1).sample(x, case.draws).requires_grad_()
    return lambda: torch.autograd.grad(divergence(f, x, prior).surrogate, f)


def recommended_cases() -> list[Case]:
    """The step of a prior on weights, and those of a prior on functions at more and more points."""
    return [Case(WEIGHTS_BESIDE, SOME_DATA, 10), *(Case(LINEARIZED, points, 8) for points in RECOMMENDED_POINTS)]


def make_recommended_step(case: Case) -> Callable[[], None]:
    pyro.set_rng_seed(0)
    x, y = torch.randn(SOME_DATA, 13), torch.randn(SOME_DATA, 1)
    if case.subject == LINEARIZED:
        between = BetweenRows(x, case.points - SOME_DATA)
        process = GaussianProcess(RBF(13), noise=0.01)
        loss: RadialELBO = FunctionalELBO(process, between, divergence=LinearizedKL(), num_functions=case.draws)
    else:
        loss = RadialELBO(case.draws, vectorize_particles=True, strict_kl=True)
    model = SupervisedModel(BayesianModule(network(13, (50, 50), nn.SiLU)), likelihoods.Gaussian(num_data=SOME_DATA))
    return step_of(loss(model, AutoMeanField(model)), x, y)


def measure_recommended(size: Size) -> list[Row]:
    cases = recommended_cases()
    times = medians({f"{case}": make_recommended_step(case) for case in cases}, 3 * size.rounds)
    unit = times[f"{cases[0]}"]
    return [{"median_ms": round(times[f"{c}"], 3), "ratio": round(times[f"{c}"] / unit, 3)} for c in cases]


def measure(units: list[Case], functional: list[Case], size: Size) -> list[Row]:
    subjects: Subjects = {f"{case}": make_step(case, size.width) for case in (*units, *functional)}
    subjects |= {f"{case} alone": make_divergence(case) for case in functional}
    times = medians(subjects, size.rounds)
    return [row_of(case, times) for case in (*units, *functional)]


def row_of(case: Case, times: dict[str, float]) -> Row:
    step = times[f"{case}"]
    row = {"median_ms": round(step, 3)}
    for name, unit in (("ratio", WEIGHTS), ("over_likelihood", LIKELIHOOD)):
        row[name] = round(step / times[f"{Case(unit, NUM_DATA, case.draws)}"], 3)
    alone = times.get(f"{case} alone")
    return row if alone is None else row | {"divergence_ms": round(alone, 3), "share": round(alone / step, 3)}


def claims(results: Results) -> list[Claim]:
    """Compare the step of the recommended form with that of a prior on weights."""
    (row,) = results.where(subject=LINEARIZED, points=RECOMMENDED_POINTS[0])
    text = "A step with `LinearizedKL` at 50 points costs at most twice as much as one with a prior on weights"
    return [Claim(text, "2", f"{row['ratio']:.2f}", str(results.setting["rounds"]), row["ratio"] <= 2.0)]


def report(results: Results) -> str:
    """Report how the cost grows with draws and with points."""
    setting, shapes = results.setting, [(row["points"], row["draws"]) for row in results.rows if "share" in row]
    points, draws = BASE if BASE in shapes else shapes[-1]
    most = max(results.distinct("draws"), key=lambda number: len({p for p, d in shapes if d == number}))
    (base,) = results.where(subject=DEFAULT, points=points, draws=draws)
    (likelihood,) = results.where(subject=LIKELIHOOD, draws=draws)
    rows = [results.where(subject=LINEARIZED, points=number)[0] for number in RECOMMENDED_POINTS]
    (unit,) = results.where(subject=WEIGHTS_BESIDE)
    recommended = [[f"multiple of {unit['median_ms']:.1f} ms", *(f"{row['ratio']:.2f}" for row in rows)]]
    return f"""### Cost of a functional loss

The first two tables give the cost of a training step with `FunctionalELBO` (loss, gradient, Adam), as a multiple of a \
step with `RadialELBO`, strict KL, `vectorize_particles=True` and the same number of draws. Parentheses show the share \
of the divergence in the step. The network is 1-100-100-100-100-100-1, the guide `AutoMeanField`, with 20 data; the \
points are the data and points of a `UniformBox`. Times are medians of {setting["rounds"]} interleaved rounds on one \
thread, with torch {setting["torch"]} (`python -m benchmarks.functional.cost`).

At {draws} draws the likelihood alone, without any KL, costs {likelihood["ratio"]:.2f} of the `RadialELBO` step. The \
base case, `{DEFAULT}` at {points} points, costs {base["over_likelihood"]:.2f} times as much as the likelihood alone. \
A cell is empty if there are too few draws for the divergence. The implicit prior is `PiecewiseLinear`, which is known \
only by 500 draws per step.

By draws, at {points} points:

{growth(results, {"points": points}, "draws")}

By points, at {most} draws:

{growth(results, {"draws": most}, "points")}

`LinearizedKL` computes its moments in closed form. The last table compares it with a prior on weights, on the same \
data: network 13-50-50-1, {SOME_DATA} data, the other points between rows, and 8 draws for the likelihood against 10:

{markdown_table(["points", *map(str, RECOMMENDED_POINTS)], recommended)}

{results.plot("Time of a step by draws and by points")}"""


def growth(results: Results, fixed: dict[str, int], grows: str) -> str:
    """A table of the cases that differ in one number."""
    rows = [row for row in results.where(**fixed) if "share" in row]
    sizes = sorted({row[grows] for row in rows})

    def cell(subject: str, size: int) -> str:
        found = (row for row in rows if (row["subject"], row[grows]) == (subject, size))
        return next((f"{row['ratio']:.2f} ({row['share']:.0%})" for row in found), "")

    subjects = sorted({row["subject"] for row in rows})
    lines = [[f"`{name}`", *(cell(name, size) for size in sizes)] for name in subjects]
    return markdown_table(["", *(f"{size} {grows}" for size in sizes)], lines)


def draw(results: Results) -> None:
    """Ratios of all cases at the points, and at the draws, that most cases have."""
    functional = [row for row in results.rows if "share" in row]
    figure = Figure(figsize=(8, 3), layout="constrained", dpi=110)
    axes = figure.subplots(1, 2, sharey=True)
    for grows, held, ax in (("draws", "points", axes[0]), ("points", "draws", axes[1])):
        common = statistics.mode(row[held] for row in functional)
        for name in sorted({row["subject"] for row in functional}):
            rows = [row for row in functional if (row["subject"], row[held]) == (name, common)]
            rows.sort(key=lambda row: row[grows])
            ax.plot([row[grows] for row in rows], [row["ratio"] for row in rows], marker="o", ms=4, label=name)
        ax.set(title=f"{common} {held}", xlabel=grows)
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("multiple of a RadialELBO step")
    figure.axes[1].legend(frameon=False, fontsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
