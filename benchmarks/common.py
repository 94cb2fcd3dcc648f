# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What all experiments share: results files, jobs, timing, data, words for their sections, and the command line."""

import argparse
import ctypes
import importlib
import inspect
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
import torch
from filelock import FileLock
from joblib import Parallel, delayed, parallel_config
from matplotlib.figure import Figure

from pyro_radial import datasets

__all__ = [
    "BLOCK",
    "FIRST_SEED",
    "REGRESSION",
    "Claim",
    "Form",
    "Job",
    "OtherSettingError",
    "Pair",
    "Results",
    "Row",
    "SizedForm",
    "Subjects",
    "compute_all",
    "flat_images",
    "keep_pages",
    "main",
    "markdown_table",
    "medians",
    "paired",
    "parser_of",
    "reaches",
    "uci_split",
    "with_error",
]

PAGE_FOLDER = Path(__file__).parent
Row = dict[str, Any]
Pair = tuple[torch.Tensor, torch.Tensor]
Subjects = Mapping[str, Callable[[], Any]]
#: The sizes of an experiment, and of one that has the paper's size too.
Form = Literal["default", "small"]
SizedForm = Literal["default", "small", "paper"]
#: The results of a regression, and what tables call them.
REGRESSION = {"rmse": "RMSE", "log_likelihood": "log-likelihood"}
#: The first of the seeds that no choice was made on.
FIRST_SEED = 10
#: Calls that are timed at once.
BLOCK = 3


class Claim(NamedTuple):
    """A line of the table that the page begins with; :attr:`held` is computed from the saved rows."""

    text: str
    published: str
    ours: str
    seeds: str
    held: bool


class OtherSettingError(ValueError):
    """A results file holds rows of another setting."""


class Results:
    """Rows of results in a JSON file, with the setting that all of them were measured in.

    Rows are saved one by one, and a row that is there is not computed again, so that a killed script goes on where it
    was. Several processes may write to one file: each reads it again, under a lock, before it adds a row.

    :param path: the file.
    :param setting: what all rows have in common; without it, whatever the file says.
    :raises OtherSettingError: if the file holds rows of another setting, which would not be comparable.
    """

    def __init__(self, path: Path, setting: Row | None = None) -> None:
        self.path = path
        # As it will be read: with lists in the place of tuples.
        self.setting: Row = json.loads(json.dumps(setting))
        self.rows: list[Row] = []
        # The version of the file that the rows are those of.
        self._seen: tuple[int, ...] | None = None
        if setting is None:
            self.setting = json.loads(path.read_text())["setting"]
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        stat = self.path.stat()
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if version == self._seen:
            return
        saved = json.loads(self.path.read_text())
        if saved["setting"] != self.setting:
            names = [n for n in saved["setting"] | self.setting if saved["setting"].get(n) != self.setting.get(n)]
            there = (f"{n} is {saved['setting'].get(n)} there, {self.setting.get(n)} here" for n in names)
            raise OtherSettingError(
                f"{self.path} must hold rows of this setting, got rows of another: {'; '.join(there)}. "
                "It is left as it is: give a file of its own with --output."
            )
        self.rows, self._seen = saved["rows"], version

    def find(self, keys: Row) -> Row | None:
        """The row with these keys, if it is there."""
        return next((row for row in self.rows if keys.items() <= row.items()), None)

    def find_now(self, keys: Row) -> Row | None:
        """As :meth:`find`, of all rows that are in the file by now."""
        self._read()
        return self.find(keys)

    def where(self, **keys: Any) -> list[Row]:
        """All rows with these keys, in the order of their splits or seeds."""
        chosen = [row for row in self.rows if keys.items() <= row.items()]
        return sorted(chosen, key=lambda row: row.get("split", row.get("seed", 0)))

    def values(self, name: str, **keys: Any) -> list[Any]:
        """One result of all rows with these keys."""
        return [row[name] for row in self.where(**keys)]

    def distinct(self, *names: str) -> list[Any]:
        """The values of a key that occur, in the order of the file, or of several keys as tuples."""
        rows = [row for row in self.rows if all(name in row for name in names)]
        return list(dict.fromkeys(row[names[0]] if len(names) == 1 else tuple(map(row.get, names)) for row in rows))

    def add(self, keys: Row, compute: Callable[[], Row]) -> Row:
        """The row with these keys, computed and saved if it is new."""
        return self.add_all([keys], lambda: [compute()])[0]

    def add_all(self, keys: Sequence[Row], compute: Callable[[], Sequence[Row]]) -> list[Row]:
        """The rows with these keys, measured together, as timings that take turns are, if one of them is new."""
        self._read()
        if any(self.find(own) is None for own in keys):
            self._save([own | _rounded(row) for own, row in zip(keys, compute(), strict=True)], keys)
        return [row for own in keys if (row := self.find(own)) is not None]

    def _save(self, rows: Iterable[Row], keys: Iterable[Row]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The lock belongs to an open file: it ends with the process, however that ends.
        with FileLock(self.path.with_suffix(".lock")):
            self._read()
            self._seen = None
            for row, own in zip(rows, keys, strict=True):
                if self.find(own) is None:
                    self.rows.append(json.loads(json.dumps(row)))
                    print({k: v for k, v in row.items() if not isinstance(v, list | dict)}, flush=True)
            partial_file = self.path.with_suffix(".partial")
            lines = ",\n".join(json.dumps(row) for row in self.rows)
            partial_file.write_text(f'{{"setting": {json.dumps(self.setting)},\n"rows": [\n{lines}\n]}}\n')
            os.replace(partial_file, self.path)

    def checkpoint(self, *parts: Any) -> Path:
        """Where a run named by these parts keeps what it goes on from; beside the results, and not in the history."""
        name = "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in str(part)) for part in parts)
        return self.path.parent / "checkpoints" / self.path.stem / name

    def plot_path(self, suffix: str = "") -> Path:
        """The file of a plot of these results."""
        return self.path.with_name(f"{self.path.stem}{suffix and '_' + suffix}.png")

    def save_plot(self, figure: Figure, suffix: str = "") -> None:
        """Save a plot of these results beside them."""
        figure.savefig(self.plot_path(suffix))

    def plot(self, caption: str, suffix: str = "") -> str:
        """A saved plot in Markdown, as the page shows it."""
        path = self.plot_path(suffix)
        shown = path.relative_to(PAGE_FOLDER) if path.is_relative_to(PAGE_FOLDER) else path
        return f"![{caption}]({shown.as_posix()})"


def _rounded(row: Row) -> Row:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}


