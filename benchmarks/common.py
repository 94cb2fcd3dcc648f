# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Shared by all experiments: result files, jobs, timing, data, pieces of text, and the command line."""

import argparse
import importlib
import inspect
import io
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
import torch
from filelock import FileLock
from joblib import Parallel, delayed
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from tutorials import image_sets

PAGE_FOLDER = Path(__file__).parent
Row = dict[str, Any]
Pair = tuple[torch.Tensor, torch.Tensor]
Subjects = Mapping[str, Callable[[], Any]]
#: Sizes of an experiment, and of one that can also run in the paper's size.
Form = Literal["default", "small"]
SizedForm = Literal["default", "small", "paper"]
#: Results of a regression and their headings in tables.
REGRESSION = {"rmse": "RMSE", "log_likelihood": "log-likelihood"}
#: Files of UCI sets that have other names.
UCI_FILES = {"boston": "bostonHousing", "power": "power-plant", "wine": "wine-quality-red"}
#: First test seed; settings were chosen with smaller seeds.
FIRST_SEED = 10
#: Calls in one timing.
BLOCK = 3


class Claim(NamedTuple):
    """A line of the table of claims; :attr:`supported` is computed from the saved rows."""

    text: str
    published: str
    ours: str
    seeds: str
    supported: bool


class OtherSettingError(ValueError):
    """Raised if a results file holds rows measured with other settings."""


class Results:
    """Rows of results in a JSON file, all measured with the same settings.

    Rows are saved one by one and never computed twice, so a killed script continues where it was. Several processes may
    write to one file: each reads it again, under a lock, before it adds a row.

    :param path: the file.
    :param setting: settings of all rows; by default those in the file.
    :raises OtherSettingError: if the file holds rows measured with other settings, which would not be comparable.
    """

    def __init__(self, path: Path, setting: Row | None = None) -> None:
        self.path = path
        # As JSON returns it, with lists instead of tuples.
        self.setting: Row = json.loads(json.dumps(setting))
        self.rows: list[Row] = []
        # The version of the file that the rows were read from.
        self._read_version: tuple[int, ...] | None = None
        if setting is None:
            self.setting = json.loads(path.read_text())["setting"]
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        stat = self.path.stat()
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if version == self._read_version:
            return
        saved = json.loads(self.path.read_text())
        if saved["setting"] != self.setting:
            names = [n for n in saved["setting"] | self.setting if saved["setting"].get(n) != self.setting.get(n)]
            differences = (f"{n} is {saved['setting'].get(n)} there, {self.setting.get(n)} here" for n in names)
            raise OtherSettingError(
                f"{self.path} must hold rows measured with the same settings, got others: {'; '.join(differences)}. "
                "The file is unchanged; name another file with --output."
            )
        self.rows, self._read_version = saved["rows"], version

    def find(self, keys: Row) -> Row | None:
        """Return the row with these keys, or None."""
        return next((row for row in self.rows if keys.items() <= row.items()), None)

    def find_now(self, keys: Row) -> Row | None:
        """Read the file again, then :meth:`find`."""
        self._read()
        return self.find(keys)

    def where(self, **keys: Any) -> list[Row]:
        """Return all rows with these keys, ordered by split or seed."""
        matching = [row for row in self.rows if keys.items() <= row.items()]
        return sorted(matching, key=lambda row: row.get("split", row.get("seed", 0)))

    def values(self, name: str, **keys: Any) -> list[Any]:
        """Return one result from all rows with these keys."""
        return [row[name] for row in self.where(**keys)]

    def distinct(self, *names: str) -> list[Any]:
        """Return the distinct values of a key, or tuples for several keys, in the order of the file."""
        rows = [row for row in self.rows if all(name in row for name in names)]
        return list(dict.fromkeys(row[names[0]] if len(names) == 1 else tuple(map(row.get, names)) for row in rows))

    def add(self, keys: Row, compute: Callable[[], Row]) -> Row:
        """Return the row with these keys; compute and save it if it is new."""
        return self.add_all([keys], lambda: [compute()])[0]

    def add_all(self, keys: Sequence[Row], compute: Callable[[], Sequence[Row]]) -> list[Row]:
        """Return rows that are measured together, such as timings in turns; compute all if one is new."""
        self._read()
        if any(self.find(row_keys) is None for row_keys in keys):
            pairs = zip(keys, compute(), strict=True)
            self._save([row_keys | _rounded(row) for row_keys, row in pairs], keys)
        return [row for row_keys in keys if (row := self.find(row_keys)) is not None]

    def _save(self, rows: Iterable[Row], keys: Iterable[Row]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The lock belongs to an open file, so it is released when the process ends for any reason.
        with FileLock(self.path.with_suffix(".lock")):
            self._read()
            self._read_version = None
            for row, row_keys in zip(rows, keys, strict=True):
                if self.find(row_keys) is None:
                    self.rows.append(json.loads(json.dumps(row)))
                    print({k: v for k, v in row.items() if not isinstance(v, list | dict)}, flush=True)
            partial_file = self.path.with_suffix(".partial")
            lines = ",\n".join(json.dumps(row) for row in self.rows)
            partial_file.write_text(f'{{"setting": {json.dumps(self.setting)},\n"rows": [\n{lines}\n]}}\n')
            os.replace(partial_file, self.path)

    def checkpoint(self, *words: Any) -> Path:
        """Return the path of a run's checkpoint, beside the results; git ignores it."""
        name = "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in str(word)) for word in words)
        return self.path.parent / "checkpoints" / self.path.stem / name

    @property
    def plot_path(self) -> Path:
        """The path of the plot of these results."""
        return self.path.with_suffix(".png")

    def save_plot(self, figure: Figure) -> None:
        """Save the plot of these results beside them, in 128 colors: a third of the bytes."""
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
        drawn = io.BytesIO()
        figure.savefig(drawn)
        colors = Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        colors.save(self.plot_path, optimize=True)

    def plot(self, caption: str) -> str:
        """Return the Markdown of the saved plot."""
        path = self.plot_path
        shown = path.relative_to(PAGE_FOLDER) if path.is_relative_to(PAGE_FOLDER) else path
        return f"![{caption}]({shown.as_posix()})"


def _rounded(row: Row) -> Row:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}


