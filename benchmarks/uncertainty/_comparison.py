# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Choose settings on validation rows and test every method with other seeds, for experiments with images."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    is_below,
    markdown_table,
    paired,
    with_error,
)
from benchmarks.uncertainty._methods import (
    DEEP_ENSEMBLE,
    NATURAL_ENSEMBLE,
    NATURAL_RADIAL,
    NATURAL_ROWS,
    PLAIN,
    SGD,
    SGD_ENSEMBLE,
    SGD_LAPLACE,
    SGD_TEMPERATURE,
    Augment,
    MakeNet,
    Setting,
    Task,
    Trained,
    scores,
    train,
)
from pyro_radial.infer import Prediction
from tutorials import image_sets

NAME = "fashion_mnist"
#: Whose setting a method has that chooses none.
SETTING_OF = {
    DEEP_ENSEMBLE: PLAIN,
    SGD_TEMPERATURE: SGD,
    SGD_LAPLACE: SGD,
    SGD_ENSEMBLE: SGD,
    NATURAL_ROWS: NATURAL_RADIAL,
    NATURAL_ENSEMBLE: NATURAL_RADIAL,
}
ENSEMBLES = (DEEP_ENSEMBLE, SGD_ENSEMBLE, NATURAL_ENSEMBLE)
#: Of an experiment's small form, which must learn more than nothing.
SMALL = Setting(epochs=3, batch_size=32, rate=0.01, num_samples=2, num_members=2, compile=False)
# Of single networks and of ensembles, which color-blind readers can tell apart.
COLORS = ("#0072B2", "#D55E00")
#: What all tables begin with.
SCORES = {"accuracy": "accuracy", "nll": "NLL", "calibration_error": "ECE"}
#: In tables; others have four.
DIGITS: Mapping[str, int] = MappingProxyType({"auroc_mnist": 3, "seconds": 0})


class Size(NamedTuple):
    """How much is trained and tested, of small images for a hundred epochs."""

    train: int = 54_000
    validation: int = 6_000
    test: int | None = None
    num_candidates: int = 8
    seeds: int = 5
    setting: Setting = Setting(epochs=100, warm_up=0.05, best_epoch=True, num_samples=64, num_members=5)


@dataclass(frozen=True)
class Study:
    """What is compared.

    :param make_net: from a dropout rate to a network.
    :param load: returns training and validation rows.
    :param judge: from what a method has learned to its results.
    :param setting: of all methods, but for what is chosen.
    :param methods: those that are compared.
    :param settings_of: by method, the settings to choose from.
    :param num_candidates: at most so many of them.
    :param seeds_of: how many seeds a method has that has fewer than the others.
    :param augment: what changes the inputs of each training batch.
    """

    make_net: MakeNet
    load: Callable[[], tuple[Pair, Pair]]
    judge: Callable[[Trained], Row]
    setting: Setting
    methods: tuple[str, ...]
    settings_of: Mapping[str, Sequence[Row]]
    num_candidates: int
    seeds_of: Mapping[str, int] = field(default_factory=dict)
    augment: Augment | None = None

    def compute(self, results: Results, seeds: int, workers: int, threads: int) -> None:
        """Choose each method's setting with seed 0, then test it with seeds from 10 on.

        Methods take turns, since those that share a training must not begin it at the same time.
        """
        for method in self.methods:
            compute_all(results, list(self._choices(results, SETTING_OF.get(method, method))), workers, threads)
            compute_all(results, list(self._tests(results, method, seeds)), workers, threads)

    def _choices(self, results: Results, method: str) -> Iterator[Job]:
        for options in self.settings_of[method][: self.num_candidates]:
            keys = {"use": "choice", "method": method, "options": options, "seed": 0}
            yield Job(keys, _chosen, (self, method, options, results.checkpoint(method, *options.values())))

    def _tests(self, results: Results, method: str, seeds: int) -> Iterator[Job]:
        setting = replace(self.setting, **options_of(results, method))
        size = setting.num_members if method in ENSEMBLES else 1
        count = min(seeds, self.seeds_of.get(method, seeds)) // size
        for first in range(FIRST_SEED, FIRST_SEED + count * size, size):
            keys = {"use": "test", "data": NAME, "method": method, "seed": first}
            folders = {seed: results.checkpoint(NAME, seed) for seed in range(first, first + size)}
            yield Job(keys, _tested, (self, method, setting, folders))


