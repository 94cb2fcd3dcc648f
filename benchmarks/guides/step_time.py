# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One ``SVI.step`` with AutoRadial against Pyro's AutoNormal: time and peak memory.

python -m benchmarks.guides.step_time
"""

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, medians
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.nn import likelihoods

__all__ = ["claims", "draw", "report", "run"]

UNIT = "AutoNormal"
GUIDES: dict[str, tuple[Any, Any]] = {
    UNIT: (AutoNormal, TraceMeanField_ELBO),
    "AutoRadial": (AutoRadial, TraceMeanField_ELBO),
    "AutoRadial with RadialELBO": (AutoRadial, RadialELBO),
    "AutoMeanField": (AutoMeanField, TraceMeanField_ELBO),
}
KINDS = {"time_ratio": "time", "memory_ratio": "peak memory"}


class Size(NamedTuple):
    """The hidden layers, the batches, and how many steps are timed."""

    hidden: tuple[int, ...] = (200, 200, 200, 200)
    batches: tuple[int, ...] = (32, 128, 1024)
    rounds: int = 200
    warmup: int = 10


SIZES = {"default": Size(), "small": Size((20,), (32, 64), 3, 1)}


def run(output: Path, *, form: Form = "default", device: Literal["cpu", "cuda"] = "cpu", threads: int = 2) -> None:
    """The same model, optimizer and loss; steps of the guides alternate, so ratios are free of the machine's drift.

    Peak memory is that of the tensors alive at once, from making the model to the end of the third step.
    """
    torch.set_num_threads(threads)
    size = SIZES[form]
    setting = {"threads": threads, "rounds": size.rounds, "device": device, "torch": torch.__version__}
    results = Results(output, setting)
    for batch in size.batches:
        keys = [{"batch": batch, "guide": name} for name in GUIDES]
        results.add_all(keys, partial(measure, batch, device, size))


def measure(batch: int, device: str, size: Size) -> list[Row]:
    """A row for each guide."""
    make = partial(make_step, batch=batch, device=device, hidden=size.hidden)
    steps = {name: make(name) for name in GUIDES}
    times = medians(steps, size.rounds, clock=wall_clock(device), block=1, warmup=size.warmup)
    memory = {name: peak_memory(partial(make, name), device) for name in GUIDES}
    return [
        {
            "median_ms": round(times[name], 3),
            "time_ratio": round(times[name] / times[UNIT], 3),
            "peak_mib": round(memory[name], 1),
            "memory_ratio": round(memory[name] / memory[UNIT], 3),
        }
        for name in GUIDES
    ]


def make_step(guide: str, *, batch: int, device: str, hidden: tuple[int, ...]) -> Callable[[], Any]:
    """A function that makes one training step on a fixed batch."""
    pyro.set_rng_seed(0)
    sizes = [784, *hidden, 10]
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
    model = SupervisedModel(BayesianModule(nn.Sequential(*layers[:-1])), likelihoods.Categorical(60_000)).to(device)
    make_guide, make_loss = GUIDES[guide]
    svi = SVI(model, make_guide(model), pyro.optim.Adam({"lr": 1e-3}), make_loss())
    x, y = torch.randn(batch, 784, device=device), torch.randint(10, (batch,), device=device)
    return lambda: svi.step(x, y)


def wall_clock(device: str) -> Callable[[], float]:
    """Seconds, after all that the device has been given to do."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return now


def peak_memory(make: Callable[[], Callable[[], Any]], device: str) -> float:
    """Peak in MiB of all tensors alive in three steps."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        three_steps(make)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # On the CPU torch keeps no such statistic, but its profiler sees each allocation and release.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        three_steps(make)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate(change for _, change in changes)) / 2**20


def three_steps(make: Callable[[], Callable[[], Any]]) -> None:
    step = make()
    for _ in range(3):
        step()


def claims(results: Results) -> list[Claim]:
    """Of the radial guide under Pyro's own loss."""
    published = {"time_ratio": "1.01 (16.2 against 16.0 minutes an epoch, VGG-16)", "memory_ratio": ""}
    found = []
    for name, noun in KINDS.items():
        values = results.values(name, guide="AutoRadial")
        text = f"A step with `AutoRadial` takes no more {noun} than one with Pyro's `AutoNormal`"
        numbers = f"{min(values):.2f} to {max(values):.2f} of it"
        found.append(Claim(text, published[name], numbers, "1", max(values) <= 1.0))
    return found


def report(results: Results) -> str:
    """Multiples of Pyro's own guide."""
    batches, setting = results.distinct("batch"), results.setting
    lines = []
    for guide in results.distinct("guide"):
        rows = [results.where(guide=guide, batch=batch)[0] for batch in batches]
        lines.append([guide, *(" / ".join(f"{row[name]:.2f}" for name in KINDS) for row in rows)])
    return f"""### Step time and memory

Time / peak memory of one `SVI.step` as multiples of Pyro's `AutoNormal`, on a 784-200-200-200-200-10 net \
({setting["threads"]} threads on {setting["device"]}, medians of {setting["rounds"]} interleaved steps, \
`TraceMeanField_ELBO` unless named; `python -m benchmarks.guides.step_time`).

{markdown_table(["", *(f"batch {batch}" for batch in batches)], lines)}

{results.plot("Time and memory by batch")}"""


def draw(results: Results) -> None:
    """Multiples by batch."""
    figure = Figure(figsize=(9, 3), layout="constrained", dpi=110)
    for (name, noun), ax in zip(KINDS.items(), figure.subplots(1, len(KINDS), sharey=True), strict=True):
        for guide in results.distinct("guide"):
            ax.plot(results.distinct("batch"), results.values(name, guide=guide), marker="o", label=guide)
        ax.set(title=noun, xlabel="batch", xscale="log")
        ax.set_xticks(results.distinct("batch"), results.distinct("batch"))
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"multiple of {UNIT}")
    figure.axes[1].legend(frameon=False, fontsize=8, loc="lower right")
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
