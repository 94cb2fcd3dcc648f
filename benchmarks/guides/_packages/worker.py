# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A process that trains the program of one package in one way, and takes steps when it is told to.

It reads lines from its standard input, and answers each with a line of JSON: a number of steps to take, "compile" for
steps that are compiled from then on, "background" for steps that are compiled in a second process, "settle" to wait
for that process, "reset" to forget the peak of memory, "spent" for the seconds of CPU time since its start, "final", or
"seeds" and a number of steps for the parameters after so many from the same start, by seed.
"""

import copy
import json
import os
import resource
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import (
    SVI,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    JitTraceMeanField_ELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)

from benchmarks.guides._packages.programs import SUBJECTS, arguments_at
from benchmarks.guides._processes import processes_below
from pyro_radial import CompiledSVI

#: Steps in which code that is ready comes into use, and the most times that there is more to compile.
STEPS_TO_LOAD, MOST_ROUNDS = 12, 5
JITTED = {
    Trace_ELBO: JitTrace_ELBO,
    TraceEnum_ELBO: JitTraceEnum_ELBO,
    TraceGraph_ELBO: JitTraceGraph_ELBO,
    TraceMeanField_ELBO: JitTraceMeanField_ELBO,
}


class Training:
    """Steps of a package's program.

    :param way: "SVI", "JitTrace_ELBO" or "CompiledSVI".
    """

    def __init__(self, name: str, way: str, small: bool) -> None:
        pyro.set_rng_seed(0)
        self.subject = SUBJECTS[name]
        self.noted = self.subject.make(small)
        self.way, self.small = way, small
        pyro.set_rng_seed(1)
        args, kwargs = arguments_at(self.noted, 0)
        given = self.noted.svi
        # After this all parameters are there.
        with torch.no_grad():
            self.noted.loss.loss(given.model, given.guide, *args, **kwargs)
        self.start = {name: p.detach().clone() for name, p in pyro.get_param_store().named_parameters()}
        self.svi = self._svi()
        self.step = 0
        self.resident = resident()

    def _svi(self) -> Any:
        given = self.noted.svi
        if self.way == "CompiledSVI":
            return CompiledSVI(given.model, given.guide, self._optim(), self.noted.loss, compile=False)
        loss: Any = self.noted.loss
        if self.way == "JitTrace_ELBO":
            loss = JITTED[type(loss)](
                max_plate_nesting=loss.max_plate_nesting,
                num_particles=loss.num_particles,
                vectorize_particles=loss.vectorize_particles,
                ignore_jit_warnings=True,
            )
        return SVI(given.model, given.guide, self._optim(), loss)

    def _optim(self) -> Any:
        """The package's optimizer, without the state of parameters."""
        optim = copy.copy(self.noted.svi.optim)
        optim.optim_objs = {}
        return optim

    def steps(self, number: int) -> None:
        """Take steps."""
        for _ in range(number):
            args, kwargs = arguments_at(self.noted, self.step)
            self.svi.step(*args, **kwargs)
            self.step += 1

    def compile(self) -> None:
        """Compile graphs from the next step on."""
        self.svi.graphs.compile = True
        self.svi.graphs.compile_now = True

    def compile_in_background(self) -> None:
        """Compile graphs in a second process, as ``CompiledSVI`` does by default."""
        self.svi.graphs.compile = True

    def settle(self) -> None:
        """Wait until all graphs have their code on disk."""
        for _ in range(MOST_ROUNDS):
            self.steps(STEPS_TO_LOAD)
            if not descendants():
                return
            while descendants():
                time.sleep(0.2)

    def trained(self, steps: int) -> list[dict[str, list[float]]]:
        """The parameters after training from the start, by seed.

        Each seed also changes the start by about its rounding, so that the seeds differ in programs without noise too.
        """
        found = []
        for seed in range(1 if self.small else self.subject.seeds):
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in pyro.get_param_store().named_parameters():
                start = self.start[name]
                rounding = torch.finfo(start.dtype).eps * torch.randn(start.shape, generator=generator).to(start)
                parameter.data.copy_(start * (1.0 + rounding))
            self.svi.optim, self.step = self._optim(), 0
            pyro.set_rng_seed(seed)
            self.steps(steps)
            store = pyro.get_param_store().named_parameters()
            found.append({name: parameter.detach().flatten()[:1_000].tolist() for name, parameter in store})
        return found

    def final(self) -> dict[str, Any]:
        """What became of the program."""
        found = {"peak_mb": round(peak() - self.resident), "version": version(self.subject.distribution)}
        if self.way == "CompiledSVI":
            found |= {
                "recorded": bool(self.svi.compiled),
                "graphs": self.svi.num_graphs,
                "because": "; ".join(self.svi.eager_reasons),
            }
        return found


def descendants() -> dict[int, float]:
    """The seconds of CPU time of the running processes that this one has started, and that those have."""
    # Of a process that has ended, and its children, the time is counted when it is waited for.
    processes = processes_below(os.getpid())
    return {number: one.seconds for number, one in processes.items() if number != os.getpid() and not one.has_ended}


def spent() -> dict[str, float]:
    """The seconds of CPU time of this process and of those that it has started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    others = children.ru_utime + children.ru_stime + sum(descendants().values())
    return {"cpu": time.process_time(), "others": others}


def resident() -> float:
    """Megabytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak() -> float:
    """The most megabytes of memory that this process has had since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def reset_peak() -> None:
    """Forget the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def main(name: str, way: str, form: str) -> None:
    """Answer until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run = Training(name, way, form == "small")
    for line in sys.stdin:
        start = time.process_time()
        answer: Any = {}
        if line.strip() == "compile":
            run.compile()
        elif line.strip() == "background":
            run.compile_in_background()
        elif line.strip() == "settle":
            run.settle()
        elif line.strip() == "reset":
            reset_peak()
        elif line.strip() == "spent":
            answer = spent()
        elif line.strip() == "final":
            answer = run.final()
        elif line.startswith("seeds"):
            answer = run.trained(int(line.split()[1]))
        else:
            run.steps(int(line))
            answer = {"cpu": time.process_time() - start}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