def options_of(results: Results, method: str) -> Row:
    """The options with the lowest validation NLL."""
    rows = results.where(use="choice", method=SETTING_OF.get(method, method))
    options: Row = min(rows, key=lambda row: row["nll"])["options"]
    return options


def _chosen(study: Study, method: str, options: Row, folder: Path) -> Row:
    fitted, held_out = study.load()
    setting = replace(study.setting, **options)
    learned = train(method, Task(study.make_net, fitted, held_out, setting, 0, folder, study.augment))
    return scores(learned.predict(held_out[0]), held_out[1]) | {"seconds": learned.seconds}


def _tested(study: Study, method: str, setting: Setting, folders: Mapping[int, Path]) -> Row:
    """A method with one seed, or the equal mixture of several, which share the draws of a prediction."""
    own = replace(setting, num_samples=max(1, setting.num_samples // len(folders)))
    single = SETTING_OF[method] if method in ENSEMBLES else method
    data = study.load()
    members = [
        train(single, Task(study.make_net, *data, own, seed, folder, study.augment)) for seed, folder in folders.items()
    ]

    def prediction(x: Tensor) -> Prediction:
        joined: Prediction = Prediction.joined([member.predict(x) for member in members])
        return joined

    seconds = sum(member.seconds for member in members)
    details = members[0].details if len(members) == 1 else {}
    return study.judge(Trained(prediction, seconds)) | {"seconds": seconds, **details}


def split(data: Pair, num_validation: int, num_train: int | None = None) -> tuple[Pair, Pair]:
    """The first rows to train on, at most so many, and the last for validation."""
    x, y = data
    kept = len(y) - num_validation
    used = kept if num_train is None else min(kept, num_train)
    return (x[:used], y[:used]), (x[kept:], y[kept:])


class Standardized:
    """Images of Fashion-MNIST, and of others, in units of its training images' mean and standard deviation.

    Their memory is in the order of channels last, in which a CPU's convolutions take three quarters of the time.

    :param data_dir: the folder of real data.
    """

    def __init__(self, data_dir: Path | None) -> None:
        self.data = image_sets.load(NAME, data_dir)
        self._mean, self._stddev = self.data.train_images.mean(), self.data.train_images.std()

    def __call__(self, images: Tensor) -> Tensor:
        return ((images - self._mean) / self._stddev).to(memory_format=torch.channels_last)

    @property
    def train(self) -> Pair:
        return self(self.data.train_images), self.data.train_labels

    def test(self, count: int | None = None) -> Pair:
        """The first test images."""
        return self(self.data.test_images[:count]), self.data.test_labels[:count]


@cache
def images_of(data_dir: Path | None) -> Standardized:
    return Standardized(data_dir)


@cache
def load(data_dir: Path | None, size: Any) -> tuple[Pair, Pair]:
    """As many images to train on as a size has, and the last for validation."""
    return split(images_of(data_dir).train, size.validation, size.train)


def tested_methods(results: Results) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in results.rows if row["use"] == "test"))


def score_table(results: Results, columns: Mapping[str, str]) -> str:
    """Make a table of results by method, with a dash where a method has none."""
    lines = []
    for method in tested_methods(results):
        rows = results.where(use="test", method=method)
        lines.append(
            [
                method,
                *(
                    with_error([row[name] for row in rows], DIGITS.get(name, 4)) if name in rows[0] else "-"
                    for name in columns
                ),
            ]
        )
    return markdown_table(["", *columns.values()], lines)


