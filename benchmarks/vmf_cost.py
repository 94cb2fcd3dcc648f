# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the von Mises-Fisher law costs: its scalars and its draws, against torch's own functions and other formulas.

Each row is the ratio of the median times of two subjects that take turns in one run. On the CPU the time is that of one
thread's work, so another program on the machine does not count, and the allocator keeps its pages: getting fresh ones
from the system would cost every subject the same. The others, written down here from their papers, are

* the ratio of Bessel functions as the mean of two bounds, and its logarithms summed over the order to log I (Oh,
  Adamczewski and Park 2019, theorems 1 to 3);
* the sampler of Davidson et al. (2018): rejection until every row has a draw, and a Householder reflection, with a
  gradient in the mean direction alone. Ours has the gradient in the concentration too.

    python benchmarks/vmf_cost.py            # about a minute; with a CUDA device, its row as well
"""

import argparse
import ctypes
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.nn.functional import normalize

from pyro_radial.distributions import VonMisesFisherStable
from pyro_radial.distributions.special import log_mean_exp_cosine, mean_cosine

RESULTS = Path(__file__).parent / "results"
# How many elements, and of which dimensions, the scalars are computed for.
NUM_SCALARS = 2**18
SCALAR_DIMS = (2, 100, 500, 4608)
# Batch and dimension of the draws.
SHAPES = ((800, 500), (256, 4608), (4096, 64), (65536, 3))
# Calls that are timed at once.
BLOCK = 3

Subjects = dict[str, Callable[[], Any]]


def keep_pages() -> None:
    """Has the allocator of Linux reuse memory instead of returning it."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        for option, value in ((-3, 2**25), (-1, 2**30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            library.mallopt(option, value)


def medians(subjects: Subjects, rounds: int) -> dict[str, float]:
    """Median milliseconds of a call to each subject, the subjects taking turns."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for call in subjects.values():
        call()
    for _ in range(rounds):
        for name, call in subjects.items():
            start = time.process_time()
            for _ in range(BLOCK):
                call()
            times[name].append(1e3 * (time.process_time() - start) / BLOCK)
    return {name: statistics.median(values) for name, values in times.items()}


def bound(concentration: Tensor, order: float, alpha: float) -> Tensor:
    """One of the two bounds on I_order / I_{order-1} whose mean the paper takes: alpha is 0 or 2."""
    lam = order + 0.5 * (alpha - 1.0)
    delta = order - 0.5 + lam / (2.0 * (lam * lam + concentration.square()).sqrt())
    return concentration / (delta + (delta.square() + concentration.square()).sqrt())


def mean_of_bounds(concentration: Tensor, order: float) -> Tensor:
    return 0.5 * (bound(concentration, order, 0.0) + bound(concentration, order, 2.0))


def log_bessel_by_ratios(concentration: Tensor, dim: int) -> Tensor:
    """Log I of order m/2 - 1 as log I_0 or log I_1 and a sum of logarithms of approximate ratios."""
    value = (torch.special.i1e(concentration)).log() + concentration
    for order in range(2, dim // 2):
        value = value + mean_of_bounds(concentration, float(order)).log()
    return value


def davidson_sample(loc: Tensor, concentration: Tensor) -> Tensor:
    dim = loc.shape[-1]
    with torch.no_grad():
        cosine = davidson_cosine(concentration, dim).unsqueeze(-1)
    around = torch.randn(*loc.shape[:-1], dim - 1)
    around = around / around.norm(dim=-1, keepdim=True)
    value = torch.cat([cosine, (1.0 - cosine.square()).clamp(min=1e-10).sqrt() * around], -1)
    first = torch.zeros_like(loc)
    first[..., 0] = 1.0
    along = first - loc
    along = along / (along.norm(dim=-1, keepdim=True) + 1e-5)
    return value - 2.0 * (value * along).sum(-1, keepdim=True) * along


def davidson_cosine(concentration: Tensor, dim: int) -> Tensor:
    root = (4.0 * concentration.square() + (dim - 1) ** 2).sqrt()
    b = (root - 2.0 * concentration) / (dim - 1)
    a = 0.25 * (dim - 1 + 2.0 * concentration + root)
    d = 4.0 * a * b / (1.0 + b) - (dim - 1) * math.log(dim - 1)
    beta = torch.distributions.Beta(0.5 * (dim - 1), 0.5 * (dim - 1), validate_args=False)
    cosine, left = torch.zeros_like(b), torch.ones_like(b, dtype=torch.bool)
    while left.any():
        y, uniform = beta.sample(b.shape), torch.rand_like(b)
        proposal = (1.0 - (1.0 + b) * y) / (1.0 - (1.0 - b) * y)
        t = 2.0 * a * b / (1.0 - (1.0 - b) * y)
        accepted = ((dim - 1) * t.log() - t + d >= uniform.log()) & left
        cosine = torch.where(accepted, proposal, cosine)
        left = left & ~accepted
    return cosine


def scalar_rows(dim: int, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Our two main scalars together, and the paper's ratio alone, in units of ``torch.lgamma``."""
    concentration = dim * (0.01 + 5.0 * torch.rand(NUM_SCALARS, dtype=dtype))
    subjects: Subjects = {
        "torch.lgamma": lambda: torch.lgamma(concentration),
        "A and L": lambda: (mean_cosine(concentration, dim), log_mean_exp_cosine(concentration, dim)),
        "mean of two bounds on A": lambda: mean_of_bounds(concentration, 0.5 * dim),
    }
    case = {"dim": dim, "elements": NUM_SCALARS, "dtype": str(dtype)}
    return ratios(case, medians(subjects, rounds), "torch.lgamma")


