# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Predict energies of crystals by networks for each element, and say which structures are predicted badly.

python -m benchmarks.uncertainty.crystals --data-dir DIR
"""

import itertools
import math
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.optim import Adam

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    is_below,
    main,
    markdown_table,
    paired,
    with_error,
)
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, Prediction, SupervisedModel, fit, predict
from pyro_radial.infer import FitOptions, last_layer_laplace
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods
from tutorials import atoms

RADIAL, MEAN_FIELD = "radial, predictive widths", "mean field, predictive widths"
ELBO_RADIAL, ELBO_MEAN_FIELD = "radial, ELBO widths", "mean field, ELBO widths"
AS_PUBLISHED = "radial draws, density of a normal"
PLAIN, LAPLACE, ENSEMBLE = "plain network", "last-layer Laplace", "deep ensemble"
METHODS = (RADIAL, MEAN_FIELD, ELBO_RADIAL, ELBO_MEAN_FIELD, AS_PUBLISHED, PLAIN, LAPLACE, ENSEMBLE)
#: Whose rate a method has that chooses none.
RATE_OF = {LAPLACE: PLAIN, ENSEMBLE: PLAIN}
#: Test NLL in a repository (farrisric/bayesaenet, arXiv 2509.19180), which has all 7,815 structures.
PUBLISHED = {"mean field": -3.44, ENSEMBLE: -4.22, AS_PUBLISHED: -0.93}
#: Of intervals.
LEVELS = (0.05, 0.95)
#: The share of structures that a chemist computes again.
FLAGGED = 0.1
NUM_MEMBERS = 5
#: Scores in the table, in which units, and how many digits they have.
COLUMNS = (
    ("nll", 1, 2),
    ("rmse", 1_000, 1),
    ("rmse_kept", 1_000, 1),
    ("worst_flagged", 1, 2),
    ("coverage", 1, 2),
    ("seconds", 1, 0),
)


class Size(NamedTuple):
    """Structures to train on, for choices and to test, epochs, rates to choose from, splits, and whether to compile."""

    train: int = 800
    validation: int = 90
    test: int = 100
    epochs: int = 300
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    splits: int = 5
    compile: bool = True


SIZES = {"default": Size(), "small": Size(40, 20, 20, 2, (3e-3, 1e-2), 2, compile=False)}


class NormalWithRadialDraws(dist.Normal):
    """Draws of a radial posterior, with density and KL of a normal: a posterior that is not what it draws from."""

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Return a direction times a radius, one for the whole tensor, scaled and moved."""
        noise = torch.randn(self._extended_shape(sample_shape))
        sample_dims, event_dims = len(sample_shape), self.loc.dim()
        norm = noise.flatten(sample_dims).norm(dim=-1)
        factor = (torch.randn(norm.shape) / norm).reshape(*norm.shape, *[1] * event_dims)
        return self.loc + self.scale * noise * factor

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Return the same without a gradient."""
        with torch.no_grad():
            return self.rsample(sample_shape)


class FamilyAsPublished(families.LocScale):
    """Start where a normal does."""

    def distribution(self, site: Any, *, loc: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
        """Return the distribution of one tensor."""
        return NormalWithRadialDraws(loc, scale, validate_args=False).to_event(site.event_dim)


@cache
def crystals(data_dir: Path) -> atoms.Crystals:
    return atoms.load(data_dir)


class Split(NamedTuple):
    """Pairs of inputs and standardized energies, of which one is ``unit`` eV for each atom."""

    train: Pair
    validation: Pair
    test: Pair
    unit: float
    places: tuple[int, ...]


def split_of(size: Size, seed: int, data_dir: Path) -> Split:
    """Shuffle all structures, and standardize by those that are trained on."""
    everything = crystals(data_dir)
    order = torch.randperm(len(everything.energies), generator=torch.Generator().manual_seed(seed))
    rows = order[: size.train + size.validation + size.test].split([size.train, size.validation, size.test])
    is_atom = everything.is_atom.unsqueeze(-1)
    of_atoms = everything.features[rows[0]][everything.is_atom[rows[0]] > 0]
    features = (everything.features - of_atoms.mean(0)) / of_atoms.std(0)
    x = torch.cat([features * is_atom, is_atom], -1)
    energies = everything.energies[rows[0]]
    unit = energies.std()
    y = ((everything.energies - energies.mean()) / unit).unsqueeze(-1)
    train, validation, test = ((x[chosen], y[chosen]) for chosen in rows)
    return Split(train, validation, test, float(unit), everything.places)


def run(output: Path, *, data_dir: Path, form: Form = "default", workers: int = 2, threads: int = 1) -> None:
    """Train on 800 of 990 structures, and test on 100 with five other splits than the rate was chosen with.

    Networks have two hidden layers of 15 tanh units for each element. Each method keeps the epoch that predicts 90
    other structures best; predictive widths are found with these, and have no rate to choose.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    with_rates = (ELBO_RADIAL, ELBO_MEAN_FIELD, AS_PUBLISHED, PLAIN)
    choices = [
        Job({"use": "choice", "method": method, "rate": rate, "seed": 0}, chosen, (method, rate, size, data_dir))
        for method, rate in itertools.product(with_rates, size.rates)
    ]
    compute_all(results, choices, workers, threads)
    tests = []
    for seed, method in itertools.product(range(FIRST_SEED, FIRST_SEED + size.splits), METHODS):
        keys = {"use": "test", "method": method, "seed": seed}
        tests.append(Job(keys, tested, (method, rate_of(results, method), seed, size, data_dir)))
    compute_all(results, tests, workers, threads)