@dataclass(frozen=True)
class Job:
    """A row to compute: its keys, and a module-level function with its arguments."""

    keys: Row
    compute: Callable[..., Row]
    arguments: tuple[Any, ...]


def compute_all(results: Results, jobs: Sequence[Job], workers: int, threads: int = 1) -> list[Row]:
    """Compute the missing rows of all jobs with joblib, and save them in order.

    :param results: results to complete.
    :param jobs: jobs, in the order of their rows.
    :param workers: number of processes; with one, this process computes.
    :param threads: torch threads in each process.
    :returns: one row per job.
    """
    started: list[Job] = []

    def missing_jobs() -> Iterator[Any]:
        for job in jobs:
            # Another run may have added the row to the same file in the meantime.
            if results.find_now(job.keys) is None:
                started.append(job)
                yield delayed(_compute)(job, threads, os.getpid())

    rows = Parallel(workers, return_as="generator", batch_size=1, pre_dispatch="all")(missing_jobs())
    for number, row in enumerate(rows):
        results.add(started[number].keys, lambda row=row: row)
    return [row for job in jobs if (row := results.find(job.keys)) is not None]


def _compute(job: Job, threads: int, script: int) -> Row:
    """Run a job in a worker."""
    torch.set_num_threads(threads)
    if os.getppid() == script:
        _end_with(script)
    # Weights that decay to almost nothing would make convolutions several times slower.
    torch.set_flush_denormal(True)
    try:
        return job.compute(*job.arguments)
    finally:
        # With one worker, joblib runs the job in the caller's own process.
        torch.set_flush_denormal(False)


@cache
def _end_with(script: int) -> None:
    """End this worker with its script; otherwise it would write the same checkpoints as a restarted script."""

    def watch() -> None:
        while os.getppid() == script:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def medians(
    subjects: Subjects,
    rounds: int,
    *,
    clock: Callable[[], float] = time.process_time,
    block: int = BLOCK,
    warmup: int = 1,
) -> dict[str, float]:
    """Return the median milliseconds of a call to each subject. Subjects take turns, so that drift affects all alike.

    :param subjects: functions to time, by name.
    :param rounds: number of turns.
    :param clock: clock in seconds; by default CPU time of this process, which excludes other programs.
    :param block: calls in one turn.
    :param warmup: calls before the first turn.
    :returns: milliseconds by name.
    """
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for call in subjects.values():
        for _ in range(warmup):
            call()
    for _ in range(rounds):
        for name, call in subjects.items():
            start = clock()
            for _ in range(block):
                call()
            times[name].append(1e3 * (clock() - start) / block)
    return {name: statistics.median(values) for name, values in times.items()}


