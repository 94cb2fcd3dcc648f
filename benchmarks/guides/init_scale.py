# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measure where the scales of a guide should start, and which link should make them positive, to set the defaults.

python -m benchmarks.guides.init_scale --data-dir DIR
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from pyro.distributions import constraints
from torch import nn

from benchmarks.common import (
    Claim,
    Form,
    Results,
    Row,
    flat_images,
    main,
    markdown_table,
    paired,
    uci_split,
    with_error,
)
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.autoguide.base import NETWORK_INIT_STDDEV
from pyro_radial.nn import likelihoods, priors

__all__ = ["claims", "draw", "report", "run"]

STDDEVS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LINKS = {"softplus": constraints.softplus_positive, "exp": constraints.positive}
GUIDES = {"AutoRadial": AutoRadial, "AutoMeanField": AutoMeanField}
# Of the weights of each; the link belongs to the family.
FAMILIES = {"AutoRadial": families.Radial, "AutoMeanField": families.Normal}
SETS = ("mnist", "boston", "yacht")
Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Size(NamedTuple):
    """What is trained, and for how long."""

    stddevs: tuple[float, ...] = STDDEVS
    image_epochs: int = 5
    regression_epochs: int = 200
    rows: int | None = None


SIZES = {"default": Size(), "small": Size((1e-2,), 1, 2, 200)}


def run(
    output: Path,
    *,
    data_dir: Path,
    form: Form = "default",
    link: Literal["both", "softplus", "exp"] = "both",
    seeds: int = 3,
    threads: int = 1,
) -> None:
    """Train each guide from each initial marginal standard deviation, with both links, and tune nothing else.

    The data are MNIST (a 784-200-200-10 network, 5 epochs) and two small regression sets (one hidden layer of 50, 200
    epochs, learned noise). A tenth of the *training* data is held out; the score is its negative log predictive density
    per datum. The link is the function from a real parameter to a positive scale.
    """
    torch.set_num_threads(threads)
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, "stddevs": list(size.stddevs)})
    links = LINKS if link == "both" else (link,)
    for data, own in itertools.product(SETS, links):
        split = load(data, data_dir, size)
        for guide, stddev, seed in itertools.product(GUIDES, size.stddevs, range(seeds if form == "default" else 1)):
            keys = {"data": data, "guide": guide, "link": own, "init_stddev": stddev, "seed": seed}
            results.add(keys, partial(score, split, size, **keys))


def load(data: str, data_dir: Path, size: Size) -> Split:
    """Training data, of a regression set those of the first split; the last tenth is held out."""
    if data == "mnist":
        x, y = (part[: size.rows] for part in flat_images("mnist", data_dir)[0])
    else:
        x, y = uci_split(data_dir, {"boston": "bostonHousing"}.get(data, data), 0)["train"]
    cut = len(x) - len(x) // 10
    return x[:cut], y[:cut], x[cut:], y[cut:]


def score(split: Split, size: Size, *, data: str, guide: str, link: str, init_stddev: float, seed: int) -> Row:
    torch.manual_seed(seed)
    model = make_model(data, split)
    settings: dict[str, Any] = {"epochs": size.regression_epochs, "batch_size": 32}
    if data == "mnist":
        settings = {"epochs": size.image_epochs, "batch_size": 128}
    with scales_by(link, FAMILIES[guide]):
        posterior = GUIDES[guide](model, init_stddev=init_stddev)
        fit(model, posterior, split[:2], seed=seed, progress=False, **settings)
        torch.manual_seed(seed)
        density = predict(model, posterior, split[2], num_samples=32).log_prob(split[3])
    return {"validation_nll": -float(density.mean())}


@contextmanager
def scales_by(link: str, family: type[families.LocScale]) -> Iterator[None]:
    """Scales of the posteriors of this family that are made inside are positive by this link."""
    before = family.scale_constraint
    family.scale_constraint = LINKS[link]
    try:
        yield
    finally:
        family.scale_constraint = before


def make_model(data: str, split: Split) -> SupervisedModel:
    x = split[0]
    if data == "mnist":
        layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
        return SupervisedModel(BayesianModule(nn.Sequential(*layers)), likelihoods.Categorical(num_data=len(x)))
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    likelihood = likelihoods.Gaussian(num_data=len(x), scale=0.5, learn_scale=True)
    return SupervisedModel(BayesianModule(net, priors.FanIn()), likelihood)


