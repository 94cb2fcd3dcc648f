# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare compiled steps with those of Pyro's ``SVI`` in programs of packages that use Pyro.

python -m benchmarks.guides.packages
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pyro
import torch

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table
from benchmarks.guides._packages.programs import SUBJECTS, Subject

NEEDS = (
    "`scvi-tools`, `cell2location`, `mofaflex`, `py-irt`, `iPoLNG`, `pyroved`, `gpytorch`, `pylineagt`, `cellbender`, "
    "`cellarium-ml`, `sctm`, `mobsterm`, `pybasilica`, and `sc-echidna`"
)
EAGER, JIT, RECORDED, COMPILED = "SVI", "JitTrace_ELBO", "CompiledSVI", "CompiledSVI, compiled"
WAYS = (EAGER, JIT, RECORDED, COMPILED)
#: Whole runs: as by default, with an empty folder for code, and with the code that the run before left there.
COLD, WARM = "CompiledSVI, no code on disk", "CompiledSVI, code on disk"
WHOLE_WAYS = (EAGER, JIT, COLD, WARM)
#: A whole run is given up after so many CPU seconds in steps; steps between looks at the clock, and in the small form.
MOST_WHOLE_SECONDS, WHOLE_BLOCK, SMALL_WHOLE = 100.0, 25, 25
#: Steps before the first timed one, and in one turn.
WARMUP, BLOCK = 100, 10
#: A way whose first steps take more CPU seconds is left out.
MOST_SECONDS = 120.0
#: Steps after which parameters are compared.
TRAINED = 50
#: The aims: packages with a recorded program, the slowest program as a multiple of ``SVI``, and the largest difference
#: in standard errors.
NUM_RECORDED, SLOWEST, MOST_DIFFERENT = 13, 1.05, 2.0
SMALL, SMALL_WHOLE_RUNS = ("GPyTorch", "py-irt"), ("py-irt",)
ROOT = Path(__file__).parents[2]


class FailedError(Exception):
    """A program does not run in this way."""


def run(output: Path, *, form: Form = "default") -> None:
    """Let steps take turns, then time whole runs, each way in a process of its own.

    Packages that are not installed are left out.
    """
    setting = {"torch": torch.__version__, "pyro": pyro.__version__, "threads": 1}
    results = Results(output, setting)
    names = SMALL if form == "small" else SUBJECTS
    for name in filter(is_installed, names):
        results.add_all([{"program": name, "way": way} for way in WAYS], partial(measure, name, form))
    timed = SMALL_WHOLE_RUNS if form == "small" else [name for name in SUBJECTS if SUBJECTS[name].whole]
    for name in filter(is_installed, timed):
        results.add_all([{"run": name, "way": way} for way in WHOLE_WAYS], partial(measure_whole_runs, name, form))


def is_installed(name: str) -> bool:
    """Return whether the package of a program is there; print that the program is left out if it is not."""
    distribution = SUBJECTS[name].distribution
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        print(f"{name} is left out: {distribution} is not installed.")
        return False
    return True


def measure(name: str, form: Form) -> list[Row]:
    """The first steps one after another, then turns of all, then training from one start with some seeds."""
    rows: dict[str, Row] = {way: {} for way in WAYS}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for way in WAYS:
            is_recorded = RECORDED in workers and workers[RECORDED].ask("final")["recorded"]
            if way == COMPILED and not is_recorded:
                rows[way]["fails"] = "it is not recorded"
                continue
            try:
                worker = stack.enter_context(Worker(name, way, form))
                worker.begin(1 if form == "small" else WARMUP)
                workers[way] = worker
            except FailedError as error:
                rows[way]["fails"] = str(error)
        times: dict[str, list[float]] = {way: [] for way in workers}
        for worker in workers.values():
            worker.ask("reset")
        for _ in range(1 if form == "small" else SUBJECTS[name].repeats):
            for way, worker in workers.items():
                times[way].append(1e3 * worker.ask(str(BLOCK))["cpu"] / BLOCK)
        for way, worker in workers.items():
            rows[way] |= {"cpu_ms": round(statistics.median(times[way]), 3), **worker.ask("final")}
        steps = 3 if form == "small" else TRAINED
        usual = workers[EAGER].ask(f"seeds {steps}")
        for way in (RECORDED, COMPILED):
            if way in workers:
                rows[way]["difference"] = round(difference(workers[way].ask(f"seeds {steps}"), usual), 4)
    return [rows[way] for way in WAYS]