def rate_of(results: Results, method: str) -> float | None:
    """Return the rate with the lowest NLL of the other structures, or None where a method has none."""
    rows = results.where(use="choice", method=RATE_OF.get(method, method))
    return min(rows, key=lambda row: row["nll"])["rate"] if rows else None


def chosen(method: str, rate: float, size: Size, data_dir: Path) -> Row:
    """Train by one method at a rate, and score the rows of a choice."""
    split = split_of(size, 0, data_dir)
    return scores(train(method, rate, 0, size, split), split.validation, split.unit)


def tested(method: str, rate: float | None, seed: int, size: Size, data_dir: Path) -> Row:
    """Train by one method, and score test rows."""
    split = split_of(size, seed, data_dir)
    start = time.process_time()
    prediction = train(method, rate, seed, size, split)
    return {"seconds": time.process_time() - start} | scores(prediction, split.test, split.unit)


def scores(prediction: Callable[[Tensor], Prediction], rows: Pair, unit: float) -> Row:
    """Scores in eV for each atom, and what intervals and standard deviations are worth."""
    x, y = rows
    torch.manual_seed(0)
    draws = prediction(x)
    errors = (draws.mean - y).abs().squeeze(-1)
    stddevs = draws.variance.sqrt().squeeze(-1)
    low, high = draws.quantiles(LEVELS)
    flagged = stddevs.argsort(descending=True)[: round(FLAGGED * len(y))]
    is_kept = torch.ones(len(y), dtype=torch.bool).index_fill(0, flagged, False)
    worst = errors.argsort(descending=True)[: len(flagged)]
    return {
        "nll": -float(draws.log_prob(y).mean()) + math.log(unit),
        "rmse": unit * float(errors.square().mean().sqrt()),
        "coverage": float(((low <= y) & (y <= high)).float().mean()),
        "rmse_kept": unit * float(errors[is_kept].square().mean().sqrt()),
        "worst_flagged": float(torch.isin(worst, flagged).float().mean()),
    }


