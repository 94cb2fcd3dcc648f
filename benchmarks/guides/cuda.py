# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure training steps, memory and samplers on a GPU, within minutes.

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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, medians
from benchmarks.guides._contenders import CONTENDERS, PLAIN, Problem
from pyro_radial import AutoRadial, BayesianModule, CompiledSVI, SupervisedModel, TermsELBO
from pyro_radial.distributions import RadialNormal, VonMisesFisherStable
from pyro_radial.infer.compiled.captured_loss import CapturedLoss
from pyro_radial.nn import likelihoods

__all__ = ["NEEDS", "claims", "draw", "report", "run"]

#: What a machine must have for it, which the page says while there are no results.
NEEDS = "a CUDA device"
TARGET = 1e-5
MLP = (PLAIN, "plain, fused Adam", "Pyro's AutoNormal", "AutoRadial, eager", "AutoRadial, compiled")
GRAPHS = {"triton.cudagraphs": True}
VGG = "VGG-16"
# The channels of the paper's radial network, and of the deterministic one that it is compared with.
RADIAL_CHANNELS, PLAIN_CHANNELS = 46, 64


class Size(NamedTuple):
    """Batches of the perceptron; pixels, images and channels of the convolutional net; samples; turns; calls before.

    In the small form steps are so few that they are not compiled.
    """

    hidden: tuple[int, ...] = (200, 200, 200, 200)
    batches: tuple[int, ...] = (32, 128, 1024)
    pixels: int = 512
    images: int = 8
    divide: int = 1
    convolutions: int = 13
    samples: int = 10_000_000
    rounds: int = 30
    warmup: int = 8


SIZES = {"default": Size(), "small": Size((8,), (4,), 32, 2, 23, 2, 1_000, 1, 0)}


def vgg16(channels: int, convolutions: int) -> nn.Module:
    """The first of thirteen convolutions in blocks of doubling width, and one linear layer on the mean over pixels."""
    widths = [channels] * 2 + [2 * channels] * 2 + [4 * channels] * 3 + [8 * channels] * 6
    layers: list[nn.Module] = []
    last = 3
    for place, width in enumerate(widths[:convolutions]):
        layers += [nn.Conv2d(last, width, 3, padding=1), nn.ReLU()]
        if place in (1, 3, 6, 9, 12):
            layers.append(nn.MaxPool2d(2))
        last = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 2))


def run(output: Path, *, form: Form = "default", device: Literal["cuda", "cpu"] = "cuda") -> None:
    """Run checks, then measure times; ``--device cpu --small`` tests the experiment without a GPU."""
    size = SIZES[form]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    results = Results(output, {"device": name, "torch": torch.__version__})
    results.add({"what": "check"}, partial(check, device, size))
    for batch in size.batches:
        keys = [{"what": "mlp", "batch": batch, "step": step} for step in (*MLP, *graphed(device))]
        results.add_all(keys, partial(perceptron, device, size, batch))
    steps = ("plain", "radial, eager", "radial, compiled", *graphed(device, "radial"))
    results.add_all([{"what": VGG, "step": step} for step in steps], partial(convolutions, device, size, steps))
    samplers = ("copy", "normal", "radial", "von Mises-Fisher")
    results.add_all([{"what": "sampler", "step": step} for step in samplers], partial(sampling, device, size))


def graphed(device: str, name: str = "AutoRadial") -> list[str]:
    """The contender with CUDA graphs, where there are any."""
    return [f"{name}, compiled, CUDA graphs"] if device == "cuda" else []


def clock(device: str) -> Callable[[], float]:
    """Seconds, after all that the device has been given to do."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return now


def check(device: str, size: Size) -> Row:
    """Gradients of the compiled step against the eager one's; a compiled step that waits for nothing."""
    model, guide, x, y = radial_problem(Problem(size.hidden, size.batches[0], device=device))
    loss = TermsELBO(strict_kl=True)
    captured = CapturedLoss(model, guide, loss)
    captured.compile_after = 0
    for _ in range(max(1, size.warmup)):
        captured((x, y), {})
    pyro.set_rng_seed(1)
    _, pairs = captured((x, y), {})
    pyro.set_rng_seed(1)
    truth = torch.autograd.grad(loss(model, guide)(x, y), [parameter for parameter, _ in pairs])
    errors = [float((found - true).norm() / true.norm()) for (_, found), true in zip(pairs, truth, strict=True)]
    svi = CompiledSVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss, check_every=1000)
    svi.captured.compile_after = 0
    for _ in range(max(1, size.warmup)):
        svi.step(x, y)
    waits = 0
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                svi.step(x, y)
        except RuntimeError:
            waits = 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"gradient_error": max(errors), "waits": waits}


def radial_problem(problem: Problem) -> tuple[Any, Any, Tensor, Tensor]:
    """A model and its guide on the device of its data."""
    x, y = problem.data()
    model = SupervisedModel(BayesianModule(problem.network()), likelihoods.Categorical(num_data=60_000)).to(
        problem.device
    )
    return model, AutoRadial(model), x, y


