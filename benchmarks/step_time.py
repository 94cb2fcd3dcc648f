# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One ``SVI.step`` with AutoRadial against Pyro's AutoNormal: time and peak memory.

The same model (784-200-200-200-200-10), optimiser and loss; steps of the two guides alternate in one run, so that the
ratio of medians is free of the machine's drift. Peak memory is that of a fresh process for each guide.

    python benchmarks/step_time.py            # on the CPU, two threads
    python benchmarks/step_time.py --device cuda
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.nn import likelihoods

RESULTS = Path(__file__).parent / "results"
BATCHES = (32, 128, 1024)
SUBJECTS: dict[str, tuple[Any, Any]] = {
    "AutoNormal": (AutoNormal, TraceMeanField_ELBO),
    "AutoRadial": (AutoRadial, TraceMeanField_ELBO),
    "AutoRadial with RadialELBO": (AutoRadial, RadialELBO),
    "AutoMeanField": (AutoMeanField, TraceMeanField_ELBO),
}


def make_step(subject: str, batch: int, device: str) -> Any:
    """A function that makes one training step on a fixed batch."""
    pyro.set_rng_seed(0)
    sizes = [784, 200, 200, 200, 200, 10]
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
    model = SupervisedModel(BayesianModule(nn.Sequential(*layers[:-1])), likelihoods.Categorical(60_000)).to(device)
    make_guide, make_loss = SUBJECTS[subject]
    svi = SVI(model, make_guide(model), pyro.optim.Adam({"lr": 1e-3}), make_loss())
    x, y = torch.randn(batch, 784, device=device), torch.randint(10, (batch,), device=device)
    return lambda: svi.step(x, y)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved_times(batch: int, device: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds per step of each subject, the subjects taking turns."""
    steps = {name: make_step(name, batch, device) for name in SUBJECTS}
    for step in steps.values():
        for _ in range(10):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            synchronise(device)
            start = time.perf_counter()
            step()
            synchronise(device)
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def peak_memory(subject: str, batch: int, device: str) -> float:
    """Peak memory in MiB of ten steps in a fresh process, above what it held before the first step."""
    command = [sys.executable, __file__, "--measure-memory", subject, "--batch", str(batch), "--device", device]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure_memory(subject: str, batch: int, device: str) -> float:
    """Peak memory in MiB of ten steps, in this process."""
    step = make_step(subject, batch, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        for _ in range(10):
            step()
        return torch.cuda.max_memory_allocated() / 2**20
    # Linux: 5 resets the peak to what the process holds now, so that the imports' own peak does not hide the steps'.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mib("VmRSS")
    for _ in range(10):
        step()
    return resident_mib("VmHWM") - before


def resident_mib(field: str) -> float:
    """A memory field of this process, VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--measure-memory", choices=list(SUBJECTS))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure_memory:
        print(measure_memory(args.measure_memory, args.batch, args.device))
        return
    rows = []
    for batch in BATCHES:
        times = interleaved_times(batch, args.device, args.rounds)
        medians = {name: statistics.median(values) for name, values in times.items()}
        memory = {name: statistics.median(peak_memory(name, batch, args.device) for _ in range(3)) for name in SUBJECTS}
        for name in SUBJECTS:
            row = {
                "batch": batch,
                "guide": name,
                "median_ms": round(medians[name], 3),
                "time_ratio": round(medians[name] / medians["AutoNormal"], 3),
                "peak_mib": round(memory[name], 1),
                "memory_ratio": round(memory[name] / memory["AutoNormal"], 3),
            }
            rows.append(row)
            print(row, flush=True)
    output = args.output or RESULTS / f"step_time_{args.device}.json"
    setting = {"threads": args.threads, "rounds": args.rounds, "device": args.device, "torch": torch.__version__}
    output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
