# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the von Mises-Fisher distribution costs: its scalars and draws, against torch's functions and other formulas.

python -m benchmarks.distributions.vmf_cost
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.common import BLOCK, Claim, Form, Results, Row, Subjects, keep_pages, main, markdown_table, medians
from benchmarks.distributions._bessel import bounds
from pyro_radial.distributions import VonMisesFisherStable
from pyro_radial.distributions.vmf.functions import log_mean_exp_cosine, mean_cosine

__all__ = ["claims", "draw", "report", "run"]

DAVIDSON = "Davidson "
BOTH_WAYS = "forward and backward"
SHOWN = ("forward", BOTH_WAYS, f"{DAVIDSON}forward", DAVIDSON + BOTH_WAYS, f"normal {BOTH_WAYS}")


class Size(NamedTuple):
    """Batch and dimension of the draws; how many elements, and of which dimensions, the scalars are computed for."""

    shapes: tuple[tuple[int, int], ...] = ((800, 500), (256, 4608), (4096, 64), (65536, 3))
    scalar_dims: tuple[int, ...] = (2, 100, 500, 4608)
    num_scalars: int = 2**18
    rounds: int = 30
    series: tuple[int, int] = (4608, 2**12)


SIZES = {"default": Size(), "small": Size(((64, 8),), (8,), 2**8, 3, (8, 16))}


