# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Count how many true values the 90 % intervals of a count model hold, for four guides.

python -m benchmarks.guides.coverage
"""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import Tensor

from benchmarks.common import FIRST_SEED, Claim, Form, Results, Row, main, markdown_table, standard_error
from pyro_radial import AutoMeanField, CompiledSVI, diagnose
from pyro_radial.infer.autoguide import families

LEVELS = (0.05, 0.95)
#: Coefficients of a gene, by their places.
VALUES = {"base": [0], "effect": [1], "batch": [2, 3]}
FULL = "AutoMeanField, MultivariateNormal"
GUIDES: dict[str, Callable[..., Any]] = {
    FULL: partial(AutoMeanField, families={"coefficients": families.MultivariateNormal()}),
    "AutoMeanField": AutoMeanField,
    "Pyro's AutoNormal": AutoNormal,
    "Pyro's AutoMultivariateNormal": AutoMultivariateNormal,
}
#: Guides with independent genes, whose intervals `diagnose` estimates on the first data sets.
CHECKED = (FULL, "AutoMeanField", "Pyro's AutoNormal")
MOST_CHECKED = 5
# At a constrained site, as the dispersion is, TraceMeanField_ELBO is wrong for Pyro's guides.
LOSSES = {name: Trace_ELBO if name.startswith("Pyro") else TraceMeanField_ELBO for name in GUIDES}


class Size(NamedTuple):
    """Genes, samples, steps and data sets."""

    genes: int = 50
    samples: int = 24
    steps: int = 4_000
    seeds: int = 20


SIZES = {"default": Size(), "small": Size(3, 12, 5, 2)}


def run(output: Path, *, form: Form = "default", threads: int = 1) -> None:
    """Draw the values of all genes from their priors, simulate counts, train each guide, and look at its quantiles.

    On the first five data sets `diagnose` estimates which share of the posterior the intervals hold.

    A gene has a base value, the effect of a condition, and the effects of two batches against a third, on the log of
    its mean count, and a dispersion; counts are negative binomial. The condition halves each batch. Guides train on all
    counts for 4,000 steps of Adam with one draw, at a rate that falls from 0.03 to a hundredth of it. They take turns
    on each data set. Nothing was chosen on these data sets.
    """
    torch.set_num_threads(threads)
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    for seed, name in itertools.product(range(FIRST_SEED, FIRST_SEED + size.seeds), GUIDES):
        results.add({"guide": name, "seed": seed}, partial(one, name, seed, size))
    for seed, name in itertools.product(range(FIRST_SEED, FIRST_SEED + min(MOST_CHECKED, size.seeds)), CHECKED):
        results.add({"checked": name, "seed": seed}, partial(check, name, seed, size))


def design_of(size: Size) -> Tensor:
    """Return a column of ones, the condition, and two batches, for each sample."""
    sample = torch.arange(size.samples)
    condition = sample % 2
    batch = sample // 2 % 3
    return torch.stack([torch.ones(size.samples), condition, batch == 1, batch == 2], -1)


def model(design: Tensor, genes: int, counts: Tensor | None = None) -> Tensor:
    """Counts of genes in samples."""
    gene_plate = pyro.plate("genes", genes, dim=-1)
    sample_plate = pyro.plate("samples", len(design), dim=-2)
    prior = dist.Normal(torch.tensor([4.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 0.5, 0.5, 0.5]))
    with gene_plate:
        coefficients = pyro.sample("coefficients", prior.to_event(1))
        dispersion = pyro.sample("dispersion", dist.LogNormal(1.5, 0.5))
    log_mean = (design.unsqueeze(-2) * coefficients).sum(-1)
    with gene_plate, sample_plate:
        likelihood = dist.NegativeBinomial(dispersion, logits=log_mean - dispersion.log())
        return pyro.sample("counts", likelihood, obs=counts)


class Trained(NamedTuple):
    """A trained guide, the arguments of the model, the true coefficients, and the time of training."""

    guide: Any
    args: tuple[Any, ...]
    truth: Tensor
    seconds: float


def train(name: str, seed: int, size: Size) -> Trained:
    """Train one guide on one data set."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    design = design_of(size)
    trace = pyro.poutine.trace(model).get_trace(design, size.genes)
    counts = trace.nodes["counts"]["value"]
    guide = GUIDES[name](model)
    optim = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.01 ** (1 / size.steps)})
    svi = CompiledSVI(model, guide, optim, LOSSES[name](), compile=False)
    start = time.process_time()
    for _ in range(size.steps):
        svi.step(design, size.genes, counts)
    seconds = time.process_time() - start
    return Trained(guide, (design, size.genes, counts), trace.nodes["coefficients"]["value"], seconds)


