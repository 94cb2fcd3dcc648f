# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Bayesian optimization of functions drawn from Gaussian processes, and of two standard functions.

python -m benchmarks.decisions.optimization
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin, Hartmann
from matplotlib.figure import Figure
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.optim import Adam

from benchmarks.common import FIRST_SEED, Claim, Form, Job, Results, Row, compute_all, main, markdown_table, perceptron
from benchmarks.decisions._guides import GUIDES, mean_of, mean_ranks
from benchmarks.decisions._surrogates import (
    GaussianProcessSurrogate,
    LaplaceSurrogate,
    NetworkSurrogate,
    RandomFeatures,
    Surrogate,
    max_value_entropy,
    thompson,
)
from pyro_radial import BayesianModule, FunctionalELBO, SupervisedModel
from pyro_radial.functional import GaussianProcess, LinearizedKL, UniformBox, init_to_prior
from pyro_radial.functional.gaussian import cholesky
from pyro_radial.nn import likelihoods

OURS, WEIGHTS, GP, CHANCE = "functional radial", "mean field", "Gaussian process", "random"
LAPLACE = "function-space Laplace"
SURROGATES = (LAPLACE, OURS, "functional mean field", "radial", WEIGHTS, "random features", GP)
ACQUISITIONS = {"Thompson": thompson, "MES": max_value_entropy}
#: Surrogates that run with every acquisition function; the others run with the first one only.
COMPARED = (OURS, WEIGHTS, GP)


class Problem(NamedTuple):
    """A function to maximize, its bounds and its maximum."""

    objective: Callable[[Tensor], Any]
    bounds: list[list[float]]
    maximum: float
    #: Prior of functional posteriors, in the units of the surrogate.
    kernel: Callable[[Tensor, Tensor], Tensor]
    standardize: bool


class Size(NamedTuple):
    """Number of evaluations, and amount of training."""

    problems: tuple[str, ...] = ("RBF", "Matern 1/2", "ArcCosine", "Branin", "Hartmann 6")
    surrogates: tuple[str, ...] = SURROGATES
    acquisitions: tuple[str, ...] = ("Thompson", "MES")
    evaluations: int = 30
    initial: int = 5
    layers: int = 2
    width: int = 100
    widths: tuple[int, ...] = (50, 100, 500)
    steps: int = 40
    batch_size: int = 32
    points: int = 10
    functions: int = 8
    knots: int = 1000
    learning_rate: float = 0.01
    compile: bool = True
    #: Of function-space Laplace: points in the cube, and steps of a refit.
    laplace_points: int = 100
    laplace_steps: int = 20


SIZES = {
    "default": Size(),
    "small": Size(("RBF",), (LAPLACE, *COMPARED), ("Thompson",), 5, 4, 1, 5, (5,), 2, 8, 4, 4, 30, 0.01, False, 5, 2),
}
#: Initial standard deviation of functional posteriors. We compared 0.01, and 0.1 with two learning rates, on 30 points
#: of a draw with seed 0. This value with the rate above came closest to the exact posterior: 0.61 of its standard
#: deviation at new inputs; 0.01 with a third of the rate has 0.12.
FUNCTIONAL_STDDEV = 0.1
DRAWN = ("RBF", "Matern 1/2", "ArcCosine")
NUM_INPUTS = 3
LENGTHSCALE = 0.3
NOISE = 0.05


