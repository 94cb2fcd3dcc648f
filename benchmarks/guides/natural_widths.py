# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare widths and means after natural gradients with the exact best posterior of linear regressions.

python -m benchmarks.guides.natural_widths
"""

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common import Claim, Form, Job, Results, Row, compute_all, main, markdown_table
from pyro_radial import AutoMeanField, AutoRadial, CompiledSVI, NaturalGradient, TermsELBO
from pyro_radial._pyro.compat import mark_stepped

NATURAL, ADAM, KEPT = "NaturalGradient()", "Adam", "NaturalGradient(beta2=0.99999)"
NORMAL, RADIAL, ROWS = "normal", "radial", "a radius per row"
KINDS = (NORMAL, RADIAL, ROWS)
STARTS = (0.01, 0.1, 1.0)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
NOISE = 0.5
#: The most that root mean squares over weights and seeds are to be: means in exact standard deviations, log(widths).
MOST_MEAN, MOST_WIDTH = 0.2, 0.1
#: Adam takes so many times the steps.
LONGER = 10
COLORS = {0.01: "#0072B2", 0.1: "#D55E00", 1.0: "#009E73"}


class Problem(NamedTuple):
    """A regression: the number of rows and features, the correlation of features, and the rows of a batch or all."""

    rows: int
    features: int
    correlation: float
    batch: int | None


class Size(NamedTuple):
    """The problems, the steps of a run, and the number of data sets for each problem."""

    rows: tuple[int, ...] = (20, 400, 10_000)
    features: tuple[int, ...] = (4, 50)
    steps: tuple[int, ...] = (100, 1_000, 10_000)
    seeds: int = 3
    #: A run whose widths are drawn over steps.
    drawn: tuple[int, int] = (400, 10_000)

    @property
    def problems(self) -> Iterator[Problem]:
        """All problems; batches of 32 take more than 32 rows."""
        for rows, features, correlation in itertools.product(self.rows, self.features, (0.0, 0.9)):
            yield from (Problem(rows, features, correlation, batch) for batch in ([32] if rows > 32 else []) + [None])


SIZES = {"default": Size(), "small": Size((20,), (4,), (100,), 1, (20, 100))}


def run(output: Path, *, form: Form = "default", workers: int = 1, threads: int = 1) -> None:
    """Train linear regressions with known noise, for which the best posterior of each family is known.

    The loss is quadratic, so the best variances of all three families are one over the diagonal of the posterior's
    precision. Errors are root mean squares over all weights and data sets: of means in units of these standard
    deviations, and of the logarithm of standard deviations. NaturalGradient has its defaults. Adam takes ten times as
    many steps, at the best of five rates for each cell. Both have the same schedule: rates rise in the first 5 % of the
    steps and then fall to zero along a cosine. Features and weights have unit variance, and the noise is 0.5. Full
    batches are replaced by the few rows that have the same likelihood. Adam trains the logarithm of scales.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "seeds": size.seeds, "noise": NOISE})
    # Short runs first.
    cells = [(problem, steps) for steps in size.steps for problem in size.problems]
    natural = [
        Job(
            {**problem._asdict(), "steps": steps, "kind": kind, "method": NATURAL},
            trained,
            (problem, steps, kind, size),
        )
        for (problem, steps), kind in itertools.product(cells, KINDS)
    ]
    adam = [
        Job({**problem._asdict(), "steps": steps, "method": ADAM}, trained_by_adam, (problem, steps, size))
        for problem, steps in cells
    ]
    rows, steps = size.drawn
    widths = [
        Job({"drawn": rows, "method": method}, widths_by_step, (Problem(rows, 4, 0.0, None), steps, method, size))
        for method in (NATURAL, KEPT)
    ]
    compute_all(results, [*widths, *natural, *adam], workers, threads)