@dataclass(frozen=True)
class Job:
    """A row to compute: its keys, and a function (of the top level of a module, with its arguments) that does it."""

    keys: Row
    compute: Callable[..., Row]
    arguments: tuple[Any, ...]


def compute_all(results: Results, jobs: Sequence[Job], workers: int, threads: int = 1) -> list[Row]:
    """The rows of all jobs, saved in their order.

    joblib spreads them: over processes of this machine, or over what ``joblib.parallel_config`` says.

    :param results: where the rows are, or will be.
    :param jobs: what to compute, if it is not there.
    :param workers: how many processes compute; with one, this process does.
    :param threads: of torch, in each process.
    :returns: a row for each job.
    """
    begun: list[Job] = []

    def new() -> Iterator[Any]:
        for job in jobs:
            # Another run that shares the file may have computed it meanwhile.
            if results.find_now(job.keys) is None:
                begun.append(job)
                yield delayed(_compute)(job, threads, os.getpid())

    rows = Parallel(workers, return_as="generator", batch_size=1, pre_dispatch="all")(new())
    for number, row in enumerate(rows):
        results.add(begun[number].keys, lambda row=row: row)
    return [row for job in jobs if (row := results.find(job.keys)) is not None]


def _compute(job: Job, threads: int, script: int) -> Row:
    """A job, in whatever process on whatever machine."""
    torch.set_num_threads(threads)
    if os.getppid() == script:
        _end_with(script)
    return job.compute(*job.arguments)


@cache
def _end_with(script: int) -> None:
    """A worker whose script was killed would go on, and write the same checkpoints as the script started anew."""

    def watch() -> None:
        while os.getppid() == script:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _backend(name: str | None) -> Any:
    """A context in which joblib spreads jobs over a backend, by its name."""
    if name is None:
        return nullcontext()
    # What these want first; joblib does the rest, and knows its own backends.
    if name == "dask":
        importlib.import_module("distributed").Client()
    if name == "ray":
        importlib.import_module("ray.util.joblib").register_ray()
    return parallel_config(backend=name)