def run(output: Path, *, form: Form = "default", seeds: int = 10, workers: int = 2, threads: int = 1) -> None:
    """Use networks of two layers of 100, and 40 steps of Adam after each evaluation; test seeds start at 10.

    All methods run seed by seed, so an interrupted run has fewer seeds, and more can be added later. To fit into an
    hour and a half on two cores, we cut three layers, 300 steps per evaluation, 20 points and 20 functions in the
    divergence, a width of 200, and MES for surrogates that the claims do not compare. Function-space Laplace has SiLU
    units, chosen on evaluations of the first function with another seed, and takes 40 minutes more. It
    has Thompson alone.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    cells = [(p, CHANCE, "none", size.width) for p in size.problems]
    cells += [
        (p, s, a, size.width)
        for p in size.problems
        for a in size.acquisitions
        for s in size.surrogates
        if s in COMPARED or a == size.acquisitions[0]
    ]
    cells += [(p, s, size.acquisitions[0], w) for p in size.problems[:1] for s in (OURS, WEIGHTS) for w in size.widths]
    jobs = []
    for seed in range(FIRST_SEED, FIRST_SEED + (seeds if form == "default" else 1)):
        for problem, method, acquisition, width in dict.fromkeys(cells):
            keys = {"problem": problem, "method": method, "acquisition": acquisition, "width": width, "seed": seed}
            jobs.append(Job(keys, optimized, (keys, size)))
    compute_all(results, jobs, workers, threads)


def optimized(keys: Row, size: Size) -> Row:
    """One optimization; all methods of a seed have the same function and the same first points."""
    problem = problem_of(keys["problem"], keys["seed"], size.knots)
    torch.manual_seed(keys["seed"])
    surrogate = None if keys["method"] == CHANCE else surrogate_of(keys["method"], keys["width"], problem, size)
    low, high = torch.tensor(problem.bounds, dtype=torch.double)
    x, y, seconds = torch.zeros(0, len(low)).double(), torch.zeros(0).double(), 0.0
    for number in range(size.evaluations):
        before = time.monotonic()
        # Numbers from the seed and the evaluation alone, so that all methods have the same first points.
        pyro.set_rng_seed(int(np.random.SeedSequence([keys["seed"], number]).generate_state(1)[0]))
        if surrogate is None or number < size.initial:
            point = torch.rand(len(low), dtype=torch.double)
        else:
            surrogate.refit(x, (standardized(y) if problem.standardize else y).unsqueeze(1))
            point = proposed(surrogate, keys["acquisition"], len(low))
        seconds += time.monotonic() - before
        value = problem.objective((low + (high - low) * point).clamp(low, high))
        x, y = torch.cat([x, point.unsqueeze(0)]), torch.cat([y, y.new_tensor([float(value)])])
    regret = problem.maximum - y.cummax(0).values
    proposals = max(1, size.evaluations - size.initial)
    return {
        "regret": float(regret[-1]),
        "seconds": seconds,
        "seconds_per_proposal": seconds / proposals,
        "steps_per_proposal": (0 if surrogate is None else surrogate.gradient_steps) / proposals,
        "curve": [round(value, 6) for value in regret.tolist()],
    }


def standardized(y: Tensor) -> Tensor:
    spread = y.std(correction=0)
    return (y - y.mean()) / torch.where(spread > 0, spread, 1.0)


def proposed(surrogate: Surrogate, acquisition: str, num_inputs: int) -> Tensor:
    """The point of the unit cube where the acquisition function is largest."""
    cube = torch.tensor([[0.0] * num_inputs, [1.0] * num_inputs], dtype=torch.double)
    function = ACQUISITIONS[acquisition](surrogate, num_inputs)
    with warnings.catch_warnings():
        # BoTorch warns of line searches that end early, and then takes the best point found or starts again.
        warnings.simplefilter("ignore")
        found, _ = optimize_acqf(function, cube, q=1, num_restarts=4, raw_samples=64)
    point: Tensor = found[0].detach()
    return point


def problem_of(name: str, seed: int, knots: int) -> Problem:
    if name in DRAWN:
        return drawn(name, seed, knots)
    function: Any = Branin(negate=True) if name == "Branin" else Hartmann(dim=6, negate=True)
    function = function.double()
    return Problem(function, function.bounds.tolist(), float(function.optimal_value), rbf, True)


@cache
def drawn(name: str, seed: int, knots: int) -> Problem:
    """Make a function through a draw of a Gaussian process at random points, and find its maximum in the cube."""
    kernel = KERNELS[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(knots, NUM_INPUTS, generator=generator, dtype=torch.double)
    factor = cholesky(kernel(x, x))
    f = factor @ torch.randn(knots, 1, generator=generator, dtype=torch.double)
    weights = torch.cholesky_solve(f, factor)

    def objective(point: Tensor) -> Tensor:
        return (kernel(point.reshape(-1, NUM_INPUTS), x) @ weights).squeeze()

    others = torch.rand(20 * knots, NUM_INPUTS, generator=generator, dtype=torch.double)
    maximum = highest(objective, torch.cat([x, others]))
    return Problem(objective, [[0.0] * NUM_INPUTS, [1.0] * NUM_INPUTS], maximum, kernel, False)


def highest(objective: Callable[[Tensor], Tensor], points: Tensor) -> float:
    """Find the largest value in the unit cube, possibly in a corner, by L-BFGS from the best points."""
    values = torch.cat([objective(part) for part in points.split(1000)])

    def descent(point: Any) -> tuple[float, Any]:
        x = torch.tensor(point, requires_grad=True)
        value = -objective(x)
        return float(value.detach()), torch.autograd.grad(value, x)[0].numpy()

    best = points[values.topk(20).indices].numpy()
    ends = [minimize(descent, start, jac=True, method="L-BFGS-B", bounds=[(0.0, 1.0)] * NUM_INPUTS) for start in best]
    return max(float(values.max()), *(-float(end.fun) for end in ends))


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(1) - b.unsqueeze(0)).square().sum(-1)


def rbf(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-0.5 * squared_distance(a, b) / LENGTHSCALE**2)


def matern12(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-squared_distance(a, b).clamp_min(1e-20).sqrt() / LENGTHSCALE)


def arc_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Arc-cosine kernel of order one with a bias, of points scaled from [0, 1] to [-3, 3], with variance about one."""
    a, b = (torch.cat([6.0 * x - 3.0, torch.ones_like(x[:, :1])], 1) for x in (a, b))
    norms = a.norm(dim=1, keepdim=True) * b.norm(dim=1)
    # The angle between a point and itself would have an infinite gradient.
    cosine = (a @ b.mT / norms).clamp(-1.0 + 1e-12, 1.0 - 1e-12)
    angle = cosine.arccos()
    return norms * (angle.sin() + (math.pi - angle) * cosine) / (10.0 * math.pi)


