# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure training steps, memory and samplers on a GPU, within five minutes.

python -m benchmarks.guides.cuda
"""

import importlib.util
import math
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
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
from benchmarks.guides._eight_models import in_pyro
from benchmarks.guides._eight_models.data import arrays
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

#: What a machine must have for it, which the page says while there are no results.
NEEDS = "a CUDA device"
LR = 1e-3
MODELS = ("hierarchical regression", "cell counts", "eight schools", "VAE", "sparse GP", "mixture, enumerated")
OURS, PEER = "CompiledSVI", "NumPyro"
#: NumPyro's steps: one compiled call each, and so many in one compiled loop.
BLOCKS = {PEER: 1, "NumPyro, 10 in a loop": 10, "NumPyro, 100 in a loop": 100}
NUM_DATA, INPUTS, CLASSES = 60_000, 784, 10
EAGER, PLAIN = "plain, eager, fused Adam", "plain, fused Adam, one CUDA graph"
NETWORKS = {
    "radial, Adam": (AutoRadial, pyro.optim.Adam({"lr": LR})),
    "mean field, Adam": (AutoMeanField, pyro.optim.Adam({"lr": LR})),
    "radial, natural gradient": (AutoRadial, NaturalGradient(LR, beta2=0.9999)),
    "mean field, natural gradient": (AutoMeanField, NaturalGradient(LR, beta2=0.9999)),
}
FIT = "fit, radial, natural gradient"
VGG, VGG_PLAIN, VGG_RADIAL = "VGG-16", "plain, compiled", "radial"
VGGS = (VGG_PLAIN, VGG_RADIAL)
# The channels of the paper's radial network, and of the deterministic one that it is compared with.
RADIAL_CHANNELS, PLAIN_CHANNELS = 46, 64


class Size(NamedTuple):
    """Rounds and steps of a timing; the network's layers and batch; LeNet's images; VGG's images; samples."""

    rounds: int = 7
    steps: int = 200
    hidden: tuple[int, ...] = (200, 200, 200, 200)
    batch: int = 128
    images: int = 54_000
    pixels: int = 512
    vgg_images: int = 8
    divide: int = 1
    convolutions: int = 13
    samples: int = 10_000_000


SIZES = {"default": Size(), "small": Size(1, 2, (8,), 4, 24, 32, 2, 23, 2, 1_000)}


def run(output: Path, *, form: Form = "default", device: Literal["cuda", "cpu"] = "cuda") -> None:
    """Run checks, then measure times; ``--device cpu --small`` tests the experiment without a GPU."""
    # JAX would take most of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    size = SIZES[form]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    results = Results(output, {"device": name, "torch": torch.__version__})
    firsts = (*MODELS, *NETWORKS, *VGGS)
    results.add_all([{"what": "first", "step": step} for step in firsts], partial(first_steps, device, size, firsts))
    results.add({"what": "check"}, partial(check, device, size))
    peers = tuple(BLOCKS) if importlib.util.find_spec("numpyro") and importlib.util.find_spec("funsor") else ()
    with pyro.validation_enabled(False):
        steps = (EAGER, *([PLAIN] if device == "cuda" else []), *NETWORKS)
        results.add_all([{"what": "network", "step": step} for step in steps], partial(networks, device, size, steps))
        results.add_all([{"what": "LeNet", "step": step} for step in (EAGER, FIT)], partial(lenets, device, size))
        samplers = ("copy", "normal", "radial", "von Mises-Fisher")
        results.add_all([{"what": "sampler", "step": step} for step in samplers], partial(sampling, device, size))
        for model in MODELS:
            keys = [{"what": "model", "model": model, "step": step} for step in (OURS, *peers)]
            results.add_all(keys, partial(model_steps, device, size, model, peers))
        for step in VGGS:
            results.add({"what": VGG, "step": step}, partial(convolutions, device, size, step))


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
    torch.manual_seed(0)
    model = SupervisedModel(BayesianModule(perceptron(size)), likelihoods.Categorical(num_data=NUM_DATA)).to(device)
    x, y = torch.randn(size.batch, INPUTS), torch.randint(CLASSES, (size.batch,))
    return model, make_guide(model), x.to(device), y.to(device)


def perceptron(size: Size) -> nn.Module:
    """Layers with rectifiers between them."""
    widths = (INPUTS, *size.hidden, CLASSES)
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


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


