# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare compiled steps with eager steps for many kinds of programs, and measure the time of compiling.

python -m benchmarks.guides.compiled_programs
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import Tensor, nn
from torch._inductor import config as inductor

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table
from benchmarks.guides._examples.program import Program, compared
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    CompiledSVI,
    FunctionalELBO,
    PriorChain,
    RadialELBO,
    SupervisedModel,
)
from pyro_radial.functional import GaussianKL, GaussianProcess, UniformBox
from pyro_radial.infer.compiled.captured_loss import CapturedLoss
from pyro_radial.nn import likelihoods

__all__ = ["PROGRAMS", "Program", "claims", "compared", "draw", "report", "run"]

TARGET = 1e-5
ROWS, NUM_DATA = 16, 100


class ResidualNet(nn.Module):
    """Two convolutions with batch norm, the second around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(channels)
        self.last = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The logits ``[B, 3]`` of images ``[B, 1, H, W]``."""
        hidden = torch.relu(self.first_norm(self.first(x)))
        hidden = torch.relu(hidden + self.second_norm(self.second(hidden)))
        logits: Tensor = self.last(hidden.mean((-1, -2)))
        return logits


def mlp(width: int, outputs: int) -> nn.Module:
    """One hidden layer on five inputs."""
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, outputs))


def labels() -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    return torch.randn(ROWS, 5), torch.randint(3, (ROWS,))


def classifier(make_guide: Callable[..., Any], loss: ELBO, width: int) -> Program:
    """A network with three classes."""
    model = SupervisedModel(BayesianModule(mlp(width, 3)), likelihoods.Categorical(num_data=NUM_DATA))
    return Program(model, make_guide(model), loss, labels())


