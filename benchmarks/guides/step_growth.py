# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure how the cost of a step grows with the number of weights and of particles.

python -m benchmarks.guides.step_growth
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, medians
from benchmarks.guides._contenders import CONTENDERS, PLAIN, Problem, available, num_weights

__all__ = ["claims", "draw", "report", "run"]

NAMES = (PLAIN, "Pyro's AutoNormal", "posteriors", "AutoRadial, eager", "AutoRadial, compiled")
KEPT = ("AutoRadial, eager", "AutoRadial, compiled")
COMPILED, PYROS = "AutoRadial, compiled", "Pyro's AutoNormal"
FLAT = 1.3


class Size(NamedTuple):
    """Hidden layers that make nets of 1e5 to 5e7 weights, with turns; particles; who takes part."""

    nets: tuple[tuple[tuple[int, ...], int], ...] = (
        ((110, 110), 60),
        ((650, 650), 30),
        ((2750, 2750), 8),
        ((6650, 6650), 3),
    )
    particles: tuple[int, ...] = (1, 4, 16)
    rounds: int = 20
    names: tuple[str, ...] = NAMES


SIZES = {"default": Size(), "small": Size((((8,), 2),), (1, 2), 2, (PLAIN, PYROS, "AutoRadial, eager"))}


def run(output: Path, *, form: Form = "default", threads: int = 1) -> None:
    """Time steps on batches of 32, which take turns by network; torch's profiler counts the tensors of a step."""
    torch.set_num_threads(threads)
    size = SIZES[form]
    results = Results(output, {"threads": threads, "torch": torch.__version__})
    for hidden, rounds in size.nets:
        names = available(size.names)
        keys = [{"weights": num_weights(Problem(hidden)), "particles": 1, "step": name} for name in names]
        results.add_all(keys, partial(measure, names, Problem(hidden), rounds))
    for particles in size.particles[1:]:
        names = [name for name in available(size.names) if name != PLAIN]
        problem = Problem(particles=particles)
        keys = [{"weights": num_weights(problem), "particles": particles, "step": name} for name in names]
        results.add_all(keys, partial(measure, names, problem, size.rounds))
    problem = Problem()
    keys = [{"weights": num_weights(problem), "particles": 1, "step": name} for name in names]
    results.add_all(keys, partial(measure, names, problem, size.rounds))
    hidden, rounds = size.nets[-1]
    for name in [name for name in KEPT if name in size.names]:
        for keeps in (False, True) if form == "default" else (True,):
            keys = {"pages": "kept" if keeps else "given back", "step": name}
            results.add(keys, partial(in_a_process, name, hidden, rounds, keeps))


