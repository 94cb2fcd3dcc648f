# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Questions about the radius: which networks are trained, with which settings, and what is measured."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from benchmarks.common import FIRST_SEED, Job, Row, perceptron
from benchmarks.uncertainty._comparison import images_of, load
from benchmarks.uncertainty._lenet import lenet
from benchmarks.uncertainty._methods import (
    MEAN_FIELD,
    PLAIN,
    PREDICTIVE_MEAN_FIELD,
    PREDICTIVE_RADIAL,
    RADIAL,
    SGD,
    SGD_DROPOUT,
    SGD_ENSEMBLE,
    SGD_LAPLACE,
    MakeNet,
    Setting,
    Task,
    Trained,
    scores,
    seeded,
    train,
    trained,
)
from benchmarks.uncertainty._residual_net import residual_net
from pyro_radial import AutoRadial, BayesianModule, Prediction, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import auroc
from tutorials import image_sets

BOTH = (RADIAL, MEAN_FIELD)
#: Standard deviations around the best one in ``lenet5``, a factor of two apart.
WIDTHS = (0.0024, 0.0048, 0.0096, 0.0192, 0.0384)
#: What softplus makes of -6, -4 and -2, which the paper's authors chose among.
PAPER_SCALES = (0.0025, 0.0181, 0.1269)
#: Units in each of four layers.
UNITS = (250, 500, 1000, 2000)
KEPT, ADAM, PAPER = "LeNet, widths kept", "LeNet, widths by Adam", "LeNet, the paper's scales and rate"
RESIDUAL, RESIDUAL_ADAM = "residual network, widths kept", "residual network, widths by Adam"
RESIDUAL_PAPER = "residual network, the paper's scales and rate"
#: Questions about a range of widths or scales.
RANGES = (KEPT, RESIDUAL, ADAM, RESIDUAL_ADAM, PAPER, RESIDUAL_PAPER)
EQUAL, SCALES = "perceptron, widths kept", "perceptron, the paper's scale"
UNKNOWN = "LeNet, equal time"
#: Several posteriors, and as many plain networks as train in their time.
LENETS, RESIDUAL_NETS = "LeNet, ensembles at equal time", "residual network, ensembles at equal time"
#: A radial posterior that goes on from a plain network's weights, for as many epochs.
TRAINED_ON, FURTHER_EPOCHS = "radial, trained on from plain weights", 6
SEVERAL_RADIAL = "radial ensemble, predictive widths"
#: Results of rows that are not of the training set's kind, by the name of the column.
KINDS = ("mnist", "noise")
SHIFTS = {"turned": "NLL, turned by 30°", "noisy": "NLL, noisy", "blurred": "NLL, blurred"}


class Question(NamedTuple):
    """Variants of a setting, each trained by the same methods.

    :param make_net: from a dropout rate to a network; one of each variant, or one for all.
    :param settings: by variant.
    :param methods: to compare.
    :param num_train: images to train on.
    :param num_validation: others, by which widths that follow predictions are found.
    :param shifted: whether to predict shifted and unknown images too.
    :param own: what differs for a method.
    """

    make_net: MakeNet | Mapping[float, MakeNet]
    settings: Mapping[float, Setting]
    methods: tuple[str, ...] = BOTH
    num_train: int = 54_000
    num_validation: int = 6_000
    shifted: bool = False
    own: Mapping[str, Row] = {}


@dataclass(frozen=True)
class Size:
    """How much is trained and tested."""

    train: int = 54_000
    validation: int = 6_000
    test: int | None = None
    shifted: int = 2_000
    seeds: int = 5
    #: What all settings have instead.
    instead: Row = field(default_factory=dict, hash=False)


