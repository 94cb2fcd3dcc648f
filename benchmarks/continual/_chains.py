# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the continual learning experiments share: data, networks, the methods compared, and one run of one of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from time import process_time
from types import MappingProxyType
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from benchmarks._published_rule import PublishedRule
from benchmarks.common import Row, flat_images
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    BayesianModule,
    FitOptions,
    PriorChain,
    SupervisedModel,
    TermsELBO,
)
from pyro_radial.continual import (
    Coreset,
    TaskStream,
    recipes,
    train_stream,
)
from pyro_radial.continual.coresets import random_coreset
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.recipes import Rates, Recipe
from pyro_radial.infer.step.optimizer import rise_and_fall
from pyro_radial.nn import MultiHead, likelihoods
from tutorials.streams import class_split_stream, permuted_stream


@dataclass(frozen=True)
class Setting:
    """How one method is trained; the same for every task but the first, of which it knows nothing in advance."""

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
    #: Steps after which the learning rates of a task have fallen to zero along a cosine; None for constant rates.
    decay_over: int | None = None
    #: The rate of the scales; None for that of the means.
    scale_rate: float | None = None
    #: Of the first prior.
    prior_stddev: float = 1.0
    #: Of the likelihood: "weights" for one network drawn for a whole batch, or "local".
    noise: Literal["weights", "local"] = "weights"
    #: The weights of the KL to the first prior, and to those that tasks leave.
    first_kl: float = 1.0
    later_kl: float = 1.0

    def training(self, method: str, compile: bool) -> dict[str, Any]:
        """Options of ``train_stream``: guides, Amsgrad, as in the paper's appendix D.2, and the losses."""
        options = {
            "guide": self.guide(method),
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "optim": pyro.optim.Adam(Rates(self.learning_rate, self.scale_rate or self.learning_rate)),
            "loss": TermsELBO(strict_kl=True, kl_weight=self.later_kl),
            "first_task": {"loss": TermsELBO(strict_kl=True, kl_weight=self.first_kl)},
            "options": FitOptions(
                checkpoint_every=200, compile=compile, scheduler_interval="epoch" if self.decay_over is None else "step"
            ),
        }
        if self.decay_over is not None:
            options["scheduler"] = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=self.decay_over)
        return options

    def guide(self, method: str) -> Callable[[PriorChain], Any]:
        """A function from a chain to the guide of its next task."""
        start = {"init_stddev": self.init_stddev, "init_scale": self.init_scale}
        start = {name: value for name, value in start.items() if value is not None}
        if method == "mean field":
            return partial(_guide, AutoMeanField, self.reset_scales, {"init_stddev": next(iter(start.values()))})
        return partial(_guide, AutoRadial, self.reset_scales, start | {"event_dim": self.event_dim})


@dataclass(frozen=True)
class Tuned(Setting):
    """A setting whose rates fall to zero by the end of each task, by Amsgrad or along the natural gradient."""

    event_dim: int | None = 1
    #: How often the data of a task count in the next prior.
    past_weight: float = 1.0
    #: Whether steps follow the natural gradient by its published rule; the next two are its settings.
    natural: bool = False
    hess_init: float | None = None
    beta2: float | None = None

    def training(self, method: str, compile: bool) -> dict[str, Any]:
        """Options of ``train_stream``."""
        options = super().training(method, compile)
        if self.natural:
            assert self.hess_init is not None
            assert self.beta2 is not None
            assert self.decay_over is not None
            # The learning rate is that of SGD at the first widths, and the curvature about their precision for a datum.
            rate = self.learning_rate * self.hess_init
            rule = partial(PublishedRule, lr=rate, hess_init=self.hess_init, beta2=self.beta2)
            make_guide = self.guide(method)
            rules: list[Any] = []

            def guide(chain: PriorChain) -> Any:
                made = make_guide(chain)
                rules.append(partial(rule, guide=made, num_data=chain.likelihood.num_data))
                return made

            options |= {"guide": guide, "optim": lambda parameters: rules[-1](parameters)}
            options["scheduler"] = partial(rise_and_fall, steps=self.decay_over)
        return options


