# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure training steps of networks on a GPU, within a minute.

python -m benchmarks.guides.cuda
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from torch.nn import functional as F
from torch.optim import Adam

from benchmarks.common import Form, Results, Row, main, markdown_table, medians, perceptron
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    BayesianModule,
    CompiledSVI,
    SupervisedModel,
    TermsELBO,
)
from pyro_radial.nn import likelihoods

#: What a machine must have for it, which the page says while there are no results.
NEEDS = "a CUDA device"
LR = 1e-3
NUM_DATA, INPUTS, CLASSES = 60_000, 784, 10
EAGER, PLAIN = "plain, eager, fused Adam", "plain, fused Adam, one CUDA graph"
NETWORKS = {
    "radial, Adam": AutoRadial,
    "mean field, Adam": AutoMeanField,
}


class Size(NamedTuple):
    """Rounds and steps of a timing; the network's layers and batch."""

    rounds: int = 7
    steps: int = 200
    hidden: tuple[int, ...] = (200, 200, 200, 200)
    batch: int = 128


SIZES = {"default": Size(), "small": Size(1, 2, (8,), 4)}


def run(output: Path, *, form: Form = "default", device: Literal["cuda", "cpu"] = "cuda") -> None:
    """Measure without validation; ``--device cpu --small`` tests the experiment without a GPU."""
    size = SIZES[form]
    device_name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    results = Results(output, {"device": device_name, "torch": torch.__version__})
    names = (EAGER, *([PLAIN] if device == "cuda" else []), *NETWORKS)
    with pyro.validation_enabled(False):
        results.add_all([{"step": name} for name in names], partial(step_rows, device, size))


def synchronize(device: str) -> None:
    """Wait for everything that the device has been given to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def step_rows(device: str, size: Size) -> list[Row]:
    """Milliseconds of a step of each multilayer perceptron; a turn is many steps and one wait."""
    steps = {EAGER: plain_step(device, size)}
    if device == "cuda":
        steps[PLAIN] = in_cuda_graph(plain_step(device, size, capturable=True))
    steps |= {name: posterior_step(device, size, guide) for name, guide in NETWORKS.items()}

    def turn(step: Callable[[], Any]) -> None:
        for _ in range(size.steps):
            step()
        synchronize(device)

    turns = {name: partial(turn, step) for name, step in steps.items()}
    times = medians(turns, size.rounds, clock=time.perf_counter, block=1)
    return [{"ms": round(times[name] / size.steps, 4)} for name in steps]


def batch_of(device: str, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of made-up images as vectors, with labels."""
    x, y = torch.randn(size.batch, INPUTS), torch.randint(CLASSES, (size.batch,))
    return x.to(device), y.to(device)


def plain_step(device: str, size: Size, capturable: bool = False) -> Callable[[], None]:
    """Return a step of a plain network."""
    torch.manual_seed(0)
    net = perceptron((INPUTS, *size.hidden, CLASSES)).to(device)
    x, y = batch_of(device, size)
    adam = Adam(net.parameters(), LR, fused=True, capturable=capturable)

    def step() -> None:
        adam.zero_grad()
        F.cross_entropy(net(x), y).backward()
        adam.step()

    return step


def posterior_step(device: str, size: Size, make_guide: Any) -> Callable[[], float]:
    """Return a step of a posterior that has been recorded, compiled and captured."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    bnn = BayesianModule(perceptron((INPUTS, *size.hidden, CLASSES)))
    model = SupervisedModel(bnn, likelihoods.Categorical(num_data=NUM_DATA)).to(device)
    optim = pyro.optim.Adam({"lr": LR})
    svi = CompiledSVI(model, make_guide(model), optim, TermsELBO(), compile=device == "cuda")
    step = partial(svi.step, *batch_of(device, size))
    for _ in range(5):
        step()
    return step


def in_cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        # The graph reads this step's tensors, so they must live as long.
        assert step
        graph.replay()

    return replay


def report(results: Results) -> str:
    """Report the table."""
    steps = [[row["step"], f"{row['ms']:.3f}"] for row in results.rows]
    code = f" {results.setting['code']}" if "code" in results.setting else ""
    return f"""### On a GPU

On {results.setting["device"]} with torch {results.setting["torch"]}, without validation (`python -m \
benchmarks.guides.cuda`).{code} A network of 784-200x4-10 and batches of 128, in milliseconds of a step; medians of \
turns of 200 steps, which only their end waits for:

{markdown_table(["", "ms"], steps)}

{results.plot("Milliseconds of a step on a GPU")}"""


def draw(results: Results) -> None:
    """Draw the milliseconds of a step."""
    figure = Figure(figsize=(6, 2.6), layout="constrained", dpi=110)
    ax = figure.subplots()
    ax.barh(results.values("step"), results.values("ms"))
    ax.set_xlabel("ms a step")
    ax.invert_yaxis()
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