def train(method: str, rate: float | None, seed: int, size: Size, split: Split) -> Callable[[Tensor], Prediction]:
    """Train by one method, and return what predicts for inputs."""
    if method == ENSEMBLE:
        members = [train(PLAIN, rate, NUM_MEMBERS * seed + k, size, split) for k in range(NUM_MEMBERS)]

        def joined(x: Tensor) -> Prediction:
            prediction: Prediction = Prediction.joined([member(x) for member in members])
            return prediction

        return joined
    torch.manual_seed(seed)
    bnn = BayesianModule(atoms.AtomicEnergies(split.train[0].shape[-1] - 1, split.places))
    model = SupervisedModel(bnn, likelihoods.Gaussian(learn_scale=True))
    guide = guide_of(method, model)
    optim: dict[str, Any] = {} if rate is None else {"optim": partial(Adam, lr=rate), "scheduler": "cosine"}
    settings: dict[str, Any] = {"epochs": size.epochs, "batch_size": 32, "seed": seed, "progress": False, **optim}
    settings["options"] = FitOptions(compile=size.compile)
    fit(model, guide, split.train, validation=split.validation, **settings)
    if method == PLAIN:
        return partial(predict, model, guide, num_samples=1)
    if method == LAPLACE:
        with warnings.catch_warnings():
            # The method is the evidence's choice, good or not.
            warnings.filterwarnings("ignore", "prior_precision=")
            guide = last_layer_laplace(model, guide, split.train)
    return partial(predict, model, guide, num_samples=64)


def guide_of(method: str, model: SupervisedModel) -> Any:
    """Make an untrained guide."""
    if method in (PLAIN, LAPLACE):
        return AutoMeanField(model, families={"": families.Delta()})
    if method == AS_PUBLISHED:
        return AutoMeanField(model, families={"": FamilyAsPublished()})
    guide_class = AutoRadial if method in (RADIAL, ELBO_RADIAL) else AutoMeanField
    return guide_class(model, widths="predictive" if method in (RADIAL, MEAN_FIELD) else "elbo")


def claims(results: Results) -> list[Claim]:
    """The right density is better than the published one, and radial posteriors than others."""
    pairs = [(ELBO_RADIAL, AS_PUBLISHED), (RADIAL, MEAN_FIELD), (ELBO_RADIAL, ELBO_MEAN_FIELD), (RADIAL, PLAIN)]
    compared = []
    for ours, theirs in pairs:
        values = [results.values("nll", use="test", method=method) for method in (ours, theirs)]
        difference = paired(*values)
        numbers = (
            f"{with_error(values[0], 2)} against {with_error(values[1], 2)}, difference {with_error(difference, 3)}"
        )
        text = f"Energies of crystals: the NLL of {ours} is below that of {theirs}"
        compared.append(Claim(text, "", numbers, str(len(difference)), is_below(difference)))
    return compared


def report(results: Results) -> str:
    """Report scores by method."""
    size = results.setting
    lines = []
    for method in METHODS:
        rows = results.where(use="test", method=method)
        cells = [with_error([scale * row[name] for row in rows], digits) for name, scale, digits in COLUMNS]
        rate = rate_of(results, method)
        lines.append([method, *cells, "-" if rate is None else f"{rate:g}"])
    headings = ["", "NLL", "RMSE, meV", "RMSE of the others, meV", "worst flagged", "coverage", "seconds", "rate"]
    published = "; ".join(f"{name} {value}" for name, value in PUBLISHED.items())
    return f"""### Energies of crystals

Structures of titanium and oxygen, of at most 47 atoms. {size["train"]} are trained on, {size["validation"]} keep the \
best of {size["epochs"]} epochs and choose Adam's rate, and {size["test"]} others are tested \
(`python -m benchmarks.uncertainty.crystals --data-dir DIR`). An energy is for each atom, in eV, less a linear fit on \
the numbers of both elements. Each element has a network of two layers of {atoms.HIDDEN} tanh units on Chebyshev \
descriptors. The noise is learned. Means and standard errors of {size["splits"]} splits.

{markdown_table(headings, lines)}

"Others" are what is left if the tenth with the largest standard deviations is computed again, and "worst flagged" is \
the share of the tenth with the largest errors in it. Coverage is of intervals of 90 %. Predictive widths have `fit`'s \
own rate. "{AS_PUBLISHED}" is what a public repository calls radial: it draws as a radial posterior does, and trains \
with the density and KL of a normal. Published with all 7,815 structures, NLL: {published}."""


if __name__ == "__main__":
    main(run, report)
