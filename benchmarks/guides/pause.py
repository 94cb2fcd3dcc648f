# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure how long the steps of a new process take while its graph is compiled, and in a later process.

python -m benchmarks.guides.pause
"""

import importlib
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceMeanField_ELBO

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table
from pyro_radial import AutoMeanField, CompiledSVI

#: Runs in the order in which they share a cache: ``warm`` finds the code of ``cold``.
RUNS = ("SVI", "recorded", "cold", "warm")
#: The first steps record the program and compare it with its graph.
FIRST = 20
AIMS = {"cold": 0.5, "warm": 0.2}
SHARE = 0.35


class Size(NamedTuple):
    """Processes of each kind, timed steps, and how long a run goes on until its code is in use."""

    repetitions: int = 1
    steps: int = 3_000
    most_seconds: float = 600.0
    runs: tuple[str, ...] = RUNS


SIZES = {"default": Size(), "small": Size(1, 2 * FIRST, 0.0, ("SVI", "cold", "warm"))}


def run(output: Path, *, form: Form = "default", threads: int = 1) -> None:
    """Train the model of the README in new processes, each with the cache of the one before."""
    size = SIZES[form]
    results = Results(output, {"threads": threads, "steps": size.steps, "torch": torch.__version__})
    for repetition in range(size.repetitions):
        keys: list[Row] = [{"run": name, "repetition": repetition} for name in size.runs]
        results.add_all(keys, lambda: measure_all(size, threads))


def measure_all(size: Size, threads: int) -> list[Row]:
    """A row for each run, in a process of its own."""
    rows = []
    with TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        for name in size.runs:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                rows.append(process.submit(measure, name, size, threads, cache).result())
    return rows


def groups_model(features: torch.Tensor, group: torch.Tensor, target: torch.Tensor | None = None) -> None:
    """The model of the README, under "Any Pyro model, faster"."""
    weights = pyro.sample("weights", dist.Normal(torch.zeros(20), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("groups", 8):
        offset = pyro.sample("offset", dist.Normal(0.0, scale))
    with pyro.plate("data", len(features)):
        pyro.sample("target", dist.Normal((features * weights).sum(-1) + offset[..., group], 0.5), obs=target)


def measure(name: str, size: Size, threads: int, cache: str) -> Row:
    """Time steps on the wall, up to the steps that are asked for, and until compiled code is in use if it may be."""
    # torch imports it when an optimizer is first made, with or without our package.
    importlib.import_module("torch._dynamo")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(threads)
    pyro.set_rng_seed(0)
    features, group = torch.randn(400, 20), torch.arange(400) % 8
    target = features[:, 0] - features[:, 1] + torch.linspace(-1, 1, 8)[group] + 0.5 * torch.randn(400)
    arguments: Any = groups_model, AutoMeanField(groups_model), pyro.optim.Adam({"lr": 0.02}), TraceMeanField_ELBO()
    svi: Any = SVI(*arguments) if name == "SVI" else CompiledSVI(*arguments, compile=name != "recorded")
    is_compiled = name not in ("cold", "warm")
    seconds: list[float] = []
    ready = None
    started = time.perf_counter()
    while len(seconds) < size.steps or not (is_compiled or time.perf_counter() - started > size.most_seconds):
        before = time.perf_counter()
        svi.step(features, group, target)
        seconds.append(time.perf_counter() - before)
        if not is_compiled and svi._latest.mode == "compiled":
            is_compiled = True
            ready = time.perf_counter() - started
    return {
        "total_s": sum(seconds[: size.steps]),
        "first_s": seconds[0],
        "longest_s": max(seconds[FIRST:]),
        "median_ms": 1e3 * statistics.median(seconds[FIRST:]),
        "ready_s": ready,
    }


def _median(results: Results, column: str, name: str) -> float:
    """The median over processes; infinite if one of them never used compiled code."""
    values = results.values(column, run=name)
    return float("inf") if None in values else statistics.median(values)


def report(results: Results) -> str:
    """The section in Markdown."""
    columns = ("first_s", "longest_s", "median_ms", "ready_s", "total_s")
    names = results.distinct("run")
    lines = []
    for name in names:
        cells = ("" if name in ("SVI", "recorded") and column == "ready_s" else column for column in columns)
        lines.append([name, *(f"{_median(results, cell, name):.3g}" if cell else "" for cell in cells)])
    steps = f"{results.setting['steps']:,}"
    headings = (
        "run",
        "first step, s",
        f"longest step after the {FIRST}th, s",
        "median step, ms",
        "compiled after, s",
        f"{steps} steps, s",
    )
    return f"""### The pause of a compiler

`python -m benchmarks.guides.pause` trains the model of the README under "Any Pyro model, faster" in new processes, on
one thread, and times each step on the wall. `cold` has an empty cache, and a second process compiles the graph
meanwhile; `warm` finds its code. `recorded` never compiles. Imports do not count. Medians over processes.

{markdown_table(headings, lines)}"""


def claims(results: Results) -> list[Claim]:
    """The aims that were set beforehand."""
    number = len(results.distinct("repetition"))
    seeds = "1 process" if number == 1 else f"{number} processes"
    found = []
    for name, aim in AIMS.items():
        longest = max(results.values("longest_s", run=name))
        text = f"No step after the {FIRST}th takes longer than {aim} s with a {name} cache"
        found.append(Claim(text, "", f"{longest:.2f} s", seeds, longest <= aim))
    share = _median(results, "total_s", "cold") / _median(results, "total_s", "SVI")
    text = f"{results.setting['steps']:,} steps with a cold cache take at most {SHARE} of the time of SVI"
    return [*found, Claim(text, "", f"{share:.2f}", seeds, share <= SHARE)]


if __name__ == "__main__":
    main(run, report)
