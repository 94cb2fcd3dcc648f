# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Hold the Pareto k-hat of guides, as ``diagnose`` gives it, against their distance from NUTS on eight small models.

python -m benchmarks.guides.k_hat
"""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor
from torch.distributions import biject_to

from benchmarks.common import FIRST_SEED, Claim, Form, Results, Row, main, markdown_table
from pyro_radial import AutoMeanField, CompiledSVI, diagnose
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.diagnose.importance import MOST_K

#: How far a mean may be from NUTS, in standard deviations of the posterior, decided before the runs.
CLOSE = 0.2
GUIDES: dict[str, Callable[..., Any]] = {
    "AutoMeanField": AutoMeanField,
    "AutoMeanField, MultivariateNormal": partial(AutoMeanField, families={".": families.MultivariateNormal()}),
    "Pyro's AutoMultivariateNormal": AutoMultivariateNormal,
}
# At a constrained site TraceMeanField_ELBO is wrong for Pyro's guides.
LOSSES = {name: Trace_ELBO if name.startswith("Pyro") else TraceMeanField_ELBO for name in GUIDES}
Model = Callable[[], None]


class Size(NamedTuple):
    """Models, draws of a chain after as many for its warm-up, and steps of a guide."""

    models: int = 8
    warm_up: int = 500
    draws: int = 1_000
    steps: int = 4_000


SIZES = {"default": Size(), "small": Size(2, 60, 40, 20)}
_EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
_ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def three_numbers() -> None:
    """A mean and a scale."""
    loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
    scale = pyro.sample("scale", dist.HalfNormal(5.0))
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal(loc, scale), obs=torch.tensor([1.0, 2.0, 4.0]))


def schools() -> None:
    """Effects around a mean, whose scale is small when they agree: a funnel."""
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        effect = pyro.sample("effect", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(effect, _ERRORS), obs=_EFFECTS)


def schools_by_noise() -> None:
    """The same by standard normal numbers."""
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        noise = pyro.sample("noise", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean + spread * noise, _ERRORS), obs=_EFFECTS)


def _numbers(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Columns and the noise of targets, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator), torch.randn(rows, generator=generator)


_LINE, _ALIKE, _CLASSES, _COUNTS, _GROUPS = (
    _numbers(*shape) for shape in ((30, 3), (30, 2), (40, 3), (40, 2), (60, 1))
)


def _line(x: Tensor, noise: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(torch.zeros(x.shape[1]), 2.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(-1.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ weights, scale), obs=x.sum(-1) + 0.5 * noise)


def line() -> None:
    """Three coefficients and the noise's scale."""
    _line(*_LINE)


def alike_columns() -> None:
    """Two columns with a correlation of 0.99."""
    x, noise = _ALIKE
    _line(torch.stack([x[:, 0], x[:, 0] + 0.14 * x[:, 1]], -1), noise)


def classes() -> None:
    """Logistic regression."""
    x, noise = _CLASSES
    weights = pyro.sample("weights", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=(2.0 * x[:, 0] + noise > 0).float())


