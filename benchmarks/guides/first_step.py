# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure the first steps of a fresh process, with and without programs that another process has compiled.

python -m benchmarks.guides.first_step
"""

import importlib.util
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table
from benchmarks.guides._eight_models.options import BLOCK, ONE_THREAD, ROOT

__all__ = ["claims", "draw", "report", "run"]

EAGER, OURS, AT_ONCE, PEER = "SVI", "CompiledSVI", "CompiledSVI, compiled at once", "NumPyro"
NOTHING, HEADER, PROGRAM = "nothing", "the header", "the program"
#: What is on disk, in the order of the runs. A header of inductor is the same for all programs.
ON_DISK = {EAGER: (NOTHING,), OURS: (NOTHING,), AT_ONCE: (NOTHING, HEADER, PROGRAM), PEER: (NOTHING, PROGRAM)}
#: The most CPU seconds from nothing; half of it for a program that is on disk.
MOST = {"hierarchical regression": 2.0, "784-200x4-10, batch 32": 6.0}
MODELS = {"default": tuple(MOST), "small": ("eight schools",)}


def run(output: Path, *, form: Form = "default") -> None:
    """Start processes one after another; without NumPyro, Pyro alone is measured."""
    results = Results(output, {"torch": torch.__version__, "steps": BLOCK})
    for model in MODELS[form]:
        for step in (EAGER, OURS, AT_ONCE, *([PEER] if importlib.util.find_spec("numpyro") else [])):
            keys = [{"model": model, "step": step, "on_disk": on_disk} for on_disk in ON_DISK[step]]
            results.add_all(keys, partial(measure, model, step, form))


def measure(model: str, step: str, form: Form) -> list[Row]:
    """A process for each state of the disk."""
    with tempfile.TemporaryDirectory() as folder:
        return [first_steps(model, step, form, Path(folder), on_disk) for on_disk in ON_DISK[step]]


def first_steps(model: str, step: str, form: Form, folder: Path, on_disk: str) -> Row:
    """Seconds from the start of a process to its end, all processes below it included."""
    programs = str(folder / ("first" if on_disk == NOTHING and step == AT_ONCE else "second"))
    # Inductor keeps its header in the folder for temporary files.
    own = {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": programs, "JAX_COMPILATION_CACHE_DIR": programs}
    own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    contender = step.partition(",")[0]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.guides._eight_models.worker", model, contender, form]
    lines = f"compile\n{BLOCK}\n" if step == AT_ONCE else f"{BLOCK}\n"
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, input=lines, cwd=ROOT, env=os.environ | ONE_THREAD | own, text=True, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": round(cpu, 1), "wall": round(time.perf_counter() - start, 1)}


def cpu_of(results: Results, model: str, step: str, on_disk: str) -> float:
    """CPU seconds; NaN if they are not measured."""
    rows = results.where(model=model, step=step, on_disk=on_disk)
    return float(rows[0]["cpu"]) if rows else float("nan")


def claims(results: Results) -> list[Claim]:
    """Compare with the targets and with NumPyro."""
    found = []
    for step, on_disk, share in ((OURS, NOTHING, 1.0), (AT_ONCE, NOTHING, 1.0), (AT_ONCE, PROGRAM, 0.5)):
        models = [model for model in MOST if model in results.distinct("model")]
        own = [cpu_of(results, model, step, on_disk) for model in models]
        most = [share * MOST[model] for model in models]
        which = f"{results.setting['steps']} steps" if step == OURS else "compiled steps"
        text = f"A fresh process ends its first {which} in {' / '.join(f'{m:.0f} s' for m in most)} of CPU time"
        text += f", hierarchical / network, with {on_disk} on disk"
        held = all(value <= bound for value, bound in zip(own, most, strict=True))
        found.append(Claim(text, "", " / ".join(f"{value:.1f} s" for value in own), "1", held))
        theirs = [cpu_of(results, model, PEER, on_disk) for model in models]
        if theirs == theirs:
            text = f"A fresh process ends its first {which} sooner than NumPyro's, with {on_disk} on disk"
            numbers = " / ".join(f"{a:.1f} against {b:.1f} s" for a, b in zip(own, theirs, strict=True))
            ahead = all(a < b for a, b in zip(own, theirs, strict=True))
            found.append(Claim(text, "", numbers, "1", ahead))
    return found


def report(results: Results) -> str:
    """Report seconds by model and by what is on disk."""
    models = results.distinct("model")
    lines = []
    for step in results.distinct("step"):
        for on_disk in ON_DISK[step]:
            rows = [results.where(model=model, step=step, on_disk=on_disk)[0] for model in models]
            lines.append([step, on_disk, *(f"{row['cpu']:.1f} / {row['wall']:.1f}" for row in rows)])
    return f"""### First steps

CPU seconds of all processes / seconds on the wall, from the start of a fresh process to the end of its first \
{results.setting["steps"]} steps, imports and compilers included (`python -m benchmarks.guides.first_step`). The \
models are those of `against_numpyro`, each with one thread. "The program" was compiled by an earlier process. "The \
header" is what inductor compiles once for all programs of a machine. `SVI` compiles nothing: its row is the time of \
imports. NumPyro uses JAX's compilation cache. `CompiledSVI` replays a graph as recorded until it has been used a \
thousand times; "compiled at once" compiles it before the first replay.

{markdown_table(["", "on disk", *models], lines)}

{results.plot("CPU time of the first steps by model")}"""


def draw(results: Results) -> None:
    """CPU seconds by model, a bar for each state of the disk."""
    models = results.distinct("model")
    cells = [(step, on_disk) for step in results.distinct("step") for on_disk in ON_DISK[step]]
    figure = Figure(figsize=(10, 3.5), layout="constrained", dpi=110)
    ax = figure.subplots()
    for number, (step, on_disk) in enumerate(cells):
        places = np.arange(len(models)) + 0.8 * (number / len(cells) - 0.4)
        values = [cpu_of(results, model, step, on_disk) for model in models]
        color = {EAGER: "0.3", OURS: "C2", AT_ONCE: "C1", PEER: "0.6"}[step]
        shade = 1.0 - 0.3 * ON_DISK[step].index(on_disk)
        label = f"{step}, {on_disk} on disk"
        bars = ax.bar(places, values, 0.7 / len(cells), label=label, color=color, alpha=shade)
        ax.bar_label(bars, fmt="%.1f", fontsize=7)
    ax.set_xticks(range(len(models)), models)
    ax.set_ylabel("CPU time of the first steps, s")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