def flat_images(name: str, data_dir: Path | None) -> tuple[Pair, Pair]:
    """Return training and test images as vectors with labels; all pixels are standardized together."""
    data = image_sets.load(name, data_dir)
    mean, stddev = data.train_images.mean(), data.train_images.std()
    train, test = (((images - mean) / stddev).flatten(1) for images in (data.train_images, data.test_images))
    return (train, data.train_labels), (test, data.test_labels)


def perceptron(sizes: Sequence[int], unit: type[nn.Module] = nn.ReLU, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers of these sizes, with units between them, and dropout after the units if there is any."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        if layers:
            layers.append(unit())
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


def uci_split(data_dir: Path, name: str, split: int) -> dict[str, Any]:
    """Return a standard split, standardized with training-set statistics; "unit" is the target's standard deviation."""
    file = np.load(data_dir / "uci" / f"{UCI_FILES.get(name, name)}.npz")
    rows, train, test = file["data"], file[f"train_indices_{split}"], file[f"test_indices_{split}"]
    scale = rows[train].std(0)
    standard = torch.tensor((rows - rows[train].mean(0)) / np.where(scale > 0, scale, 1.0), dtype=torch.float32)
    target = int(file["target_column"])
    x, y = standard[:, file["feature_columns"]], standard[:, [target]]
    return {"train": (x[train], y[train]), "test": (x[test], y[test]), "unit": float(scale[target])}


def markdown_table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, zero for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def with_error(values: Sequence[float], digits: int) -> str:
    """Return the mean as text, with its standard error if there is more than one value."""
    error = f" ± {standard_error(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def reaches(values: Sequence[float], published: float) -> bool:
    """Return whether the mean is at most its own standard error below a published number."""
    return statistics.mean(values) + standard_error(values) >= published


def is_below(difference: Sequence[float]) -> bool:
    """Return whether the mean is more than two standard errors below zero; False for a single number."""
    return len(difference) > 1 and statistics.mean(difference) < -2 * standard_error(difference)


def paired(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Return the differences between results on the same splits."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]


OPTIONS = {
    "data_dir": "folder of real data, with images/, uci/ and bandits/",
    "seeds": "number of seeds, or of splits of the data",
    "workers": "number of processes",
    "threads": "torch threads in each process",
}
FORMS = {"small": "a quick test; saved in a temporary folder", "paper": "the size of the paper"}


def main(run: Callable[..., None], report: Callable[..., str], draw: Callable[..., None] | None = None) -> None:
    """Run an experiment from the command line: options are the parameters of ``run``; prints the section."""
    run = _by_name(run)
    file = Path(inspect.getfile(run))
    parser = parser_of(run)
    options = vars(parser.parse_args())
    form = options.get("form", "default")
    folder = Path(tempfile.mkdtemp()) if form == "small" else file.parent
    output = options.pop("output") or folder / f"{file.stem}{'_paper' if form == 'paper' else ''}.json"
    try:
        run(output, **options)
    except OtherSettingError as error:
        parser.error(str(error))
    results = Results(output)
    if draw is not None:
        draw(results)
    print(f"\n{report(results)}\n\nSaved in {output}")


def _by_name(function: Callable[..., None]) -> Callable[..., None]:
    """The same function, imported by the module's name, because workers cannot import it from ``__main__``."""
    spec = sys.modules["__main__"].__spec__
    if function.__module__ != "__main__" or spec is None:
        return function
    imported: Callable[..., None] = getattr(importlib.import_module(spec.name), function.__name__)
    return imported


def parser_of(run: Callable[..., None]) -> argparse.ArgumentParser:
    """Return a parser with ``--output`` and a flag for each other parameter of ``run``."""
    description = f"{inspect.getdoc(inspect.getmodule(run))}\n\n{inspect.getdoc(run)}"
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file; by default beside the experiment")
    _, *parameters = inspect.signature(run).parameters.values()
    for parameter in parameters:
        default = None if parameter.default is parameter.empty else parameter.default
        if parameter.name == "form":
            sizes = parser.add_mutually_exclusive_group()
            for form in set(get_args(parameter.annotation)) - {default}:
                sizes.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=FORMS[form])
            parser.set_defaults(form=default)
            continue
        choices = get_args(parameter.annotation) if get_origin(parameter.annotation) is Literal else None
        parser.add_argument(
            "--" + parameter.name.replace("_", "-"),
            type=str if choices else next(iter(get_args(parameter.annotation)), parameter.annotation),
            choices=choices,
            default=default,
            required=parameter.default is parameter.empty,
            help=OPTIONS.get(parameter.name),
        )
    return parser