def first_steps(device: str, size: Size, names: tuple[str, ...]) -> list[Row]:
    """Seconds of the first step of each, which records and compiles; all at once, in processes of their own."""
    if device == "cpu":
        return [{"s": first_step(device, size, name)} for name in names]
    # Threads and CUDA do not survive a fork.
    with ProcessPoolExecutor(len(names), multiprocessing.get_context("spawn")) as pool:
        return [{"s": seconds} for seconds in pool.map(partial(first_step, device, size), names)]


def first_step(device: str, size: Size, name: str) -> float:
    """Seconds of the first steps until one is a single graph."""
    with pyro.validation_enabled(False):
        if name in MODELS:
            make = partial(model_svi, device, size, name)
        elif name in NETWORKS:
            make = partial(network_svi, device, size, name)
        else:
            make = partial(vgg_svi, device, size, name)
        with torch.device(device) if device != "cpu" and name in MODELS else nullcontext():
            step = make()
            wait(device)
            start = time.perf_counter()
            for _ in range(4):
                step()
            wait(device)
    return round(time.perf_counter() - start, 1)


def model_svi(device: str, size: Size, model: str) -> Callable[[], Any]:
    """A step of a model that is not a network."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    data = {key: value.to(device) for key, value in in_pyro.tensors(arrays(model, size.rounds == 1)).items()}
    program, guide, loss, args = in_pyro.made(model, data)
    nesting = {"max_plate_nesting": 2 if model == "cell counts" else 1}
    svi = CompiledSVI(program, guide, pyro.optim.Adam({"lr": LR}), loss(**nesting), compile=device == "cuda")
    return lambda: svi.step(*args)


def network_svi(device: str, size: Size, name: str) -> Callable[[], Any]:
    """A step of the multilayer perceptron."""
    make_guide, optim = NETWORKS[name]
    model, guide, x, y = made(device, size, make_guide)
    svi = CompiledSVI(model, guide, optim, TermsELBO(), compile=device == "cuda")
    return lambda: svi.step(x, y)


def vgg_svi(device: str, size: Size, name: str) -> Callable[[], Any]:
    """A step of a convolutional network."""
    x, y = images(device, size)
    return vgg_step(name, x, y, size)


def images(device: str, size: Size) -> tuple[Tensor, Tensor]:
    """The batch of the convolutional networks."""
    torch.manual_seed(0)
    x = torch.randn(size.vgg_images, 3, size.pixels, size.pixels, device=device)
    return x, torch.randint(2, (size.vgg_images,), device=device)


def model_steps(device: str, size: Size, model: str, peers: tuple[str, ...]) -> list[Row]:
    """Milliseconds of a step of a model that is not a network, in Pyro and in NumPyro."""
    with torch.device(device) if device != "cpu" else nullcontext():
        ours = model_svi(device, size, model)
        for _ in range(5):
            ours()
    steps: dict[str, Callable[[], Any]] = {OURS: ours}
    steps |= {name: numpyro_step(model, size, BLOCKS[name]) for name in peers}
    found = milliseconds(device, size, steps)
    return [{"ms": round(found[name] / BLOCKS.get(name, 1), 4)} for name in steps]


def numpyro_step(model: str, size: Size, block: int) -> Callable[[], Any]:
    """A step, or a compiled loop of steps, that is not waited for."""
    from benchmarks.guides._eight_models.in_numpyro import Training

    training = Training(model, size.rounds == 1, "NumPyro, scan" if block > 1 else PEER, LR, block)
    advance = training.update if block == 1 else training.loop

    def step() -> None:
        training.state, training.loss = advance(training.state, *training.args)

    step()
    training.loss.block_until_ready()
    return step


def networks(device: str, size: Size, names: tuple[str, ...]) -> list[Row]:
    """Milliseconds of a step of the multilayer perceptron."""
    steps: dict[str, Callable[[], Any]] = {EAGER: plain_step(device, size)}
    if PLAIN in names:
        steps[PLAIN] = in_cuda_graph(plain_step(device, size, capturable=True))
    for name in NETWORKS:
        steps[name] = network_svi(device, size, name)
        for _ in range(5):
            steps[name]()
    times = milliseconds(device, size, steps)
    return [{"ms": times[name]} for name in names]


def plain_step(device: str, size: Size, capturable: bool = False) -> Callable[[], Any]:
    """A step of a plain network."""
    torch.manual_seed(0)
    net = perceptron(size).to(device)
    x, y = torch.randn(size.batch, INPUTS).to(device), torch.randint(CLASSES, (size.batch,)).to(device)
    adam = Adam(net.parameters(), LR, fused=True, capturable=capturable)

    def step() -> None:
        adam.zero_grad()
        F.cross_entropy(net(x), y).backward()
        adam.step()

    return step


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


def vgg16(channels: int, number: int) -> nn.Module:
    """The first of thirteen convolutions in blocks of doubling width, and one linear layer on the mean over pixels."""
    widths = [channels] * 2 + [2 * channels] * 2 + [4 * channels] * 3 + [8 * channels] * 6
    layers: list[nn.Module] = []
    last = 3
    for place, width in enumerate(widths[:number]):
        layers += [nn.Conv2d(last, width, 3, padding=1), nn.ReLU()]
        if place in (1, 3, 6, 9, 12):
            layers.append(nn.MaxPool2d(2))
        last = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 2))


def convolutions(device: str, size: Size, name: str) -> Row:
    """Milliseconds and peak memory of a step on the paper's images."""
    x, y = images(device, size)
    if device == "cuda":
        torch.cuda.empty_cache()
    step = vgg_step(name, x, y, size)
    for _ in range(4):
        step()
    wait(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = milliseconds(device, size._replace(rounds=3, steps=min(5, size.steps)), {name: step})
    # What is reserved counts the memory of CUDA graphs too.
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    held = torch.cuda.memory_reserved() / 2**30 if device == "cuda" else 0.0
    return {"ms": round(times[name], 2), "peak_gib": round(peak, 3), "reserved_gib": round(held, 3)}


def vgg_step(name: str, x: Tensor, y: Tensor, size: Size) -> Callable[[], Any]:
    """A step of a plain compiled network, or of a radial one."""
    if name == VGG_PLAIN:
        net = vgg16(max(1, PLAIN_CHANNELS // size.divide), size.convolutions).to(x.device)
        optimizer = Adam(net.parameters(), lr=1e-4, fused=True)
        compiled = torch.compile(net) if x.is_cuda else net

        def plain() -> None:
            optimizer.zero_grad()
            F.cross_entropy(compiled(x), y).backward()
            optimizer.step()

        return plain
    net = vgg16(max(1, RADIAL_CHANNELS // size.divide), size.convolutions)
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=10_000)).to(x.device)
    svi = CompiledSVI(model, AutoRadial(model), pyro.optim.Adam({"lr": 1e-4}), TermsELBO(), compile=x.is_cuda)
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
    times = milliseconds(device, size._replace(steps=min(20, size.steps)), subjects)
    elements = {name: size.samples if name == "copy" else rows * dim for name in subjects}
    each = {name: 1e6 * times[name] / elements[name] for name in subjects}
    return [{"ns": round(each[name], 4), "ratio": round(each[name] / each["copy"], 2)} for name in subjects]


def claims(results: Results) -> list[Claim]:
    """Compare with NumPyro, a plain network, a plain loop, and a plain convolutional network."""
    (found,) = results.where(what="check")
    ratios = [ours / theirs for ours, theirs in (times(results, model) for model in measured(results)) if theirs]
    names = NETWORKS if any(row["step"] == PLAIN for row in results.where(what="network")) else ()
    plain = results.where(what="network", step=PLAIN) or results.where(what="network", step=EAGER)
    networks = [results.where(what="network", step=name)[0]["ms"] / plain[0]["ms"] for name in names]
    epochs = [results.where(what="LeNet", step=step)[0]["s"] for step in (FIT, EAGER)]
    vgg = [row for step in (VGG_RADIAL, VGG_PLAIN) for row in results.where(what=VGG, step=step)]
    slower, larger = (vgg[0][key] / max(vgg[1][key], 1e-9) if vgg else math.nan for key in ("ms", "peak_gib"))
    every = [
        Claim(
            "On a GPU, steps of six models take at most half as long as NumPyro's compiled steps",
            "",
            f"{min(ratios):.2f} to {max(ratios):.2f} of NumPyro's" if ratios else "not measured",
            "1",
            bool(ratios) and max(ratios) <= 0.5,
        ),
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
            "A step of a radial VGG-16 with 46 channels takes at most 1.1 times as long as a compiled plain one's",
            "",
            f"{slower:.2f} times, in {larger:.2f} times the memory" if vgg else "not measured",
            "1",
            slower <= 1.1 and larger <= 1.15,
        ),
        Claim(
            "On a GPU, 100 steps of `fit` wait for the device at most twice",
            "",
            f"{found['waits']} times",
            "1",
            found["waits"] <= 2,
        ),
    ]
    return [claim for claim in every if claim.ours != "not measured"]


def measured(results: Results) -> list[str]:
    """The models with results; a run that its time limit cut short lacks some."""
    return [model for model in MODELS if results.where(what="model", model=model, step=OURS)]


def times(results: Results, model: str) -> tuple[float, float]:
    """Milliseconds of our step and of NumPyro's, or zero."""
    ours, theirs = (results.where(what="model", model=model, step=step) for step in (OURS, PEER))
    return ours[0]["ms"], theirs[0]["ms"] if theirs else 0.0


def report(results: Results) -> str:
    """Report the tables."""
    there = measured(results)
    contenders = [row["step"] for row in results.where(what="model", model=there[0])] if there else []
    models = []
    for model in MODELS:
        rows = [row for step in contenders for row in results.where(what="model", model=model, step=step)]
        first = [f"{row['s']:.0f}" for row in results.where(what="first", step=model)] or ["not measured"]
        models.append([model, *(f"{row['ms']:.3f}" for row in rows), *first])
    networks = []
    for row in results.where(what="network"):
        first = results.where(what="first", step=row["step"])
        networks.append([row["step"], f"{row['ms']:.3f}", f"{first[0]['s']:.0f}" if first else ""])
    lenet = [[row["step"], f"{row['s']:.2f}"] for row in results.where(what="LeNet")]
    vgg = [
        [row["step"], f"{row['ms']:.1f}", f"{row['peak_gib']:.2f}", f"{row['reserved_gib']:.2f}"]
        for row in results.where(what=VGG)
    ]
    samplers = [[row["step"], f"{row['ratio']:.1f}"] for row in results.where(what="sampler")]
    found = results.where(what="check")[0]
    missing = [*(model for model in MODELS if model not in there), *([] if vgg else [VGG])]
    notes = [
        *([results.setting["code"]] if "code" in results.setting else []),
        *([f"The machine's time ran out before the steps of {', '.join(missing)}."] if missing else []),
    ]
    convolutional = f"""

Steps of VGG-16 on {SIZES["default"].vgg_images} images of 512 x 512 pixels, with {RADIAL_CHANNELS} channels in the \
radial and {PLAIN_CHANNELS} in the plain network:

{markdown_table(["", "ms", "peak GiB", "reserved GiB"], vgg)}"""
    return f"""### On a GPU

On {results.setting["device"]} with torch {results.setting["torch"]}, without validation (`python -m \
benchmarks.guides.cuda`). {" ".join([*notes, ""])}Milliseconds of a step that nobody waits for, medians of turns of \
200 steps, and the seconds of the first four steps, which record, compile and capture, with nothing in caches and all \
of them at once:

{markdown_table(["", *contenders, "first steps, s"], models)}

A network of 784-200x4-10 and batches of 128, in ms:

{markdown_table(["", "ms", "first steps, s"], networks)}

An epoch of LeNet-5 on 54,000 images, batches of 128, in seconds:

{markdown_table(["", "s"], lenet)}{convolutional if vgg else ""}

Time per element drawn, as a multiple of the time to copy an element:

{markdown_table(["", "of a copy"], samplers)}

An epoch of 100 steps of `fit` waits {found["waits"]} times for the device, and {found["waits_at_end"]} times at its \
end.

{results.plot("Milliseconds of a step on a GPU")}"""


def draw(results: Results) -> None:
    """Steps of networks, and of models beside NumPyro's where they were measured."""
    models = measured(results)
    figure = Figure(figsize=(9 if models else 6, 2.6), layout="constrained", dpi=110)
    left, *others = figure.subplots(1, 2 if models else 1, squeeze=False)[0]
    rows = results.where(what="network")
    left.barh([row["step"] for row in rows], [row["ms"] for row in rows])
    for right in others:
        places, pairs = range(len(models)), [times(results, model) for model in models]
        right.barh([place - 0.2 for place in places], [ours for ours, _ in pairs], 0.4, label=OURS)
        right.barh([place + 0.2 for place in places], [theirs for _, theirs in pairs], 0.4, label=PEER)
        right.set_yticks(list(places), models)
        right.legend(frameon=False)
    for ax in (left, *others):
        ax.set_xlabel("ms a step")
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
