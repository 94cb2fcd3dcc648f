# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train methods for classification experiments with ``fit``, and score them with a ``Prediction``."""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset, default_collate

from benchmarks._published_rule import PublishedRule
from benchmarks.common import Pair, Row
from benchmarks.guides._ensemble import Ensemble
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    BayesianModule,
    FitOptions,
    SupervisedModel,
    TermsELBO,
    fit,
    predict,
)
from pyro_radial.infer import Prediction, last_layer_laplace
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.step.optimizer import rise_and_fall
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn
from pyro_radial.uncertainty import TemperatureScaling, auroc, expected_calibration_error
from pyro_radial.uncertainty.metrics import brier_score

#: From a dropout rate to a new network, whose weights are drawn from torch's random numbers.
MakeNet = Callable[[float], nn.Module]
#: From a batch of inputs to as many, changed at random.
Augment = Callable[[Tensor], Tensor]

PLAIN, DROPOUT, DEEP_ENSEMBLE = "plain", "MC dropout", "deep ensemble"
MEAN_FIELD, TWEAKS = "mean field", "mean field, tweaks"
RADIAL, RADIAL_ENSEMBLE = "radial", "radial ensemble"
#: A radius for each row of a weight.
ROWS = "radial by row"
TEMPERATURE, LAPLACE, IVON = "temperature", "last-layer Laplace", "IVON"
ADAMW, SGD = "plain, AdamW", "plain, SGD"
SGD_TEMPERATURE, SGD_DROPOUT, SGD_LAPLACE = "SGD, temperature", "SGD, MC dropout", "SGD, last-layer Laplace"
SGD_ENSEMBLE = "SGD, deep ensemble"
NATURAL_MEAN_FIELD, NATURAL_RADIAL = "mean field, natural gradient", "radial, natural gradient"
NATURAL_ROWS, NATURAL_ENSEMBLE = "radial by row, natural gradient", "radial ensemble, natural gradient"
#: By ``fit``'s defaults; widths follow predictions for the validation rows. The prior was chosen in ``guides.priors``.
PREDICTIVE_RADIAL, PREDICTIVE_MEAN_FIELD = "radial, predictive widths", "mean field, predictive widths"
#: All weights keep one width.
ONE_WIDTH_RADIAL, ONE_WIDTH_MEAN_FIELD = "radial, one width", "mean field, one width"


@dataclass(frozen=True)
class Setting:
    """How a network is trained and tested; a method passes over what it has no use for."""

    epochs: int = 20
    batch_size: int = 128
    #: Of Adam, AdamW, SGD with Nesterov's momentum, or the published natural gradients; in units of a row's mean loss.
    optimizer: str = "adam"
    rate: float = 1e-3
    #: The decay of AdamW, instead of a prior.
    weight_decay: float = 0.0
    #: The share of the steps in which the rate rises, before it falls along a cosine.
    warm_up: float = 0.0
    #: Whether to keep the epoch with the lowest validation NLL, not the last.
    best_epoch: bool = False
    #: Of what softplus makes scales of; without, that of the means.
    scale_rate: float | None = None
    #: The marginal standard deviation that scales start at, or in its place the paper's sigma.
    init_stddev: float = 0.01
    init_scale: float | None = None
    prior_stddev: float = 1.0
    dropout: float = 0.1
    #: Of natural gradients, times the first variance and the number of data: the rate of SGD at first.
    ivon_rate: float = 0.1
    lr: float | None = None
    #: The curvature that widths start from, and the rate of widths.
    hess_init: float = 0.5
    hess_rate: float = 1e-5
    #: The rate of SGD for parameters without a posterior; with zero they train by Adam at 1e-3.
    others_rate: float = 0.0
    #: Draws of the weights in a step.
    draws: int = 1
    #: Whether the prior of a weight has the width of He's start, times ``prior_stddev``.
    prior_by_layer: bool = False
    num_members: int = 5
    #: Draws of a prediction; the members of an ensemble share them.
    num_samples: int = 32
    compile: bool = True


