# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare truncated mean field with mean field and radial posteriors when scales start too high.

python -m benchmarks.guides.truncated_mean_field
"""

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.common import (
    Claim,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    flat_images,
    is_below,
    main,
    markdown_table,
    paired,
    with_error,
)
from benchmarks.guides._truncated_normal import TruncatedNormal, TruncatedNormalFamily
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn
from pyro_radial.uncertainty import accuracy, negative_log_likelihood

__all__ = ["claims", "draw", "report", "run"]

#: The paper's start, of all scales.
INIT = 0.12
TRUNCATIONS = (0.5, 1.0, 2.0)
MEAN_FIELD, RADIAL = "mean field", "radial"
# What equals the start of mean field's: the normal's sigma, as published, or the standard deviation of what is drawn.
SAME = {"sigma": "same sigma", "stddev": "same standard deviation"}
RATES = {"locs": 1e-3, "scales": 1e-2}


class Size(NamedTuple):
    """What is trained, for how long, with how many draws to a step, and on what it is tested."""

    truncations: tuple[float, ...] = TRUNCATIONS
    particles: tuple[int, ...] = (1, 4)
    rows: int = 2_000
    test: int = 2_000
    hidden: int = 100
    epochs: int = 10
    batch_size: int = 64
    num_samples: int = 16


SIZES = {"default": Size(), "small": Size((0.5,), (1,), 60, 40, 8, 1, 20, 2)}


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 3,
    workers: int = 1,
    threads: int = 1,
) -> None:
    """Train 784-100-100-10 on 2,000 images of Fashion-MNIST for 10 epochs, with scales that start at 0.12.

    The start is that of the Radial paper, appendix F. Adam has a rate of 1e-3 for means and 1e-2 for scales, with
    batches of 64. The prior is normal with a variance of one over the number of inputs of a unit. Draws and KL both
    belong to the truncated posterior, so its loss is a bound; the paper uses the KL of the normal.
    """
    size = SIZES[form]
    train, test = flat_images("fashion_mnist", data_dir)
    data = (train[0][: size.rows], train[1][: size.rows]), (test[0][: size.test], test[1][: size.test])
    results = Results(output, {"torch": torch.__version__, "init": INIT, "rates": RATES, **size._asdict()})
    methods = [(MEAN_FIELD, "sigma"), (RADIAL, "sigma"), (RADIAL, "stddev")]
    methods += [(f"within {c:g}", same) for c, same in itertools.product(size.truncations, SAME)]
    jobs = [
        Job(
            {"method": method, "same": same, "particles": particles, "seed": seed},
            score,
            (data, method, same, particles, seed, size),
        )
        for seed, particles in itertools.product(range(seeds if form == "default" else 1), size.particles)
        for method, same in methods
    ]
    compute_all(results, jobs, workers, threads)


def score(data: tuple[Pair, Pair], method: str, same: str, particles: int, seed: int, size: Size) -> Row:
    train, test = data
    torch.manual_seed(seed)
    hidden = size.hidden
    net = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    model = SupervisedModel(BayesianModule(net, FanIn()), likelihoods.Categorical(num_data=len(train[0])))
    guide = make(model, method, same)
    fit(
        model,
        guide,
        train,
        epochs=size.epochs,
        batch_size=size.batch_size,
        optim=pyro.optim.Adam(rate_of),
        loss=RadialELBO(particles, vectorize_particles=particles > 1, max_plate_nesting=1, strict_kl=True),
        seed=seed,
        progress=False,
    )
    torch.manual_seed(seed)
    probabilities = predict(model, guide, test[0], size.num_samples).mean
    return {
        "accuracy": float(accuracy(probabilities, test[1])),
        "nll": float(negative_log_likelihood(probabilities, test[1])),
    }


def rate_of(name: str) -> dict[str, float]:
    """Of a parameter of the guide."""
    return {"lr": RATES["scales" if "scales" in name else "locs"]}


def make(model: SupervisedModel, method: str, same: str) -> Any:
    if method == MEAN_FIELD:
        return AutoMeanField(model, init_stddev=INIT)
    if method == RADIAL:
        return AutoRadial(model, **{"init_scale" if same == "sigma" else "init_stddev": INIT})
    truncation = float(method.split()[-1])
    share = math.sqrt(TruncatedNormal(0.0, 1.0, truncation).unit_variance) if same == "sigma" else 1.0
    return AutoMeanField(model, init_stddev=share * INIT, families={".": TruncatedNormalFamily(truncation)})


def claims(results: Results) -> list[Claim]:
    """Check the paper's two claims, as published and at the same width, by more than two standard errors."""
    seeds, particles = str(len(results.distinct("seed"))), sorted(results.distinct("particles"))
    found = []
    for same, title in SAME.items():
        gains = {count: gain(results, same, count) for count in particles}
        few = gains[particles[0]]
        name, values = max(few.items(), key=lambda item: sum(item[1]))
        text = f"Scales that start too high, {title}: truncation raises the test accuracy (Radial paper, figure 11)"
        numbers = f"by {with_error(values, 4)} ({name} sigma), {particles[0]} draw"
        found.append(Claim(text, "higher", numbers, seeds, is_below([-value for value in values])))
        if len(particles) > 1:
            many = gains[particles[-1]][name]
            text = (
                f"Scales that start too high, {title}: truncation gains more with fewer draws (Radial paper, figure 11)"
            )
            numbers = f"{with_error(values, 4)} at {particles[0]}, {with_error(many, 4)} at {particles[-1]}"
            found.append(Claim(text, "more", numbers, seeds, is_below(paired(many, values))))
    return found