def means(results: Results, **keys: Any) -> dict[float, float]:
    """The mean score over all rows with these keys, by start; none where a set of data is not measured yet."""
    found = {}
    for stddev in sorted(results.setting["stddevs"]):
        by_data = [results.values("validation_nll", init_stddev=stddev, **{"data": d} | keys) for d in SETS]
        if all(by_data):
            # Each set counts as much, whatever the seeds measured so far.
            found[stddev] = mean(mean(values) for values in by_data)
    return found


def default_link(guide: str) -> str:
    """The one that the library has."""
    return next(name for name, constraint in LINKS.items() if constraint is FAMILIES[guide].scale_constraint)


def exp_less_softplus(results: Results, **keys: Any) -> str:
    """The mean difference between the links over rows with these keys, paired by data, start and seed."""
    rows = [
        [row["validation_nll"] for row in sorted(results.where(link=link, **keys), key=pair_of)]
        for link in ("exp", "softplus")
    ]
    return with_error(paired(*rows), 3)


def pair_of(row: Row) -> tuple[Any, ...]:
    return row["data"], row["init_stddev"], row["seed"]


def claims(results: Results) -> list[Claim]:
    """Check that the default start is one of the two best."""
    found = []
    for guide in GUIDES:
        by_start = means(results, guide=guide, link=default_link(guide))
        rank = sorted(by_start, key=by_start.__getitem__).index(NETWORK_INIT_STDDEV) + 1
        text = f"`{guide}`: the default start of {NETWORK_INIT_STDDEV:g} is among the two best of {len(by_start)}"
        numbers = f"{by_start[NETWORK_INIT_STDDEV]:.3f}, rank {rank}; the best has {min(by_start.values()):.3f}"
        found.append(Claim(text, "", numbers, str(len(results.distinct("seed"))), rank <= 2))
    return found


def report(results: Results) -> str:
    """Report scores by guide, data, link and start."""
    stddevs = sorted(results.setting["stddevs"])
    lines = []
    for guide, data in itertools.product(GUIDES, (*SETS, "mean")):
        for link in results.distinct("link"):
            keys = {"guide": guide, "link": link} | ({} if data == "mean" else {"data": data})
            by_start = means(results, **keys)
            cells = (f"{by_start[stddev]:.3f}" if stddev in by_start else "" for stddev in stddevs)
            lines.append([f"{guide}, {data}", link, *cells])
    links = "; ".join(
        f"`{guide}` (by default {default_link(guide)}) {exp_less_softplus(results, guide=guide)}, "
        f"from the default start {exp_less_softplus(results, guide=guide, init_stddev=NETWORK_INIT_STDDEV)}"
        for guide in GUIDES
    )
    return f"""### Initial scales and their link

Where should scales start, and which link should turn real parameters into scales? The table gives the validation \
negative log predictive density by initial marginal standard deviation, for {len(results.distinct("seed"))} seeds \
(`python -m benchmarks.guides.init_scale --data-dir DIR`). With both links 0.003 and 0.01 are best on average. Of \
these two, 0.01 is ahead on two of the three sets, and is the default of both guides at sites of a network. Score with \
an exponential minus score with a softplus, paired by set, start and seed: {links}.

{markdown_table(["", "link", *(f"{stddev:g}" for stddev in stddevs)], lines)}

{results.plot("Score by start and link")}"""


def draw(results: Results) -> None:
    """Scores by start, for each set and guide."""
    figure = Figure(figsize=(10, 5), layout="constrained", dpi=110)
    axes = figure.subplots(len(GUIDES), len(SETS), sharex=True, sharey="col")
    for guide, line in zip(GUIDES, axes, strict=True):
        line[0].set_ylabel(f"{guide}\nvalidation NLL")
        for data, ax in zip(SETS, line, strict=True):
            for link, style in zip(results.distinct("link"), ("o-", "s--"), strict=False):
                by_start = means(results, guide=guide, data=data, link=link)
                ax.plot(by_start.keys(), by_start.values(), style, ms=4, label=link)
            ax.set(title=data, xscale="log")
            ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("initial standard deviation")
    axes[0][0].legend(frameon=False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
