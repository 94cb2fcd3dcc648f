# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare radial posteriors with mean field at the same settings and seeds: what the radius buys.

python -m benchmarks.uncertainty.radius
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import (
    PAGE_FOLDER,
    Claim,
    Form,
    Results,
    compute_all,
    is_below,
    main,
    markdown_table,
    paired,
    standard_error,
    with_error,
)
from benchmarks.uncertainty._comparison import COLORS, of_shared_seeds
from benchmarks.uncertainty._methods import (
    MEAN_FIELD,
    NATURAL_MEAN_FIELD,
    NATURAL_RADIAL,
    PREDICTIVE_MEAN_FIELD,
    PREDICTIVE_RADIAL,
    RADIAL,
    SGD,
    SGD_DROPOUT,
    SGD_ENSEMBLE,
    Setting,
)
from benchmarks.uncertainty._questions import (
    BOTH,
    EQUAL,
    FURTHER_EPOCHS,
    KEPT,
    KINDS,
    LENETS,
    PAPER_SCALES,
    QUESTIONS,
    RANGES,
    RESIDUAL,
    RESIDUAL_NETS,
    SCALES,
    SEVERAL_RADIAL,
    SHIFTS,
    SIZES,
    TRAINED_ON,
    UNITS,
    UNKNOWN,
    WIDTHS,
    jobs,
)

#: The least that the worst of a range must gain, decided before the runs.
LEAST_GAIN = 0.010
#: Lines of the table by units.
_BY_UNITS = ((EQUAL, RADIAL), (EQUAL, MEAN_FIELD), (SCALES, RADIAL), (EQUAL, SGD), (EQUAL, SGD_DROPOUT))
_PREDICTIVE = (PREDICTIVE_RADIAL, PREDICTIVE_MEAN_FIELD)
_NATURAL = (NATURAL_RADIAL, NATURAL_MEAN_FIELD)
#: Widths that the loss or predictions find.
_KINDS = ("ELBO", "predictive")
#: Unknown images, and the uncertainty that tells them apart.
_AUROCS = tuple(product(KINDS, ("entropy", "information")))


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 5,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """Train radial and mean field with the same settings and seeds; nothing is chosen, and test images count."""
    size = SIZES[form] if form == "small" else replace(SIZES[form], seeds=seeds)
    results = Results(output, {"torch": torch.__version__, "threads": threads, "train": size.train})
    compute_all(results, list(jobs(size, data_dir)), workers, threads)


class Comparison(NamedTuple):
    """Radial beside mean field with the same seeds or splits; lower is better."""

    question: str
    rule: str
    radial: list[float]
    mean_field: list[float]
    #: The least mean difference that counts.
    least: float = 0.0

    @property
    def held(self) -> bool:
        """Whether radial is lower by more than two errors, and by as much as the rule asks."""
        difference = paired(self.radial, self.mean_field)
        return is_below(difference) and mean(difference) <= -self.least

    def cells(self) -> list[str]:
        """The table's cells; the smallest difference that it could have found is two errors."""
        difference = paired(self.radial, self.mean_field)
        numbers = [with_error(values, 4) for values in (self.radial, self.mean_field, difference)]
        found = f"{2 * standard_error(difference):.4f}" if len(difference) > 1 else "-"
        return [self.question, self.rule, str(len(difference)), *numbers, found, "✓" if self.held else "✗"]


LOWER = "lower"


def nll_by_seed(
    results: Results, question: str, method: str, variants: Collection[float] = ()
) -> dict[int, dict[float, float]]:
    """The NLL of each variant, or of these, by seed; only seeds that have all."""
    variants = variants or QUESTIONS[question].settings
    rows: dict[int, dict[float, float]] = {}
    for row in results.where(question=question, method=method):
        rows.setdefault(row["seed"], {})[row["variant"]] = row["nll"]
    return {seed: values for seed, values in rows.items() if values.keys() >= set(variants)}