def gain(results: Results, same: str, particles: int) -> dict[str, list[float]]:
    """The accuracy less mean field's, by truncation."""
    own = results.values("accuracy", method=MEAN_FIELD, particles=particles)
    names = [method for method in results.distinct("method") if method.startswith("within")]
    keys = {"same": same, "particles": particles}
    return {name: paired(results.values("accuracy", method=name, **keys), own) for name in names}


def report(results: Results) -> str:
    """Report both scores by method and number of draws."""
    size, particles = results.setting, sorted(results.distinct("particles"))
    lines = []
    for method, same in results.distinct("method", "same"):
        cells = [
            with_error(results.values(name, method=method, same=same, particles=count), 3)
            for count in particles
            for name in ("accuracy", "nll")
        ]
        lines.append([method if method == MEAN_FIELD else f"{method}, {SAME[same]}", *cells])
    draws = [f"{count} draw{'s' * (count > 1)}" for count in particles]
    headings = ["", *(f"{name}, {own}" for own in draws for name in ("test accuracy", "NLL"))]
    return f"""### Truncated mean field

The experiment repeats figure 11 of the Radial paper, which has no numbers, on {size["rows"]:,} images of \
Fashion-MNIST with 784-{size["hidden"]}-{size["hidden"]}-10. All scales start at {size["init"]:g}, which is too high. \
Training takes {size["epochs"]} epochs with one or more draws per step, for {len(results.distinct("seed"))} seeds \
(`python -m benchmarks.guides.truncated_mean_field`). "within c" means that draws are at most c times the sigma of the \
normal away from the mean. With "same sigma", as published, that sigma starts at {size["init"]:g}, so draws are \
narrower for a smaller c. With "same standard deviation", the draws themselves start at that standard deviation.

{markdown_table(headings, lines)}

{results.plot("Accuracy by truncation")}"""


def draw(results: Results) -> None:
    """Accuracy against the truncation; dotted lines are mean field that is not truncated, as in figure 11."""
    particles = sorted(results.distinct("particles"))
    figure = Figure(figsize=(8, 3.2), layout="constrained", dpi=110)
    axes = figure.subplots(1, len(SAME), sharey=True)
    names = [method for method in results.distinct("method") if method.startswith("within")]
    at = [float(name.split()[-1]) for name in names]
    for (same, title), ax in zip(SAME.items(), axes, strict=True):
        for count, color in zip(particles, ("#0072B2", "#E69F00"), strict=False):
            own = [results.values("accuracy", method=name, same=same, particles=count) for name in names]
            values = torch.tensor(own, dtype=torch.double)
            error = values.std(1, correction=min(1, values.shape[1] - 1)) / values.shape[1] ** 0.5
            ax.errorbar(at, values.mean(1), error, fmt="o-", ms=4, color=color, label=f"truncated, draws: {count}")
            plain = torch.tensor(results.values("accuracy", method=MEAN_FIELD, particles=count)).mean()
            ax.axhline(float(plain), ls=":", color=color, label=f"mean field, draws: {count}")
        ax.set(title=title, xscale="log", xlabel="truncation, in sigma", xticks=at, xticklabels=[f"{c:g}" for c in at])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("test accuracy")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