def fields(recipe: Recipe, *names: str) -> Mapping[str, Any]:
    """Some settings of a recipe, which have the same names here."""
    return MappingProxyType({name: getattr(recipe, name) for name in names})


#: Little noise, and a first prior near He's start that weighs little.
LOCAL_NOISE = fields(
    recipes.nothing_kept(), "init_stddev", "learning_rate", "scale_rate", "prior_stddev", "noise", "first_kl"
)


@dataclass(frozen=True)
class Keeping:
    """What is kept of each task, and how it is used."""

    use: Literal["nothing", "functions"] = "nothing"
    #: Of each task.
    coreset: int = 0
    #: Of the KL of functions, and the most inputs in one step.
    function_weight: float | None = None
    max_points: int | None = None

    def options(self) -> Coreset | None:
        """The coreset."""
        if self.use == "nothing":
            return None
        return Coreset(self.coreset, use="functions", weight=self.function_weight, max_points=self.max_points)

    def __str__(self) -> str:
        return f"{self.coreset} inputs, weight {self.function_weight:g}" if self.use == "functions" else "nothing"


NOTHING = Keeping()


def one_color(x: Tensor, size: int, *, seed: int) -> Tensor:
    """Images that have in all places the value of a random pixel of the inputs."""
    places = torch.randint(x.numel(), (size,), generator=torch.Generator().manual_seed(seed))
    return x.flatten()[places].unsqueeze(1).expand(size, x.shape[1]).clone()


def by_pixel(x: Tensor, size: int, *, seed: int) -> Tensor:
    """Noise with the mean and the standard deviation of each pixel, between the least and the largest pixel."""
    noise = torch.randn(size, x.shape[1], generator=torch.Generator().manual_seed(seed))
    return (x.mean(0) + x.std(0) * noise).clamp(x.min(), x.max())


def ten_and_one_color(x: Tensor, size: int, *, seed: int) -> Tensor:
    """Ten of the inputs, and images of one color."""
    return torch.cat([x[random_coreset(x, min(10, size), seed=seed)], one_color(x, max(0, size - 10), seed=seed)])


SOURCES = {
    "rows": random_coreset,
    "one color": one_color,
    "pixel statistics": by_pixel,
    "ten rows, one color": ten_and_one_color,
}


@dataclass(frozen=True)
class Holding(Keeping):
    """Inputs at which functions are held: of each earlier task, or of the task in training, with nothing kept."""

    source: str = "rows"
    inputs: Literal["kept", "current"] = "kept"

    def options(self) -> Coreset | None:
        """The coreset."""
        if self.use == "nothing":
            return None
        points = {"weight": self.function_weight, "max_points": self.max_points}
        return Coreset(self.coreset, SOURCES[self.source], use="functions", inputs=self.inputs, **points)

    def __str__(self) -> str:
        if self.use == "nothing":
            return "nothing"
        kept = {"kept": f"{self.coreset} points a task", "current": "nothing"}[self.inputs]
        where = self.source if self.inputs == "kept" else f"{self.source} of the task in training"
        return f"{kept}; functions at {where}, weight {self.function_weight:g}"


def _guide(family: Any, reset_scales: bool, options: dict[str, Any], chain: PriorChain) -> Any:
    return chain.guide(family, reset_scales=reset_scales, **options)


def make_chain(method: str, model: nn.Module, weight: float = 1.0) -> PriorChain:
    return PriorChain(model, "normal" if method == "radial normal" or weight != 1.0 else "exact", weight)


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


@lru_cache
def permuted_mnist(data_dir: Path | None, rows: int | None, num_tasks: int, held_out: float = 0.1) -> TaskStream:
    """Permuted MNIST, all or the first rows, with a tenth of the training images held out at random."""
    train, test = ((x[:rows], y[:rows]) for x, y in flat_images("mnist", data_dir))
    return permuted_stream(train, test, num_tasks, validation_fraction=held_out)