def series_rows(dim: int, count: int, rounds: int) -> list[dict[str, Any]]:
    concentration = dim * (0.01 + 5.0 * torch.rand(count, dtype=torch.double))
    subjects: Subjects = {
        "L": lambda: log_mean_exp_cosine(concentration, dim),
        "log-ratio series": lambda: log_bessel_by_ratios(concentration, dim),
    }
    return ratios({"dim": dim, "elements": count, "dtype": "torch.float64"}, medians(subjects, rounds), "L")


def draw_rows(batch: int, dim: int, rounds: int) -> list[dict[str, Any]]:
    """Draws in units of ``torch.randn`` of their shape, without and with gradients."""
    loc = normalize(torch.randn(batch, dim), dim=-1).requires_grad_()
    concentration = torch.full((batch,), float(dim)).requires_grad_()
    grad, scale = torch.randn(batch, dim), torch.rand(batch, dim).requires_grad_()

    def ours() -> Tensor:
        return VonMisesFisherStable(loc, concentration, validate_args=False).rsample()

    def without_gradient(sample: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            sample()

    subjects: Subjects = {
        "torch.randn": lambda: torch.randn(batch, dim),
        "forward": lambda: without_gradient(ours),
        "forward and backward": lambda: torch.autograd.grad(ours(), (loc, concentration), grad),
        "Davidson forward": lambda: without_gradient(lambda: davidson_sample(loc, concentration)),
        "Davidson forward and backward": lambda: torch.autograd.grad(davidson_sample(loc, concentration), loc, grad),
        "normal forward and backward": lambda: torch.autograd.grad(
            torch.addcmul(loc, scale, torch.randn(batch, dim)), (loc, scale), grad
        ),
    }
    return ratios({"batch": batch, "dim": dim, "dtype": "torch.float32"}, medians(subjects, rounds), "torch.randn")


def ratios(case: dict[str, Any], times: dict[str, float], unit: str) -> list[dict[str, Any]]:
    rows = [
        case | {"subject": name, "unit": unit, "ratio": round(value / times[unit], 3), "median_ms": round(value, 4)}
        for name, value in times.items()
    ]
    for row in rows:
        print(row, flush=True)
    return rows


def cuda_rows(batch: int, dim: int, rounds: int) -> list[dict[str, Any]]:
    """A forward draw as a captured graph, in units of a copy of the same tensor."""
    loc = normalize(torch.randn(batch, dim, device="cuda"), dim=-1)
    law = VonMisesFisherStable(loc, torch.full((batch,), float(dim), device="cuda"), validate_args=False)
    for _ in range(3):
        law.rsample()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        law.rsample()
    target = torch.empty_like(loc)
    subjects: Subjects = {"copy": lambda: target.copy_(loc), "forward, captured": graph.replay, "forward": law.rsample}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, call in subjects.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(BLOCK):
                call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / BLOCK)
    case = {"batch": batch, "dim": dim, "dtype": "torch.float32", "device": torch.cuda.get_device_name()}
    return ratios(case, {name: statistics.median(values) for name, values in times.items()}, "copy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, default=RESULTS / "vmf_cost.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_pages()
    pyro.set_rng_seed(0)
    rows = []
    for batch, dim in SHAPES:
        rows += draw_rows(batch, dim, args.rounds)
    for dim in SCALAR_DIMS:
        for dtype in (torch.float32, torch.float64):
            rows += scalar_rows(dim, dtype, max(args.rounds // 4, 5))
    rows += series_rows(4608, 2**12, 5)
    if torch.cuda.is_available():
        rows += cuda_rows(256, 4608, args.rounds)
    setting = {"threads": 1, "rounds": args.rounds, "calls_per_round": BLOCK, "torch": torch.__version__}
    args.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
