# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare one training step in each library with that of a plain network.

python -m benchmarks.guides.step_time
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, medians
from benchmarks.guides._contenders import (
    CONTENDERS,
    ON_LENET_ALONE,
    OURS,
    PEERS,
    PLAIN,
    Problem,
    available,
    bytes_per_weight,
)

#: Who is timed on LeNet, at the default batch size of ``fit``.
ON_LENET = (
    PLAIN,
    "plain, fused Adam",
    "AutoRadial, SVI",
    "AutoRadial, eager",
    "AutoRadial, compiled",
    *ON_LENET_ALONE,
    "AutoMeanField, eager",
    "AutoMeanField, compiled",
)
LENET_BATCH = 128


class Size(NamedTuple):
    """The hidden layers, the batches with the turns of each, and who takes part."""

    hidden: tuple[int, ...] = (200, 200, 200, 200)
    rounds: tuple[tuple[int, int], ...] = ((32, 100), (128, 60), (1024, 20))
    names: tuple[str, ...] = tuple(CONTENDERS)
    lenet_rounds: int = 60
    on_lenet: tuple[str, ...] = ON_LENET


SIZES = {
    "default": Size(),
    "small": Size(
        (8,), ((32, 2),), (PLAIN, "Pyro's AutoNormal", "AutoRadial, eager", "AutoRadial, recorded"), 2, ON_LENET[:4:3]
    ),
}


def run(output: Path, *, form: Form = "default", threads: int = 1) -> None:
    """Time steps that take turns, so ratios do not depend on drift of the machine; missing peers are left out."""
    torch.set_num_threads(threads)
    size = SIZES[form]
    results = Results(output, {"threads": threads, "hidden": size.hidden, "torch": torch.__version__})
    for batch, rounds in size.rounds:
        names = available(size.names)
        results.add_all(
            [{"batch": batch, "step": name} for name in names],
            partial(measure, names, Problem(size.hidden, batch), rounds),
        )
    results.add_all(
        [{"lenet_batch": LENET_BATCH, "step": name} for name in size.on_lenet],
        partial(measure, size.on_lenet, Problem(batch=LENET_BATCH, lenet=True), size.lenet_rounds),
    )
    results.add({"memory": "Adam"}, lambda: {"bytes": bytes_per_weight(Problem(size.hidden))})
    results.add({"noise": "of all weights"}, partial(noise_time, Problem(size.hidden)))


def noise_time(problem: Problem) -> Row:
    """The CPU time to draw a standard normal number for each weight."""
    noise = [torch.empty_like(parameter) for parameter in problem.network().parameters()]
    return {"cpu_ms": medians({"noise": lambda: [tensor.normal_() for tensor in noise]}, 100)["noise"]}


def measure(names: Sequence[str], problem: Problem, rounds: int) -> list[Row]:
    """A row for each: CPU time and time on the wall."""
    steps = {name: (CONTENDERS | ON_LENET_ALONE)[name](problem) for name in names}
    # What is compiled is compiled in its first steps.
    cpu = medians(steps, rounds, warmup=6)
    wall = medians(steps, max(2, rounds // 3), clock=time.perf_counter)
    return [
        {
            "cpu_ms": round(cpu[name], 3),
            "cpu_ratio": round(cpu[name] / cpu[PLAIN], 3),
            "wall_ms": round(wall[name], 3),
            "wall_ratio": round(wall[name] / wall[PLAIN], 3),
        }
        for name in names
    ]


def ratios(results: Results, name: str) -> list[float]:
    """Multiples of the plain step, by batch."""
    return [row["cpu_ratio"] for batch in results.distinct("batch") for row in results.where(step=name, batch=batch)]


def claims(results: Results) -> list[Claim]:
    """Compare with every peer."""
    name = "AutoRadial, compiled"
    rivals = [peer for peer in PEERS if ratios(results, peer)]
    fastest = min(rivals, key=lambda peer: ratios(results, peer)[0])
    every = [ratios(results, step) for step in (name, *rivals)]
    ahead = all(ours <= min(theirs) for ours, *theirs in zip(*every, strict=True))
    numbers = " / ".join(f"{value:.2f}" for value in ratios(results, fastest))
    text = f"A step of `{name}` is at least as fast as every peer, fused or not"
    return [Claim(text, "", f"the next is {fastest}: {numbers}", "1", ahead)]


def report(results: Results) -> str:
    """Report multiples of the plain step."""
    batches, setting = results.distinct("batch"), results.setting
    lines = []
    for name in results.distinct("step"):
        rows = [row for batch in batches for row in results.where(step=name, batch=batch)]
        if rows:
            lines.append([name, *(f"{row['cpu_ratio']:.2f} / {row['wall_ratio']:.2f}" for row in rows)])
    hidden = "-".join(map(str, [784, *setting["hidden"], 10]))
    on_lenet = [
        [row["step"], f"{row['cpu_ratio']:.2f} / {row['wall_ratio']:.2f}"]
        for row in results.rows
        if "lenet_batch" in row
    ]
    return f"""### Step time

Each cell gives CPU time / wall time of one training step on a {hidden} network, as multiples of a step of a plain \
network (forward, backward and an unfused Adam). Runs use {setting["threads"]} thread; times are medians of steps that \
take turns (`python -m benchmarks.guides.step_time`). Peers that are not installed are left out. "SVI" is Pyro's own; \
"eager" is the loss as a module with one fused Adam, as in `fit`; "recorded" is a `CompiledSVI` that does not compile \
its graph. A radial posterior with its gradients and Adam holds {results.values("bytes", memory="Adam")[0]:.0f} bytes \
per weight between two steps. Drawing a standard normal number for each weight takes \
{results.values("cpu_ms", noise="of all weights")[0]:.1f} ms of the CPU; a plain step in batches of {batches[0]} takes \
{results.values("cpu_ms", step=PLAIN, batch=batches[0])[0]:.1f}.

{markdown_table(["", *(f"batch {batch}" for batch in batches)], lines)}

The same on the LeNet of `uncertainty.lenet5`, with 44,426 weights. Predictive widths train by SGD with momentum:

{markdown_table(["", f"batch {LENET_BATCH}"], on_lenet)}

{results.plot("CPU time of a step by batch")}"""


def draw(results: Results) -> None:
    """Multiples at each batch, the fastest on top."""
    batches = results.distinct("batch")
    figure = Figure(figsize=(11, 4.5), layout="constrained", dpi=110)
    names = [name for name in results.distinct("step") if ratios(results, name)]
    names.sort(key=lambda name: -ratios(results, name)[0])
    axes = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for place, (batch, ax) in enumerate(zip(batches, axes, strict=True)):
        values = [ratios(results, name)[place] for name in names]
        colors = ["C1" if name in OURS else "0.4" if name.startswith(PLAIN) else "C0" for name in names]
        bars = ax.barh(names, values, color=colors)
        ax.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
        ax.set(title=f"batch {batch}", xlabel="multiple of a plain step")
        ax.tick_params(labelsize=8)
        ax.margins(x=0.12)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
