# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the continual learning experiments share: data, networks, the methods compared, and one run of one of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import cos, pi
from pathlib import Path
from shutil import rmtree
from statistics import mean
from time import perf_counter
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.distributions import register_kl

from benchmarks.common import Results, Row, markdown_table, with_error
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, PriorChain, RadialELBO, SupervisedModel
from pyro_radial.continual import AccuracyMatrix, Coreset, TaskStream, learn_stream
from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.wrappers import map_leaf
from pyro_radial.nn import MultiHead, likelihoods

METHODS = ("radial exact", "radial published", "radial normal", "mean field")
SCORES = {
    "average_accuracy": "average accuracy",
    "learned": "just learned",
    "backward_transfer": "backward transfer",
}


class PublishedRadial(RadialNormal):
    """A radial prior under the objective that Farquhar, Osborne and Gal (2020) published, eq. 43 and 44.

    Their "KL" lacks (D - 1) (E log rho_p - E log rho_q), so it can be negative. It is here to repeat their experiment.
    """


@register_kl(RadialNormal, PublishedRadial)
def published_kl(q: RadialNormal, p: PublishedRadial) -> Tensor:
    dims = tuple(range(-q.event_dim, 0))
    ratio, shift = q.scale / p.scale, (q.loc - p.loc) / p.scale
    terms = 0.5 * (ratio.square() / q.num_elements + shift.square()) - ratio.log()
    return terms.sum(dims, dtype=torch.double).to(q.loc.dtype) - 0.5


class PublishedChain(PriorChain):
    """A chain whose priors carry the published objective."""

    def advance(self, guide: Any, exclude: Any = None) -> None:
        """As in the library."""
        posterior = guide if isinstance(guide, Mapping) else guide.posterior()
        super().advance({name: map_leaf(published, own) for name, own in posterior.items()}, exclude)


def published(radial: RadialNormal) -> PublishedRadial:
    return PublishedRadial(radial.loc, radial.scale, radial.event_dim)


class CosineAmsgrad(torch.optim.Adam):
    """Amsgrad whose learning rate falls to zero along a cosine; its place on it is in its state."""

    def __init__(self, params: Any, lr: float, total_steps: int) -> None:
        super().__init__(params, lr=lr, amsgrad=True)
        for group in self.param_groups:
            group |= {"start": lr, "total_steps": total_steps, "taken": 0}

    def step(self, closure: Any = None) -> Any:
        """As in torch."""
        for group in self.param_groups:
            share = min(1.0, group["taken"] / group["total_steps"])
            group["lr"] = 0.5 * group["start"] * (1.0 + cos(pi * share))
            group["taken"] += 1
        return super().step(closure)


@dataclass(frozen=True)
class Setting:
    """How one method is trained; the same for every task, of which it knows nothing in advance."""

    epochs: int
    #: The marginal standard deviation that the guide's elements start at, or None for ``init_scale``.
    init_stddev: float | None = None
    #: The scale (the paper's sigma) that they start at.
    init_scale: float | None = None
    #: How many of a site's last dimensions share one radius; None for all.
    event_dim: int | None = None
    reset_scales: bool = False
    learning_rate: float = 1e-3
    batch_size: int = 1024
    #: Steps after which the learning rate of a task has fallen to zero along a cosine; None for a constant rate.
    decay_over: int | None = None

    def optimizer(self) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
        """Amsgrad, as in the paper's appendix D.2."""
        if self.decay_over is None:
            return partial(torch.optim.Adam, lr=self.learning_rate, amsgrad=True)
        return partial(CosineAmsgrad, lr=self.learning_rate, total_steps=self.decay_over)

    def guide(self, method: str) -> Callable[[PriorChain], Any]:
        """A function from a chain to the guide of its next task."""
        start = {"init_stddev": self.init_stddev, "init_scale": self.init_scale}
        start = {name: value for name, value in start.items() if value is not None}
        if method == "mean field":
            return partial(_guide, AutoMeanField, self.reset_scales, {"init_stddev": next(iter(start.values()))})
        return partial(_guide, AutoRadial, self.reset_scales, start | {"event_dim": self.event_dim})


def _guide(family: Any, reset_scales: bool, options: dict[str, Any], chain: PriorChain) -> Any:
    return chain.guide(family, reset_scales=reset_scales, **options)


def make_chain(method: str, model: nn.Module) -> PriorChain:
    if method == "radial published":
        return PublishedChain(model, "exact")
    return PriorChain(model, "normal" if method == "radial normal" else "exact")