@dataclass(frozen=True)
class Trained:
    """What a method has learned: a prediction for any inputs, and the CPU seconds that it took, with all it needs."""

    predict: Callable[[Tensor], Prediction]
    seconds: float
    details: Row = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What a network is to learn.

    :param make_net: from a dropout rate to a new network of logits.
    :param train: inputs ``[N, ...]`` and labels ``[N]``.
    :param validation: others, for what is chosen or stopped by them.
    :param setting: how.
    :param seed: of all that is random.
    :param folder: a folder that belongs to this setting, data and seed. What was begun there is gone on with, and
        methods that share it share trainings: an ensemble has the single network as its first member.
    :param augment: what changes the inputs of each batch.
    """

    make_net: MakeNet
    train: Pair
    validation: Pair
    setting: Setting
    seed: int
    folder: Path | None = None
    augment: Augment | None = None

    @property
    def data(self) -> Any:
        """The training rows as ``fit`` takes them."""
        if self.augment is None:
            return self.train
        dataset = TensorDataset(*self.train)
        return DataLoader(dataset, self.setting.batch_size, collate_fn=partial(_augmented, self.augment))


Method = Callable[[Task], Trained]


def _augmented(augment: Augment, items: list[tuple[Tensor, ...]]) -> list[Tensor]:
    x, y = default_collate(items)
    return [augment(x), y]


def train(name: str, task: Task) -> Trained:
    """Train a method of :data:`METHODS` or :data:`OTHERS`."""
    return (METHODS | OTHERS)[name](task)


def scores(prediction: Prediction, labels: Tensor) -> Row:
    """Accuracy, NLL and calibration error; not all classes need be there."""
    return {
        "accuracy": float((prediction.mean.argmax(-1) == labels).float().mean()),
        "nll": -float(prediction.log_prob(labels).mean()),
        "calibration_error": float(expected_calibration_error(prediction.mean, labels)),
    }


def measures(prediction: Prediction, labels: Tensor) -> Row:
    """Scores, Brier score and area under the ROC curve."""
    brier = float(brier_score(prediction.mean, labels))
    return {**scores(prediction, labels), "brier": brier, "auc": area(prediction.mean, labels)}


def area(probabilities: Tensor, labels: Tensor) -> float:
    """The area under the ROC curve of the second of two classes, or the mean over classes of one against the rest."""
    num_classes = probabilities.shape[-1]
    counted = [1] if num_classes == 2 else range(num_classes)
    areas = [auroc(probabilities[labels != k, k], probabilities[labels == k, k]) for k in counted]
    return sum(areas) / len(areas)


def _guide(kind: str, model: SupervisedModel, setting: Setting) -> nn.Module:
    if kind in (RADIAL, ROWS):
        stddev = setting.init_stddev if setting.init_scale is None else None
        event_dim = 1 if kind == ROWS else None
        return AutoRadial(model, init_stddev=stddev, init_scale=setting.init_scale, event_dim=event_dim)
    if kind in (PLAIN, DROPOUT):
        return AutoMeanField(model, families={".": families.Delta()})
    if kind == TWEAKS:
        return AutoMeanField(model, init_stddev=1e-3)
    return AutoMeanField(model, init_stddev=setting.init_scale or setting.init_stddev)


def _model(net: nn.Module, setting: Setting, **options: Any) -> SupervisedModel:
    stddev = setting.prior_stddev
    prior: Any = dist.Normal(0.0, stddev)
    if setting.prior_by_layer:
        # Biases, of ten outputs, as if these were inputs.
        prior = FanIn(math.sqrt(2.0) * stddev, math.sqrt(2.0 / 10) * stddev)
    bnn = BayesianModule(net, prior, **options)
    return SupervisedModel(bnn, likelihoods.Categorical())


def _made(kind: str, make_net: MakeNet, setting: Setting, seed: int) -> tuple[SupervisedModel, nn.Module]:
    """A member of an ensemble; torch is seeded for each."""
    model = _model(make_net(setting.dropout if kind == DROPOUT else 0.0), setting)
    return model, _guide(kind, model, setting)


def optimizer(setting: Setting, num_data: int, guide: Any) -> Any:
    """With a rate of its own for scales. Losses are sums over all data, which Adam does not see."""
    if setting.optimizer == "natural":
        rate = setting.rate
        if setting.lr is not None:
            # One over the first variance and the number of data.
            rate = setting.lr * (setting.hess_init + 1.0 / (num_data * setting.prior_stddev**2))
        options: dict[str, Any] = {"hess_init": setting.hess_init, "beta2": 1.0 - setting.hess_rate}
        if setting.others_rate:
            options["other_optim"] = partial(torch.optim.SGD, **_sgd_options(setting.others_rate, num_data))
        return partial(PublishedRule, guide=guide, num_data=num_data, lr=rate, **options)

    def options_of(name: str) -> dict[str, Any]:
        own = setting.scale_rate if "scales" in name and setting.scale_rate is not None else setting.rate
        if setting.optimizer == "sgd":
            return _sgd_options(own, num_data)
        if setting.optimizer == "adamw":
            return {"lr": own, "weight_decay": setting.weight_decay}
        return {"lr": own}

    kinds = {"sgd": pyro.optim.SGD, "adam": pyro.optim.Adam, "adamw": pyro.optim.AdamW}
    return kinds[setting.optimizer](options_of)


def _sgd_options(rate: float, num_data: int) -> dict[str, Any]:
    """Return the options of SGD for a loss that is a sum over the data, from the rate for its mean."""
    return {"lr": rate / num_data, "momentum": 0.9, "nesterov": True}


def schedule(setting: Setting, steps: int) -> Any:
    """A rate that rises and then falls along a cosine, changed after each step."""
    rising = round(setting.warm_up * steps)
    falling = partial(CosineAnnealingLR, T_max=steps - rising)
    if not rising:
        return falling

    def made(optimizer: Any) -> SequentialLR:
        first = LinearLR(optimizer, 1.0 / rising, total_iters=rising)
        return SequentialLR(optimizer, [first, falling(optimizer)], [rising])

    return made


class _Clock:
    """CPU seconds of a training's epochs, also of one that was killed or done before.

    :param path: where they are kept.
    :param before: of what it goes on from.
    """

    def __init__(self, path: Path | None, before: float) -> None:
        self._path = path
        self.seconds = float(path.read_text()) if path is not None and path.exists() else before
        self._latest = time.process_time()

    def __call__(self, record: Any = None) -> None:
        now = time.process_time()
        self.seconds, self._latest = self.seconds + now - self._latest, now
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(repr(self.seconds))


class Training(NamedTuple):
    """Trained guides, their CPU seconds, the epochs of all, and the first one's last loss, in nats for each row."""

    ensemble: Ensemble
    seconds: float
    epochs: int
    loss: float


