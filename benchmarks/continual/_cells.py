# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What to learn for a table of the continual learning experiments, and the table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.common import FIRST_SEED, Job, Results, Row, compute_all, markdown_table, with_error
from benchmarks.continual._chains import NOTHING, Holding, Keeping, Setting, row_keys

METHODS = ("mean field", "radial normal")
FAST = MappingProxyType({"learning_rate": 0.1, "scale_rate": 0.1})
SCORES = {
    "average_accuracy": "average accuracy",
    "learned": "just learned",
    "backward_transfer": "backward transfer",
}


class Size(NamedTuple):
    """How much is learned."""

    sizes: tuple[int, ...]
    num_tasks: int
    num_samples: int
    #: Rows that a task is learned from, on which the rate's decay is reckoned.
    learned_rows: int
    batch_size: int
    coreset: int = 200
    #: Of all data; None for all.
    rows: int | None = None
    epochs_factor: float = 1.0
    #: Learning rates in the place of each setting's own.
    rates: Mapping[str, float] = MappingProxyType({})

    def setting(self, epochs: int, **setting: Any) -> Setting:
        """A setting with a radius a row, whose rates fall to zero over the steps of a task."""
        epochs = ceil(self.epochs_factor * epochs)
        steps = epochs * ceil(self.learned_rows / self.batch_size)
        own = {**setting, **self.rates}
        return Setting(epochs, batch_size=self.batch_size, event_dim=1, decay_over=steps, **own)

    def small(self, learned_rows: int) -> "Size":
        """The same experiment in seconds."""
        tiny = {"sizes": (784, 20), "num_tasks": 2, "num_samples": 2, "coreset": 20, "rows": 300, "rates": FAST}
        return self._replace(**tiny, learned_rows=learned_rows, epochs_factor=0.1)


class Cell(NamedTuple):
    """A line of a table, but for its method: how tasks are trained and what is kept of them, to choose from."""

    settings: Sequence[Setting]
    keepings: Sequence[Keeping] = (NOTHING,)
    methods: Sequence[str] = METHODS

    @property
    def pairs(self) -> list[tuple[Setting, Keeping]]:
        return [(setting, keeping) for setting in self.settings for keeping in self.keepings]


def compute_cells(
    results: Results,
    cells: Sequence[Cell],
    job: Callable[[str, Setting, int, str, Keeping], Job],
    seeds: int,
    workers: int,
    threads: int,
    **where: Any,
) -> None:
    """Choose on validation rows with seed 0, then test with seeds from 10 on.

    :param job: from a method, its setting, a seed, "validation" or "test", and what is kept, to the job.
    :param where: the keys of rows besides those of :func:`row_keys`.
    """
    choosing = [
        job(method, setting, 0, "validation", keeping)
        for cell in cells
        if len(cell.pairs) > 1
        for method in cell.methods
        for setting, keeping in cell.pairs
    ]
    compute_all(results, choosing, workers, threads)
    jobs = []
    for cell in cells:
        for method in cell.methods:
            setting, keeping = chosen(results, cell, method, **where)
            jobs += [job(method, setting, FIRST_SEED + seed, "test", keeping) for seed in range(seeds)]
    compute_all(results, jobs, workers, threads)


def chosen(results: Results, cell: Cell, method: str, **where: Any) -> tuple[Setting, Keeping]:
    """What validation finds best for a method."""

    def accuracy(pair: tuple[Setting, Keeping]) -> float:
        row = results.find({**where, **row_keys(method, pair[0], 0, "validation", pair[1])})
        assert row is not None
        return row["average_accuracy"]

    return cell.pairs[0] if len(cell.pairs) == 1 else max(cell.pairs, key=accuracy)


def tested_rows(results: Results, cell: Cell, method: str, **where: Any) -> list[Row]:
    """The rows of a method on test data, in the setting that was chosen."""
    setting, keeping = chosen(results, cell, method, **where)
    return results.where(**where, method=method, measured_on="test", **asdict(setting), **asdict(keeping))


def keeping_of(row: Row) -> Keeping:
    kind = Holding if "source" in row else Keeping
    return kind(**{name: row[name] for name in asdict(kind())})


def described(row: Row) -> str:
    """The setting of a row in a few words."""
    if row["method"].startswith("plain"):
        return f"{row['epochs']} epochs, Adam at {row['learning_rate']:g}, rate to zero"
    start = f"sigma from {row['init_scale']:g}" if row["init_stddev"] is None else f"from {row['init_stddev']:g}"
    words = [f"{row['epochs']} epochs", start]
    if (weight := row.get("past_weight", 1.0)) != 1.0:
        words.append(f"data of tasks counted {weight:g} times in the next prior")
    if row.get("natural"):
        words += [f"natural gradient, rate {row['learning_rate']:g}", f"h {row['hess_init']:g}, beta {row['beta2']:g}"]
    if row["noise"] == "local":
        words.append("local noise")
    if row["prior_stddev"] != 1.0:
        words.append(f"first prior N(0, {row['prior_stddev']:g}^2)")
    if row["method"] != "mean field":
        words.append("one radius per tensor" if row["event_dim"] is None else "one radius per row")
    if row["reset_scales"]:
        words.append("scales reset")
    if not row.get("natural"):
        rates = [f"{row[name]:g}" for name in ("learning_rate", "scale_rate") if row[name] is not None]
        words.append(f"rate {' and '.join(dict.fromkeys(rates))}{' to zero' if row['decay_over'] else ''}")
    if row["later_kl"] != 1.0:
        words.append(f"later KL x {row['later_kl']:g}")
    return ", ".join(words)


def by_setting(results: Results, **keys: Any) -> dict[tuple[str, str, str], list[Row]]:
    """Rows measured on test data with these keys, by method, setting in words, and what is kept."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in results.rows:
        if row["measured_on"] == "test" and keys.items() <= row.items():
            found.setdefault((row["method"], described(row), str(keeping_of(row))), []).append(row)
    return found


def accuracy_table(results: Results, **keys: Any) -> str:
    """Average accuracy, accuracy just learned and backward transfer, in percent, and seconds, by setting."""
    lines = [
        [method, kept, setting, *(percent(rows, name) for name in SCORES), seconds(rows), str(len(rows))]
        for (method, setting, kept), rows in by_setting(results, **keys).items()
    ]
    return markdown_table(["", "kept", "setting", *SCORES.values(), "seconds", "seeds"], lines)


def percent(rows: Sequence[Row], name: str) -> str:
    return with_error([100.0 * row[name] for row in rows], 2)


def seconds(rows: Sequence[Row]) -> str:
    return f"{median(row['seconds'] for row in rows):.0f}"