def of_range(results: Results, question: str) -> Comparison:
    """The worst NLL of a range of widths."""
    radial, mean_field = (nll_by_seed(results, question, method) for method in BOTH)
    seeds = sorted(radial.keys() & mean_field.keys())
    worst = [[max(values[seed].values()) for seed in seeds] for values in (radial, mean_field)]
    count = len(QUESTIONS[question].settings)
    return Comparison(f"{question}: NLL of the worst of {count}", f"{LEAST_GAIN:.3f} lower", *worst, LEAST_GAIN)


def number_ahead(results: Results, question: str) -> tuple[int, int]:
    """At how many variants the mean NLL of radial is lower, and how many there are."""
    radial, mean_field = (nll_by_seed(results, question, method) for method in BOTH)
    seeds = radial.keys() & mean_field.keys()
    variants = list(QUESTIONS[question].settings)
    ahead = [mean(radial[seed][variant] - mean_field[seed][variant] for seed in seeds) < 0 for variant in variants]
    return sum(ahead), len(variants)


def by_size(results: Results) -> list[Comparison]:
    """How much the NLL rises from the narrowest perceptron to the widest."""
    least, most = UNITS[0], UNITS[-1]
    found = []
    for question, text in ((EQUAL, "at equal standard deviations"), (SCALES, "at the paper's scale")):
        radial, mean_field = (question, RADIAL), (EQUAL, MEAN_FIELD)
        by_method = [nll_by_seed(results, *own, (least, most)) for own in (radial, mean_field)]
        seeds = sorted(set.intersection(*(set(values) for values in by_method)))
        rises = [[values[seed][most] - values[seed][least] for seed in seeds] for values in by_method]
        found.append(Comparison(f"perceptron, {text}: rise of the NLL from {least} to {most} units", LOWER, *rises))
    return found


def of_unlike(results: Results) -> list[Comparison]:
    """Test images, unknown images and changed ones; an AUROC counts by its distance from one."""
    names = {"nll": "NLL", **SHIFTS}
    errors = {f"{kind}_{by}": f"1 - AUROC against {kind} by {by}" for kind, by in _AUROCS}
    found = []
    for name, title in (names | errors).items():
        rows = [results.where(question=UNKNOWN, method=method) for method in _PREDICTIVE]
        count = min(map(len, rows))
        values = [[1.0 - row[name] if name in errors else row[name] for row in own[:count]] for own in rows]
        found.append(Comparison(f"{UNKNOWN}, predictive widths: {title}", LOWER, *values))
    return found


def of_others(folder: Path = PAGE_FOLDER) -> list[Comparison]:
    """What other experiments have of both methods."""
    names = ("uncertainty/crystals", "uncertainty/lenet5", "uncertainty/retinopathy", "guides/widths")
    crystals, lenet5, retinopathy, widths = (Results(folder / f"{name}.json") for name in names)
    subjects = [(crystals, f"crystals, {kind} widths", [f"{name}, {kind} widths" for name in BOTH]) for kind in _KINDS]
    by_method = {"Adam": BOTH, "predictive widths": _PREDICTIVE, "natural gradients": _NATURAL}
    subjects += [(lenet5, f"LeNet, best setting, {title}", methods) for title, methods in by_method.items()]
    found = [
        Comparison(f"{title}: NLL", LOWER, *of_shared_seeds(saved, "test", "nll", methods))
        for saved, title, methods in subjects
    ]
    areas = [[1.0 - row["auc"] for row in retinopathy.where(part="test", method=method)] for method in BOTH]
    found.append(Comparison("RetinaMNIST, best setting, Adam: 1 - AUC", LOWER, *areas))
    for data in widths.distinct("data"):
        own = [widths.values("nll", use="test", data=data, method=method) for method in _PREDICTIVE]
        found.append(Comparison(f"{data}, predictive widths: NLL", LOWER, *own))
    return found


def comparisons(results: Results) -> list[Comparison]:
    """All of them, ours first."""
    ranges = [of_range(results, question) for question in RANGES]
    own = [*ranges, *by_size(results), *of_unlike(results)]
    return [*(comparison for comparison in own if comparison.radial), *of_others()]


