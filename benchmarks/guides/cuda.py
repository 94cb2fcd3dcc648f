# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure training steps, epochs and samplers on a GPU, within five minutes.

python -m benchmarks.guides.cuda
"""

import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, without_advice_on_widths
from benchmarks.guides._contenders import CLASSES, NUM_DATA, Problem, plain
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    BayesianModule,
    CompiledSVI,
    NaturalGradient,
    SupervisedModel,
    TermsELBO,
    fit,
)
from pyro_radial.distributions import RadialNormal, VonMisesFisherStable
from pyro_radial.nn import likelihoods

#: What a machine must have for it.
NEEDS = "a CUDA device"
LR = 1e-3
EAGER, PLAIN = "plain, eager, fused Adam", "plain, fused Adam, one CUDA graph"
NETWORKS = {
    "radial, Adam": (AutoRadial, pyro.optim.Adam({"lr": LR})),
    "mean field, Adam": (AutoMeanField, pyro.optim.Adam({"lr": LR})),
    "radial, natural gradient": (AutoRadial, NaturalGradient(LR, beta2=0.9999)),
    "mean field, natural gradient": (AutoMeanField, NaturalGradient(LR, beta2=0.9999)),
}
FIT = "fit, radial, natural gradient"


class Size(NamedTuple):
    """Rounds and steps of a timing; the network's layers and batch; LeNet's images; samples."""

    rounds: int = 7
    steps: int = 200
    hidden: tuple[int, ...] = (200, 200, 200, 200)
    batch: int = 128
    images: int = 54_000
    samples: int = 10_000_000

    def problem(self, device: str) -> Problem:
        """The multilayer perceptron and its batch."""
        return Problem(self.hidden, self.batch, device=device)


SIZES = {"default": Size(), "small": Size(1, 2, (8,), 4, 24, 1_000)}


def run(output: Path, *, form: Form = "default", device: Literal["cuda", "cpu"] = "cuda") -> None:
    """Run checks, then measure times; ``--device cpu --small`` tests the experiment without a GPU."""
    size = SIZES[form]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    results = Results(output, {"device": name, "torch": torch.__version__})
    results.add_all([{"what": "first", "step": step} for step in NETWORKS], partial(first_steps, device, size))
    results.add({"what": "check"}, partial(check, device, size))
    with pyro.validation_enabled(False):
        steps = (EAGER, *([PLAIN] if device == "cuda" else []), *NETWORKS)
        results.add_all([{"what": "network", "step": step} for step in steps], partial(networks, device, size, steps))
        results.add_all([{"what": "LeNet", "step": step} for step in (EAGER, FIT)], partial(lenets, device, size))
        samplers = ("copy", "normal", "radial", "von Mises-Fisher")
        results.add_all([{"what": "sampler", "step": step} for step in samplers], partial(sampling, device, size))


def wait(device: str) -> None:
    """Wait for all that the device has been given to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(device: str, size: Size, steps: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The medians of rounds in which contenders take turns; a turn is many steps and one wait."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(size.rounds):
        for name, step in steps.items():
            step()
            wait(device)
            start = time.perf_counter()
            for _ in range(size.steps):
                step()
            wait(device)
            times[name].append(1e3 * (time.perf_counter() - start) / size.steps)
    return {name: round(statistics.median(found), 4) for name, found in times.items()}


def made(device: str, size: Size, make_guide: Any) -> tuple[Any, Any, Tensor, Tensor]:
    """The multilayer perceptron, its guide and a batch."""
    pyro.clear_param_store()
    problem = size.problem(device)
    x, y = problem.data()
    model = SupervisedModel(BayesianModule(problem.network()), likelihoods.Categorical(num_data=NUM_DATA)).to(device)
    return model, make_guide(model), x, y


def check(device: str, size: Size) -> Row:
    """How often the host waits for the device in an epoch of 100 steps of ``fit``, and how often at the epoch's end."""
    model, guide, x, y = made(device, size, AutoRadial)
    found: list[list[str]] = []

    def epoch(_: Any) -> None:
        found.append([str(warning.filename) for warning in caught if "synchronizing" in str(warning.message)])
        caught.clear()

    with warnings.catch_warnings(record=True) as caught, pyro.validation_enabled(False):
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        rows = x.repeat(100, 1), y.repeat(100)
        model.likelihood.num_data = None
        fit(model, guide, rows, epochs=3, batch_size=size.batch, callback=epoch, progress=False)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    # Epochs after the first have nothing to set up.
    at_end = sum("training" in name or "not_finite" in name for name in found[-1])
    return {"waits": len(found[-1]) - at_end, "waits_at_end": at_end, "where": sorted(map(short, {*found[-1]}))}


def short(path: str) -> str:
    """The last two parts of a path."""
    return "/".join(Path(path).parts[-2:])


def first_steps(device: str, size: Size) -> list[Row]:
    """Seconds of the first step of each, which records and compiles; all at once, in processes of their own."""
    if device == "cpu":
        return [{"s": first_step(device, size, name)} for name in NETWORKS]
    # Threads and CUDA do not survive a fork.
    with ProcessPoolExecutor(len(NETWORKS), multiprocessing.get_context("spawn")) as pool:
        return [{"s": seconds} for seconds in pool.map(partial(first_step, device, size), NETWORKS)]


def first_step(device: str, size: Size, name: str) -> float:
    """Seconds of the first steps until one is a single graph."""
    with pyro.validation_enabled(False):
        step = network_svi(device, size, name)
        wait(device)
        start = time.perf_counter()
        for _ in range(4):
            step()
        wait(device)
    return round(time.perf_counter() - start, 1)


def network_svi(device: str, size: Size, name: str) -> Callable[[], Any]:
    """A step of the multilayer perceptron."""
    make_guide, optim = NETWORKS[name]
    model, guide, x, y = made(device, size, make_guide)
    svi = CompiledSVI(model, guide, optim, TermsELBO(), compile=device == "cuda")
    return lambda: svi.step(x, y)


def networks(device: str, size: Size, names: tuple[str, ...]) -> list[Row]:
    """Milliseconds of a step of the multilayer perceptron."""
    steps: dict[str, Callable[[], Any]] = {EAGER: plain(size.problem(device), fused=True)}
    if PLAIN in names:
        steps[PLAIN] = in_cuda_graph(plain(size.problem(device), fused=True, capturable=True))
    for name in NETWORKS:
        steps[name] = network_svi(device, size, name)
        for _ in range(5):
            steps[name]()
    times = milliseconds(device, size, steps)
    return [{"ms": times[name]} for name in names]


def in_cuda_graph(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step as one CUDA graph."""
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


def lenet() -> nn.Module:
    """LeNet-5 for images of 28 x 28 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


def lenets(device: str, size: Size) -> list[Row]:
    """Seconds of an epoch: a loop over batches on the device, and ``fit`` from its second epoch on."""
    torch.manual_seed(0)
    pyro.clear_param_store()
    x, y = torch.randn(size.images, 1, 28, 28), torch.randint(CLASSES, (size.images,))
    net, on_device = lenet().to(device), (x.to(device), y.to(device))
    adam = Adam(net.parameters(), LR, fused=True)

    def epoch() -> None:
        for rows in torch.randperm(size.images, device=device).split(size.batch):
            adam.zero_grad()
            F.cross_entropy(net(on_device[0][rows]), on_device[1][rows]).backward()
            adam.step()

    epoch()
    wait(device)
    start = time.perf_counter()
    epoch()
    wait(device)
    plain = time.perf_counter() - start
    model = SupervisedModel(BayesianModule(lenet()), likelihoods.Categorical()).to(device)
    ends: list[float] = []
    begun = time.perf_counter()
    optim = NaturalGradient(LR, beta2=0.9999)

    def ended(_: Any) -> None:
        ends.append(time.perf_counter())

    with pyro.validation_enabled(False), without_advice_on_widths():
        fit(
            *(model, AutoRadial(model), (x, y)),
            epochs=4,
            batch_size=size.batch,
            optim=optim,
            callback=ended,
            progress=False,
        )
    epochs = [after - before for before, after in pairwise(ends)]
    return [{"s": round(plain, 3)}, {"s": round(statistics.median(epochs), 3), "first_s": round(ends[0] - begun, 1)}]


def sampling(device: str, size: Size) -> list[Row]:
    """Nanoseconds for each element drawn, beside a copy of as many."""
    source = torch.randn(size.samples, device=device)
    rows, dim = max(1, size.samples // 1000), 1000
    loc, scale = torch.zeros(rows, dim, device=device), torch.ones(rows, dim, device=device)
    direction = F.normalize(torch.randn(rows, dim, device=device), dim=-1)
    vmf = VonMisesFisherStable(direction, torch.full((rows,), 50.0, device=device), validate_args=False)
    radial = RadialNormal(loc, scale, validate_args=False)
    subjects = {
        "copy": source.clone,
        "normal": lambda: torch.normal(loc, scale),
        "radial": radial.rsample,
        "von Mises-Fisher": vmf.rsample,
    }
    times = milliseconds(device, size._replace(steps=min(20, size.steps)), subjects)
    elements = {name: size.samples if name == "copy" else rows * dim for name in subjects}
    each = {name: 1e6 * times[name] / elements[name] for name in subjects}
    return [{"ns": round(each[name], 4), "ratio": round(each[name] / each["copy"], 2)} for name in subjects]


def claims(results: Results) -> list[Claim]:
    """Compare with a plain network and with a plain loop."""
    (found,) = results.where(what="check")
    names = NETWORKS if results.where(what="network", step=PLAIN) else ()
    networks = [milliseconds_of(results, name) / milliseconds_of(results, PLAIN) for name in names]
    epochs = [results.where(what="LeNet", step=step)[0]["s"] for step in (FIT, EAGER)]
    return [
        Claim(
            "On a GPU, steps of radial and mean-field networks take at most 1.5 times as long as a plain CUDA graph",
            "",
            f"{min(networks):.2f} to {max(networks):.2f} times" if networks else "without a GPU",
            "1",
            bool(networks) and max(networks) <= 1.5,
        ),
        Claim(
            "On a GPU, an epoch of `fit` with natural gradients is faster than an eager loop of the plain LeNet",
            "",
            f"{epochs[0]:.2f} s and {epochs[1]:.2f} s",
            "1",
            epochs[0] < epochs[1],
        ),
        Claim(
            "On a GPU, 100 steps of `fit` wait for the device at most twice",
            "",
            f"{found['waits']} times",
            "1",
            found["waits"] <= 2,
        ),
    ]


def milliseconds_of(results: Results, name: str) -> float:
    """The time of a step of a network."""
    (found,) = results.values("ms", what="network", step=name)
    return float(found)


def report(results: Results) -> str:
    """Report the tables."""
    networks = []
    for row in results.where(what="network"):
        first = results.where(what="first", step=row["step"])
        networks.append([row["step"], f"{row['ms']:.3f}", f"{first[0]['s']:.0f}" if first else ""])
    lenet = [[row["step"], f"{row['s']:.2f}"] for row in results.where(what="LeNet")]
    samplers = [[row["step"], f"{row['ratio']:.1f}"] for row in results.where(what="sampler")]
    found = results.where(what="check")[0]
    code = f"{results.setting['code']} " if "code" in results.setting else ""
    return f"""### On a GPU

On {results.setting["device"]} with torch {results.setting["torch"]}, without validation (`python -m \
benchmarks.guides.cuda`). {code}Milliseconds of a step of a network of 784-200x4-10 with batches of 128 that nobody \
waits for, medians of turns of 200 steps, and the seconds of the first four steps, which record, compile and capture, \
with nothing in caches and all of them at once:

{markdown_table(["", "ms", "first steps, s"], networks)}

An epoch of LeNet-5 on 54,000 images, batches of 128, in seconds:

{markdown_table(["", "s"], lenet)}

Time per element drawn, as a multiple of the time to copy an element:

{markdown_table(["", "of a copy"], samplers)}

An epoch of 100 steps of `fit` waits {found["waits"]} times for the device, and {found["waits_at_end"]} times at its \
end.

{results.plot("Milliseconds of a step on a GPU")}"""


def draw(results: Results) -> None:
    """Draw the steps of networks."""
    figure = Figure(figsize=(6, 2.6), layout="constrained", dpi=110)
    ax = figure.subplots()
    rows = results.where(what="network")
    ax.barh([row["step"] for row in rows], [row["ms"] for row in rows])
    ax.set_xlabel("ms a step")
    ax.invert_yaxis()
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