KERNELS = {"RBF": rbf, "Matern 1/2": matern12, "ArcCosine": arc_cosine}


def surrogate_of(method: str, width: int, problem: Problem, size: Size) -> Surrogate:
    if method == GP:
        return GaussianProcessSurrogate()
    if method == "random features":
        return RandomFeatures()
    functional = method.startswith("functional ")
    num_inputs = len(problem.bounds[0])
    unit = nn.SiLU if method == LAPLACE else nn.Tanh
    net = perceptron((num_inputs, *[width] * size.layers, 1), unit).double()
    prior = GaussianProcess(problem.kernel)
    if method == LAPLACE:
        engine = torch.quasirandom.SobolEngine(num_inputs, scramble=True, seed=0)
        points = engine.draw(size.laplace_points, dtype=torch.double)
        return LaplaceSurrogate(init_to_prior(net, prior, points), NOISE, prior, points, size.laplace_steps)
    likelihood = likelihoods.Gaussian(scale=NOISE)
    model = SupervisedModel(BayesianModule(net), likelihood, local_reparameterization=not functional)
    options: dict[str, Any] = {
        "steps": size.steps,
        "batch_size": size.batch_size,
        "optim": partial(Adam, lr=size.learning_rate),
        "compile": size.compile,
    }
    start = {"init_stddev": FUNCTIONAL_STDDEV} if functional else {}
    if functional:
        options["loss"] = FunctionalELBO(
            prior,
            UniformBox(0.0, 1.0, size.points),
            divergence=LinearizedKL(1e-3),
            compare_at="measurement_points",
            num_functions=size.functions,
        )
    guide = GUIDES[method.removeprefix("functional ")](model, **start)
    return NetworkSurrogate(model, guide, num_inputs, **options)


def shown(values: list[float]) -> str:
    """Return the median as text, with quartiles if there is more than one value."""
    if len(values) < 2:
        return f"{statistics.median(values):.3f}" if values else ""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def claims(results: Results) -> list[Claim]:
    """Compare priors on functions and on weights, for functions drawn from the former, and rank the surrogates."""
    found, setting = [], results.setting
    drawn_from = [name for name in setting["problems"] if name in DRAWN]
    for ours, acquisitions in ((LAPLACE, setting["acquisitions"][:1]), (OURS, setting["acquisitions"])):
        pairs = {}
        for problem, acquisition in product(drawn_from, acquisitions):
            keys = {"problem": problem, "acquisition": acquisition, "width": setting["width"]}
            pairs[problem, acquisition] = [results.values("regret", method=m, **keys) for m in (ours, WEIGHTS)]
        lower = [key for key, (own, theirs) in pairs.items() if statistics.median(own) < statistics.median(theirs)]
        text = (
            f"Optimization of draws of {len(drawn_from)} processes, {' and '.join(acquisitions)}: {ours} has a lower "
            "median regret than mean field"
        )
        seeds = str(min(len(own) for own, _ in pairs.values()))
        found.append(
            Claim(text, "lower (Sun et al. 2019)", f"{len(lower)} of {len(pairs)}", seeds, len(lower) == len(pairs))
        )
    ranks = ranked(results)
    for among, left_out in (("networks", (GP, "random features")), ("all surrogates", ())):
        of = {method: own for method, own in ranks.items() if method not in left_out}
        best, *others = sorted(of, key=lambda method: statistics.mean(of[method]))
        text = f"Optimization, Thompson: of {among} function-space Laplace has the best mean rank of regret"
        which, other = ("next", others[0]) if best == LAPLACE else ("best", best)
        shown_ranks = f"{mean_of(of[LAPLACE], 2)}; the {which} is {other}, {mean_of(of[other], 2)}"
        found.append(Claim(text, "first (Sun et al. 2019)", shown_ranks, str(len(of[LAPLACE])), best == LAPLACE))
    return found