_SMALL = {"epochs": 2, "num_samples": 2, "num_members": 2, "compile": False}
SIZES = {"default": Size(), "small": Size(240, 60, 40, 20, 2, _SMALL)}
#: To save time.
SEEDS_OF = {EQUAL: 2, SCALES: 2, LENETS: 2, RESIDUAL_NETS: 2}
#: At twice the rate, or with a shorter rise, some networks never leave their start.
_SGD = Setting(
    epochs=10, optimizer="sgd", rate=0.05, scale_rate=0.0, warm_up=0.2, prior_stddev=0.1, num_samples=32, num_members=3
)
_ADAM = replace(_SGD, optimizer="adam", rate=1e-3, scale_rate=None)
#: Of the same prior as the other perceptrons, whatever their width.
_PERCEPTRON = replace(_SGD, prior_stddev=1.0, prior_by_layer=True, num_samples=16)


def _net_of(units: int, dropout: float) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *perceptron((784, *[units] * 4, 10), dropout=dropout))


_OF_UNITS = {units: partial(_net_of, units) for units in UNITS}
#: Epochs that take the time of twelve of a posterior whose widths follow predictions.
_PLAIN = {"epochs": 70}
_SEVERAL = Question(lenet, {0.0: replace(_SGD, epochs=12)}, (SEVERAL_RADIAL, SGD_ENSEMBLE), 20_000, 2_000)
_BY_ADAM = {width: replace(_ADAM, init_stddev=width) for width in (0.003, 0.01, 0.03)}
_BY_PAPER = {scale: replace(_ADAM, rate=1e-4, init_scale=scale) for scale in PAPER_SCALES}
_residual_net = partial(residual_net, 8, (1, 1, 1))
QUESTIONS = {
    KEPT: Question(lenet, {width: replace(_SGD, init_stddev=width) for width in WIDTHS}),
    UNKNOWN: Question(
        lenet,
        {0.0: replace(_SGD, epochs=12)},
        (PREDICTIVE_RADIAL, PREDICTIVE_MEAN_FIELD, TRAINED_ON, SGD, SGD_DROPOUT, SGD_LAPLACE, SGD_ENSEMBLE),
        20_000,
        2_000,
        True,
        {
            TRAINED_ON: {"epochs": 32},
            SGD: _PLAIN,
            SGD_LAPLACE: _PLAIN,
            SGD_DROPOUT: _PLAIN | {"dropout": 0.2},
            SGD_ENSEMBLE: {"epochs": 23},
        },
    ),
    EQUAL: Question(
        _OF_UNITS,
        {units: replace(_PERCEPTRON, init_stddev=PAPER_SCALES[1]) for units in UNITS},
        (*BOTH, SGD, SGD_DROPOUT),
        10_000,
    ),
    SCALES: Question(
        _OF_UNITS, {units: replace(_PERCEPTRON, init_scale=PAPER_SCALES[1]) for units in UNITS}, (RADIAL,), 10_000
    ),
    RESIDUAL: Question(_residual_net, {width: replace(_SGD, init_stddev=width) for width in WIDTHS}, BOTH, 20_000),
    ADAM: Question(lenet, _BY_ADAM),
    PAPER: Question(lenet, _BY_PAPER),
    LENETS: _SEVERAL._replace(own={SGD_ENSEMBLE: {"epochs": 23, "num_members": 9}}),
    RESIDUAL_NETS: _SEVERAL._replace(make_net=_residual_net, own={SGD_ENSEMBLE: {"epochs": 23, "num_members": 6}}),
    RESIDUAL_ADAM: Question(_residual_net, _BY_ADAM, BOTH, 20_000),
    RESIDUAL_PAPER: Question(_residual_net, _BY_PAPER, BOTH, 20_000),
}


@cache
def unlike(data_dir: Path | None, count: int | None) -> dict[str, Tensor]:
    """Images of another kind, and test images that are changed."""
    x, _ = images_of(data_dir).test(count)
    generator = torch.Generator().manual_seed(0)
    angle = torch.tensor(torch.pi / 6)
    turn = torch.tensor([[angle.cos(), -angle.sin(), 0.0], [angle.sin(), angle.cos(), 0.0]])
    grid = affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    uniform = torch.rand(x.shape, generator=generator)
    return {
        "mnist": images_of(data_dir)(image_sets.load("mnist", data_dir).test_images[:count]),
        "noise": images_of(data_dir)(uniform),
        # The background is zero only before standardization.
        "turned": grid_sample(x - x.min(), grid, padding_mode="zeros", align_corners=False) + x.min(),
        "noisy": x + 0.5 * torch.randn(x.shape, generator=generator),
        "blurred": avg_pool2d(x, 5, 1, 2, count_include_pad=False),
    }