class Data(NamedTuple):
    """Rows of every data set, [rows, seeds, features] and [rows, seeds], and the best mean and precision."""

    x: Tensor
    y: Tensor
    mean: Tensor
    precision: Tensor

    def errors(self, loc: Tensor, stddev: Tensor) -> dict[str, list[float]]:
        """Errors by start, from tensors [starts, seeds, features]."""
        means = (loc.double() - self.mean) * self.precision.sqrt()
        widths = stddev.double().log() + 0.5 * self.precision.log()
        return {
            "mean": means.square().mean((-2, -1)).sqrt().tolist(),
            "width": widths.square().mean((-2, -1)).sqrt().tolist(),
            "narrowest": widths.amin((-2, -1)).exp().tolist(),
            "widest": widths.amax((-2, -1)).exp().tolist(),
        }


def data(problem: Problem, seeds: int) -> Data:
    """The same data for all methods."""
    torch.manual_seed(problem.rows + problem.features)
    shape = problem.rows, seeds
    own, shared = (torch.randn(*shape, number, dtype=torch.float64) for number in (problem.features, 1))
    x = math.sqrt(1.0 - problem.correlation) * own + math.sqrt(problem.correlation) * shared
    weights = torch.randn(seeds, problem.features, dtype=torch.float64)
    y = (x * weights).sum(-1) + NOISE * torch.randn(shape, dtype=torch.float64)
    by_seed, targets = x.transpose(0, 1), y.T[..., None]
    precision = by_seed.mT @ by_seed / NOISE**2 + torch.eye(problem.features, dtype=torch.float64)
    mean = torch.linalg.solve(precision, by_seed.mT @ targets / NOISE**2)[..., 0]
    if problem.batch is None:
        # The triangular factor of [x, y] has the same sum of squares for all weights.
        factor = torch.linalg.qr(torch.cat([by_seed, targets], -1), mode="r").R.transpose(0, 1)
        x, y = factor[..., :-1], factor[..., -1]
    return Data(x, y, mean, precision.diagonal(dim1=-2, dim2=-1))


def batches(rows: int, batch: int | None, steps: int) -> Iterator[Tensor]:
    """The rows of each step; epochs pass over all rows in random order."""
    done = 0
    while True:
        for chosen in torch.randperm(rows).split(batch or rows):
            if done == steps:
                return
            yield chosen
            done += 1


def trained(
    problem: Problem,
    steps: int,
    kind: str,
    size: Size,
    method: str = NATURAL,
    watch: Callable[[Tensor], None] | None = None,
) -> Row:
    """Errors of natural gradients by start, from one model of all data sets and starts."""
    known = data(problem, size.seeds)
    x, y = known.x.float(), known.y.float()
    # Starts, data sets, rows and columns; a radial posterior has a radius for the last dimension.
    parts = 2 if kind == ROWS else 1
    shape = len(STARTS), size.seeds, parts, problem.features // parts

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand(shape).to_event(4)).flatten(-2)
        with pyro.plate("data", len(known.x), subsample=torch.arange(len(x))):
            pyro.sample(
                "y",
                dist.Normal(torch.einsum("bsd,ksd->bks", x, w), NOISE).to_event(2),
                obs=y[:, None].expand(-1, len(STARTS), -1),
            )

    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    guide = AutoMeanField(model) if kind == NORMAL else AutoRadial(model, event_dim=1)
    guide.setup(x, y)
    start = torch.tensor(STARTS)[:, None, None, None].expand(shape)
    guide.load_means({"w": torch.zeros(shape)})
    guide.set_stddevs({"w": start})
    optim = NaturalGradient(**({"beta2": 0.99999} if method == KEPT else {}))
    svi = CompiledSVI(model, guide, optim, TermsELBO(), compile=False)
    scheduler: Any = None
    for chosen in batches(len(x), problem.batch, steps):
        if scheduler is not None:
            scheduler.step()
        svi.step(x[chosen], y[chosen])
        # The optimizer exists after the first step.
        if scheduler is None:
            scheduler = optim.scheduler(svi.optimizer, steps)
            mark_stepped(svi.optimizer)
        if watch is not None:
            watch(guide.posterior()["w"].stddev.flatten(-2) * known.precision.sqrt())
    posterior = guide.posterior()["w"]
    return known.errors(posterior.mean.flatten(-2), posterior.stddev.flatten(-2))


