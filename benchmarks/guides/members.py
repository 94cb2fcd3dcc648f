# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Time a step of five radial members in one graph against a step of one member, in turns.

python -m benchmarks.guides.members
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.contrib.autoname import scope
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, medians, perceptron
from benchmarks.uncertainty._lenet import lenet
from pyro_radial import AutoRadial, BayesianModule, CompiledSVI, SupervisedModel, TermsELBO
from pyro_radial.nn import likelihoods

MEMBERS, BATCH, NUM_DATA = 5, 128, 60_000
ONE, SEPARATE, JOINT, BATCHED = "one member", "five, each by its own step", "five in one graph", "five by vmap, by hand"
#: The most that five members were to cost, in steps of one.
AIMS = {"784-50-10": 2.0, "LeNet": 4.0}


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), *perceptron((784, 50, 10)))


NETS: dict[str, Callable[[], nn.Module]] = {"784-50-10": _perceptron, "LeNet": partial(lenet, 0.0)}


class Joint(PyroModule):
    """Members that run one after another, each with its own names."""

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, *args: Any) -> None:
        """Run all members."""
        for number, member in enumerate(self.members):
            with scope(prefix=f"member_{number}"):
                member(*args)


def _step(model: nn.Module, guide: nn.Module, data: tuple[Tensor, Tensor]) -> Callable[[], Any]:
    svi = CompiledSVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), TermsELBO())
    svi.graphs.compile_now = True
    return partial(svi.step, *data)


def _batched_step(make_net: Callable[[], nn.Module], data: tuple[Tensor, Tensor]) -> Callable[[], Any]:
    """The least that a step of stacked members can do: noise, loss, KL up to constants, and Adam."""
    x, y = data
    state, _ = stack_module_state([make_net() for _ in range(MEMBERS)])
    locs = {name: value.detach().clone().requires_grad_() for name, value in state.items()}
    raw_scales = {name: torch.full_like(value, -5.0).requires_grad_() for name, value in state.items()}
    optimizer = torch.optim.Adam([*locs.values(), *raw_scales.values()], 1e-3, fused=True)
    skeleton = make_net().to("meta")

    def one(locs: Any, raw_scales: Any, noise: Any) -> Tensor:
        scales = {name: nn.functional.softplus(value) for name, value in raw_scales.items()}
        radii = {name: value.flatten()[0] / value.norm() for name, value in noise.items()}
        weights = {name: loc + scales[name] * noise[name] * radii[name] for name, loc in locs.items()}
        kl = sum((scales[n].square() + locs[n].square() - raw_scales[n]).sum() for n in locs)
        logits = functional_call(skeleton, weights, (x,))
        return NUM_DATA * nn.functional.cross_entropy(logits, y) + kl

    def loss(locs: Any, raw_scales: Any, noise: Any) -> Tensor:
        return vmap(one)(locs, raw_scales, noise).sum()

    compiled = torch.compile(loss)

    def step() -> None:
        noise = {name: torch.randn_like(value) for name, value in locs.items()}
        compiled(locs, raw_scales, noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, small: bool) -> list[Row]:
    """CPU milliseconds of a step, in turns."""
    torch.manual_seed(0)
    batch = 8 if small else BATCH
    data = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))

    def member() -> tuple[nn.Module, nn.Module]:
        likelihood = likelihoods.Categorical(num_data=NUM_DATA)
        model = SupervisedModel(BayesianModule(NETS[name]()), likelihood)
        guide = AutoRadial(model)
        guide.setup(*data)
        return model, guide

    pairs = [member() for _ in range(MEMBERS)]
    models, guides = zip(*[member() for _ in range(MEMBERS)], strict=True)
    separate = [_step(*pair, data) for pair in pairs]
    steps = {
        ONE: _step(*member(), data),
        SEPARATE: lambda: [step() for step in separate],
        JOINT: _step(Joint(list(models)), Joint(list(guides)), data),
        BATCHED: _batched_step(NETS[name], data),
    }
    return [{"milliseconds": value} for value in medians(steps, 2 if small else 40, warmup=6).values()]


def run(output: Path, *, form: Form = "default", threads: int = 1) -> None:
    """Time steps of 128 images that take turns."""
    torch.set_num_threads(threads)
    results = Results(output, {"torch": torch.__version__, "threads": threads})
    for name in list(NETS)[: 1 if form == "small" else None]:
        keys = [{"net": name, "step": step} for step in (ONE, SEPARATE, JOINT, BATCHED)]
        results.add_all(keys, partial(measure, name, form == "small"))


def ratio(results: Results, name: str, step: str) -> float:
    """The time of a step in steps of one member."""
    ours, one = (results.values("milliseconds", net=name, step=kind)[0] for kind in (step, ONE))
    return float(ours / one)


def claims(results: Results) -> list[Claim]:
    """Five members in one graph cost less than five steps."""
    found = []
    for name in results.distinct("net"):
        value = min(ratio(results, name, step) for step in (JOINT, BATCHED))
        text = f"{name}: five members in one graph take at most {AIMS[name]:.0f} times the step of one"
        found.append(Claim(text, "", f"{value:.1f}", "1", value <= AIMS[name]))
    return found


def report(results: Results) -> str:
    """Report times in steps of one member."""
    lines = [
        [name, *(f"{ratio(results, name, step):.1f}" for step in (SEPARATE, JOINT, BATCHED))]
        for name in results.distinct("net")
    ]
    return f"""### Five members in one graph

CPU time of a step of five radial members, in steps of one, in batches of {BATCH} and turns \
(`python -m benchmarks.guides.members`). "In one graph" is a `CompiledSVI` whose model runs five models under scopes. \
"By vmap" is written by hand in torch, with the least that such a step must do. A CPU does five times the arithmetic \
in any form, so little is left to save, and grouped convolutions are slower than five.

{markdown_table(["", SEPARATE, JOINT, BATCHED], lines)}"""


if __name__ == "__main__":
    main(run, report)