def run(output: Path, *, form: Form = "default") -> None:
    """Each row is the ratio of the median times of two subjects that take turns in one run.

    On the CPU the time is that of one thread's work, so another program on the machine does not count, and the
    allocator keeps its pages: getting fresh ones from the system would cost every subject the same. With a CUDA device,
    its rows as well. The others, written down here from their papers, are

    * the ratio of Bessel functions as the mean of two bounds, and its logarithms summed over the order to log I (Oh,
      Adamczewski and Park 2019, theorems 1 to 3);
    * the sampler of Davidson et al. (2018): rejection until every row has a draw, and a Householder reflection, with a
      gradient in the mean direction alone. Ours has the gradient in the concentration too.
    """
    torch.set_num_threads(1)
    keep_pages()
    pyro.set_rng_seed(0)
    size = SIZES[form]
    setting = {"threads": 1, "rounds": size.rounds, "calls_per_round": BLOCK, "torch": torch.__version__}
    results = Results(output, setting)
    for batch, dim in size.shapes:
        case = {"batch": batch, "dim": dim, "dtype": "torch.float32"}
        time_ratios(results, case, "torch.randn", draws(batch, dim), size.rounds)
    for dim in size.scalar_dims:
        for dtype in (torch.float32, torch.float64):
            case = {"dim": dim, "elements": size.num_scalars, "dtype": str(dtype)}
            subjects = scalars(dim, size.num_scalars, dtype)
            time_ratios(results, case, "torch.lgamma", subjects, max(size.rounds // 4, 5))
    dim, count = size.series
    time_ratios(results, {"dim": dim, "elements": count, "dtype": "torch.float64"}, "L", series(dim, count), 5)
    if torch.cuda.is_available():
        dim, batch = 4608, 256
        case = {"batch": batch, "dim": dim, "dtype": "torch.float32", "device": torch.cuda.get_device_name()}
        time_ratios(results, case, "copy", cuda_draws(batch, dim), size.rounds, cuda_medians)


def time_ratios(
    results: Results,
    case: Row,
    unit: str,
    subjects: Subjects,
    rounds: int,
    measure: Callable[[Subjects, int], dict[str, float]] = medians,
) -> None:
    """A row for each subject, in units of one of them."""

    def compute() -> list[Row]:
        times = measure(subjects, rounds)
        return [{"ratio": round(v / times[unit], 3), "median_ms": round(v, 4)} for v in times.values()]

    results.add_all([case | {"subject": name, "unit": unit} for name in subjects], compute)


def mean_of_bounds(concentration: Tensor, order: float) -> Tensor:
    """What the paper takes for I_order / I_{order-1}."""
    return sum(bounds("theorem 1", order, concentration)) / 2


def log_bessel_by_ratios(concentration: Tensor, dim: int) -> Tensor:
    """Log I of order m/2 - 1 as log I_1 and a sum of logarithms of approximate ratios."""
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


def scalars(dim: int, count: int, dtype: torch.dtype) -> Subjects:
    """Our two main scalars together, and the paper's ratio alone."""
    concentration = dim * (0.01 + 5.0 * torch.rand(count, dtype=dtype))
    return {
        "torch.lgamma": lambda: torch.lgamma(concentration),
        "A and L": lambda: (mean_cosine(concentration, dim), log_mean_exp_cosine(concentration, dim)),
        "mean of two bounds on A": lambda: mean_of_bounds(concentration, 0.5 * dim),
    }


def series(dim: int, count: int) -> Subjects:
    concentration = dim * (0.01 + 5.0 * torch.rand(count, dtype=torch.double))
    return {
        "L": lambda: log_mean_exp_cosine(concentration, dim),
        "log-ratio series": lambda: log_bessel_by_ratios(concentration, dim),
    }


def draws(batch: int, dim: int) -> Subjects:
    """Draws without and with gradients, and ``torch.randn`` of their shape."""
    loc = normalize(torch.randn(batch, dim), dim=-1).requires_grad_()
    concentration = torch.full((batch,), float(dim)).requires_grad_()
    grad, scale = torch.randn(batch, dim), torch.rand(batch, dim).requires_grad_()

    def ours() -> Tensor:
        return VonMisesFisherStable(loc, concentration, validate_args=False).rsample()

    def without_gradient(sample: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            sample()

    return {
        "torch.randn": lambda: torch.randn(batch, dim),
        "forward": lambda: without_gradient(ours),
        BOTH_WAYS: lambda: torch.autograd.grad(ours(), (loc, concentration), grad),
        f"{DAVIDSON}forward": lambda: without_gradient(lambda: davidson_sample(loc, concentration)),
        DAVIDSON + BOTH_WAYS: lambda: torch.autograd.grad(davidson_sample(loc, concentration), loc, grad),
        f"normal {BOTH_WAYS}": lambda: torch.autograd.grad(
            torch.addcmul(loc, scale, torch.randn(batch, dim)), (loc, scale), grad
        ),
    }


def cuda_draws(batch: int, dim: int) -> Subjects:
    """A forward draw, also as a captured graph, and a copy of the same tensor."""
    loc = normalize(torch.randn(batch, dim, device="cuda"), dim=-1)
    directions = VonMisesFisherStable(loc, torch.full((batch,), float(dim), device="cuda"), validate_args=False)
    for _ in range(3):
        directions.rsample()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        directions.rsample()
    target = torch.empty_like(loc)
    return {"copy": lambda: target.copy_(loc), "forward, captured": graph.replay, "forward": directions.rsample}


def cuda_medians(subjects: Subjects, rounds: int) -> dict[str, float]:
    """Median milliseconds of a call on the device, the subjects taking turns."""
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
    return {name: statistics.median(values) for name, values in times.items()}


def claims(results: Results) -> list[Claim]:
    """Compare with the widely used sampler, which has no gradient in the concentration."""
    found = []
    for way in ("forward", BOTH_WAYS):
        ours, theirs = (results.values("ratio", unit="torch.randn", subject=name) for name in (way, DAVIDSON + way))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        text = f"Drawing a direction ({way}) takes at most as long as with the sampler of Davidson et al. (2018)"
        found.append(Claim(text, "", f"{min(ratios):.2f} to {max(ratios):.2f} times as long", "1", max(ratios) <= 1.0))
    return found


def report(results: Results) -> str:
    """Report times as multiples of torch's functions."""

    def ratio(**keys: object) -> str:
        return next((f"{row['ratio']:.1f}" for row in results.where(**keys)), "")

    shapes = results.distinct("batch", "dim")
    lines = [[f"{b:,} x {m:,}", *(ratio(batch=b, dim=m, subject=subject) for subject in SHOWN)] for b, m in shapes]
    dim = 500 if results.where(dim=500) else results.rows[-1]["dim"]
    scalar = ", ".join(
        f"{ratio(dim=dim, subject='A and L', dtype=f'torch.{dtype}')} times `torch.lgamma` in {dtype}"
        for dtype in ("float32", "float64")
    )
    last = results.where(subject="log-ratio series")[0]
    rows = f"{results.where(subject='A and L')[0]['elements']:,} rows of m = {dim}"
    return f"""### Cost of the von Mises-Fisher distribution

Time to draw von Mises-Fisher directions, as multiples of `torch.randn` with the same shape (`python -m \
benchmarks.distributions.vmf_cost`), compared with a sampler as in Davidson et al. (2018) and a normal. One thread, \
medians of {results.setting["rounds"]} interleaved rounds. Computing A and L together for {rows} takes {scalar}. The \
paper's series for L at m = {last["dim"]:,} takes {last["ratio"]:.1f} times as long as L.

{markdown_table(["rows x m", *SHOWN], lines)}

{results.plot("Time of a draw")}"""


def draw(results: Results) -> None:
    """Forward and backward, by shape."""
    figure = Figure(figsize=(7, 2.8), layout="constrained", dpi=110)
    ax = figure.subplots()
    shapes = results.distinct("batch", "dim")
    for number, name in enumerate((BOTH_WAYS, DAVIDSON + BOTH_WAYS, f"normal {BOTH_WAYS}")):
        ratios = [results.values("ratio", batch=b, dim=m, subject=name)[0] for b, m in shapes]
        color = ("#D55E00", "#0072B2", "0.6")[number]
        ax.bar([place + 0.27 * (number - 1) for place in range(len(shapes))], ratios, 0.25, label=name, color=color)
    ax.set(yscale="log", ylabel="multiple of torch.randn", xlabel="rows x m")
    ax.set_xticks(range(len(shapes)), [f"{b:,} x {m:,}" for b, m in shapes])
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