def trained(task: Task, kind: str, size: int = 1, validation: Any = None, **options: Any) -> Training:
    """Several guides of a kind, the first of which is that of an ensemble of one."""
    setting, num_data = task.setting, len(task.train[1])
    timed = size > 1 and task.folder is not None
    before = trained(task, kind, validation=validation, **options).seconds if timed else 0.0
    place = kind if setting.optimizer == "adam" else f"{kind}_{setting.optimizer}"
    folder = None if task.folder is None else task.folder / place.replace(", ", "_").replace(" ", "_")
    clock = _Clock(None if folder is None else folder / f"seconds_{size}", before)
    ensemble = Ensemble(partial(_made, kind, task.make_net, setting), size, seed=task.seed)
    results = ensemble.fit(
        task.data,
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        optim=partial(optimizer, setting, num_data),
        scheduler=schedule(setting, setting.epochs * -(-num_data // setting.batch_size)),
        loss=TermsELBO(
            num_particles=setting.draws,
            strict_kl=True,
            kl_weight=0.0 if setting.optimizer == "adamw" else 1.0,
        ),
        callback=clock,
        checkpoint=folder,
        validation=task.validation if setting.best_epoch else validation,
        options=FitOptions(scheduler_interval="step", compile=setting.compile, **options),
    )
    epochs = sum(len(result.history) for result in results)
    return Training(ensemble, clock.seconds, epochs, results[0].history[-1]["loss"])


def seeded(seed: int, draws: Callable[[Tensor], Prediction]) -> Callable[[Tensor], Prediction]:
    """The same draws at each call."""

    def prediction(x: Tensor) -> Prediction:
        torch.manual_seed(seed)
        return draws(x)

    return prediction


def plain(task: Task, size: int = 1) -> Trained:
    """Points, one for each member."""
    ensemble, seconds, epochs, _ = trained(task, PLAIN, size)
    return Trained(partial(ensemble.predict, num_samples=1), seconds, {"epochs": epochs})


def dropout(task: Task) -> Trained:
    ensemble, seconds, epochs, _ = trained(task, DROPOUT)
    draws = partial(predict, *ensemble.members[0], num_samples=task.setting.num_samples, dropout=True)
    return Trained(seeded(task.seed, draws), seconds, {"epochs": epochs})


def width_spread(guide: Any) -> float:
    """Return the standard deviation of the logarithms of the widths within a tensor, over all weights."""
    squares, count = 0.0, 0
    for posterior in guide.posterior().values():
        logarithms = posterior.stddev.log()
        squares += float((logarithms - logarithms.mean()).square().sum())
        count += logarithms.numel()
    return math.sqrt(squares / count)


def variational(kind: str, task: Task, size: int = 1) -> Trained:
    """Guides, whose members share the draws of a prediction."""
    ensemble, seconds, epochs, loss = trained(task, kind, size)
    draws = partial(ensemble.predict, num_samples=max(1, task.setting.num_samples // size))
    guide = ensemble.members[0][1]
    changes = guide.scale_change().values()
    details = {
        "epochs": epochs,
        "loss": loss,
        "width_change": sum(changes) / len(changes),
        "width_spread": width_spread(guide),
    }
    return Trained(seeded(task.seed, draws), seconds, details)


def predictive(guide_class: type[AutoRadial] | type[AutoMeanField], name: str, task: Task) -> Trained:
    """A guide whose widths follow predictions, by the defaults of ``fit``; checkpoints are in the folder ``name``."""
    setting = task.setting
    torch.manual_seed(task.seed)
    model = SupervisedModel(BayesianModule(task.make_net(0.0), FanIn(math.sqrt(2.0))), likelihoods.Categorical())
    guide = guide_class(model, widths="predictive")
    folder = None if task.folder is None else task.folder / name
    clock = _Clock(None if folder is None else folder / "seconds", 0.0)
    result = fit(
        model,
        guide,
        task.data,
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        seed=task.seed,
        validation=task.validation,
        callback=clock,
        checkpoint=None if folder is None else folder / "fit",
        options=FitOptions(compile=setting.compile),
        progress=False,
    )
    draws = partial(predict, model, guide, num_samples=setting.num_samples)
    details = {"epochs": len(result.history), "loss": result.history[-1]["loss"]}
    return Trained(seeded(task.seed, draws), clock.seconds, details)


def tweaks(task: Task) -> Trained:
    """Means first, scales from next to nothing, an end by validation: paper 000, section 4.1.2."""
    epochs = task.setting.epochs
    own = {
        "mean_only_epochs": max(1, epochs // 2),
        "validation": task.validation,
        "patience": max(2, epochs // 5),
    }
    ensemble, seconds, run, _ = trained(task, TWEAKS, **own)
    draws = partial(ensemble.predict, num_samples=task.setting.num_samples)
    return Trained(seeded(task.seed, draws), seconds, {"epochs": run})


def temperature(task: Task) -> Trained:
    """The plain network, its logits over one number."""
    member = plain(task)
    scaling = TemperatureScaling.fit(member.predict(task.validation[0]), task.validation[1])

    def prediction(x: Tensor) -> Prediction:
        draws = member.predict(x)
        return replace(draws, samples=draws.samples / scaling.temperature)

    return Trained(prediction, member.seconds, {"temperature": scaling.temperature})


def laplace(task: Task) -> Trained:
    """A Laplace approximation of the plain network's last layer, whose prior the evidence chooses."""
    ensemble, seconds, *_ = trained(task, PLAIN)
    model, points = ensemble.members[0]
    start = time.process_time()
    with warnings.catch_warnings():
        # The method is the evidence's choice, good or not.
        warnings.filterwarnings("ignore", "prior_precision=")
        guide = last_layer_laplace(model, points, task.train, structure="full")
    seconds += time.process_time() - start
    draws = partial(predict, model, guide, num_samples=task.setting.num_samples)
    return Trained(seeded(task.seed, draws), seconds, {"prior_precision": guide.prior_precision})


def ivon(task: Task) -> Trained:
    """Natural gradients for a normal posterior; the Hessian starts where standard deviations do in mean field."""
    setting, num_data = task.setting, len(task.train[1])
    torch.manual_seed(task.seed)
    start = time.process_time()
    model = _model(task.make_net(0.0), setting, select=lambda name, parameter: True)
    least = setting.prior_stddev**-2 / num_data
    guide = AutoMeanField(model)
    hess_init = max(setting.init_stddev**-2 / num_data - least, 0.01 * least)
    rate, decay = setting.ivon_rate * (hess_init + least), 1.0 - setting.hess_rate
    fit(
        model,
        guide,
        task.data,
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        optim=partial(PublishedRule, guide=guide, num_data=num_data, lr=rate, hess_init=hess_init, beta2=decay),
        scheduler=partial(rise_and_fall, steps=setting.epochs * -(-num_data // setting.batch_size)),
        seed=task.seed,
        progress=False,
        options=FitOptions(scheduler_interval="step"),
    )
    seconds = time.process_time() - start
    draws = partial(predict, model, guide, num_samples=setting.num_samples)
    return Trained(seeded(task.seed, draws), seconds, {"epochs": setting.epochs})


def _with(method: Callable[..., Trained], task: Task, optimizer: str, **size: int) -> Trained:
    """A method by another optimizer."""
    return method(replace(task, setting=replace(task.setting, optimizer=optimizer)), **size)


def _with_members(method: Callable[..., Trained], task: Task) -> Trained:
    return method(task, size=task.setting.num_members)


METHODS: dict[str, Method] = {
    PLAIN: plain,
    TEMPERATURE: temperature,
    DROPOUT: dropout,
    LAPLACE: laplace,
    DEEP_ENSEMBLE: partial(_with_members, plain),
    MEAN_FIELD: partial(variational, MEAN_FIELD),
    TWEAKS: tweaks,
    IVON: ivon,
    RADIAL: partial(variational, RADIAL),
    RADIAL_ENSEMBLE: partial(_with_members, partial(variational, RADIAL)),
}
_BY_SGD = {"optimizer": "sgd"}
_NATURAL_MEAN_FIELD = partial(_with, partial(variational, MEAN_FIELD), optimizer="natural")
_NATURAL_RADIAL = partial(_with, partial(variational, RADIAL), optimizer="natural")
#: What single experiments ask for besides.
OTHERS: dict[str, Method] = {
    ADAMW: partial(_with, plain, optimizer="adamw"),
    SGD: partial(_with, plain, **_BY_SGD),
    SGD_TEMPERATURE: partial(_with, temperature, **_BY_SGD),
    SGD_DROPOUT: partial(_with, dropout, **_BY_SGD),
    SGD_LAPLACE: partial(_with, laplace, **_BY_SGD),
    SGD_ENSEMBLE: partial(_with_members, partial(_with, plain, **_BY_SGD)),
    NATURAL_MEAN_FIELD: _NATURAL_MEAN_FIELD,
    NATURAL_RADIAL: _NATURAL_RADIAL,
    NATURAL_ROWS: partial(_with, partial(variational, ROWS), optimizer="natural"),
    NATURAL_ENSEMBLE: partial(_with_members, _NATURAL_RADIAL),
    PREDICTIVE_RADIAL: partial(predictive, AutoRadial, "predictive_radial"),
    PREDICTIVE_MEAN_FIELD: partial(predictive, AutoMeanField, "predictive_mean_field"),
    ONE_WIDTH_RADIAL: _NATURAL_RADIAL,
    ONE_WIDTH_MEAN_FIELD: _NATURAL_MEAN_FIELD,
}
