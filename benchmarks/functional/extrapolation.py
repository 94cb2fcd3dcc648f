# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare networks under a Gaussian process prior with the exact process and mean field (Sun et al., 2019).

python -m benchmarks.functional.extrapolation --data-dir DIR
"""

import csv
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gpytorch.kernels as kernels
import pyro
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.common import Claim, Job, Pair, Results, Row, SizedForm, compute_all, main, markdown_table, with_error
from benchmarks.functional._training import (
    FALLING,
    NUM_SAMPLES,
    function_draws,
    network,
    rounded,
    spread_kinks,
    train,
    weight_space,
)
from pyro_radial import BayesianModule, FunctionalELBO, RadialELBO, SupervisedModel
from pyro_radial.functional import GaussianKL, GaussianProcess, UniformBox
from pyro_radial.functional.gaussian import gaussian_sample
from pyro_radial.nn import likelihoods

__all__ = ["claims", "draw", "report", "run"]

EXACT, FUNCTIONAL, YEARLY = "exact process", "functional", "functional, yearly features"
GRID = 201
# Of a step: at most so many data, and so many further points in the domain.
BATCH_SIZE, NUM_POINTS = 60, 40
# Of all weights. From 0.01 the standard deviations between two groups of data stay far too small.
INIT_STDDEV = 0.03
FORMS: dict[str, Row] = {
    "default": {"steps": 4_000, "functions": 100, "lr": 3e-3, "depth": 2, "width": 100},
    "small": {"steps": 4, "functions": 100, "lr": 3e-3, "depth": 1, "width": 10},
    "paper": {"steps": 80_000, "functions": 150, "lr": 1e-3, "depth": 5, "width": 500},
}
WEIGHT_SPACE = {"mean field": 1.0, "mean field, KL x 0.001": 1e-3}


@dataclass(frozen=True)
class Task:
    """Data with their domain, and the kernel of a prior."""

    #: Training data, and data to be predicted, which may be none.
    data: Callable[[Path, torch.Generator], tuple[Pair, Pair]]
    domain: tuple[float, float]
    #: By the unit of standardized inputs.
    kernel: Callable[[float], kernels.Kernel]
    #: The standard deviation of the targets' noise, or None where the process is to find it.
    noise: float | None
    #: That of function values, standardized. The fewer directions a prior leaves open, the more of it a network needs
    #: to be trained at all; where the posterior is narrower than this noise, less of its width is seen.
    prior_noise: float
    #: See :func:`benchmarks.functional._training.train`.
    rates: Sequence[tuple[float, float]] = FALLING
    more_steps: int = 1


def two_sides(generator: torch.Generator, low: float, high: float) -> Tensor:
    """20 points ``[20, 1]`` at distances between two numbers from zero, on both sides."""
    distance = low + (high - low) * torch.rand(20, 1, generator=generator)
    return distance * (1.0 - 2.0 * torch.randint(2, (20, 1), generator=generator))


def sine(data_dir: Path, generator: torch.Generator) -> tuple[Pair, Pair]:
    x = two_sides(generator, 0.5, 2.0)
    return (x, 2.0 * (4.0 * x).sin() + 0.2 * torch.randn(20, 1, generator=generator)), (x[:0], x[:0])


def cube(data_dir: Path, generator: torch.Generator) -> tuple[Pair, Pair]:
    x = two_sides(generator, 1.0, 4.0)
    return (x, x**3 + 3.0 * torch.randn(20, 1, generator=generator)), (x[:0], x[:0])


def carbon_dioxide(data_dir: Path, generator: torch.Generator) -> tuple[Pair, Pair]:
    with (data_dir / "timeseries" / "co2_mauna_loa_monthly.csv").open() as file:
        rows = [(float(row["decimal_date"]), float(row["average"])) for row in csv.DictReader(file)]
    x, y = torch.tensor(rows).T.unsqueeze(-1)
    train, later = ((first <= x[:, 0]) & (x[:, 0] < last) for first, last in ((2006, 2016), (2016, 2021)))
    return (x[train], y[train]), (x[later], y[later])


def rbf(unit: float) -> kernels.Kernel:
    return kernels.ScaleKernel(kernels.RBFKernel())


def periodic_and_rbf(unit: float) -> kernels.Kernel:
    periodic = kernels.PeriodicKernel()
    periodic.period_length = 1.5 / unit
    return kernels.ScaleKernel(periodic) + kernels.ScaleKernel(kernels.RBFKernel())


def linear_and_rbf(unit: float) -> kernels.Kernel:
    return kernels.LinearKernel() + kernels.ScaleKernel(kernels.RBFKernel())


def trend_and_season(unit: float) -> kernels.Kernel:
    """A trend, and a yearly wave whose form may change slowly."""
    periodic, slow, trend = kernels.PeriodicKernel(), kernels.RBFKernel(), kernels.RBFKernel()
    periodic.period_length = 1.0 / unit
    periodic.raw_period_length.requires_grad_(False)
    slow.lengthscale, trend.lengthscale = 20.0 / unit, 10.0 / unit
    season = kernels.ScaleKernel(periodic * slow)
    season.outputscale = 0.1
    return kernels.LinearKernel() + kernels.ScaleKernel(trend) + season


TASKS = {
    "sin, RBF": Task(sine, (-5.0, 5.0), rbf, 0.2, 0.05),
    "sin, PER + RBF": Task(sine, (-5.0, 5.0), periodic_and_rbf, 0.2, 0.15),
    "cube": Task(cube, (-6.0, 6.0), linear_and_rbf, 3.0, 0.05),
    "co2": Task(carbon_dioxide, (2006.0, 2021.0), trend_and_season, None, 0.1, ((0.4, 5), (0.3, 1.5), (0.3, 0.25)), 2),
}


@dataclass(frozen=True)
class Problem:
    """A task's data in the units that networks and processes see."""

    train: Pair
    later: Pair
    grid: Tensor
    noise: float | None
    prior_noise: float
    unit: float
    unit_of_inputs: float

    @property
    def domain(self) -> tuple[float, float]:
        """The ends of the grid."""
        return float(self.grid[0]), float(self.grid[-1])