def widths_by_step(problem: Problem, steps: int, method: str, size: Size) -> Row:
    """The geometric mean of all widths over the exact ones, by start, at steps about evenly spaced in the logarithm."""
    kept, found, count = {round(10 ** (number / 10)) for number in range(10 * 5)}, [], itertools.count(1)

    def watch(ratios: Tensor) -> None:
        if (step := next(count)) in kept:
            found.append([step, *ratios.log().mean((-2, -1)).exp().tolist()])

    trained(problem, steps, NORMAL, size, method, watch)
    return {"widths": found}


def trained_by_adam(problem: Problem, steps: int, size: Size) -> Row:
    """The errors of Adam by family and start, for the rate that comes nearest to both limits."""
    known = data(problem, size.seeds)
    torch.manual_seed(1)
    shape = len(KINDS), len(STARTS), size.seeds, problem.features
    start = torch.tensor(STARTS, dtype=torch.float64).log()[:, None, None].expand(shape)
    locs, logs = ([first.clone() for _ in RATES] for first in (torch.zeros(shape, dtype=torch.float64), start))
    groups = [{"params": pair, "lr": rate} for rate, *pair in zip(RATES, locs, logs, strict=True)]
    optimizer = torch.optim.Adam(groups, fused=True)
    steps *= LONGER
    rate = NaturalGradient().scheduler(optimizer, steps)
    for chosen in batches(len(known.x), problem.batch, steps):
        x, y = known.x[chosen], known.y[chosen]
        loc, log = torch.stack(locs), torch.stack(logs)
        noise = torch.stack([draws(kind, loc[:, 0]) for kind in KINDS], 1) * log.exp()
        residual = torch.einsum("bsd,lkasd->lkasb", x, loc + noise) - y.T
        gradient = torch.einsum("lkasb,bsd->lkasd", residual, x) * (len(known.x) / len(x) / NOISE**2)
        # The KL to the unit normal is that of normals in all families, up to a constant.
        by_loc, by_log = gradient + loc, gradient * noise + (2.0 * log).exp() - 1.0
        for number in range(len(RATES)):
            # Fused steps take gradients to have the strides of parameters.
            locs[number].grad, logs[number].grad = by_loc[number].contiguous(), by_log[number].contiguous()
        optimizer.step()
        rate.step()
    found: Row = {}
    for number, kind in enumerate(KINDS):
        errors = [known.errors(loc[number], log[number].exp()) for loc, log in zip(locs, logs, strict=True)]
        for place, first in enumerate(STARTS):
            best = min(range(len(RATES)), key=lambda rate: excess(errors[rate], place))
            found[f"{kind} from {first}"] = [RATES[best], errors[best]["mean"][place], errors[best]["width"][place]]
    return found


def draws(kind: str, like: Tensor) -> Tensor:
    """Noise of unit variance in every element."""
    normal = torch.randn_like(like)
    if kind == NORMAL:
        return normal
    parts = normal.unflatten(-1, (2 if kind == ROWS else 1, -1))
    radii = torch.randn_like(parts[..., :1]).abs() * math.sqrt(parts.shape[-1])
    return (parts / parts.norm(dim=-1, keepdim=True) * radii).flatten(-2)


def excess(errors: dict[str, list[float]], place: int) -> float:
    """How many times the limits are reached by the worse of both errors."""
    worst = max(errors["mean"][place] / MOST_MEAN, errors["width"][place] / MOST_WIDTH)
    return worst if math.isfinite(worst) else math.inf


class Cell(NamedTuple):
    """One start of one family: errors of means and widths for both methods."""

    problem: Problem
    steps: int
    start: float
    kind: str
    mean: float
    width: float
    by_adam: tuple[float, float]

    @property
    def arrived(self) -> bool:
        """Whether natural gradients are within both limits."""
        return self.mean <= MOST_MEAN and self.width <= MOST_WIDTH

    @property
    def adam_arrived(self) -> bool:
        """Whether Adam is, with ten times the steps."""
        return self.by_adam[0] <= MOST_MEAN and self.by_adam[1] <= MOST_WIDTH