def claims(results: Results) -> list[Claim]:
    """The rules that were written down before the runs."""
    found = []
    for question in RANGES:
        worst, (ahead, count) = of_range(results, question), number_ahead(results, question)
        _, _, seeds, *_, difference, _, _ = worst.cells()
        text = f"{question}: radial's worst NLL is {LEAST_GAIN:.3f} lower, and it is ahead at all widths but one"
        held = worst.held and ahead >= count - 1
        found.append(Claim(text, "", f"difference {difference}; ahead at {ahead} of {count}", seeds, held))
    for question in (LENETS, RESIDUAL_NETS):
        difference = paired(*of_ensembles(results, question).values())
        text = f"{question}: radial networks have a lower NLL than plain ones that take as long"
        ours = f"difference {with_error(difference, 4)}"
        found.append(Claim(text, "", ours, str(len(difference)), is_below(difference)))
    return found


def equal_time_table(results: Results) -> str:
    """All methods at equal time."""
    columns = {
        "nll": "NLL",
        **{f"{kind}_{by}": f"AUROC, {kind}, by {by}" for kind, by in _AUROCS},
        **SHIFTS,
        "seconds": "CPU seconds",
    }
    lines = []
    for method in QUESTIONS[UNKNOWN].methods:
        rows = results.where(question=UNKNOWN, method=method)
        digits = {name: 0 if name == "seconds" else 3 for name in columns}
        lines.append([method, *(with_error([row[name] for row in rows], digits[name]) for name in columns)])
    return markdown_table(["", *columns.values()], lines)


def ensemble_table(results: Results) -> str:
    """Ensembles of radial networks beside plain ones that take as long."""
    lines = []
    for question in (LENETS, RESIDUAL_NETS):
        values = of_ensembles(results, question)
        for method, nll in values.items():
            rows = results.where(question=question, method=method)
            accuracy, seconds = ([row[name] for row in rows] for name in ("accuracy", "seconds"))
            cells = [with_error(nll, 4), with_error(accuracy, 4), with_error(seconds, 0)]
            difference = with_error(paired(*values.values()), 4) if method == SEVERAL_RADIAL else ""
            number = str(_own(question, method).num_members)
            lines.append([question.split(",")[0], method, number, *cells, difference])
    return markdown_table(["", "", "networks", "NLL", "accuracy", "CPU seconds", "difference"], lines)


def of_ensembles(results: Results, question: str) -> dict[str, list[float]]:
    """The NLL of both ensembles, by seed."""
    return {method: results.values("nll", question=question, method=method) for method in QUESTIONS[question].methods}


def _own(question: str, method: str) -> Setting:
    """How a method of a question with one setting is trained."""
    (setting,) = QUESTIONS[question].settings.values()
    return replace(setting, **QUESTIONS[question].own.get(method, {}))


def _epochs(question: str, method: str) -> int:
    return _own(question, method).epochs


def _title(question: str, method: str) -> str:
    """The name of a line by units."""
    return f"{method}, the paper's scale" if question == SCALES else method


def size_table(results: Results) -> str:
    """The NLL of perceptrons by their units."""
    lines = []
    for question, method in _BY_UNITS:
        values = [results.values("nll", question=question, variant=units, method=method) for units in UNITS]
        lines.append([_title(question, method), *(with_error(own, 3) if own else "-" for own in values)])
    return markdown_table(["", *(f"{units:,} units" for units in UNITS)], lines)


def range_table(results: Results, question: str) -> str:
    """The NLL of both by width or scale."""
    lines = []
    for variant in QUESTIONS[question].settings:
        own = [results.values("nll", question=question, variant=variant, method=method) for method in BOTH]
        count = min(map(len, own))
        radial, mean_field = (values[:count] for values in own)
        cells = [with_error(values, 4) for values in (radial, mean_field, paired(radial, mean_field))]
        lines.append([f"{variant:g}", str(count), *cells])
    return markdown_table(["", "seeds", "radial", "mean field", "difference"], lines)