def make_net(sizes: Sequence[int], num_heads: int, num_outputs: int) -> nn.Module:
    """Fully connected with ReLU and He's start; the output layer is a head of its own where tasks have one."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    heads = [nn.Linear(sizes[-1], num_outputs) for _ in range(num_heads)]
    for layer in [*layers, *heads]:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return MultiHead(nn.Sequential(*layers), heads) if num_heads > 1 else nn.Sequential(*layers, *heads)


def learn(
    stream: TaskStream,
    sizes: Sequence[int],
    method: str,
    setting: Setting,
    seed: int,
    checkpoint: Path,
    *,
    coreset: Coreset | None = None,
    measure_on: str = "test",
    num_samples: int = 64,
) -> Row:
    """Learn the stream; a killed run goes on from its checkpoints, a folder which is removed at the end."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    net = make_net(sizes, stream.num_heads, stream.num_outputs)
    chain = make_chain(method, SupervisedModel(BayesianModule(net), likelihoods.Categorical()))
    began = perf_counter()
    matrix = learn_stream(
        chain,
        stream,
        setting.guide(method),
        coreset=coreset,
        measure_on=measure_on,
        num_samples=num_samples,
        seed=seed,
        checkpoint=checkpoint,
        progress=False,
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        optim=setting.optimizer(),
        loss=RadialELBO(strict_kl=True),
        checkpoint_every=200,
    )
    seconds = perf_counter() - began
    rmtree(checkpoint)
    return measures(matrix) | {"seconds": round(seconds, 1)}


def measures(matrix: AccuracyMatrix) -> Row:
    # The upper triangle is not measured; JSON has no NaN.
    values = [[round(float(v), 5) for v in row[: i + 1]] for i, row in enumerate(matrix.values)]
    return {
        "average_accuracy": matrix.average_accuracy,
        "learned": float(matrix.learned.mean()),
        "backward_transfer": matrix.backward_transfer,
        "forgetting": matrix.forgetting,
        "values": values,
    }


def as_matrix(row: Row, names: Sequence[str]) -> AccuracyMatrix:
    """The accuracy matrix of a saved row."""
    matrix = AccuracyMatrix.empty(names)
    for i, accuracies in enumerate(row["values"]):
        matrix = matrix.with_row(i, accuracies)
    return matrix


def row_keys(method: str, setting: Setting, seed: int, part: str, coreset: int) -> Row:
    """What a row of results is of."""
    return {"method": method, **asdict(setting), "seed": seed, "measured_on": part, "coreset": coreset}


def described(row: Row) -> str:
    """The setting of a row in a few words."""
    start = f"sigma from {row['init_scale']:g}" if row["init_stddev"] is None else f"from {row['init_stddev']:g}"
    words = [f"{row['epochs']} epochs", start]
    if row["method"] != "mean field":
        words.append("a radius a tensor" if row["event_dim"] is None else "a radius a row")
    if row["reset_scales"]:
        words.append("scales reset")
    if row["decay_over"]:
        words.append("rate to zero")
    return ", ".join(words)


def by_setting(results: Results, **keys: Any) -> dict[tuple[str, str, int], list[Row]]:
    """Rows measured on test data with these keys, by method, setting in words, and size of the coreset."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in results.rows:
        if row["measured_on"] == "test" and keys.items() <= row.items():
            found.setdefault((row["method"], described(row), row["coreset"]), []).append(row)
    return found


def named(method: str, coreset: int) -> str:
    return f"{method}, coreset of {coreset}" if coreset else method


def accuracy_table(results: Results, **keys: Any) -> str:
    """Average accuracy, accuracy just learned and backward transfer, in percent, by setting."""
    lines = [
        [named(method, coreset), setting, *(percent(rows, name) for name in SCORES), str(len(rows))]
        for (method, setting, coreset), rows in by_setting(results, **keys).items()
    ]
    return markdown_table(["", "setting", *SCORES.values(), "seeds"], lines)


def percent(rows: Sequence[Row], name: str) -> str:
    return with_error([100.0 * row[name] for row in rows], 2)


def best_of(results: Results, **keys: Any) -> tuple[str, list[Row]]:
    """The method and setting with the best average accuracy, and its rows."""
    groups = by_setting(results, **keys)
    best = max(groups, key=lambda group: mean(row["average_accuracy"] for row in groups[group]))
    return best[0], groups[best]
