# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock

from benchmarks import common
from benchmarks.common import Job, OtherSettingError, Results, compute_all, parser_of, reaches, with_error
from benchmarks.continual import permuted_mnist

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
    # Python's own function, so that workers do not import this module.
    jobs = [Job({"seed": number}, dict, ([("value", float(number))],)) for number in range(3)]
    assert [row["value"] for row in compute_all(results, jobs, workers)] == [0.0, -1.0, 2.0]
    assert [row["seed"] for row in results.rows] == [1, 0, 2]


def wait_long(folder, number):
    (folder / str(number)).write_text(str(os.getpid()))
    time.sleep(60)


@pytest.mark.slow
def test_workers_end_with_a_script_that_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.benchmarks.test_results import *; folder = Path(sys.argv[1]);"
        "jobs = [Job({'seed': n}, wait_long, (folder, n)) for n in range(2)];"
        "compute_all(Results(folder / 'rows.json', SETTING), jobs, 2)"
    )
    script = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        workers = [int(wait_for(tmp_path / str(number))) for number in range(2)]
    finally:
        script.kill()
        script.wait()
    deadline = time.monotonic() + 30
    while any(is_running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert script.pid not in workers
    assert not any(is_running(worker) for worker in workers)


def wait_for(path):
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return path.read_text()


def is_running(process):
    """Whether a process is there, and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_mean_reaches_a_number_within_its_standard_error():
    assert with_error([1.0, 3.0], 2) == "2.00 ± 1.00"
    assert with_error([1.0], 2) == "1.00"
    assert reaches([1.0, 3.0], 2.9)
    assert not reaches([1.0, 3.0], 3.1)
    assert not reaches([1.0], 1.1)


def test_the_options_of_a_command_are_the_parameters_of_its_run():
    from benchmarks.functional import uci
    from benchmarks.guides import cuda

    args = parser_of(uci.run).parse_args(["--data-dir", "there", "--small", "--seeds", "10"])
    assert (args.data_dir, args.form, args.seeds, args.workers, args.output) == (Path("there"), "small", 10, 2, None)
    assert parser_of(cuda.run).parse_args(["--device", "cpu"]).form == "default"
    for wrong in (["--device", "abacus"], ["--paper"], ["--data-dir", "there"]):
        with pytest.raises(SystemExit):
            parser_of(cuda.run).parse_args(wrong)
    with pytest.raises(SystemExit):
        parser_of(uci.run).parse_args([])


def test_what_a_script_runs_can_be_imported_by_other_processes(monkeypatch):
    def run(output):
        """Of the script itself."""

    run.__module__ = "__main__"
    script = ModuleType("__main__")
    script.__spec__ = ModuleSpec("benchmarks.continual.permuted_mnist", None)
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert common._by_name(run) is permuted_mnist.run
    script.__spec__ = None  # A script by its path.
    assert common._by_name(run) is run
