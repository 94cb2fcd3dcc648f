# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One ``SVI.step`` with AutoRadial against Pyro's AutoNormal: time and peak memory.

The same model (784-200-200-200-200-10), optimiser and loss; steps of the two guides alternate in one run, so that the
ratio of medians is free of the machine's drift. Peak memory is that of the tensors alive at once.

    python benchmarks/step_time.py            # on the CPU, two threads
    python benchmarks/step_time.py --device cuda
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import accumulate, pairwise
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
    """Peak in MiB of all tensors alive, from making the model to the end of the third step."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_three_steps(subject, batch, device)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # On the CPU torch keeps no such statistic, but its profiler sees each allocation and release.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run_three_steps(subject, batch, device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate(change for _, change in changes)) / 2**20


def run_three_steps(subject: str, batch: int, device: str) -> None:
    step = make_step(subject, batch, device)
    for _ in range(3):
        step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for batch in BATCHES:
        times = interleaved_times(batch, args.device, args.rounds)
        medians = {name: statistics.median(values) for name, values in times.items()}
        memory = {name: peak_memory(name, batch, args.device) for name in SUBJECTS}
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