def choices(results: Results) -> str:
    """Describe the chosen settings."""
    methods = dict.fromkeys(row["method"] for row in results.rows if row["use"] == "choice")
    return "; ".join(
        f"{method} {', '.join(f'{name} {value:g}' for name, value in options_of(results, method).items())}"
        for method in methods
    )


def candidates_table(results: Results) -> str:
    """The validation NLL of all settings."""
    lines = [
        [row["method"], ", ".join(f"{name} {value:g}" for name, value in row["options"].items()), f"{row['nll']:.4f}"]
        for row in results.where(use="choice")
    ]
    return markdown_table(["", "setting", "validation NLL"], lines)


def described(size: Any) -> Row:
    """The numbers of a size for the setting of its results, and those of its training that are the same for all."""
    own = {name: getattr(size.setting, name) for name in ("epochs", "batch_size", "rate", "num_members", "num_samples")}
    return {name: value for name, value in size._asdict().items() if name != "setting"} | own


def compared(text: str, ours: Sequence[float], theirs: Sequence[float]) -> Claim:
    """Claim that our results are lower than theirs with the same seeds, by more than two standard errors.

    With one seed there is no standard error, so the claim does not hold; its text says that there is one of each.
    """
    difference = paired(ours, theirs)
    text = f"{text} (one of each)" if len(difference) == 1 else text
    numbers = f"{with_error(ours, 3)} against {with_error(theirs, 3)}, difference {with_error(difference, 4)}"
    return Claim(text, "", numbers, str(len(ours)), is_below(difference))


def compared_pairs(results: Results, of: str, pairs: Sequence[tuple[str, str, str]]) -> list[Claim]:
    """Claim of each score, method and other method that the score of the first is lower, with the seeds of both."""
    found = []
    for name, *methods in pairs:
        values = of_shared_seeds(results, "test", name, methods)
        text = f"{of}: the {SCORES[name]} of {methods[0]} is below that of {methods[1]}"
        found.append(compared(text, *values))
    return found


def of_shared_seeds(results: Results, use: str, name: str, methods: Sequence[str]) -> list[list[float]]:
    """Return a score of each method with the seeds that all have, by seed; the lowest of several rows of a seed."""
    by_method: list[dict[int, float]] = []
    for method in methods:
        found: dict[int, float] = {}
        for row in results.where(use=use, method=method):
            found[row["seed"]] = min(row[name], found.get(row["seed"], math.inf))
        by_method.append(found)
    seeds = sorted(set.intersection(*map(set, by_method)))
    return [[found[seed] for seed in seeds] for found in by_method]


def counted(results: Results) -> str:
    """How many results each method has."""
    methods = tested_methods(results)
    return ", ".join(f"{len(results.where(use='test', method=method))} {method}" for method in methods)


def draw_by_method(results: Results, published: Mapping[str, float] = MappingProxyType({})) -> Figure:
    """Draw NLL and calibration error by method, a dot for each network or ensemble, and published NLLs."""
    names = ("nll", "calibration_error")
    figure = Figure(figsize=(10, 3.6), layout="constrained", dpi=110)
    methods = list(reversed(tested_methods(results)))
    for place, (ax, name) in enumerate(zip(figure.subplots(1, len(names)), names, strict=True)):
        for height, method in enumerate(methods):
            values = [row[name] for row in results.where(use="test", method=method) if name in row]
            color = COLORS[1] if method in ENSEMBLES else COLORS[0]
            ax.plot(values, [height] * len(values), "o", color=color, alpha=0.6, markersize=4)
        for title, value in published.items() if place == 0 else ():
            ax.axvline(value, color="0.6", linewidth=0.8)
            ax.text(value, len(methods) - 0.4, title, rotation=30, fontsize=6, color="0.4")
        ax.set(yticks=range(len(methods)), yticklabels=methods if place == 0 else [""] * len(methods))
        ax.set_xlabel(f"test {SCORES[name]}")
        ax.locator_params(axis="x", nbins=5)
    return figure
