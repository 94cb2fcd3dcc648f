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
from time import perf_counter
from typing import Any

import pyro
import torch
from common import RESULTS, Row, mean_and_error
from torch import Tensor, nn
from torch.distributions import Independent, register_kl

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, PriorChain, RadialELBO, SupervisedModel
from pyro_radial.continual import AccuracyMatrix, Coreset, TaskStream, learn_stream
from pyro_radial.distributions import RadialNormal
from pyro_radial.nn import MultiHead, likelihoods

CHECKPOINTS = RESULTS.parent / "checkpoints"
METHODS = ("radial exact", "radial published", "radial normal", "mean field")


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
        super().advance({name: published(law) for name, law in posterior.items()}, exclude)


def published(law: Any) -> Any:
    if isinstance(law, Independent):
        return published(law.base_dist).to_event(law.reinterpreted_batch_ndims)
    return PublishedRadial(law.loc, law.scale, law.event_dim)


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

    def optimiser(self) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
        """Amsgrad, as in the paper's appendix D.2."""
        if self.decay_over is None:
            return partial(torch.optim.Adam, lr=self.learning_rate, amsgrad=True)
        return partial(CosineAmsgrad, lr=self.learning_rate, total_steps=self.decay_over)

    def guide(self, method: str) -> Callable[[PriorChain], Any]:
        """A function from a chain to the guide of its next task."""
        start = {"init_stddev": self.init_stddev, "init_scale": self.init_scale}
        start = {name: value for name, value in start.items() if value is not None}
        if method == "mean field":
            return partial(_guide, AutoMeanField, self.reset_scales, {"init_scale": next(iter(start.values()))})
        return partial(_guide, AutoRadial, self.reset_scales, start | {"event_dim": self.event_dim})


def _guide(family: Any, reset_scales: bool, options: dict[str, Any], chain: PriorChain) -> Any:
    return chain.guide(family, reset_scales=reset_scales, **options)


def make_chain(method: str, model: nn.Module) -> PriorChain:
    if method == "radial published":
        return PublishedChain(model)
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


def run(
    stream: TaskStream,
    sizes: Sequence[int],
    method: str,
    setting: Setting,
    seed: int,
    name: str,
    *,
    coreset: Coreset | None = None,
    measure_on: str = "test",
    num_samples: int = 64,
) -> Row:
    """Learn the stream; a killed run goes on from ``checkpoints/name``, which is removed at the end."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    net = make_net(sizes, stream.num_heads, stream.num_outputs)
    chain = make_chain(method, SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=1)))
    began = perf_counter()
    matrix = learn_stream(
        chain,
        stream,
        setting.guide(method),
        coreset=coreset,
        measure_on=measure_on,
        num_samples=num_samples,
        seed=seed,
        checkpoint=CHECKPOINTS / name,
        progress=False,
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        optim=setting.optimiser(),
        loss=RadialELBO(strict_kl=True),
        checkpoint_every=200,
    )
    seconds = perf_counter() - began
    rmtree(CHECKPOINTS / name)
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


def summary(rows: Sequence[Row], label: str) -> str:
    scores = (
        f"{name} {mean_and_error([row[name] for row in rows])}"
        for name in ("average_accuracy", "learned", "backward_transfer")
    )
    return "  ".join([f"{label:42s}", *scores, f"seconds {max(row['seconds'] for row in rows):.0f}"])


def checkpoint_name(*parts: Any) -> Path:
    return Path("-".join(str(part).replace(" ", "_") for part in parts))
