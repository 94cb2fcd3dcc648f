# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compile graphs on a CPU in a second process while training goes on, and keep the code on disk for later runs.

The code is a library that torch loads without inductor, whose import takes seconds.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile, gettempdir
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyro_radial._pyro.compat import compile_library, load_library
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.infer.compiler.inductor import (
    SLOW,
    GraphFunction,
    Options,
    draw_noise,
    find_fault,
    trial_options,
)
from pyro_radial.infer.compiler.noise import split_noise
from pyro_radial.infer.compiler.state import Metadata, Refused, first_line, metadata_of
from pyro_radial.infer.compiler.tensor_graph import Graph

# A graph is compiled after this many uses. A shorter run would end before its code is ready.
USES_BEFORE_COMPILING = 10
# The second process watches its parent from its start on. It imports nothing of the user's, takes no memory of a GPU,
# and starts no processes but a compiler.
PROGRAM = """\
import os, signal, sys, threading, time
os.nice(10)
{}
threading.Thread(target=_end_with, args=({},), daemon=True).start()
sys.path[:] = {}
from {} import compile_job
compile_job()
"""
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
# The file with a digest of the code, by which damage is found.
DIGEST = "digest"

# The processes by the folders for their code; one runs at a time.
_processes: dict[Path, "subprocess.Popen[str]"] = {}


class Job(NamedTuple):
    """A graph to compile, with the properties of its inputs, and the folder for its code."""

    module: GraphModule
    inputs: list[Metadata]
    options: Options
    default_dtype: torch.dtype
    folder: Path


class BackgroundCode:
    """The code of a graph, from disk or from a second process that compiles it.

    :param tensors: the constants and inputs of the graph.
    """

    @one_at_a_time()
    def __init__(self, graph: Graph, tensors: Sequence[Tensor], options: Options) -> None:
        if not hasattr(os, "nice"):
            raise Refused("graphs are compiled in the background on Linux and macOS only")
        self._draw, module = split_noise(graph.module)
        inputs = list(map(metadata_of, draw_noise(tensors, self._draw)))
        default = Path(gettempdir(), f"torchinductor_{os.getuid()}")
        root = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default))
        # Older versions of torch only tell the vector instructions.
        processor = getattr(torch.cpu, "get_capabilities", torch.backends.cpu.get_cpu_capability)
        self._jobs: list[Job] = []
        settings_here = {"cpp.threads": torch.get_num_threads(), **options}
        for trial in trial_options(settings_here, tensors):
            settings = sorted(trial.items()), torch.get_default_dtype()
            key = repr((module.code, inputs, settings, torch.__version__, processor()))
            folder = root.absolute() / "pyro_radial" / sha256(key.encode()).hexdigest()
            self._jobs.append(Job(module, inputs, trial, torch.get_default_dtype(), folder))
        self._has_looked = False

    def code(self, tensors: Callable[[], Sequence[Tensor]], uses: int) -> GraphFunction | None:
        """Return the code if it is ready and agrees with the graph, else None.

        :param tensors: returns the constants and inputs of the graph.
        :param uses: the number of uses of the graph.
        :raises Exception: if there will be no code.
        """
        job = self._jobs[0]
        process = _processes.get(job.folder)
        if process is None:
            is_waiting = self._has_looked and (uses < USES_BEFORE_COMPILING or not _may_start())
        else:
            is_waiting = process.poll() is None
        if is_waiting:
            return None
        if job.folder.exists():
            try:
                # Damaged code could end the process.
                if (job.folder / DIGEST).read_text() != _digest(job.folder):
                    raise OSError(f"{job.folder} is damaged")
                return self._checked(load_library(job.folder), tensors())
            except (OSError, RuntimeError) as error:
                # Code of a former run is compiled once more.
                shutil.rmtree(job.folder, ignore_errors=True)
                if self._has_looked:
                    raise Refused(f"its code cannot be loaded: {first_line(error)}") from error
        elif process is not None and process.returncode:
            output, _ = process.communicate()
            raise Refused(f"its compilation failed with {process.returncode}: {output.strip()}")
        elif self._has_looked and process is None:
            _processes[job.folder] = _start(job)
        self._has_looked = True
        return None

    @one_at_a_time()
    def _checked(self, code: GraphFunction, tensors: Sequence[Tensor]) -> GraphFunction | None:
        """Return code with its noise if it agrees with the graph; else go on to the next options, and return None."""
        draw = self._draw
        fault = find_fault(code, self._jobs[0].module, draw_noise(tensors, draw), timed=True)
        if fault is None:
            return lambda *tensors: code(*tensors, *draw())
        if len(self._jobs) == 1 or fault == SLOW:
            raise Refused(fault)
        del self._jobs[0]
        self._has_looked = False
        return None


def _may_start() -> bool:
    """Return whether a process may start: after the end of the one before, if there is a second core for it."""
    # On some systems a process may run on all cores. A frozen program would start itself again.
    cores = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    if len(cores) == 1 or getattr(sys, "frozen", False):
        return False
    return all(process.poll() is not None for process in _processes.values())


def _start(job: Job) -> "subprocess.Popen[str]":
    """Start the process that compiles a graph."""
    program = PROGRAM.format(getsource(_end_with), os.getpid(), [*map(str, sys.path)], __name__)
    with TemporaryFile() as file:
        pickle.dump(job, file)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
            text=True,
            # Low priority counts only among the processes of one session.
            process_group=0,
        )


def compile_job() -> None:
    """Compile the job in the standard input, in the second process; print the reason if that fails."""
    try:
        job: Job = pickle.load(sys.stdin.buffer)
        torch.set_default_dtype(job.default_dtype)
        job.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryDirectory(dir=job.folder.parent, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            examples = list(map(Metadata.empty, job.inputs))
            compile_library(job.module, examples, job.options, folder)
            (folder / DIGEST).write_text(_digest(folder))
            # If another training has left the same code, this fails, and that code is used.
            folder.rename(job.folder)
    except Exception as error:
        print(first_line(error))
        sys.exit(1)


def _end_with(parent: int) -> None:
    """End the second process and its own, such as a C++ compiler, when its parent ends."""
    while os.getppid() == parent:
        time.sleep(0.2)
    # Python and compilers delete their files at this signal.
    os.killpg(0, signal.SIGINT)
    time.sleep(5.0)
    os.killpg(0, signal.SIGKILL)


def _digest(folder: Path) -> str:
    """Return a digest of the code in a folder."""
    return sha256(b"".join(map(Path.read_bytes, sorted(folder.glob("code.*"))))).hexdigest()