def standardized(task: Task, data_dir: Path, seed: int) -> Problem:
    train, later = task.data(data_dir, torch.Generator().manual_seed(seed))
    (x_mean, y_mean), (x_unit, y_unit) = ([float(f(v)) for v in train] for f in (torch.mean, torch.std))

    def scaled(pair: Pair) -> Pair:
        return (pair[0] - x_mean) / x_unit, (pair[1] - y_mean) / y_unit

    grid = (torch.linspace(*task.domain, GRID)[:, None] - x_mean) / x_unit
    noise = None if task.noise is None else task.noise / y_unit
    return Problem(scaled(train), scaled(later), grid, noise, task.prior_noise, y_unit, x_unit)


def run(output: Path, *, data_dir: Path, form: SizedForm = "default", seeds: int = 3, workers: int = 2) -> None:
    """Train on four tasks; ``seeds`` applies to the two tasks with a sine.

    ``sin``: 20 points of 2 sin(4x) with noise of 0.2 in [-2, -0.5] and [0.5, 2], under an RBF kernel and under a
    periodic plus an RBF kernel (section 5.1 and figure 2). ``cube``: 20 points of x^3 with noise of 3 in [-4, -1] and
    [1, 4] under a linear plus an RBF kernel, with networks of several sizes (figure 1). ``co2``: monthly means of
    carbon dioxide at Mauna Loa from 2006 to 2015, and the five years after (appendix C.2).

    The prior of the network is a Gaussian process, fitted to the data by marginal likelihood. Scores are measured on an
    even grid over the whole domain. ``error`` is the root mean square difference of the means in standard deviations of
    the prior; ``ratio`` is the mean ratio of the standard deviations of the function. ``mean field`` has standard
    normal priors on weights instead, with the full KL or 0.001 times the KL.

    Inputs and targets are standardized. The noise is known, except for co2, where it is fitted with the process. A ReLU
    network does not continue waves beyond the data, so ``functional, yearly features`` also gets the sine and cosine of
    one and two waves per year, with the same prior. Batches have at most 60 data, with 40 more points in the domain.
    co2 has thirty bends to learn, so it takes twice the steps and starts at five times the rate. The paper's size is 5
    layers of 500 and 80,000 steps.
    """
    common = {
        "prior_noise": [task.prior_noise for task in TASKS.values()],
        "rates": [[list(phase) for phase in task.rates] for task in TASKS.values()],
        "more_steps": [task.more_steps for task in TASKS.values()],
        "batch_size": BATCH_SIZE,
        "num_points": NUM_POINTS,
        "init_stddev": INIT_STDDEV,
    }
    results = Results(output, {"torch": torch.__version__, **FORMS[form], **common})
    jobs = []
    for name, method, hidden, seed in cases(form, seeds):
        keys = {"task": name, "method": method, "net": described(hidden), "seed": seed}
        jobs.append(Job(keys, compare, (data_dir, name, method, hidden, seed, form, results.checkpoint("runs"))))
    compute_all(results, jobs, workers)
    for name in results.distinct("task"):
        results.add({"data": name}, lambda name=name: shown(standardized(TASKS[name], data_dir, 0)))