def ranked(results: Results) -> dict[str, list[float]]:
    """Mean ranks of the surrogates over functions, for each seed."""
    setting = results.setting
    keys = {"acquisition": setting["acquisitions"][0], "width": setting["width"]}
    return mean_ranks(results, "regret", "problem", setting["surrogates"], **keys)


def report(results: Results) -> str:
    """Report regrets by function, the cost, and the width study."""
    setting = results.setting
    problems = setting["problems"]
    lines, ranks = [], ranked(results)
    cells = [(m, a) for a in setting["acquisitions"] for m in setting["surrogates"]]
    for method, acquisition in [(CHANCE, "none"), *cells]:
        keys = {"method": method, "acquisition": acquisition, "width": setting["width"]}
        if not results.where(**keys):
            continue
        own = [shown(results.values("regret", problem=p, **keys)) for p in problems]
        rank = mean_of(ranks.get(method, []), 2) if acquisition == setting["acquisitions"][0] else ""
        costs = ("seconds_per_proposal", "steps_per_proposal")
        cost = [f"{statistics.mean(results.values(name, **keys)):.1f}" for name in costs]
        lines.append([method, acquisition, *own, rank, *cost])
    first, how = problems[0], setting["acquisitions"][0]
    keys = {"problem": first, "acquisition": how}
    widths = [
        [m, *(shown(results.values("regret", method=m, width=w, **keys)) for w in setting["widths"])]
        for m in (OURS, WEIGHTS)
    ]
    return f"""### Bayesian optimization

Median simple regret, with quartiles, after {setting["evaluations"]} evaluations, the first {setting["initial"]} at \
random; {len(results.distinct("seed"))} seeds (`python -m benchmarks.decisions.optimization`). RBF, Matern 1/2 and \
ArcCosine are functions of three inputs through a draw of a Gaussian process with this kernel at {setting["knots"]:,} \
points, a new draw for each seed. Functional posteriors have the same kernel as prior; for the other two functions \
they have RBF, and values are standardized. Networks have {setting["layers"]} layers of {setting["width"]} units and \
take {setting["steps"]} further steps after each evaluation. Function-space Laplace takes at most \
{setting["laplace_steps"]} Gauss-Newton steps instead, with the evaluations and {setting["laplace_points"]} more \
points, and draws functions that are linear in the weights; other programs ran beside it, so its seconds are too many. \
The last columns are per proposal:

{markdown_table(["", "", *problems, "mean rank", "seconds", "steps"], lines)}

Simple regret by the number of units per layer, on {first} with {how}:

{markdown_table(["", *map(str, setting["widths"])], widths)}

{results.plot("Median simple regret so far, by function and method")}"""


def draw(results: Results) -> None:
    """Draw the median regret after each evaluation."""
    setting = results.setting
    problems = setting["problems"]
    figure = Figure(figsize=(3.0 * len(problems), 3.6), layout="constrained", dpi=110)
    axes = figure.subplots(1, len(problems), squeeze=False)[0]
    for ax, problem in zip(axes, problems, strict=True):
        for method in (CHANCE, *setting["surrogates"]):
            for acquisition, style in (("none", ":"), *zip(setting["acquisitions"], ("-", "--"), strict=False)):
                keys = {"problem": problem, "method": method, "acquisition": acquisition, "width": setting["width"]}
                curves = results.values("curve", **keys)
                if curves:
                    color = f"C{[CHANCE, *setting['surrogates']].index(method)}"
                    label = method if acquisition == "none" else f"{method}, {acquisition}"
                    # torch.median returns the lower of the two middle values.
                    medians = torch.tensor(curves).quantile(0.5, dim=0).clamp_min(1e-3)
                    ax.semilogy(medians, style, color=color, label=label)
        ax.set(title=problem, xlabel="evaluations")
    axes[0].set_ylabel("simple regret")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