def residual(width: int) -> Program:
    """Convolutions, and batch norm in train mode."""
    net = ResidualNet(max(2, width // 4))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=NUM_DATA))
    return Program(model, AutoRadial(model), RadialELBO(), (torch.randn(ROWS, 1, 6, 6), torch.randint(3, (ROWS,))))


def regression(make_guide: Callable[..., Any], loss: ELBO, width: int) -> Program:
    """A network with one output, under noise of which nothing is known."""
    model = SupervisedModel(BayesianModule(mlp(width, 1)), likelihoods.Gaussian(num_data=NUM_DATA))
    x = torch.randn(ROWS, 5)
    return Program(model, make_guide(model), loss, (x, x[:, :1].sin()))


def chain(form: Any, width: int) -> Program:
    """The second task of a chain."""
    model, _, _, args = classifier(AutoRadial, RadialELBO(), width)
    priors = chained(model, form, args)
    return Program(priors, priors.guide(AutoRadial), RadialELBO(strict_kl=True), args)


def chained(model: Any, form: Any, args: tuple[Tensor, ...]) -> PriorChain:
    """A model whose prior is a posterior with means and scales of its own."""
    priors = PriorChain(model, form=form)
    first = AutoRadial(priors, init_stddev=0.05)
    first.setup(*args)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    priors.advance(first)
    return priors


def regression_with_temperature(x: Tensor, y: Tensor) -> None:
    """Written by hand: a parameter of the model's own, and a plate that subsamples."""
    temperature = pyro.param("temperature", torch.tensor(0.5), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([5, 3]).to_event(2))
    with pyro.plate("data", len(x), subsample_size=len(x) // 2) as rows:
        pyro.sample("y", dist.Categorical(logits=(x[rows] @ w) / temperature), obs=y[rows])


def by_hand(width: int) -> Program:
    """The same with Pyro's guide and loss."""
    return Program(regression_with_temperature, AutoNormal(regression_with_temperature), Trace_ELBO(), labels())


def functional(divergence: Any, guide: Any, width: int) -> Program:
    """A prior on functions."""
    process = GaussianProcess(lambda a, b: torch.exp(-0.5 * torch.cdist(a, b).square()))
    box = UniformBox([-2.0] * 5, [2.0] * 5, num_points=6)
    loss = FunctionalELBO(process, box, divergence=divergence, num_functions=60)
    return regression(guide, loss, width)


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "AutoRadial, RadialELBO": partial(classifier, AutoRadial, RadialELBO(strict_kl=True)),
    "AutoRadial, TraceMeanField_ELBO": partial(classifier, AutoRadial, TraceMeanField_ELBO()),
    "AutoRadial, Trace_ELBO": partial(classifier, AutoRadial, Trace_ELBO()),
    "AutoMeanField, TraceMeanField_ELBO": partial(classifier, AutoMeanField, TraceMeanField_ELBO()),
    "Pyro's AutoNormal, TraceMeanField_ELBO": partial(classifier, AutoNormal, TraceMeanField_ELBO()),
    "Pyro's AutoMultivariateNormal, Trace_ELBO": partial(classifier, AutoMultivariateNormal, Trace_ELBO()),
    "AutoRadialDirectional": partial(classifier, AutoRadialDirectional, RadialELBO()),
    "four particles, looped": partial(classifier, AutoRadial, RadialELBO(4)),
    "four particles, vectorized": partial(classifier, AutoRadial, RadialELBO(4, vectorize_particles=True)),
    "residual net with batch norm": residual,
    "learned noise": partial(regression, AutoRadial, RadialELBO()),
    "pyro.param and subsampling": by_hand,
    "PriorChain, normal": partial(chain, "normal"),
    "PriorChain, exact": partial(chain, "exact"),
    "FunctionalELBO, SteinKL": partial(functional, None, AutoRadial),
    "FunctionalELBO, GaussianKL, AutoMultivariateNormal": partial(functional, GaussianKL(), AutoMultivariateNormal),
}

WIDTHS = {"default": 50, "small": 4}
# So few that nothing is compiled.
STEPS = {"default": 500, "small": 3}
HIDDEN = (200, 200, 200, 200)
# The most that recording and compiling is to take.
SECONDS = {"AutoRadial": 30.0, "exact chain": 60.0}
RUNS: dict[str, Any] = {"eager": SVI, "compiled": CompiledSVI}
SMALL = ("AutoRadial, RadialELBO",)


def run(output: Path, *, form: Form = "default", threads: int = 1) -> None:
    """Capture each program once, and compare gradients on the same noise."""
    torch.set_num_threads(threads)
    results = Results(output, {"threads": threads, "width": WIDTHS[form], "torch": torch.__version__})
    for name in SMALL if form == "small" else PROGRAMS:
        results.add({"program": name}, partial(measure, name, WIDTHS[form], form != "small"))
    for kind in () if form == "small" else SECONDS:
        results.add({"first steps": kind}, partial(to_first_fast_step, kind, HIDDEN))
    for kind in RUNS:
        results.add({"run": kind}, partial(trained, kind, WIDTHS[form], STEPS[form]))


# What is cached would be none of the seconds.
WITHOUT_CACHES = inductor.patch(force_disable_caches=True)


@WITHOUT_CACHES
def measure(name: str, width: int, compiled: bool) -> Row:
    """Errors in float32, of all gradients together, and in float64, of each; seconds to the first compiled step."""
    program, captured, seconds = recorded(name, width, compiled, torch.float32)
    value, worst, together = compared(program, captured)
    in_double, captured_in_double, _ = recorded(name, width, compiled, torch.float64)
    _, worst_in_double, _ = compared(in_double, captured_in_double)
    (recording,) = captured.recordings
    return {
        "loss": value,
        # As exponents of ten, since small numbers are rounded when they are saved.
        "error": log10(together),
        "worst_error": log10(worst),
        "worst_error_float64": log10(worst_in_double),
        "nodes": len(recording.graph.module.graph.nodes),
        "seconds": round(seconds, 1),
    }


def recorded(name: str, width: int, compiled: bool, dtype: torch.dtype) -> tuple[Program, CapturedLoss, float]:
    """A program with its graph, and the seconds until that is compiled."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        program = PROGRAMS[name](width)
        captured = CapturedLoss(program.model, program.guide, program.loss, compile=compiled)
        captured.compile_after = 3
        start = time.perf_counter()
        for _ in range(5):
            captured(program.args, {})
        return program, captured, time.perf_counter() - start
    finally:
        torch.set_default_dtype(before)


def trained(kind: str, width: int, steps: int) -> Row:
    """A run whose weight of the KL grows to one over its first two fifths: the losses of its last tenth."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    loss = RadialELBO(kl_weight=lambda step: min(1.0, 0.01 + step / (0.4 * steps)))
    model, guide, _, args = classifier(AutoRadial, loss, width)
    svi = RUNS[kind](model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
    if isinstance(svi, CompiledSVI):
        svi.captured.compile_after = 3
    losses = [float(svi.step(*args)) for _ in range(steps)][-max(2, steps // 10) :]
    graphs = len(svi.captured.recordings) if isinstance(svi, CompiledSVI) else 0
    return {"mean": statistics.mean(losses), "stddev": statistics.stdev(losses), "graphs": graphs}


@WITHOUT_CACHES
def to_first_fast_step(kind: str, hidden: tuple[int, ...]) -> Row:
    """Seconds from the first call to the first compiled one for a larger net, with nothing cached."""
    pyro.clear_param_store()
    sizes = [784, *hidden, 10]
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
    model: Any = SupervisedModel(BayesianModule(nn.Sequential(*layers[:-1])), likelihoods.Categorical(num_data=60_000))
    args = torch.randn(32, 784), torch.randint(10, (32,))
    guide = AutoRadial(model)
    if kind == "exact chain":
        model = chained(model, "exact", args)
        guide = model.guide(AutoRadial)
    captured = CapturedLoss(model, guide, RadialELBO(strict_kl=True))
    captured.compile_after = 3
    start = time.perf_counter()
    for _ in range(5):
        captured(args, {})
    return {"seconds": round(time.perf_counter() - start, 1)}


def log10(error: float) -> float:
    """The exponent of ten, of at least 1e-20."""
    return math.log10(max(error, 1e-20))


def claims(results: Results) -> list[Claim]:
    """Compare gradients with eager ones, and check the time of compiling."""
    largest, in_double = (10 ** max(results_of(results, name)) for name in ("error", "worst_error_float64"))
    (eager,), (compiled,) = (results.where(run=kind) for kind in RUNS)
    number = STEPS["default"] // 10
    error = math.hypot(eager["stddev"], compiled["stddev"]) / number**0.5
    return [
        Claim(
            f"Gradients of compiled steps equal those of eager steps up to {TARGET:.0e}, for sixteen kinds of programs",
            "",
            f"at most {largest:.0e} in float32 (all gradients); {in_double:.0e} in float64 (the worst parameter)",
            "1",
            largest <= TARGET and in_double <= TARGET,
        ),
        *(
            Claim(
                f"Recording and compiling a 784-200x4-10 network takes at most {most:.0f} s ({kind})",
                "",
                f"{row['seconds']:.0f} s",
                "1",
                row["seconds"] <= most,
            )
            for kind, most in SECONDS.items()
            for row in results.where(**{"first steps": kind})
        ),
        Claim(
            "A run with a schedule for the KL weight uses one graph and ends at the loss of the eager run",
            "",
            f"{compiled['graphs']} graph, {compiled['mean']:.1f} and {eager['mean']:.1f}, standard error {error:.1f}",
            "1",
            compiled["graphs"] == 1 and abs(compiled["mean"] - eager["mean"]) <= 2.0 * error,
        ),
    ]


def results_of(results: Results, name: str) -> list[Any]:
    """One result of each program."""
    return [row[name] for row in results.rows if "program" in row]


def report(results: Results) -> str:
    """Report a line for each program."""
    columns = ("error", "worst_error", "worst_error_float64")
    lines = [
        [row["program"], f"{row['nodes']}", *(f"{10 ** row[name]:.0e}" for name in columns), f"{row['seconds']:.0f}"]
        for row in results.rows
        if "program" in row
    ]
    headings = ["", "nodes", "float32", "float32, worst", "float64, worst", "seconds"]
    setting = results.setting
    mean = {kind: results.where(run=kind)[0]["mean"] for kind in RUNS}
    return f"""### Compiled programs

Each line compares the gradients of one compiled step with those of an eager step on the same noise. It gives the \
relative error of all gradients together and the worst error of any parameter. It also gives the nodes of the graph, \
and the seconds from the first call to the first compiled step in float32, with nothing cached ({setting["width"]} \
hidden units, {setting["threads"]} thread; `python -m benchmarks.guides.compiled_programs`). The bias of a convolution \
before batch norm does not influence the likelihood, so its gradient is mostly rounding error in float32, but not in \
float64. A run of {STEPS["default"]} steps with a schedule for the KL weight ends at a mean loss of \
{mean["compiled"]:.1f} compiled and {mean["eager"]:.1f} eager.

{markdown_table(headings, lines)}

{results.plot("Errors of gradients by program")}"""


def draw(results: Results) -> None:
    """Errors against the target."""
    figure = Figure(figsize=(7, 3.8), layout="constrained", dpi=110)
    ax = figure.subplots()
    names = results_of(results, "program")
    for column, label in (("error", "float32, together"), ("worst_error_float64", "float64, worst")):
        ax.plot([10**error for error in results_of(results, column)], range(len(names)), "o", label=label)
    ax.axvline(TARGET, color="0.5", linestyle=":")
    ax.set(xscale="log", xlabel="relative error of gradients")
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