def medians(
    subjects: Subjects,
    rounds: int,
    *,
    clock: Callable[[], float] = time.process_time,
    block: int = BLOCK,
    warmup: int = 1,
) -> dict[str, float]:
    """Median milliseconds of a call to each subject, the subjects taking turns, so that drift is common to all.

    :param subjects: what is timed, by name.
    :param rounds: turns of each.
    :param clock: seconds; that of this process's own work by default, in which other programs do not count.
    :param block: calls of a turn.
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


def keep_pages() -> None:
    """Has the allocator of Linux reuse memory instead of returning it."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        for option, value in ((-3, 2**25), (-1, 2**30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            library.mallopt(option, value)


def flat_images(name: str, data_dir: Path | None) -> tuple[Pair, Pair]:
    """Training and test images as vectors, standardized by mean and standard deviation of all pixels, with labels."""
    data = datasets.load(name, data_dir)
    mean, stddev = data.train_images.mean(), data.train_images.std()
    train, test = (((images - mean) / stddev).flatten(1) for images in (data.train_images, data.test_images))
    return (train, data.train_labels), (test, data.test_labels)


def uci_split(data_dir: Path, name: str, split: int) -> dict[str, Any]:
    """One standard split, standardized by its training rows, with the target's standard deviation as its unit."""
    file = np.load(data_dir / "uci" / f"{name}.npz")
    rows, train, test = file["data"], file[f"train_indices_{split}"], file[f"test_indices_{split}"]
    scale = rows[train].std(0)
    standard = torch.tensor((rows - rows[train].mean(0)) / np.where(scale > 0, scale, 1.0), dtype=torch.float32)
    target = int(file["target_column"])
    x, y = standard[:, file["feature_columns"]], standard[:, [target]]
    return {"train": (x[train], y[train]), "test": (x[test], y[test]), "unit": float(scale[target])}


def markdown_table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells as a table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_error(values: Sequence[float], digits: int) -> str:
    """The mean with its standard error, if there is more than one value."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def reaches(values: Sequence[float], published: float) -> bool:
    """Whether the mean is as high as a published number, or lower by no more than its own standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values) + error >= published


def is_below(difference: Sequence[float]) -> bool:
    """Whether the mean is below zero by more than two of its standard errors, which one number alone has none of."""
    if len(difference) < 2:
        return False
    return statistics.mean(difference) < -2 * statistics.stdev(difference) / len(difference) ** 0.5


def paired(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """The differences of results of the same splits."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]


OPTIONS = {
    "data_dir": "the folder of real data, with images/, uci/ and timeseries/",
    "seeds": "how many seeds, or splits of the data",
    "workers": "processes that compute",
    "backend": "where joblib computes: loky (processes of this machine, the default), dask, ray, ...",
    "threads": "threads of torch in each process",
}
FORMS = {"small": "to see that it runs; saved in a temporary folder", "paper": "the size of the paper"}


def main(run: Callable[..., None], report: Callable[..., str], draw: Callable[..., None] | None = None) -> None:
    """The command line of an experiment: its options are the parameters of ``run``, and it prints its section."""
    run = _by_name(run)
    file = Path(inspect.getfile(run))
    parser = parser_of(run)
    options = vars(parser.parse_args())
    form = options.get("form", "default")
    folder = Path(tempfile.mkdtemp()) if form == "small" else file.parent
    output = options.pop("output") or folder / f"{file.stem}{'_paper' if form == 'paper' else ''}.json"
    try:
        with _backend(options.pop("backend", None)):
            run(output, **options)
    except OtherSettingError as error:
        parser.error(str(error))
    results = Results(output)
    if draw is not None:
        draw(results)
    print(f"\n{report(results)}\n\nSaved in {output}")


def _by_name(function: Callable[..., None]) -> Callable[..., None]:
    """The same function of the module by its name: what is in ``__main__`` other processes cannot import."""
    spec = sys.modules["__main__"].__spec__
    if function.__module__ != "__main__" or spec is None:
        return function
    found: Callable[..., None] = getattr(importlib.import_module(spec.name), function.__name__)
    return found


def parser_of(run: Callable[..., None]) -> argparse.ArgumentParser:
    """A flag for each parameter of ``run`` after the first, and ``--output`` for that."""
    description = f"{inspect.getdoc(inspect.getmodule(run))}\n\n{inspect.getdoc(run)}"
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the results file; by default beside the experiment")
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
        if parameter.name == "workers":
            parser.add_argument("--backend", help=OPTIONS["backend"])
    return parser
