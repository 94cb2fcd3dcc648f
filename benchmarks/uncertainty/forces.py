# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Energies and forces of a surface in two dimensions, learned from both or from energies alone.

python -m benchmarks.uncertainty.forces
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Results,
    Row,
    compute_all,
    is_below,
    main,
    markdown_table,
    paired,
    with_error,
)
from pyro_radial import AutoRadial, BayesianModule, RadialELBO, SupervisedModel, fit, predict
from pyro_radial.nn import InputGradient, likelihoods

__all__ = ["claims", "draw", "report", "run"]

BOTH, ALONE = "energies and forces", "energies alone"
OUTPUTS = ("energy", "force")
#: The network's inputs are twice the coordinates around this center, and its energies are in units of 50.
CENTER, STRETCH, UNIT = torch.tensor([-0.2, 0.9]), 2.0, 50.0
LOW, HIGH = torch.tensor([-1.5, -0.2]), torch.tensor([1.1, 2.0])
#: Points of a higher energy are left out, as a simulation would not reach them.
HIGHEST = 50.0
#: Standard deviations of the noise on energies and forces, in the units of the network.
NOISE = {"energy": 0.02, "force": 0.05}


class Size(NamedTuple):
    """Rows, the network, and its training."""

    rows: int = 50
    test_rows: int = 1000
    width: int = 32
    steps: int = 1500
    learning_rate: float = 0.01
    init_stddev: float = 0.01
    samples: int = 32


SIZES = {"default": Size(), "small": Size(rows=8, test_rows=20, width=4, steps=2, samples=2)}


def run(output: Path, *, form: Form = "default", seeds: int = 5, workers: int = 1, threads: int = 1) -> None:
    """Train on points of the Müller-Brown surface; forces of the model are gradients of its energy.

    Both models are the same; that of energies alone gets NaN in place of all forces.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, **size._asdict()})
    jobs = [
        Job({"targets": targets, "seed": seed}, scored, (targets, seed, size))
        for seed in range(FIRST_SEED, FIRST_SEED + (seeds if form == "default" else 1))
        for targets in (BOTH, ALONE)
    ]
    compute_all(results, jobs, workers, threads)


def energy(x: Tensor) -> Tensor:
    """The surface of Müller and Brown (1979), "Location of Saddle Points", at coordinates ``[B, 2]``."""
    height = torch.tensor([-200.0, -100.0, -170.0, 15.0])
    a, b, c = torch.tensor([[-1.0, -1.0, -6.5, 0.7], [0.0, 0.0, 11.0, 0.6], [-10.0, -10.0, -6.5, 0.7]])
    u = x[:, :1] - torch.tensor([1.0, 0.0, -0.5, -1.0])
    v = x[:, 1:] - torch.tensor([0.0, 0.5, 1.5, 1.0])
    return (height * torch.exp(a * u**2 + b * u * v + c * v**2)).sum(-1, keepdim=True)


def surface(z: Tensor) -> Tensor:
    """The energy of the network's inputs, in its units."""
    return energy(CENTER + z / STRETCH) / UNIT


def points(rows: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs ``[rows, 2]`` where the energy is not too high, and their energies and forces."""
    x = LOW + (HIGH - LOW) * torch.rand(20 * rows, 2, generator=generator)
    z = STRETCH * (x[energy(x).squeeze(-1) < HIGHEST][:rows] - CENTER)
    return z, {"energy": surface(z), "force": -torch.func.grad(lambda z: surface(z).sum())(z)}


def scored(targets: str, seed: int, size: Size) -> Row:
    """Root mean square errors of the predictive means at new points, in the units of the surface."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x, y = points(size.rows, generator)
    y = {name: value + NOISE[name] * torch.randn(value.shape, generator=generator) for name, value in y.items()}
    if targets == ALONE:
        y["force"] = torch.full_like(y["force"], torch.nan)
    layers = [nn.Linear(2, size.width), nn.Tanh(), nn.Linear(size.width, size.width), nn.Tanh()]
    net = InputGradient(nn.Sequential(*layers, nn.Linear(size.width, 1)), "energy", "force", -1.0)
    observed = {name: likelihoods.Gaussian(scale=scale) for name, scale in NOISE.items()}
    model = SupervisedModel(BayesianModule(net), observed)
    guide = AutoRadial(model, init_stddev=size.init_stddev)
    fit(
        model,
        guide,
        (x, y),
        epochs=size.steps,
        batch_size=size.rows,
        optim=partial(torch.optim.Adam, lr=size.learning_rate),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=size.steps),
        loss=RadialELBO(),
        progress=False,
    )
    x, y = points(size.test_rows, generator)
    predictions = predict(model, guide, x, num_samples=size.samples)
    unit = {"energy": UNIT, "force": UNIT * STRETCH}
    return {f"{name}_rmse": unit[name] * float((predictions[name].mean - y[name]).square().mean().sqrt()) for name in y}


def claims(results: Results) -> list[Claim]:
    """Compare both errors, seed by seed."""
    found = []
    for name in OUTPUTS:
        both, alone = (results.values(f"{name}_rmse", targets=targets) for targets in (BOTH, ALONE))
        text = f"Müller-Brown surface: with forces among the targets, the {name} RMSE is lower"
        numbers = f"{with_error(both, 2)} against {with_error(alone, 2)}"
        found.append(Claim(text, "", numbers, str(len(both)), is_below(paired(both, alone))))
    return found


def report(results: Results) -> str:
    """Report both errors by what was learned from."""
    lines = [
        [targets, *(with_error(results.values(f"{name}_rmse", targets=targets), 2) for name in OUTPUTS)]
        for targets in (BOTH, ALONE)
    ]
    setting = results.setting
    return f"""### Energies and forces

RMSE of the predictive mean at {setting["test_rows"]:,} new points of the Müller-Brown surface, after training on \
{setting["rows"]}; {len(results.where(targets=BOTH))} seeds (`python -m benchmarks.uncertainty.forces`). The force is \
the negative gradient of the network's energy. Both models and their {setting["steps"]:,} steps are the same; one gets \
no forces.

{markdown_table(["learned from", "energy", "force"], lines)}

{results.plot("Energy and force RMSE by seed")}"""


def draw(results: Results) -> None:
    """Draw the errors of each seed."""
    figure = Figure(figsize=(6.0, 3.0), layout="constrained", dpi=110)
    for ax, name in zip(figure.subplots(1, 2), OUTPUTS, strict=True):
        pairs = zip(*(results.values(f"{name}_rmse", targets=targets) for targets in (ALONE, BOTH)), strict=True)
        for pair in pairs:
            ax.plot([0, 1], pair, "o-", color="C0")
        ax.set(title=f"{name} RMSE", xticks=[0, 1], xticklabels=[ALONE, BOTH], xlim=(-0.3, 1.3), ylim=(0, None))
        ax.spines[["top", "right"]].set_visible(False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