def on_unlike(learned: Trained, data_dir: Path | None, count: int | None) -> Row:
    """How well unknown images are told apart, and the NLL of changed ones."""
    x, labels = images_of(data_dir).test(count)
    known = learned.predict(x)
    row: Row = {}
    for name, images in unlike(data_dir, count).items():
        prediction = learned.predict(images)
        if name in SHIFTS:
            row[name] = -float(prediction.log_prob(labels).mean())
            continue
        row[f"{name}_entropy"] = float(auroc(known.entropy, prediction.entropy))
        row[f"{name}_information"] = float(auroc(known.mutual_information, prediction.mutual_information))
    return row


def trained_on(task: Task) -> Trained:
    """Train a plain network, and center the prior of a radial posterior at its weights, with a deviation of 0.3."""
    ensemble, seconds, *_ = trained(task, PLAIN)
    plain_model, points = ensemble.members[0]
    start = time.process_time()
    net = plain_model.bnn.to_module(points.median())
    bnn = BayesianModule(net, lambda name, weight: dist.Normal(weight, 0.3))
    model = SupervisedModel(bnn, likelihoods.Categorical())
    guide = AutoRadial(model, widths="predictive")
    options = {"batch_size": task.setting.batch_size, "validation": task.validation, "seed": task.seed}
    fit(model, guide, task.train, epochs=FURTHER_EPOCHS, progress=False, **options)
    seconds += time.process_time() - start
    return Trained(seeded(task.seed, partial(predict, model, guide, num_samples=task.setting.num_samples)), seconds)


def several_radial(task: Task) -> Trained:
    """Radial posteriors from starts of their own, which share the draws of a prediction."""
    size = task.setting.num_members
    setting = replace(task.setting, num_samples=max(1, task.setting.num_samples // size))
    tasks = [replace(task, setting=setting, seed=1000 * task.seed + member) for member in range(size)]
    members = [train(PREDICTIVE_RADIAL, own) for own in tasks]

    def prediction(x: Tensor) -> Prediction:
        joined: Prediction = Prediction.joined([member.predict(x) for member in members])
        return joined

    return Trained(prediction, sum(member.seconds for member in members))


#: Methods of these questions alone.
OWN = {TRAINED_ON: trained_on, SEVERAL_RADIAL: several_radial}


def measured(name: str, variant: float, method: str, seed: int, size: Size, data_dir: Path | None) -> Row:
    """Train one method and score it on the test images."""
    question = QUESTIONS[name]
    setting = replace(question.settings[variant], **question.own.get(method, {}))
    setting = replace(setting, **size.instead)
    make_net = question.make_net[variant] if isinstance(question.make_net, Mapping) else question.make_net
    (x, y), others = load(data_dir, size)
    held_out = others[0][: question.num_validation], others[1][: question.num_validation]
    few = x[: question.num_train], y[: question.num_train]
    task = Task(make_net, few, held_out, setting, seed)
    learned = OWN[method](task) if method in OWN else train(method, task)
    inputs, labels = images_of(data_dir).test(size.test)
    row = scores(learned.predict(inputs), labels) | {"seconds": learned.seconds}
    return row | on_unlike(learned, data_dir, size.shifted) if question.shifted else row


def jobs(size: Size, data_dir: Path | None) -> Iterator[Job]:
    """All questions by seed, so that a run cut short has whole seeds."""
    for seed, (name, question) in product(range(size.seeds), QUESTIONS.items()):
        for variant, method in product(question.settings, question.methods):
            if seed < SEEDS_OF.get(name, size.seeds):
                keys = {"question": name, "variant": variant, "method": method, "seed": FIRST_SEED + seed}
                yield Job(keys, measured, (name, variant, method, FIRST_SEED + seed, size, data_dir))