def report(results: Results) -> str:
    """Report what the radius buys."""
    table = markdown_table(
        ["question", "rule", "seeds", "radial", "mean field", "difference", "two errors", ""],
        [comparison.cells() for comparison in comparisons(results)],
    )
    ranges = "\n\n".join(f"{name}:\n\n{range_table(results, name)}" for name in RANGES)
    epochs = partial(_epochs, UNKNOWN)

    return f"""### What the radius buys

Radial posteriors beside mean field, with the same settings and seeds, on test rows that no choice saw \
(`python -m benchmarks.uncertainty.radius`). Rules were written before the runs. "Lower" is lower by more than two \
standard errors of the paired difference; "two errors" is the smallest difference that a row could have found. The \
first rows are of this experiment, where nothing was chosen by scores. Its rate was halved after a first run at 0.1 \
with a shorter rise, in which one network of 36 never left its start. To save time, perceptrons and ensembles have two \
seeds. The other rows are of experiments that have sections of their own, with settings by validation rows or none to \
choose.

{table}

**Widths.** Networks train on Fashion-MNIST for ten epochs in batches of 128: LeNet on {results.setting["train"]:,} \
images, the residual network on {QUESTIONS[RESIDUAL].num_train:,}. "Kept" means that all weights keep the standard \
deviation of the first column, and means train by SGD at 0.05, the same for both. By Adam, widths start there and \
train at 0.001. The paper's scales are those of its authors' code, at its rate of 0.0001; at an equal scale a radial \
posterior is far narrower.

{ranges}

**Size.** Perceptrons with four hidden layers train on {QUESTIONS[EQUAL].num_train:,} images for ten epochs; widths \
are kept at {PAPER_SCALES[1]:g}, and the prior has the width of He's start. The largest has 13.6 million weights. The \
NLL:

{size_table(results)}

**Unknown and changed images, at equal time.** LeNet on {QUESTIONS[UNKNOWN].num_train:,} images, with epochs such that \
methods take about the same time: {epochs(PREDICTIVE_RADIAL)} for posteriors with predictive widths, {epochs(SGD)} for \
single networks, {epochs(SGD_ENSEMBLE)} for each of the three members of an ensemble, {epochs(TRAINED_ON)} as a plain \
network and {FURTHER_EPOCHS} more for the one that is trained on. Unknown images are those of MNIST, and uniform \
noise; of both and of changed images there are 2,000. A plain network has no mutual information.

{equal_time_table(results)}

**Ensembles at equal time.** Networks train on {QUESTIONS[LENETS].num_train:,} images: radial ones with predictive \
widths for {_epochs(LENETS, SEVERAL_RADIAL)} epochs, plain ones for {_epochs(LENETS, SGD_ENSEMBLE)}, as many as train \
in about the time of the radial ones. Radial networks share the draws of a prediction. The difference is that of the \
radial ensemble's NLL:

{ensemble_table(results)}

{results.plot("NLL by width and by units")}"""


def draw(results: Results) -> None:
    """NLL over widths for two networks, and over units."""
    figure = Figure(figsize=(12, 3.6), layout="constrained", dpi=110)
    axes = figure.subplots(1, 3)
    for ax, question in zip(axes, (KEPT, RESIDUAL), strict=False):
        for method, color in zip(BOTH, COLORS, strict=True):
            lists = [results.values("nll", question=question, variant=width, method=method) for width in WIDTHS]
            _curve(ax, WIDTHS, lists, label=method, color=color)
        ax.set(title=question, xlabel="standard deviation of all weights")
    for number, (question, method) in enumerate(_BY_UNITS):
        lists = [results.values("nll", question=question, variant=units, method=method) for units in UNITS]
        label = _title(question, method)
        _curve(axes[2], UNITS, lists, label=label, color=(*COLORS, "0.6", "0.3", "#009E73")[number])
    axes[2].set(title="perceptron, four layers", xlabel="units of a layer")
    axes[0].set_ylabel("test NLL")
    for ax in axes:
        ax.legend(fontsize=7)
    results.save_plot(figure)


def _curve(ax: Axes, places: Sequence[float], lists: Sequence[list[float]], **options: Any) -> None:
    """Means with two standard errors over places that double."""
    shown = [(place, mean(own), 2 * standard_error(own)) for place, own in zip(places, lists, strict=True) if own]
    if shown:
        x, y, errors = zip(*shown, strict=True)
        ax.errorbar(x, y, errors, marker="o", markersize=4, capsize=3, **options)
    ax.set_xscale("log", base=2)
    ax.set_xticks(places, [f"{place:g}" for place in places])


if __name__ == "__main__":
    main(run, report, draw)
