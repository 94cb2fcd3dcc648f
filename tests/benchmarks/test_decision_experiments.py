# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Experiments on decisions that are cut short: their rows come seed by seed, and what there is is reported."""

import json

import pytest

pytest.importorskip("botorch")

from benchmarks.common import Results
from benchmarks.decisions import bandits


def jobs_of(experiment, tmp_path, monkeypatch):
    """The keys of all rows, in the order in which they are computed."""
    found = []
    monkeypatch.setattr(experiment, "compute_all", lambda results, jobs, *_: found.extend(job.keys for job in jobs))
    experiment.run(tmp_path / "none.json")
    return found


def row_of(number, keys):
    value = 1.0 + 0.1 * (number % 7)
    names = ("relative", "relative_simple", "cumulative", "steps_per_decision", "seconds", "process_seconds")
    own = dict.fromkeys((*names, "regret", "seconds_per_proposal", "steps_per_proposal"), value)
    return {**keys, **own, "curve": [value, value / 2]}


def results_of(experiment, rows, path):
    setting = json.loads(json.dumps(experiment.SIZES["default"]._asdict()))
    path.write_text(json.dumps({"setting": setting, "rows": rows}))
    return Results(path)


def test_only_seeds_that_both_have_are_compared(tmp_path, monkeypatch):
    jobs = jobs_of(bandits, tmp_path, monkeypatch)
    rows = [row_of(number, keys) for number, keys in enumerate(jobs)]
    of_width = [row for row in rows if (row["task"], row["method"]) == (bandits.WIDTH_TASKS[0], bandits.FUNCTIONAL)]
    narrow, wide = min(bandits.WIDTHS), max(bandits.WIDTHS)
    kept = [row for row in of_width if row["width"] == narrow or row["seed"] == jobs[0]["seed"]]
    results = results_of(bandits, kept, tmp_path / "some.json")
    keys = {"task": bandits.WIDTH_TASKS[0], "method": bandits.FUNCTIONAL}
    few, many = bandits.of_common_seeds(results, "relative", "width", (narrow, wide), **keys)
    assert few == [next(row["relative"] for row in kept if row["width"] == narrow)]
    assert many == [next(row["relative"] for row in kept if row["width"] == wide)]