def cases(form: str, seeds: int) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Task, method, hidden layers and seed of each row: the cube, and nothing else, by networks of several sizes."""
    depth, width = FORMS[form]["depth"], FORMS[form]["width"]
    names, more = tuple(TASKS), ((width,), (width,) * 5, (2 * width,) * 2)
    if form == "small":
        names, more, seeds = ("cube", "co2"), ((width,) * 2,), 1
    found = []
    for name, seed in itertools.product(names, range(seeds)):
        if name in ("cube", "co2") and seed:
            continue
        found.append((name, EXACT, (), seed))
        yearly = (YEARLY,) if name == "co2" else ()
        found += [(name, method, (width,) * depth, seed) for method in (FUNCTIONAL, *yearly, *WEIGHT_SPACE)]
    for sizes in more:
        found += [("cube", method, sizes, 0) for method in (FUNCTIONAL, *WEIGHT_SPACE)]
    return found


def described(hidden: tuple[int, ...]) -> str:
    """Layers times units."""
    return f"{len(hidden)} x {hidden[0]}" if hidden else ""


def shown(problem: Problem) -> Row:
    """What a plot shows of the data: inputs and targets, and the ends of the grid."""
    pairs = {"train": problem.train, "later": problem.later}
    return {name: [rounded(part.squeeze(-1)) for part in pair] for name, pair in pairs.items()} | {
        "domain": list(problem.domain)
    }


def fitted_prior(task: Task, problem: Problem, steps: int) -> GaussianProcess:
    prior = GaussianProcess(task.kernel(problem.unit_of_inputs))
    prior.fit(*problem.train, steps=steps, observation_noise=problem.noise)
    return prior


def compare(data_dir: Path, name: str, method: str, hidden: tuple[int, ...], seed: int, form: str, folder: Path) -> Row:
    """A method's scores, and its mean, standard deviations and three draws on the grid."""
    task, setting = TASKS[name], FORMS[form]
    problem = standardized(task, data_dir, seed)
    pyro.set_rng_seed(seed)
    prior = fitted_prior(task, problem, min(1_000, setting["steps"]))
    points = torch.cat([problem.grid, problem.later[0]])
    mean, covariance = prior.posterior(*problem.train, points)
    exact = mean.squeeze(-1), covariance[0].diagonal().clamp_min(0.0).sqrt()
    started = time.perf_counter()
    if method == EXACT:
        draws = gaussian_sample(mean, covariance, num_samples=500).squeeze(-1)
        moments = exact
    else:
        # Weight space sees no kernel: what it is trained on the same data for one task serves another.
        what = name if method in (FUNCTIONAL, YEARLY) else task.data.__name__
        checkpoint = folder / "-".join([what, *map(str, hidden), method, str(seed)]).replace(" ", "_")
        more = {"steps": task.more_steps * setting["steps"], "rates": task.rates}
        draws = posterior_draws(problem, prior, method, hidden, points, setting | more, checkpoint, NUM_SAMPLES[form])
        moments = draws.mean(0), draws.std(0)
    row: Row = {"seconds": time.perf_counter() - started}
    prior_stddev = prior.moments(problem.grid)[1][0].diagonal().sqrt()
    row["error"] = float(((moments[0] - exact[0])[:GRID] / prior_stddev).square().mean().sqrt())
    row["ratio"] = float((moments[1] / exact[1])[:GRID].mean())
    if len(problem.later[0]):
        noise = float(prior.observation_noise)
        row |= prediction(problem, moments[0][GRID:], (moments[1][GRID:].square() + noise**2).sqrt())
    row |= {key: rounded(value[:GRID]) for key, value in zip(("mean", "stddev"), moments, strict=True)}
    return row | {"draws": [rounded(draw[:GRID]) for draw in draws[:3]]}


