# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One training step with FunctionalELBO as a multiple of one with a prior on weights, and how the cost grows.

A step is the loss, its gradient and Adam. The network is 1-100-100-100-100-100-1 with ReLU, its guide AutoMeanField, on
20 data; the functional loss has a UniformBox of further points, up to the number of points named. Its unit is a step
with RadialELBO on the same data with as many draws, all at once, and every KL in closed form. ``likelihood`` is that
step without its KL, what no loss with so many draws goes below; ``over_likelihood`` is in its units. ``divergence_ms``
is the divergence alone, forward and backward, of fixed function values, and ``share`` its part of the step.

The prior is a Gaussian process with noise, but for ``SteinKL(), implicit prior``: piecewise linear functions, whose
score is estimated from 500 draws. A divergence that needs more draws than a case has is left out there.

All subjects take turns in one run. The time is that of one thread's work, so that another program on the machine
counts little, and the allocator keeps its pages, as in vmf_cost.py.

    python benchmarks/functional_cost.py            # about eight minutes; --small: half a minute
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from common import RESULTS, Row
from functional_runs import network
from pyro.contrib.gp.kernels import RBF
from torch import Tensor, nn
from vmf_cost import BLOCK, Subjects, keep_pages, medians

from pyro_radial import AutoMeanField, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.functional import (
    FunctionPrior,
    GaussianKL,
    GaussianProcess,
    PiecewiseLinear,
    RegularisedKL,
    SteinKL,
    UniformBox,
)
from pyro_radial.infer.functional_elbo import Divergence, FunctionalELBO
from pyro_radial.nn import likelihoods

NUM_DATA = 20
BASE = (60, 100)
# Points and draws: the base case, more draws at its points, more points at 300 draws.
SHAPES = (BASE, (60, 50), (60, 200), (60, 400), (30, 300), (60, 300), (120, 300), (240, 300))
WEIGHTS, LIKELIHOOD = "weights", "likelihood"


class LikelihoodAlone(RadialELBO):
    """The loss without its KL."""

    def _kl_by_site(self, model_trace: Any, guide_trace: Any) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True)
class Case:
    """What is timed: a divergence by name, or one of the units."""

    subject: str
    points: int
    draws: int


def divergences(points: int, draws: int) -> dict[str, tuple[Divergence, FunctionPrior]]:
    """Those that can be estimated at so many points from so many draws, and the prior of each."""
    process = GaussianProcess(RBF(input_dim=1, lengthscale=torch.tensor(0.5)), noise=0.1)
    found: dict[str, tuple[Divergence, FunctionPrior]] = {"RegularisedKL(1e-3)": (RegularisedKL(1e-3), process)}
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


def make_step(case: Case) -> Callable[[], None]:
    """A function that makes one training step."""
    pyro.set_rng_seed(0)
    net = network(1, (100,) * 5, nn.ReLU)
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=NUM_DATA, scale=0.1))
    loss = make_loss(case)(model, AutoMeanField(model))
    x = 2.0 * torch.rand(NUM_DATA, 1) - 1.0
    y = (4.0 * x).sin() + 0.1 * torch.randn(NUM_DATA, 1)
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


def measure(shapes: tuple[tuple[int, int], ...], rounds: int) -> list[Row]:
    functional = [Case(name, *shape) for shape in shapes for name in divergences(*shape)]
    draws = sorted({case.draws for case in functional})
    units = [Case(name, NUM_DATA, number) for name in (LIKELIHOOD, WEIGHTS) for number in draws]
    subjects: Subjects = {f"{case}": make_step(case) for case in (*units, *functional)}
    subjects |= {f"{case} alone": make_divergence(case) for case in functional}
    times = medians(subjects, rounds)
    return [asdict(case) | figures(case, times) for case in (*units, *functional)]


def figures(case: Case, times: dict[str, float]) -> Row:
    step = times[f"{case}"]
    row = {"median_ms": round(step, 3)}
    for name, unit in (("ratio", WEIGHTS), ("over_likelihood", LIKELIHOOD)):
        row[name] = round(step / times[f"{Case(unit, NUM_DATA, case.draws)}"], 3)
    alone = times.get(f"{case} alone")
    return row if alone is None else row | {"divergence_ms": round(alone, 3), "share": round(alone / step, 3)}


def show(rows: list[Row]) -> None:
    columns = ("points", "draws", "median_ms", "ratio", "over_likelihood", "divergence_ms", "share")
    print(f"{'':28}" + "".join(f"{name:>17}" for name in columns))
    for row in rows:
        print(f"{row['subject']:28}" + "".join(f"{row.get(name, ''):>17}" for name in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the base case alone, a few rounds, nothing saved")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS / "functional_cost.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_pages()
    if args.small:
        show(measure((BASE,), rounds=5))
        return
    rows = measure(SHAPES, args.rounds)
    setting = {"threads": 1, "rounds": args.rounds, "calls_per_round": BLOCK, "torch": torch.__version__}
    args.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