@lru_cache
def split_images(
    name: str, data_dir: Path | None, rows: int | None, num_tasks: int, heads: str, held_out: float = 0.1
) -> TaskStream:
    """MNIST or Fashion-MNIST likewise, two classes a task.

    Tasks have a head each ("multi"), one for all classes ("single"), or one for the two of any task ("shared").
    """
    train, test = ((x[:rows], y[:rows]) for x, y in flat_images(name, data_dir))
    stream = class_split_stream(train, test, multi_head=heads != "single", validation_fraction=held_out)[:num_tasks]
    if heads != "shared":
        return stream
    return TaskStream.of([replace(task, head=0) for task in stream], num_outputs=stream.num_outputs)


def learn(
    make_stream: Callable[[], TaskStream],
    sizes: Sequence[int],
    num_samples: int,
    method: str,
    setting: Setting,
    seed: int,
    measure_on: str,
    keeping: Keeping,
    checkpoint: Path,
) -> Row:
    """Learn a stream; a killed run goes on from its checkpoints, a folder which is removed at the end.

    The seconds are those of the CPU, and of a run that was killed those since then.
    """
    stream = make_stream()
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    net = make_net(sizes, stream.num_heads, stream.num_outputs)
    bnn = BayesianModule(net, prior=dist.Normal(0.0, setting.prior_stddev))
    model = SupervisedModel(bnn, likelihoods.Categorical(), local_reparameterization=setting.noise == "local")
    chain = make_chain(method, model, getattr(setting, "past_weight", 1.0))
    began = process_time()
    matrix = train_stream(
        chain,
        stream,
        coreset=keeping.options(),
        measure_on=measure_on,
        num_samples=num_samples,
        seed=seed,
        checkpoint=checkpoint,
        progress=False,
        **setting.training(method, _is_worth_compiling(stream)),
    )
    seconds = process_time() - began
    rmtree(checkpoint)
    row = measures(matrix) | {"seconds": round(seconds, 1)}
    if stream.num_heads == 1:
        row["at_mean"] = accuracy_at_mean(chain, bnn, stream, measure_on)
    return row


@torch.no_grad()
def accuracy_at_mean(chain: PriorChain, bnn: BayesianModule, stream: TaskStream, measure_on: str) -> float:
    """Return the average accuracy of the network whose weights are the means of the last posterior."""
    net = bnn.to_module({name: posterior.mean for name, posterior in chain.prior.items()})
    accuracies = []
    for task in stream:
        x, y = getattr(task, measure_on)
        accuracies.append(float((net(x).argmax(-1) == y).double().mean()))
    return sum(accuracies) / len(accuracies)


def fine_tuned(
    make_stream: Callable[[], TaskStream], sizes: Sequence[int], setting: Setting, seed: int, measure_on: str
) -> Row:
    """A plain network with one head, trained by Adam on one task after another with nothing against forgetting."""
    stream = make_stream()
    pyro.set_rng_seed(seed)
    net = make_net(sizes, 1, stream.num_outputs)
    matrix = AccuracyMatrix.empty(stream.names)
    began = process_time()
    for number in range(len(stream)):
        x, y = stream[number].train
        optimizer = torch.optim.Adam(net.parameters(), setting.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.decay_over or 1)
        for _ in range(setting.epochs):
            for index in torch.randperm(len(x)).split(setting.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x[index]), y[index]).backward()
                optimizer.step()
                scheduler.step()
        with torch.no_grad():
            tasks = (getattr(stream[earlier], measure_on) for earlier in range(number + 1))
            row = [float((net(x).argmax(-1) == y).double().mean()) for x, y in tasks]
        matrix = matrix.with_row(number, row)
    return measures(matrix) | {"seconds": round(process_time() - began, 1)}


def _is_worth_compiling(stream: TaskStream) -> bool:
    """Return whether steps can be compiled and are many; heads whose functions take turns are not one graph."""
    return stream.num_heads == 1 and len(stream[0].train[0]) >= 10_000


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


def row_keys(method: str, setting: Setting, seed: int, part: str, keeping: Keeping = NOTHING) -> Row:
    """What a row of results is of."""
    return {"method": method, **asdict(setting), "seed": seed, "measured_on": part, **asdict(keeping)}