def check(name: str, seed: int, size: Size) -> Row:
    """Train one guide on one data set, and estimate which share of the posterior its intervals hold."""
    trained = train(name, seed, size)
    start = time.process_time()
    found = diagnose(model, trained.guide, trained.args, intervals=True)
    share = found.intervals["coefficients"]
    return {
        "estimate": share.coverage,
        "pareto k": share.pareto_k,
        "flagged": any("intervals of 'coefficients'" in finding for finding in found.findings),
        "seconds": time.process_time() - start,
    }


def one(name: str, seed: int, size: Size) -> Row:
    """Train one guide on one data set, and return the share of true values that its intervals hold."""
    guide, args, truth, seconds = train(name, seed, size)
    quantiles = guide.quantiles(LEVELS, *args)
    if not isinstance(quantiles["coefficients"], Tensor):
        quantiles["coefficients"] = torch.stack(list(quantiles["coefficients"]))
    lower, upper = quantiles["coefficients"].detach()
    held = ((lower <= truth) & (truth <= upper)).double()
    width = (upper - lower).double()
    row: Row = {"seconds": seconds}
    for value, places in VALUES.items():
        row[value] = float(held[:, places].mean())
        row[f"{value} width"] = float(width[:, places].mean())
    return row


def claims(results: Results) -> list[Claim]:
    """Compare the shares with 90 %."""
    seeds = str(results.setting["seeds"])
    full = {value: mean(results.values(value, guide=FULL)) for value in VALUES}
    return [
        Claim(
            "Counts: 90 % intervals of a full covariance for each gene hold 87 to 93 % of true values, of each kind",
            "",
            ", ".join(f"{value} {percent([share])}" for value, share in full.items()),
            seeds,
            all(0.87 <= share <= 0.93 for share in full.values()),
        ),
        Claim(
            "Counts: `diagnose` flags the intervals of independent normals, and not those of a full covariance",
            "",
            ", ".join(f"{name} {flagged(results, name)}" for name in CHECKED),
            str(len(results.where(checked=FULL))),
            not any(results.values("flagged", checked=FULL))
            and all(all(results.values("flagged", checked=name)) for name in CHECKED[1:]),
        ),
    ]


def flagged(results: Results, name: str) -> str:
    """Return on how many data sets the intervals of a guide are flagged."""
    found = results.values("flagged", checked=name)
    return f"{sum(found)} of {len(found)}"


def percent(shares: Sequence[float]) -> str:
    """Return the mean of some shares in percent, with its standard error."""
    error = f" ± {100 * standard_error(shares):.1f}" if len(shares) > 1 else ""
    return f"{100 * mean(shares):.0f}{error} %"


def report(results: Results) -> str:
    """Report what intervals hold, how wide they are, and the time of training."""
    size = results.setting
    lines = []
    for name in GUIDES:
        held = [percent(results.values(value, guide=name)) for value in VALUES]
        width = f"{mean(results.values('base width', guide=name)):.2f}"
        seconds = f"{mean(results.values('seconds', guide=name)):.0f} s"
        lines.append([name, *held, width, seconds])
    columns = ("guide", *VALUES, "width of base", "time")
    estimates = []
    for name in CHECKED:
        share = percent(results.values("estimate", checked=name))
        shape = f"{mean(results.values('pareto k', checked=name)):.2f}"
        seconds = f"{mean(results.values('seconds', checked=name)):.0f} s"
        estimates.append([name, share, shape, flagged(results, name), seconds])
    checked = ("guide", "estimated share", "Pareto k", "flagged", "time")
    return f"""### Intervals of a count model

Negative binomial counts of {size["genes"]} genes in {size["samples"]} samples, of two conditions and three batches, \
with all values drawn from their priors (`python -m benchmarks.guides.coverage`). The table has the share of true \
values that 90 % intervals hold, mean and standard error over {size["seeds"]} data sets, and the CPU time of \
{size["steps"]:,} recorded steps. `MultivariateNormal` has a covariance for each gene, `AutoMultivariateNormal` one \
for all {5 * size["genes"]} numbers, which so many steps do not train out.

{markdown_table(columns, lines)}

`diagnose(..., intervals=True)` estimates from guide and model which share of the posterior the intervals hold, for \
the coefficient with the least one, and flags those below 85 %. Over {len(results.where(checked=FULL))} of the data \
sets:

{markdown_table(checked, estimates)}"""


if __name__ == "__main__":
    main(run, report)
