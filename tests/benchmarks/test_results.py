# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from filelock import FileLock

from benchmarks.common import Job, OtherSettingError, Results, compute_all, medians, parser_of, reaches, with_error

SETTING = {"rounds": 3, "sizes": (1, 2)}


def row_of(number):
    return {"value": float(number)}


def test_rows_are_saved_one_by_one_and_not_computed_again(tmp_path):
    path = tmp_path / "rows.json"
    Results(path, SETTING).add({"seed": 0}, lambda: {"value": 1 / 3})
    again = Results(path, SETTING)
    assert again.add({"seed": 0}, lambda: pytest.fail("computed again")) == {"seed": 0, "value": 0.333333}
    again.add({"seed": 1}, lambda: {"value": 2.0})
    assert Results(path).values("value") == [0.333333, 2.0]
    assert Results(path).setting == {"rounds": 3, "sizes": [1, 2]}


def test_rows_of_another_setting_are_refused_and_kept(tmp_path):
    path = tmp_path / "rows.json"
    Results(path, SETTING).add({"seed": 0}, lambda: row_of(0))
    before = path.read_bytes()
    with pytest.raises(OtherSettingError, match=r"rounds is 3 there, 5 here.*--output"):
        Results(path, SETTING | {"rounds": 5})
    assert path.read_bytes() == before


def test_a_setting_that_another_writer_saved_meanwhile_is_refused(tmp_path):
    path = tmp_path / "rows.json"
    late = Results(path, SETTING | {"rounds": 5})
    Results(path, SETTING).add({"seed": 0}, lambda: row_of(0))
    before = path.read_bytes()
    with pytest.raises(OtherSettingError):
        late.add({"seed": 1}, lambda: row_of(1))
    assert path.read_bytes() == before


def test_a_row_that_another_writer_computed_meanwhile_stays(tmp_path):
    path = tmp_path / "rows.json"
    slow = Results(path, SETTING)

    def compute():
        Results(path, SETTING).add({"seed": 0}, lambda: row_of(1))
        return row_of(2)

    assert slow.add({"seed": 0}, compute)["value"] == 1.0
    assert Results(path).values("value") == [1.0]


def add_rows(path, numbers, start):
    results = Results(path, SETTING)
    start.wait()
    for number in numbers:
        results.add({"seed": number}, lambda number=number: row_of(number))


def test_two_processes_that_write_to_one_file_lose_no_row(tmp_path):
    path, context = tmp_path / "rows.json", multiprocessing.get_context("fork")
    start = context.Barrier(2)
    writers = [
        context.Process(target=add_rows, args=(path, range(first, 100, 2), start), daemon=True) for first in (0, 1)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert sorted(Results(path).values("seed")) == list(range(100))


def hold_lock(path, held):
    with FileLock(path.with_suffix(".lock")):
        held.set()
        time.sleep(60)


def test_a_killed_writer_leaves_no_lock(tmp_path):
    path, context = tmp_path / "rows.json", multiprocessing.get_context("fork")
    held = context.Event()
    writer = context.Process(target=hold_lock, args=(path, held), daemon=True)
    writer.start()
    assert held.wait(30)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(30)
    Results(path, SETTING).add({"seed": 0}, lambda: row_of(0))
    assert Results(path).values("value") == [0.0]


def test_rows_measured_together_are_saved_together(tmp_path):
    results = Results(tmp_path / "rows.json", SETTING)
    keys = [{"guide": name} for name in ("a", "b")]
    rows = results.add_all(keys, lambda: [row_of(1), row_of(2)])
    assert [row["value"] for row in rows] == [1.0, 2.0]
    assert results.add_all(keys, lambda: pytest.fail("computed again")) == rows


def test_rows_are_found_by_their_keys_in_the_order_of_their_seeds(tmp_path):
    path = tmp_path / "rows.json"
    rows = [{"method": m, "seed": s, "score": 10 * s + len(m)} for s in (1, 0) for m in ("a", "bb")]
    path.write_text(json.dumps({"setting": SETTING, "rows": rows}))
    results = Results(path)
    assert results.values("score", method="bb") == [2, 12]
    assert results.distinct("method") == ["a", "bb"]
    assert results.distinct("seed", "method") == [(1, "a"), (1, "bb"), (0, "a"), (0, "bb")]


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_are_computed_once_and_saved_in_their_order(tmp_path, workers):
    results = Results(tmp_path / "rows.json", SETTING)
    results.add({"seed": 1}, lambda: {"value": -1.0})
    jobs = [Job({"seed": number}, row_of, (number,)) for number in range(3)]
    assert [row["value"] for row in compute_all(results, jobs, workers)] == [0.0, -1.0, 2.0]
    assert [row["seed"] for row in results.rows] == [1, 0, 2]


def test_subjects_take_turns():
    calls, ticks = [], iter(range(1_000))
    subjects = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = medians(subjects, 2, clock=lambda: float(next(ticks)), block=2, warmup=1)
    assert "".join(calls) == "ab" + "aabb" * 2
    # A tick between two readings of the clock, for two calls.
    assert times == {"a": 500.0, "b": 500.0}


def test_a_mean_reaches_a_number_within_its_standard_error():
    assert with_error([1.0, 3.0], 2) == "2.00 ± 1.00"
    assert with_error([1.0], 2) == "1.00"
    assert reaches([1.0, 3.0], 2.9)
    assert not reaches([1.0, 3.0], 3.1)
    assert not reaches([1.0], 1.1)


def test_the_options_of_a_command_are_the_parameters_of_its_run():
    from benchmarks.functional import uci
    from benchmarks.guides import cuda

    args = parser_of(uci.run).parse_args(["--data-dir", "there", "--paper", "--seeds", "10"])
    assert (args.data_dir, args.form, args.seeds, args.workers, args.output) == (Path("there"), "paper", 10, 2, None)
    assert parser_of(cuda.run).parse_args(["--device", "cpu"]).form == "default"
    for wrong in (["--device", "abacus"], ["--paper"], ["--data-dir", "there"]):
        with pytest.raises(SystemExit):
            parser_of(cuda.run).parse_args(wrong)
    with pytest.raises(SystemExit):
        parser_of(uci.run).parse_args([])
