# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a KL and its gradient cost: between radial distributions, and between von Mises-Fisher distributions.

python -m benchmarks.distributions.kl_cost
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributions import Distribution, kl_divergence
from torch.nn.functional import normalize

from benchmarks.common import BLOCK, Claim, Form, Results, Row, keep_pages, main, markdown_table, medians
from pyro_radial.distributions import RadialNormal, VonMisesFisherStable

__all__ = ["claims", "draw", "report", "run"]

#: The most that is asked for: multiples of a normal's time, and seconds.
MOST_RATIO, MOST_SECONDS = 8.0, 1.0


class Size(NamedTuple):
    """Events and elements of the radial distributions; rows and dimensions of the von Mises-Fisher distributions."""

    events: int = 100_000
    elements: int = 10
    rows: int = 200_000
    dims: tuple[int, ...] = (3, 5)
    rounds: int = 4


SIZES = {"default": Size(), "small": Size(64, 4, 64, (3,), 2)}


def run(output: Path, *, form: Form = "default") -> None:
    """Medians of one thread's own time, in which other programs do not count; radial and normal take turns."""
    torch.set_num_threads(1)
    keep_pages()
    pyro.set_rng_seed(0)
    size = SIZES[form]
    results = Results(output, {"threads": 1, "rounds": size.rounds, "calls": BLOCK, "torch": torch.__version__})
    case = {"events": size.events, "elements": size.elements}
    families = ("normal", "radial")
    results.add_all([case | {"family": family} for family in families], lambda: against_normal(size))
    for dim in size.dims:
        keys = {"events": size.rows, "elements": dim, "family": "von Mises-Fisher"}
        results.add(keys, lambda dim=dim: {"ms": von_mises_fisher(size, dim)})


def against_normal(size: Size) -> list[Row]:
    """A normal's and a radial distribution's time on the same tensors."""
    shape = (size.events, size.elements)
    tensors = [t.requires_grad_() for _ in range(2) for t in (torch.randn(shape), torch.rand(shape) + 0.5)]

    def normal(loc: Tensor, scale: Tensor) -> Distribution:
        return dist.Normal(loc, scale, validate_args=False).to_event(1)

    def radial(loc: Tensor, scale: Tensor) -> Distribution:
        return RadialNormal(loc, scale, validate_args=False)

    subjects = {"normal": lambda: with_gradient(normal, tensors), "radial": lambda: with_gradient(radial, tensors)}
    times = medians(subjects, size.rounds)
    return [{"ms": value, "ratio": value / times["normal"]} for value in times.values()]


def von_mises_fisher(size: Size, dim: int) -> float:
    """Concentrations from 0.1 to 100, and any directions."""
    tensors = []
    for _ in range(2):
        tensors.append(normalize(torch.randn(size.rows, dim), dim=-1).requires_grad_())
        tensors.append((0.1 * 1000.0 ** torch.rand(size.rows)).requires_grad_())

    def make(loc: Tensor, concentration: Tensor) -> Distribution:
        return VonMisesFisherStable(loc, concentration, validate_args=False)

    return medians({"ours": lambda: with_gradient(make, tensors)}, size.rounds, block=1)["ours"]


def with_gradient(make: Callable[[Tensor, Tensor], Distribution], tensors: list[Tensor]) -> None:
    q, p = make(*tensors[:2]), make(*tensors[2:])
    torch.autograd.grad(kl_divergence(q, p).sum(), tensors)


def claims(results: Results) -> list[Claim]:
    """Check the radial distribution, and the von Mises-Fisher distribution in each dimension."""
    (radial,) = results.where(family="radial")
    text = (
        f"The KL between radial distributions and its gradient, for {radial['events']:,} events of "
        f"{radial['elements']} elements, take at most {MOST_RATIO:.0f} times as long as between normals"
    )
    found = [Claim(text, "", f"{radial['ratio']:.1f} times", "1", radial["ratio"] <= MOST_RATIO)]
    for row in results.where(family="von Mises-Fisher"):
        text = (
            f"The KL between von Mises-Fisher distributions and its gradient, for {row['events']:,} rows of "
            f"m = {row['elements']}, take at most {MOST_SECONDS:.0f} s on one thread"
        )
        found.append(Claim(text, "", f"{row['ms'] / 1e3:.2f} s", "1", row["ms"] <= 1e3 * MOST_SECONDS))
    return found


def report(results: Results) -> str:
    """Report milliseconds, and multiples of the normal distribution."""
    lines = [
        [row["family"], f"{row['events']:,} x {row['elements']}", f"{row['ms']:.1f}", f"{ratio:.1f}" if ratio else ""]
        for row in results.rows
        for ratio in [row.get("ratio")]
    ]
    return f"""### Cost of a KL and its gradient

Time of the KL between two distributions of a family and of its gradient (`python -m \
benchmarks.distributions.kl_cost`), on one thread in float32. Medians of {results.setting["rounds"]} rounds, in which \
the normal and the radial distribution take turns on the same tensors.

{markdown_table(["family", "events x elements", "ms", "multiple of the normal's"], lines)}

{results.plot("Time of a KL and its gradient")}"""


def draw(results: Results) -> None:
    """A bar for each row."""
    figure = Figure(figsize=(6, 2.4), layout="constrained", dpi=110)
    ax = figure.subplots()
    names = [f"{row['family']}, {row['events']:,} x {row['elements']}" for row in results.rows]
    ax.barh(names, [row["ms"] for row in results.rows], color="#0072B2")
    ax.set(xscale="log", xlabel="milliseconds of a KL and its gradient")
    ax.spines[["top", "right"]].set_visible(False)
    ax.invert_yaxis()
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