def cells(results: Results) -> list[Cell]:
    """All cells with results of both methods."""
    found = []
    for row in results.where(method=NATURAL):
        if "rows" not in row:
            continue
        problem = Problem(*(row[name] for name in Problem._fields))
        for other in results.where(method=ADAM, steps=row["steps"], **problem._asdict()):
            for place, start in enumerate(STARTS):
                _, *by_adam = other[f"{row['kind']} from {start}"]
                errors = row["mean"][place], row["width"][place]
                found.append(Cell(problem, row["steps"], start, row["kind"], *errors, (by_adam[0], by_adam[1])))
    return found


def claims(results: Results) -> list[Claim]:
    """Compare with Adam, for all numbers of steps at once."""
    every = cells(results)
    numbers = sorted({cell.steps for cell in every})
    there, both = [], []
    for steps in numbers:
        arrived = [cell for cell in every if cell.steps == steps and cell.adam_arrived]
        there.append(len(arrived))
        both.append(sum(cell.arrived for cell in arrived))
    text = (
        f"Linear regressions, {' / '.join(f'{steps:,}' for steps in numbers)} steps of NaturalGradient(): means are "
        f"within {MOST_MEAN:g} exact standard deviations and widths within {MOST_WIDTH:.0%} wherever Adam is with ten "
        "times the steps"
    )
    shown = [" / ".join(map(str, counts)) for counts in (there, both)]
    return [Claim(text, f"{shown[0]} cells", f"{shown[1]} cells", str(results.setting["seeds"]), both == there)]


def in_words(own: list[Cell]) -> str:
    """The medians and the worst of both errors."""
    if not own:
        return "-"
    numbers = []
    for name in ("mean", "width"):
        values = [getattr(cell, name) for cell in own]
        numbers.append(f"{median(values):.2g} ({max(values):.2g})")
    return " / ".join(numbers)


def report(results: Results) -> str:
    """Report errors by problem and number of steps."""
    every = cells(results)
    lengths = sorted({cell.steps for cell in every})
    lines = []
    for problem in sorted(
        {cell.problem for cell in every}, key=lambda p: (p.rows, p.features, p.correlation, p.batch or 0)
    ):
        line = [f"{problem.rows:,}", str(problem.features), f"{problem.correlation:g}", str(problem.batch or "all")]
        for steps in lengths:
            own = [cell for cell in every if cell.problem == problem and cell.steps == steps]
            line += [
                in_words(own),
                f"{sum(c.arrived for c in own if c.adam_arrived)} of {sum(c.adam_arrived for c in own)}",
            ]
        lines.append(line)
    headings = ["rows", "features", "correlation", "batch"]
    for steps in lengths:
        headings += [f"{steps:,} steps: means / widths", "arrived"]
    return f"""### Widths and means after natural gradients

Linear regressions with known noise have an exact best posterior in each family. Errors of means are in its standard \
deviations, those of widths in their logarithm. Each number is the median over three families (normal, radial, a \
radius per row) and three starts (standard deviations of 0.01, 0.1 and 1), with the worst in parentheses \
(`python -m benchmarks.guides.natural_widths`). "Arrived" counts families and starts. It looks at those where Adam, \
with ten times the steps and the best of {len(RATES)} rates, comes within {MOST_MEAN:g} standard deviations and \
{MOST_WIDTH:.0%}, and says in how many of them `NaturalGradient()` does so with its defaults.

{markdown_table(headings, lines)}

{results.plot("Widths over steps, with the default and with widths that all but stay at their start")}"""


def draw(results: Results) -> None:
    """Widths over steps, by start and method."""
    figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=110)
    axes = figure.subplots(1, 2, sharey=True)
    for ax, method in zip(axes, (KEPT, NATURAL), strict=True):
        for row in [row for row in results.where(method=method) if "drawn" in row]:
            steps, *by_start = zip(*row["widths"], strict=True)
            for start, ratios in zip(STARTS, by_start, strict=True):
                ax.plot(steps, ratios, color=COLORS[start], lw=1.5, label=f"from {start:g}")
        ax.axhline(1.0, color="0.6", lw=1.0, zorder=0)
        ax.set(xscale="log", yscale="log", xlabel="step", title=method)
    axes[0].set_ylabel("width / exact width")
    axes[1].legend(frameon=False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