def in_a_process(name: str, hidden: tuple[int, ...], rounds: int, keeps: bool) -> Row:
    """Milliseconds of a step in a process of its own, whose allocator keeps its pages or gives them back."""
    settings = {variable: str(2**30) for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
    environment = {key: value for key, value in os.environ.items() if key not in settings} | (settings if keeps else {})
    code = f"from benchmarks.guides.step_growth import alone; print(alone({name!r}, {hidden!r}, {rounds}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return {"cpu_ms": round(float(done.stdout.split()[-1]), 2)}


def alone(name: str, hidden: tuple[int, ...], rounds: int) -> float:
    """Milliseconds of a step."""
    torch.set_num_threads(1)
    return medians({name: CONTENDERS[name](Problem(hidden))}, rounds, block=1, warmup=6)[name]


def measure(names: list[str], problem: Problem, rounds: int) -> list[Row]:
    """Milliseconds and peak memory of a step."""
    memory = {}
    for name in names:
        step = CONTENDERS[name](problem)
        for _ in range(6):
            step()
        memory[name] = peak_bytes(step)
    steps = {name: CONTENDERS[name](problem) for name in names}
    times = medians(steps, rounds, block=1, warmup=6)
    weights = num_weights(problem)
    return [
        {
            "cpu_ms": round(times[name], 3),
            "ns_per_weight": round(1e6 * times[name] / weights, 2),
            "bytes_per_weight": round(memory[name] / weights, 1),
        }
        for name in names
    ]


def peak_bytes(step: Callable[[], Any]) -> float:
    """The most that a step has allocated at any time, above what was there before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate(change for _, change in changes))


def near(results: Results, weights: float) -> int:
    """The net whose number of weights is nearest."""
    found: int = min(results.distinct("weights"), key=lambda number: abs(number - weights))
    return found


def claims(results: Results) -> list[Claim]:
    """Check that time per weight is flat, and memory no larger than with Pyro's guide."""
    rows = [results.where(step=COMPILED, weights=near(results, n), particles=1) for n in (1e6, 1e7)]
    if not all(rows):
        return []
    small, large = (row[0]["ns_per_weight"] for row in rows)
    ours, theirs = (
        [row["bytes_per_weight"] for row in results.where(step=name, particles=1)] for name in (COMPILED, PYROS)
    )
    return [
        Claim(
            f"The time of a compiled step per weight is flat from 10^6 to 10^7 weights, within a factor of {FLAT}",
            "",
            f"{small:.0f} and {large:.0f} ns",
            "1",
            max(small, large) <= FLAT * min(small, large),
        ),
        Claim(
            "A compiled step needs no more memory than one with Pyro's `AutoNormal`",
            "",
            ", ".join(f"{a:.0f} to {b:.0f}" for a, b in zip(ours, theirs, strict=True)) + " bytes per weight",
            "1",
            all(a <= b for a, b in zip(ours, theirs, strict=True)),
        ),
    ]


def report(results: Results) -> str:
    """Report two tables: by weights and by particles."""
    names, setting = results.distinct("step"), results.setting
    own = num_weights(Problem())
    sizes = [weights for weights in results.distinct("weights") if weights != own]
    by_weights = []
    for name in names:
        rows = [results.where(step=name, weights=weights, particles=1)[0] for weights in sizes]
        by_weights.append([name, *(f"{row['ns_per_weight']:.0f} / {row['bytes_per_weight']:.0f}" for row in rows)])
    particles = sorted(results.distinct("particles"))
    by_particles = []
    for name in names:
        found = [results.where(step=name, weights=own, particles=number) for number in particles]
        if all(found):
            by_particles.append([name, *(f"{rows[0]['cpu_ms']:.1f}" for rows in found)])
    return f"""### How the cost of a step grows

Each cell gives nanoseconds of CPU time / peak bytes of a step, both per weight, on batches of 32 and \
{setting["threads"]} thread (`python -m benchmarks.guides.step_growth`). glibc returns tensors above 32 MiB to the \
system, so every operation gets new pages for them. `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` of 1 GiB in \
the environment keep the pages: on the largest network a step then takes {pages_kept(results)}.

{markdown_table(["", *(f"{weights:.0e} weights" for weights in sizes)], by_weights)}

Milliseconds per step by the number of particles, vectorized, at {own:.1e} weights:

{markdown_table(["", *map(str, particles)], by_particles)}

{results.plot("Time per weight by the number of weights")}"""


def pages_kept(results: Results) -> str:
    """Describe how keeping pages changes the time of a step."""
    found = []
    for name in results.distinct("step"):
        kept, given = (results.where(step=name, pages=pages) for pages in ("kept", "given back"))
        if kept and given:
            found.append(f"{kept[0]['cpu_ms'] / given[0]['cpu_ms']:.2f} of the time ({name})")
    return " and ".join(found)


def draw(results: Results) -> None:
    """Time for each weight."""
    figure = Figure(figsize=(7.5, 3.2), layout="constrained", dpi=110)
    ax = figure.subplots()
    for name in results.distinct("step"):
        rows = sorted(results.where(step=name, particles=1), key=lambda row: row["weights"])
        ax.plot([row["weights"] for row in rows], [row["ns_per_weight"] for row in rows], marker="o", label=name)
    ax.set(xscale="log", yscale="log", xlabel="weights", ylabel="ns of a step per weight")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