def measure_whole_runs(name: str, form: Form) -> list[Row]:
    """Time a whole run in each way, from the start of Python to the last step."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for way in WHOLE_WAYS:
            try:
                rows.append(whole_run(name, way, form, folder))
            except FailedError as error:
                rows.append({"fails": str(error)})
    return rows


def whole_run(name: str, way: str, form: Form, folder: str) -> Row:
    """The seconds of a whole run, and of CPU time in it and in the processes that compile for it.

    :param folder: the folder for compiled code. A run that finds none waits afterwards until its code is there.
    """
    start = time.perf_counter()
    steps = SMALL_WHOLE if form == "small" else SUBJECTS[name].whole
    with Worker(name, way, form, folder) as worker:
        if way in (COLD, WARM):
            worker.ask("background")
        seconds = 0.0
        for taken in range(0, steps, WHOLE_BLOCK):
            seconds += worker.ask(str(min(WHOLE_BLOCK, steps - taken)))["cpu"]
            if seconds > MOST_WHOLE_SECONDS:
                raise FailedError(f"its first {taken + WHOLE_BLOCK} steps take {seconds:.0f} s")
        spent = worker.ask("spent")
        row = {
            "seconds": round(time.perf_counter() - start, 2),
            "cpu": round(spent["cpu"], 2),
            "compiler": round(spent["others"], 2),
            "steps": steps,
        }
        if way == COLD:
            worker.ask("settle")
    return row


def difference(ours: list[dict[str, list[float]]], theirs: list[dict[str, list[float]]]) -> float:
    """The largest difference of mean parameters, over all tensors, relative to their standard error over seeds.

    Both are root mean squares over the elements of a tensor. Two independent sets of seeds would differ by 1.4.
    """
    found = [0.0]
    for name in theirs[0]:
        own, other = (torch.tensor([run[name] for run in runs], dtype=torch.float64) for runs in (ours, theirs))
        if not other.numel():
            continue
        error = (other.var(0).mean() / len(other)).sqrt() if len(other) > 1 else torch.ones(())
        apart = (own.mean(0) - other.mean(0)).square().mean().sqrt()
        if float(apart) > 1e-6 * float(other.abs().max()):
            found.append(float(apart / error.clamp(min=1e-12)))
    return max(found)


class Worker:
    """A fresh process with a package's program."""

    def __init__(self, name: str, way: str, form: Form, folder: str | None = None) -> None:
        self.way = way
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.guides._packages.worker"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        if folder is not None:
            environment |= {"TORCHINDUCTOR_CACHE_DIR": folder}
        self.process = subprocess.Popen(
            [*command, name, way.partition(",")[0], form],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip

    def begin(self, steps: int) -> None:
        """Take the first steps, the last of them compiled if they are to be."""
        seconds = 0.0
        for taken in range(0, steps, BLOCK):
            seconds += self.ask(str(min(BLOCK, steps)))["cpu"]
            if seconds > MOST_SECONDS:
                raise FailedError(f"its first {taken + BLOCK} steps take {seconds:.0f} s")
        if self.way == COMPILED:
            self.ask("compile")
            self.ask(str(BLOCK))

    def ask(self, line: str) -> Any:
        """The answer to a line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            self.errors.seek(0)
            last = [text for text in self.errors.read().splitlines() if "Error" in text] or ["it ended"]
            raise FailedError(last[-1].strip()[:160])
        return json.loads(answer)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.communicate()
        self.errors.close()


def rows_of(results: Results, program: str) -> dict[str, Row]:
    """The rows of a program by way."""
    return {row["way"]: row for row in results.where(program=program)}


def is_recorded(rows: dict[str, Row]) -> bool:
    """Return whether a program is replayed."""
    return bool(rows[RECORDED].get("recorded"))


def claims(results: Results) -> list[Claim]:
    """Count the programs that are recorded, and compare times and parameters."""
    programs = [rows_of(results, program) for program in results.distinct("program")]
    recorded = [rows for rows in programs if is_recorded(rows)]
    by_package: defaultdict[str, list[bool]] = defaultdict(list)
    for program in results.distinct("program"):
        by_package[SUBJECTS[program].distribution].append(is_recorded(rows_of(results, program)))
    num_packages, num_whole = sum(map(any, by_package.values())), sum(map(all, by_package.values()))
    faster = [rows[EAGER]["cpu_ms"] / rows[RECORDED]["cpu_ms"] for rows in recorded]
    slowest = max(rows[RECORDED]["cpu_ms"] / rows[EAGER]["cpu_ms"] for rows in programs)
    seeds = [SUBJECTS[program].seeds for program in results.distinct("program")]
    differences = [row["difference"] for rows in programs for row in rows.values() if "difference" in row]
    return [
        Claim(
            f"`CompiledSVI` records programs of at least {NUM_RECORDED} packages that use Pyro",
            "",
            f"of {num_packages} of {len(by_package)} packages, all programs of {num_whole}; "
            f"{len(recorded)} of {len(programs)} programs",
            "1",
            num_packages >= NUM_RECORDED,
        ),
        Claim(
            f"After {WARMUP} steps no program of a package takes more than {SLOWEST} times a step of Pyro's `SVI`",
            "",
            f"at most {slowest:.2f} times; recorded ones are {min(faster):.1f} to {max(faster):.1f} times as fast",
            "1",
            slowest <= SLOWEST,
        ),
        Claim(
            "Trained parameters of packages' programs do not differ between `SVI` and `CompiledSVI`",
            "",
            f"at most {max(differences):.2f} standard errors",
            " to ".join(map(str, sorted({min(seeds), max(seeds)}))),
            max(differences) <= MOST_DIFFERENT,
        ),
    ]


def cell(row: Row) -> str:
    """Milliseconds and megabytes of one way."""
    return "" if "fails" in row else f"{row['cpu_ms']:.1f} ms, {row['peak_mb']:,} MB"


def line(program: str, rows: dict[str, Row]) -> list[str]:
    """What became of a program."""
    name = f"{program} {rows[EAGER]['version']}: {SUBJECTS[program].data}"
    compared = [rows[way]["difference"] for way in (RECORDED, COMPILED) if "difference" in rows[way]]
    faster = rows[EAGER]["cpu_ms"] / rows[RECORDED]["cpu_ms"]
    return [name, *(cell(rows[way]) for way in WAYS), f"{faster:.2f}", f"{max(compared):.2f}"]


def whole_cell(row: Row) -> str:
    """Seconds of a whole run, those of its CPU time, and those of the compiler's."""
    if "fails" in row:
        return ""
    compiler = f" + {row['compiler']:.1f}" if row["way"] == COLD else ""
    return f"{row['seconds']:.1f} s ({row['cpu']:.1f}{compiler})"


def whole_line(program: str, rows: dict[str, Row]) -> list[str]:
    """The whole runs of a program."""
    faster = ["" if "fails" in rows[way] else f"{rows[EAGER]['cpu'] / rows[way]['cpu']:.2f}" for way in (COLD, WARM)]
    return [program, f"{rows[EAGER]['steps']:,}", *(whole_cell(rows[way]) for way in WHOLE_WAYS), *faster]


def whole_runs(results: Results) -> str:
    """The part of the report on whole runs; empty if there are none."""
    measured = [program for program in SUBJECTS if program in results.distinct("run")]
    if not measured:
        return ""
    rows = {program: {row["way"]: row for row in results.where(run=program)} for program in measured}
    timed = [whole_line(program, by_way) for program, by_way in rows.items() if "fails" not in by_way[EAGER]]
    headings = ["", "steps", *(f"`{way}`" for way in (EAGER, JIT)), "no code on disk", "code on disk"]
    return f"""

Whole runs, from the start of Python to the last step: imports, made-up data, the package's setup, and as many steps \
as the package takes by default, or 1,000 if it fixes no number or takes more than a minute. Wall seconds, which other \
programs on the machine may have lengthened, and in brackets the CPU seconds of the process, plus those of the process \
that compiles beside it. `CompiledSVI` has its defaults, first with an empty folder for compiled code, then with the \
code of that run. "Times as fast" compares CPU seconds of the process. An empty cell is a run that fails, or whose \
steps take more than {MOST_WHOLE_SECONDS:.0f} CPU seconds.

{markdown_table([*headings, "times as fast, no code", "times as fast, code"], timed)}"""


def report(results: Results) -> str:
    """Report a line for each program, why the others are not recorded, and whole runs."""
    measured = results.distinct("program")
    programs = {program: rows_of(results, program) for program in SUBJECTS if program in measured}
    table = [line(program, rows) for program, rows in programs.items()]
    reasons = [
        [program, "`CompiledSVI`", rows[RECORDED]["because"]]
        for program, rows in programs.items()
        if not is_recorded(rows)
    ]
    reasons += [[program, f"`{JIT}`", rows[JIT]["fails"]] for program, rows in programs.items() if "fails" in rows[JIT]]
    with_more_seeds = [program for program in programs if SUBJECTS[program].seeds != Subject.seeds]
    more_seeds = (
        f" {', '.join(with_more_seeds)}: 10 seeds, which also change the rounding of the start."
        if with_more_seeds
        else ""
    )
    headings = ["", *(f"`{way}`" for way in (EAGER, JIT, RECORDED)), "compiled", "times as fast", "difference"]
    return f"""### Packages that use Pyro

Each package builds its own model, guide, loss, optimizer and batches on made-up data; the steps are taken by Pyro's \
`SVI`, by `SVI` with the package's loss as a `{JIT}` (or its like), and by `CompiledSVI`, recorded and compiled. Each \
runs in a process of its own with one thread, and processes take turns after {WARMUP} steps \
(`python -m benchmarks.guides.packages`; it needs {NEEDS}). Medians of CPU time per step, and the peak of resident \
memory in these steps above that before the first. "Times as fast" compares recorded steps with those of `SVI`. The \
difference is that of the parameters after {TRAINED} steps from one start, means over 3 seeds, in standard errors; \
independent runs would differ by about 1.4.{more_seeds} Here Python is 3.11. Under 3.13, with ArviZ 1.3, the same two \
of three programs of scvi-tools are recorded.

{markdown_table(headings, table)}

Why programs are not recorded, or have no `{JIT}`:

{markdown_table(["", "", "because"], reasons)}{whole_runs(results)}"""


if __name__ == "__main__":
    main(run, report)