def counts() -> None:
    """Poisson regression."""
    x, noise = _COUNTS
    weights = pyro.sample("weights", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    base = pyro.sample("base", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(x)):
        seen = (0.5 * x[:, 0] + 0.3 * noise).exp().mul(2.0).round()
        pyro.sample("y", dist.Poisson((base + x @ weights).exp()), obs=seen)


def groups() -> None:
    """Ten intercepts with a scale of their own."""
    x, noise = _GROUPS
    group = torch.arange(60) % 10
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("groups", 10):
        intercept = pyro.sample("intercept", dist.Normal(0.0, spread))
    with pyro.plate("rows", 60):
        seen = x[:, 0] + (group - 4.5) / 3.0 + 0.5 * noise
        pyro.sample("y", dist.Normal(slope * x[:, 0] + intercept[group], scale), obs=seen)


MODELS: dict[str, Model] = {
    "three numbers": three_numbers,
    "two classes": classes,
    "a line": line,
    "a line, columns alike": alike_columns,
    "counts": counts,
    "ten groups": groups,
    "eight schools": schools,
    "eight schools, by noise": schools_by_noise,
}


def unconstrained(model: Model, samples: dict[str, Tensor]) -> dict[str, Tensor]:
    """Map draws to all real numbers, as a guide has them: a column for each number."""
    nodes = poutine.trace(model).get_trace().nodes
    mapped = {name: biject_to(nodes[name]["fn"].support).inv(value) for name, value in samples.items()}
    return {name: value.reshape(len(value), -1) for name, value in mapped.items()}


def chains(name: str, size: Size) -> Row:
    """Two chains of NUTS: means and standard deviations of unconstrained values, by site.

    Chains do not mix in the funnel of the eight schools, so theirs are those of the noise, from which effects are made.
    """
    model, start = MODELS[name], time.process_time()
    sampled = schools_by_noise if model is schools else model
    drawn = []
    for seed in range(2):
        pyro.set_rng_seed(seed)
        kernel = NUTS(sampled, jit_compile=True, ignore_jit_warnings=True, target_accept_prob=0.9)
        mcmc = MCMC(kernel, size.draws, warmup_steps=size.warm_up, disable_progbar=True)
        mcmc.run()
        samples = mcmc.get_samples()
        if model is schools:
            samples["effect"] = samples["mean"][:, None] + samples["spread"][:, None] * samples.pop("noise")
        drawn.append(unconstrained(model, samples))
    both = {site: torch.stack([chain[site] for chain in drawn]) for site in drawn[0]}
    return {
        "seconds": time.process_time() - start,
        "mean": {site: value.mean((0, 1)).tolist() for site, value in both.items()},
        "stddev": {site: value.flatten(0, 1).std(0).tolist() for site, value in both.items()},
        "effective": min(float(effective_sample_size(value).min()) for value in both.values()),
        "r_hat": max(float(split_gelman_rubin(value).max()) for value in both.values()),
    }


def fitted(name: str, guide_name: str, reference: Row, size: Size) -> Row:
    """The k-hat of a trained guide, and how far its means and standard deviations are from the chains'."""
    model = MODELS[name]
    pyro.set_rng_seed(FIRST_SEED)
    pyro.clear_param_store()
    start = time.process_time()
    guide = GUIDES[guide_name](model)
    rates = {"lr": 0.03, "lrd": 0.01 ** (1.0 / size.steps)}
    svi = CompiledSVI(model, guide, pyro.optim.ClippedAdam(rates), LOSSES[guide_name]())
    for _ in range(size.steps):
        svi.step()
    k_hat = diagnose(model, guide, (), intervals=True).k_hat
    with torch.no_grad(), pyro.plate("draws", 10_000, dim=-3):
        draws = poutine.trace(guide).get_trace()
    sites = {site: draws.nodes[site]["value"] for site in reference["mean"]}
    values = unconstrained(model, {site: value.reshape(10_000, *value.shape[1:]) for site, value in sites.items()})
    off, ratio = [], []
    for site, value in values.items():
        mean, stddev = (torch.tensor(reference[key][site]) for key in ("mean", "stddev"))
        off += ((value.mean(0) - mean) / stddev).abs().tolist()
        ratio += (value.std(0) / stddev).tolist()
    return {
        "k_hat": k_hat,
        "mean_off": max(off),
        "narrowest": min(ratio),
        "widest": max(ratio),
        "seconds": time.process_time() - start,
    }


def run(output: Path, *, form: Form = "default", threads: int = 1) -> None:
    """Run NUTS on each model, train three guides for it, and ask ``diagnose`` for their k-hat. Nothing was chosen."""
    torch.set_num_threads(threads)
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    for name in list(MODELS)[: size.models]:
        reference = results.add({"chains": name}, partial(chains, name, size))
        for guide in GUIDES:
            results.add({"model": name, "guide": guide}, partial(fitted, name, guide, reference, size))


def claims(results: Results) -> list[Claim]:
    """A k-hat that says "usable" comes with right means."""
    rows = [row for row in results.rows if "k_hat" in row]
    usable = [row for row in rows if row["k_hat"] <= MOST_K]
    worst = max((row["mean_off"] for row in usable), default=math.inf)
    text = f"Eight models: where k-hat is at most {MOST_K}, every mean is within {CLOSE} standard deviations of NUTS"
    return [Claim(text, "", f"{len(usable)} of {len(rows)} guides, at most {worst:.2f}", "1", worst <= CLOSE)]


def report(results: Results) -> str:
    """Report k-hat beside distances from NUTS."""
    size = results.setting
    rows = sorted((row for row in results.rows if "k_hat" in row), key=lambda row: row["k_hat"])
    lines = [
        [
            row["model"],
            row["guide"],
            f"{row['k_hat']:.2f}",
            f"{row['mean_off']:.2f}",
            f"{row['narrowest']:.2f} to {row['widest']:.2f}",
        ]
        for row in rows
    ]
    table = markdown_table(["model", "guide", "k-hat", "mean, off by", "width, times that of NUTS"], lines)
    chained = [row for row in results.rows if "chains" in row]
    return f"""### K-hat against NUTS

`diagnose(..., intervals=True).k_hat` says how far a guide is from the joint posterior. Here it stands beside what two \
chains of NUTS find on eight small models (`python -m benchmarks.guides.k_hat`). Each chain has {size["draws"]:,} \
draws after {size["warm_up"]} for the warm-up; the fewest effective draws of a number are \
{min(row["effective"] for row in chained):.0f}, the largest R-hat is {max(row["r_hat"] for row in chained):.3f}. \
Guides train for {size["steps"]:,} steps. The table has the largest distance of a mean from that of NUTS, in standard \
deviations of the posterior, and the range of widths, all in the unconstrained space. Rows are ordered by k-hat. The \
chains of the eight schools are those of their noise, from which the effects are made, because chains do not mix in \
the funnel.

{table}"""


if __name__ == "__main__":
    main(run, report)
