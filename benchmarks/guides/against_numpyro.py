# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare steps of the same models in Pyro, compiled and not, and in NumPyro.

python -m benchmarks.guides.against_numpyro
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table
from benchmarks.guides._eight_models.data import (
    BLOCK,
    CONTENDERS,
    DRAWS,
    LEARNING_RATE,
    MODELS,
    ONE_THREAD,
    PYRO,
    ROOT,
)
from benchmarks.guides._processes import processes_below

NEEDS = "`numpyro`, and `funsor` for the mixture"
OURS, PEER, EAGER, JIT = "CompiledSVI", "NumPyro", "SVI", "JitTrace_ELBO"
#: How often steps take turns, a block of them at a time.
ROUNDS = {"default": 40, "small": 1}
SMALL = ("eight schools",)
#: The most that our step may take, as a multiple of NumPyro's; how many models must be ahead; eager over compiled.
FASTER = 4.0


def run(output: Path, *, form: Form = "default") -> None:
    """Let steps take turns, each library in a process of its own; without NumPyro, Pyro's steps alone are measured."""
    contenders = CONTENDERS if all(map(importlib.util.find_spec, ("numpyro", "funsor"))) else PYRO
    if contenders is PYRO:
        print(f"NumPyro is left out: {NEEDS} must be installed.")
    setting = {"torch": torch.__version__, "lr": LEARNING_RATE, "steps": BLOCK * (2 + ROUNDS[form]), "draws": DRAWS}
    results = Results(output, setting)
    for model in SMALL if form == "small" else MODELS:
        keys = [{"model": model, "step": name} for name in contenders]
        results.add_all(keys, partial(measure, model, contenders, form))


def measure(model: str, contenders: tuple[str, ...], form: Form) -> list[Row]:
    """The first steps one after another, then the first compiled ones, then turns of all, then the losses."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(model, name, form)) for name in contenders]
        for worker in workers:
            worker.compile()
        times: list[list[float]] = [[] for _ in workers]
        for _ in range(ROUNDS[form]):
            for worker, own in zip(workers, times, strict=True):
                own.append(1e3 * worker.ask(str(BLOCK))["cpu"] / BLOCK)
        return [
            {
                "cpu_ms": round(statistics.median(own), 4),
                "first_cpu": round(worker.first_cpu, 1),
                "first_wall": round(worker.first_wall, 1),
                "compiled_cpu": round(worker.compiled_cpu, 1),
                **worker.ask("final"),
                **({name: version(name) for name in ("numpyro", "jax")} if contender not in PYRO else {}),
            }
            for contender, worker, own in zip(contenders, workers, times, strict=True)
        ]


class Worker:
    """A fresh process that has taken its first steps, without anything in caches on disk."""

    def __init__(self, model: str, contender: str, form: Form) -> None:
        self.caches = tempfile.TemporaryDirectory()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.guides._eight_models.worker"]
        environment = os.environ | ONE_THREAD | {"TORCHINDUCTOR_CACHE_DIR": self.caches.name}
        start = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, model, contender, form],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.ask(str(BLOCK))
        self.first_wall = time.perf_counter() - start
        self.first_cpu = cpu_seconds(self.process.pid)

    def compile(self) -> None:
        """Take steps that are compiled."""
        self.ask("compile")
        self.ask(str(BLOCK))
        self.compiled_cpu = cpu_seconds(self.process.pid)

    def ask(self, line: str) -> Any:
        """The answer to a line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.communicate()
        self.caches.cleanup()


def cpu_seconds(process: int) -> float:
    """CPU seconds of a process and all below it, also of those that have ended (on Linux; NaN elsewhere)."""
    processes = processes_below(process)
    return sum(one.seconds for one in processes.values()) if processes else float("nan")


def by_contender(results: Results, model: str) -> dict[str, Row]:
    """The rows of a model."""
    return {row["step"]: row for row in results.where(model=model)}


