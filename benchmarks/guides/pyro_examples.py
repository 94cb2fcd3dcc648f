# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare compiled steps with those of Pyro's ``SVI``, on programs after the examples in Pyro's repository.

python -m benchmarks.guides.pyro_examples
"""

import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyro
import torch
from matplotlib.figure import Figure
from pyro.infer import SVI

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, medians
from benchmarks.guides._examples import mixtures, networks, regressions, sequences
from benchmarks.guides._examples.changes import CHANGES
from benchmarks.guides._examples.program import Program, compared
from pyro_radial import CompiledSVI

PROGRAMS: dict[str, Callable[[], Program]] = {
    name: make for module in (regressions, mixtures, sequences, networks) for name, make in module.PROGRAMS.items()
}
TARGET = 1e-5
#: How many programs are to run, and how many of them compiled.
NUM_PROGRAMS, NUM_COMPILED = 25, 20
#: Steps before the gradients are compared once more.
WARMUP = 6
#: How often steps take turns.
ROUNDS = {"default": 40, "small": 1}
SMALL = ("eight_schools", "coin", "vae")
SMALL_CHANGES = ("tensor as argument", "branch on a draw")
LEARNING_RATE = 1e-4


def run(output: Path, *, form: Form = "default", threads: int = 1) -> None:
    """Compare the gradients on the same noise, and time steps that take turns."""
    torch.set_num_threads(threads)
    results = Results(output, {"threads": threads, "torch": torch.__version__, "pyro": pyro.__version__})
    small = form == "small"
    for name in SMALL if small else PROGRAMS:
        results.add({"program": name}, partial(measure, name, ROUNDS[form], compile=not small))
    for name in SMALL_CHANGES if small else CHANGES:
        results.add({"change": name}, partial(changed, name))


def measure(name: str, rounds: int, *, compile: bool) -> Row:
    """The errors of gradients before and after training, the milliseconds, and why it runs eagerly or fails."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    program = PROGRAMS[name]()
    row = {"loss": type(program.loss).__name__}
    # After this step all parameters are there.
    eager = SVI(program.model, program.guide, pyro.optim.Adam({"lr": LEARNING_RATE}), program.loss)
    eager.step(*program.args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            svi = compiled(program, compile=compile)
            errors = [compared(program, svi.graphs).together]
            svi.graphs.compile_now = True
        except (ValueError, RuntimeError) as error:
            return row | {"fails": str(error)}
        steps = {"eager": lambda: eager.step(*program.args), "compiled": lambda: svi.step(*program.args)}
        times = medians(steps, rounds, warmup=WARMUP)
        errors.append(compared(program, svi.graphs, seed=4).together)
    times = {f"{step}_ms": round(milliseconds, 3) for step, milliseconds in times.items()}
    return row | outcome(svi, errors) | times


def compiled(program: Program, *, compile: bool) -> CompiledSVI:
    """The program with its own optimizer."""
    optim = pyro.optim.Adam({"lr": LEARNING_RATE})
    return CompiledSVI(program.model, program.guide, optim, program.loss, compile=compile)


def outcome(svi: CompiledSVI, errors: list[float]) -> Row:
    """The largest error, and why steps run eagerly."""
    return {"error": f"{max(errors):.1e}", "eagerly": "; ".join(svi.graphs.eager_reasons)}


def changed(name: str) -> Row:
    """The error of gradients after a change, and why the program runs eagerly."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    program, change, after = CHANGES[name]()
    svi = compiled(program, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            svi.step(*program.args)
        return outcome(svi, [compared(after, svi.graphs, seed, change).together for seed in range(4)])


def held(rows: list[Row]) -> list[Row]:
    """The rows whose gradients are right."""
    return [row for row in rows if float(row.get("error", "inf")) <= TARGET]


def in_graphs(results: Results) -> list[Row]:
    """The programs that run compiled."""
    return [row for row in programs(results) if row.get("eagerly") == ""]


def speedup(row: Row) -> float:
    """How many times as fast as Pyro's own step."""
    return row["eager_ms"] / row["compiled_ms"]


def programs(results: Results) -> list[Row]:
    """The rows of the examples."""
    return [row for row in results.rows if "program" in row]


def changes(results: Results) -> list[Row]:
    """The rows of the changes between steps."""
    return [row for row in results.rows if "change" in row]


def claims(results: Results) -> list[Claim]:
    """Count the programs that run compiled, and check all gradients."""
    rows = programs(results)
    right = held(in_graphs(results))
    faster = [speedup(row) for row in right]
    return [
        Claim(
            f"`CompiledSVI` runs {NUM_PROGRAMS} or more of Pyro's examples, at least {NUM_COMPILED} of them compiled",
            "",
            f"{len(held(rows))} of {len(rows)} with right gradients, {len(right)} of them compiled",
            "1",
            len(held(rows)) == len(rows) >= NUM_PROGRAMS and len(right) >= NUM_COMPILED,
        ),
        Claim(
            "A compiled step is at least twice as fast as that of Pyro's `SVI`, in the median of the compiled programs",
            "",
            f"{statistics.median(faster):.1f} times, from {min(faster):.1f} to {max(faster):.1f}",
            "1",
            statistics.median(faster) >= 2.0,
        ),
    ]


def line(row: Row) -> list[str]:
    """What became of a program."""
    found = [row["program"], f"`{row['loss']}`"]
    if "fails" in row:
        return [*found, "", "", "", f"fails: {row['fails']}"]
    times = [f"{row[name]:.2f}" for name in ("eager_ms", "compiled_ms")]
    return [
        *found,
        row["error"],
        *times,
        f"runs eagerly: {row['eagerly']}" if row["eagerly"] else f"{speedup(row):.1f}",
    ]


def report(results: Results) -> str:
    """Report a line for each program, and one for each change."""
    after = [[row["change"], row["error"], row["eagerly"] or "compiled"] for row in changes(results)]
    headings = ["", "loss", "error", "`SVI`, ms", "`CompiledSVI`, ms", "times as fast"]
    return f"""### Pyro's examples

The programs follow the examples in Pyro's repository and tutorials; we wrote them ourselves, and they use \
made-up data. Each has the loss and the kind of guide of the example. The error is that of all gradients together, \
relative to those of Pyro's `SVI` on the same noise; it is the larger one of before and after training. \
Times are medians of CPU time of steps that take turns \
({results.setting["threads"]} thread; `python -m benchmarks.guides.pyro_examples`).

{markdown_table(headings, map(line, programs(results)))}

The next table changes between two steps what a program reads besides its arguments.

{markdown_table(["what changes", "error", "runs"], after)}

{results.plot("How many times as fast compiled steps are")}"""


def draw(results: Results) -> None:
    """How many times as fast, the fastest on top."""
    rows = sorted(in_graphs(results), key=speedup)
    figure = Figure(figsize=(7, 1.0 + 0.22 * len(rows)), layout="constrained", dpi=110)
    ax = figure.subplots()
    bars = ax.barh([row["program"] for row in rows], list(map(speedup, rows)), color="#0072B2")
    ax.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    ax.axvline(1.0, color="0.5", linestyle=":")
    ax.set(xlabel="times as fast as Pyro's SVI")
    ax.tick_params(labelsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