def prediction(problem: Problem, mean: Tensor, stddev: Tensor) -> Row:
    """Root mean square error in the targets' units, and the share of targets in central intervals of 95 %."""
    gap = (mean - problem.later[1].squeeze(-1)).abs()
    return {
        "rmse": problem.unit * float(gap.square().mean().sqrt()),
        "coverage": float((gap < 1.96 * stddev).double().mean()),
    }


class YearlyWaves(nn.Module):
    """Times ``[N, 1]`` to the time, and sines and cosines of one and two waves a year, ``[N, 5]``."""

    def __init__(self, years: float) -> None:
        super().__init__()
        self.years = years

    def forward(self, x: Tensor) -> Tensor:
        angles = [2.0 * torch.pi * self.years * number * x for number in (1, 2)]
        return torch.cat([x, *(wave(angle) for angle in angles for wave in (torch.sin, torch.cos))], -1)


def network_of(problem: Problem, hidden: tuple[int, ...], yearly: bool) -> nn.Sequential:
    """ReLU units, of the time or of waves too."""
    if yearly:
        return nn.Sequential(YearlyWaves(problem.unit_of_inputs), *network(5, hidden, nn.ReLU))
    return spread_kinks(network(1, hidden, nn.ReLU), *problem.domain)


def posterior_draws(
    problem: Problem,
    prior: GaussianProcess,
    method: str,
    hidden: tuple[int, ...],
    points: Tensor,
    setting: Row,
    checkpoint: Path,
    num_samples: int,
) -> Tensor:
    """Draws ``[S, N]`` at points from the posterior of a network trained by a method."""
    net = network_of(problem, hidden, yearly=method == YEARLY)
    num_data = len(problem.train[0])
    likelihood = likelihoods.Gaussian(num_data=num_data, scale=float(prior.observation_noise))
    model = SupervisedModel(BayesianModule(net), likelihood)
    batch_size = min(BATCH_SIZE, num_data)
    box = UniformBox(*([end] for end in problem.domain), num_points=NUM_POINTS)
    noisy = GaussianProcess(prior.kernel, noise=problem.prior_noise)
    # More than the values that are compared at once.
    num_functions = max(setting["functions"], batch_size + NUM_POINTS + 40)

    def functional(kl_weight: Callable[[int], float]) -> RadialELBO:
        return FunctionalELBO(noisy, box, divergence=GaussianKL(), num_functions=num_functions, kl_weight=kl_weight)

    guide = train(
        model,
        problem.train,
        functional if method in (FUNCTIONAL, YEARLY) else weight_space,
        steps=setting["steps"],
        lr=setting["lr"],
        rates=setting["rates"],
        batch_size=batch_size,
        checkpoint=checkpoint,
        kl_weight=WEIGHT_SPACE.get(method, 1.0),
        init_stddev=INIT_STDDEV,
    )
    return function_draws(model, guide, points, num_samples)


def claims(results: Results) -> list[Claim]:
    """Compare functional networks with the same networks under priors on weights, by task."""
    found = []
    usual = described((results.setting["width"],) * results.setting["depth"])
    for task in results.distinct("task"):
        methods = (FUNCTIONAL, *WEIGHT_SPACE)
        ours, *others = (results.values("error", task=task, method=method, net=usual) for method in methods)
        text = (
            f"Task {task}: the mean is closer to the exact process with a functional prior than with priors on weights"
        )
        numbers = f"{with_error(ours, 3)} against {' and '.join(with_error(values, 3) for values in others)}"
        held = all(sum(ours) < sum(values) for values in others)
        found.append(Claim(text, "figures, no numbers", numbers, str(len(ours)), held))
    for method in (FUNCTIONAL, YEARLY):
        ours, exact = (results.where(task="co2", method=name)[0] for name in (method, EXACT))
        text = (
            f"Task co2, {method}: over the next five years the error is at most 1.2 times that of the exact process, "
            "and coverage is no worse"
        )
        numbers = (
            f"{ours['rmse']:.2f} against {exact['rmse']:.2f} ppm, {ours['coverage']:.0%} and {exact['coverage']:.0%}"
        )
        held = ours["rmse"] <= 1.2 * exact["rmse"] and ours["coverage"] >= exact["coverage"]
        found.append(Claim(text, "1.2", numbers, "1", held))
    return found


