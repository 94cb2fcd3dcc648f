# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the experiments share: results that grow row by row, so that a killed script goes on where it was."""

import argparse
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyro_radial import datasets

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Pair = tuple[torch.Tensor, torch.Tensor]


class Table:
    """Rows of results in a JSON file; a row whose keys are there already is not computed again."""

    def __init__(self, path: Path, setting: Row) -> None:
        self.path, self.setting = path, setting
        saved = json.loads(path.read_text()) if path.exists() else {}
        # Rows of another setting would not be comparable.
        self.rows: list[Row] = saved["rows"] if saved.get("setting") == setting else []

    def find(self, keys: Row) -> Row | None:
        """The row with these keys, if it is there."""
        return next((row for row in self.rows if keys.items() <= row.items()), None)

    def add(self, keys: Row, compute: Callable[[], Row]) -> Row:
        """The row with these keys, computed and saved if it is new."""
        found = self.find(keys)
        if found is not None:
            return found
        row = keys | {k: round(v, 6) if isinstance(v, float) else v for k, v in compute().items()}
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        partial.write_text(f'{{"setting": {json.dumps(self.setting)},\n"rows": [\n{rows}\n]}}\n')
        os.replace(partial, self.path)
        print({k: v for k, v in row.items() if not isinstance(v, list)}, flush=True)
        return row


def flat_images(name: str, data_dir: str | None) -> tuple[Pair, Pair]:
    """Training and test images as vectors, standardised by mean and deviation of all training pixels, and labels."""
    data = datasets.load(name, data_dir)
    mean, stddev = data.train_images.mean(), data.train_images.std()
    train, test = (((images - mean) / stddev).flatten(1) for images in (data.train_images, data.test_images))
    return (train, data.train_labels), (test, data.test_labels)


def uci_split(data_dir: str, name: str, split: int) -> dict[str, Any]:
    """One standard split, standardised by its training rows, with the target's standard deviation as its unit."""
    file = np.load(Path(data_dir) / "uci" / f"{name}.npz")
    rows, train, test = file["data"], file[f"train_indices_{split}"], file[f"test_indices_{split}"]
    scale = rows[train].std(0)
    standard = torch.tensor((rows - rows[train].mean(0)) / np.where(scale > 0, scale, 1.0), dtype=torch.float32)
    target = int(file["target_column"])
    x, y = standard[:, file["feature_columns"]], standard[:, [target]]
    return {"train": (x[train], y[train]), "test": (x[test], y[test]), "unit": float(scale[target])}


def sized_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of an experiment with a small form and one of the paper's size; see :func:`form_of`."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--workers", type=int, default=2)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true")
    size.add_argument("--paper", action="store_true")
    parser.add_argument("--output", type=Path)
    return parser


def form_of(args: argparse.Namespace, name: str) -> tuple[str, Path]:
    """Which size is asked for, "default", "small" or "paper", and the file of its results."""
    form = "small" if args.small else "paper" if args.paper else "default"
    return form, args.output or RESULTS / f"{name}{'' if form == 'default' else '_' + form}.json"


def mean_and_error(values: list[float]) -> str:
    """A mean with its standard error over seeds, for a printed table."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    tensor = torch.tensor(values, dtype=torch.double)
    return f"{tensor.mean():.4f} +- {tensor.std() / len(values) ** 0.5:.4f}"


@dataclass(frozen=True)
class Job:
    """A row to compute: its keys, and a function (of the top level of a module, with its arguments) that does it."""

    keys: Row
    compute: Callable[..., Row]
    arguments: tuple[Any, ...]


def compute_all(table: Table, jobs: Sequence[Job], workers: int, threads: int) -> list[Row]:
    """The rows of all jobs, those that are new computed by this many processes and saved in the order of the jobs."""
    new = {str(job.keys): job for job in jobs if table.find(job.keys) is None}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (threads,)) as pool:
        futures = {keys: pool.submit(job.compute, *job.arguments) for keys, job in new.items()}
        return [table.add(job.keys, lambda job=job: futures[str(job.keys)].result()) for job in jobs]


def _start_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose script was killed would go on, and write the same checkpoints as the script started anew."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