def perceptron(device: str, size: Size, batch: int) -> list[Row]:
    """Milliseconds of a step."""
    problem = Problem(size.hidden, batch, device=device)
    steps = {name: CONTENDERS[name](problem) for name in MLP}
    if device == "cuda":
        model, guide, x, y = radial_problem(problem)
        svi = CompiledSVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), TermsELBO(), options=GRAPHS)
        svi.captured.compile_after = 0
        steps[graphed(device)[0]] = lambda: svi.step(x, y)
    times = medians(steps, size.rounds, clock=clock(device), warmup=size.warmup)
    return [{"ms": round(times[name], 3), "ratio": round(times[name] / times[PLAIN], 3)} for name in steps]


def convolutions(device: str, size: Size, steps: tuple[str, ...]) -> list[Row]:
    """Milliseconds and peak memory of a step on the paper's images, one contender after another for the memory."""
    rows = []
    for name in steps:
        torch.manual_seed(0)
        x = torch.randn(size.images, 3, size.pixels, size.pixels, device=device)
        y = torch.randint(2, (size.images,), device=device)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step = vgg_step(name, x, y, size)
        times = medians({name: step}, size.rounds // 3 + 1, clock=clock(device), block=1, warmup=size.warmup)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        rows.append({"ms": round(times[name], 2), "peak_gib": round(peak, 3)})
    return [{**row, "ratio": round(row["ms"] / rows[0]["ms"], 3)} for row in rows]


def vgg_step(name: str, x: Tensor, y: Tensor, size: Size) -> Callable[[], Any]:
    if name == "plain":
        net = vgg16(max(1, PLAIN_CHANNELS // size.divide), size.convolutions).to(x.device)
        optimizer = Adam(net.parameters(), lr=1e-4, fused=True)

        def plain_step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

        return plain_step
    net = vgg16(max(1, RADIAL_CHANNELS // size.divide), size.convolutions)
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=10_000)).to(x.device)
    guide = AutoRadial(model)
    adam = pyro.optim.Adam({"lr": 1e-4})
    if name.endswith("eager"):
        module = TermsELBO()(model, guide)
        module(x, y)
        optimizer = Adam(module.parameters(), lr=1e-4, fused=True)

        def eager_step() -> None:
            optimizer.zero_grad()
            module(x, y).backward()
            optimizer.step()

        return eager_step
    svi = CompiledSVI(model, guide, adam, TermsELBO(), options=GRAPHS if "graphs" in name else None)
    svi.captured.compile_after = 0
    return lambda: svi.step(x, y)


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
    times = medians(subjects, size.rounds, clock=clock(device), block=1, warmup=3)
    elements = {name: size.samples if name == "copy" else rows * dim for name in subjects}
    each = {name: 1e6 * times[name] / elements[name] for name in subjects}
    return [{"ns": round(each[name], 4), "ratio": round(each[name] / each["copy"], 2)} for name in subjects]


def claims(results: Results) -> list[Claim]:
    """Check gradients and waiting, and compare the time of a step of the paper's network."""
    (found,) = results.where(what="check")
    compiled = results.where(what=VGG, step="radial, compiled")[0]
    return [
        Claim(
            "On a GPU, gradients of compiled steps equal those of eager steps",
            "",
            f"relative errors of at most {found['gradient_error']:.0e}",
            "1",
            found["gradient_error"] <= TARGET,
        ),
        Claim(
            "On a GPU, a compiled step never waits for the device",
            "",
            f"{found['waits']} waits",
            "1",
            found["waits"] == 0,
        ),
        Claim(
            "A compiled step of a radial VGG-16 with 46 channels takes no longer than one of a plain VGG-16 with 64",
            "",
            f"{compiled['ratio']:.2f} of its time",
            "1",
            compiled["ratio"] <= 1.0,
        ),
    ]


def report(results: Results) -> str:
    """Report three tables."""
    batches = results.distinct("batch")
    mlp = [
        [name, *(f"{row['ratio']:.2f}" for row in results.where(what="mlp", step=name))]
        for name in dict.fromkeys(row["step"] for row in results.where(what="mlp"))
    ]
    vgg = [
        [row["step"], f"{row['ms']:.1f}", f"{row['ratio']:.2f}", f"{row['peak_gib']:.2f}"]
        for row in results.where(what=VGG)
    ]
    samplers = [[row["step"], f"{row['ratio']:.1f}"] for row in results.where(what="sampler")]
    return f"""### On a GPU

On {results.setting["device"]} (`python -m benchmarks.guides.cuda`). Steps of the multilayer perceptron, as multiples \
of a plain step:

{markdown_table(["", *(f"batch {batch}" for batch in batches)], mlp)}

Steps of VGG-16 on images of 512 x 512 pixels, with {RADIAL_CHANNELS} channels in the radial and {PLAIN_CHANNELS} in \
the plain network:

{markdown_table(["", "ms", "of plain", "peak GiB"], vgg)}

Time per element drawn, as a multiple of the time to copy an element:

{markdown_table(["", "of a copy"], samplers)}

{results.plot("Time and memory of VGG-16")}"""


def draw(results: Results) -> None:
    """Time and memory of the convolutional net."""
    figure = Figure(figsize=(8, 2.4), layout="constrained", dpi=110)
    rows = results.where(what=VGG)
    for ax, (name, unit) in zip(figure.subplots(1, 2, sharey=True), (("ms", "ms"), ("peak_gib", "GiB")), strict=True):
        ax.barh([row["step"] for row in rows], [row[name] for row in rows])
        ax.set_xlabel(unit)
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