def ratios(results: Results, name: str, other: str, what: str = "cpu_ms") -> list[float]:
    """What a contender takes over what another does, by model; models where one of them is missing are left out."""
    found = [by_contender(results, model) for model in results.distinct("model")]
    return [rows[name][what] / rows[other][what] for rows in found if name in rows and other in rows]


def claims(results: Results) -> list[Claim]:
    """Compare with NumPyro and with Pyro."""
    faster = ratios(results, EAGER, OURS)
    found = [
        Claim(
            f"A compiled step is at least {FASTER:.0f} times as fast as that of Pyro's `SVI`, in the median of models",
            "",
            f"{statistics.median(faster):.1f} times, from {min(faster):.1f} to {max(faster):.1f}",
            "1",
            statistics.median(faster) >= FASTER,
        )
    ]
    first = ratios(results, OURS, PEER, "first_cpu")
    if first:
        text = f"The first {BLOCK} steps are done sooner than NumPyro's, in CPU time of a fresh process"
        found.append(Claim(text, "", f"{min(first):.2f} to {max(first):.2f} times its time", "1", max(first) < 1.0))
    return found


def report(results: Results) -> str:
    """Report the times and losses by model."""
    models, contenders = results.distinct("model"), results.distinct("step")
    rows = {model: by_contender(results, model) for model in models}
    tables = {
        what: [[model, *(cell(rows[model][name][what], what) for name in contenders)] for model in models]
        for what in ("cpu_ms", "first_cpu", "compiled_cpu", "loss")
    }
    setting = results.setting
    versions = ", ".join(f"{name} {row[name]}" for row in results.where(step=PEER)[:1] for name in ("numpyro", "jax"))
    return f"""### Pyro, compiled Pyro and NumPyro

The same models with the same guides, priors, data, mini-batches and optimizer (Adam, rate {setting["lr"]}), each in a \
process of its own with one thread (`python -m benchmarks.guides.against_numpyro`). Processes take turns. Guides are \
`AutoNormal`, except for the VAE (its encoder) and the sparse GP (`AutoMultivariateNormal`). "NumPyro" is \
`jax.jit(svi.update)` ({versions}); "NumPyro, scan" runs {BLOCK} steps in one compiled loop, as `SVI.run` does, which \
leaves no place for Python between steps. CPU milliseconds per step, medians:

{markdown_table(["", *contenders], tables["cpu_ms"])}

CPU seconds from the start of a fresh process to the end of its first {BLOCK} steps, with nothing in caches on disk, \
imports and compilers included:

{markdown_table(["", *contenders], tables["first_cpu"])}

`CompiledSVI` replays these steps as recorded, and compiles a graph after a thousand uses. Here it is told to compile \
after the first {BLOCK} steps; CPU seconds to the end of the next {BLOCK}:

{markdown_table(["", *contenders], tables["compiled_cpu"])}

The loss after {setting["steps"]} steps, a mean over {setting["draws"]} draws. All guides start at the same values:

{markdown_table(["", *contenders], tables["loss"])}

{results.plot("CPU time of a step by model")}"""


def cell(value: float, what: str) -> str:
    """A number as the tables show it."""
    return f"{value:.2f}" if what == "cpu_ms" else f"{value:,.1f}"


def draw(results: Results) -> None:
    """Milliseconds by model on a logarithmic scale."""
    models, contenders = results.distinct("model"), results.distinct("step")
    figure = Figure(figsize=(9, 4.5), layout="constrained", dpi=110)
    ax = figure.subplots()
    for number, name in enumerate(contenders):
        values = [by_contender(results, model)[name]["cpu_ms"] for model in models]
        places = np.arange(len(models)) + 0.8 * (number / len(contenders) - 0.4)
        color = "C1" if name == OURS else f"{0.3 + 0.15 * number}"
        ax.bar(places, values, 0.8 / len(contenders), label=name, color=color)
    ax.set_xticks(range(len(models)), models, rotation=20, ha="right", fontsize=8)
    ax.set(yscale="log", ylabel="CPU time of a step, ms")
    ax.legend(frameon=False, fontsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