def report(results: Results) -> str:
    """Report errors and ratios by task, method and size."""
    setting, lines = results.setting, []
    tasks = results.distinct("task")
    for task, method, net in sorted(results.distinct("task", "method", "net"), key=lambda key: tasks.index(key[0])):
        own = results.where(task=task, method=method, net=net)
        cells = [with_error([row[key] for row in own], 3) for key in ("error", "ratio")]
        if method == EXACT:
            cells = ["", ""]
        later = [f"{own[0]['rmse']:.2f} / {own[0]['coverage']:.0%}" if "rmse" in own[0] else ""]
        lines.append([task, f"{method} {net}".strip(), *cells, *later, str(len(own))])
    return f"""### Functional priors and exact processes

Networks with a Gaussian process as their prior are compared with weight-space mean field (standard normal priors, \
with the full KL or with 0.001 times the KL). All networks use ReLU and train for {setting["steps"]:,} steps of Adam \
at {setting["lr"]:g}, with a tenth of that rate in the last 30 %. The carbon dioxide series takes twice as many steps \
and starts at five times that rate (`python -m benchmarks.functional.extrapolation --data-dir DIR`). "error" is the \
root mean square difference between the posterior means of the method and of the exact process over the whole domain, \
in standard deviations of the prior. "ratio" is the mean ratio of the standard deviations. For the carbon dioxide \
series, "later" gives the root mean square error in ppm and the coverage of 95 % intervals in the five years after the \
data.

{markdown_table(["", "", "error", "ratio", "later", "seeds"], lines)}

{results.plot("Posteriors and the exact processes")}

The cube, with networks of several sizes:

{results.plot("Posteriors of the cube by size", "sizes")}"""


def draw(results: Results) -> None:
    """Of the first seed: the exact process and all methods for each task, and each method by size for the cube."""
    usual = described((results.setting["width"],) * results.setting["depth"])
    tasks = {
        task: [row for row in results.where(task=task, seed=0) if row["net"] in ("", usual)]
        for task in results.distinct("task")
    }
    results.save_plot(panels(results, tasks, "method"))
    cube = sorted((row for row in results.where(task="cube", seed=0) if row["net"]), key=lambda row: row["net"])
    methods = {method: [row for row in cube if row["method"] == method] for method in (FUNCTIONAL, *WEIGHT_SPACE)}
    results.save_plot(panels(results, methods, "net"), "sizes")


def panels(results: Results, lines: dict[str, list[Row]], title: str) -> Figure:
    """A line of panels for each name, each with what its row says under ``title``."""
    columns = max(len(own) for own in lines.values())
    figure = Figure(figsize=(2.6 * columns, 2.1 * len(lines)), layout="constrained", dpi=110)
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for (name, own), line in zip(lines.items(), axes, strict=True):
        for row, ax in zip(own, line, strict=False):
            draw_posterior(ax, results.where(data=row["task"])[0], row)
            ax.set_title(row[title], fontsize=9)
        for ax in line[len(own) :]:
            ax.set_axis_off()
        line[0].set_ylabel(name, fontsize=9)
    return figure


def draw_posterior(ax: Axes, data: Row, row: Row) -> None:
    """Mean, two standard deviations and draws of a row, with the data."""
    grid, mean, stddev = torch.linspace(*data["domain"], GRID), torch.tensor(row["mean"]), torch.tensor(row["stddev"])
    ax.fill_between(grid, mean - 2 * stddev, mean + 2 * stddev, color="tab:blue", alpha=0.2, lw=0)
    for function in row["draws"]:
        ax.plot(grid, function, color="tab:blue", lw=0.5, alpha=0.7)
    ax.plot(grid, mean, color="tab:blue", lw=1.5)
    ax.plot(*data["train"], ".", color="black", ms=4)
    ax.plot(*data["later"], ".", color="tab:red", ms=2)
    width = 1.3 * max(abs(target) for pair in (data["train"], data["later"]) for target in pair[1])
    ax.set(ylim=(-width, width), xticks=[], yticks=[])
    ax.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(run, report, draw)
