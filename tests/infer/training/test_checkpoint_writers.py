# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One writer of a checkpoint at a time, no name that others can foresee, and what cannot be written is known first."""

import errno
import os
import resource
import secrets
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

from pyro_radial.infer.training import training_run
from pyro_radial.infer.training.checkpoint import Checkpoint
from tests.helpers.runs import assert_same, problem, trained
from tests.helpers.streams import MODULE, learn


def test_a_second_writer_is_refused_while_the_first_lives_and_not_after_it(tmp_path):
    path = tmp_path / "run.pt"
    refusals = []

    def second(record):
        with pytest.raises(ValueError, match=r"run\.pt is being written by another run") as error:
            trained(*problem(), checkpoint=path)
        refusals.append(error)

    state, _ = trained(*problem(), checkpoint=path, callback=second)
    assert len(refusals) == 3
    again, _ = trained(*problem(), checkpoint=path)
    assert_same(again, state)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_another_file_of_the_same_folder_is_not_locked(tmp_path):
    with Checkpoint(tmp_path / "a.pt"):
        trained(*problem(), epochs=1, checkpoint=tmp_path / "b.pt")


def test_a_second_writer_of_a_stream_is_refused(tmp_path):
    with Checkpoint(tmp_path / "stream.pt"), pytest.raises(ValueError, match=r"stream\.pt is being written"):
        learn(checkpoint=tmp_path)
    assert not (tmp_path / "stream.pt").exists()


HOLDER = """
import sys, time
import torch
from pyro_radial.infer.training.checkpoint import Checkpoint

def save(state, file):
    print("locked", flush=True)
    time.sleep(60)

torch.save = save
with Checkpoint(sys.argv[1]) as checkpoint:
    checkpoint.save({})
"""


def test_a_lock_ends_with_its_holder_and_what_he_left_is_removed(tmp_path):
    path = tmp_path / "run.pt"
    holder = subprocess.Popen([sys.executable, "-W", "ignore", "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"locked\n"
    with pytest.raises(ValueError, match="written by another run"), Checkpoint(path):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    assert len(list(tmp_path.iterdir())) == 2
    with Checkpoint(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_links_are_not_followed(tmp_path, monkeypatch):
    victim, path = tmp_path / "victim", tmp_path / "run.pt"
    victim.write_text("precious")
    (tmp_path / ".run.pt.lock").symlink_to(victim)
    with pytest.raises(OSError, match="lock"):
        trained(*problem(), checkpoint=path)
    (tmp_path / ".run.pt.lock").unlink()
    for predictable in ("run.pt.partial", ".run.pt.00.partial"):
        (tmp_path / predictable).symlink_to(victim)
    Checkpoint(path).save({"epoch": 1})
    monkeypatch.setattr(secrets, "token_hex", lambda size: "00")
    with pytest.raises(FileExistsError):
        Checkpoint(path).save({"epoch": 2})
    assert victim.read_text() == "precious"
    assert Checkpoint(path).load()["epoch"] == 1
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    with pytest.raises(ValueError, match=r"must be a regular file, got .*link\.pt, a folder, link or pipe"):
        trained(*problem(), checkpoint=link)


def test_a_full_disk_is_an_error_of_the_operating_system_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "run.pt"
    Checkpoint(path).save({"epoch": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"checkpoint cannot be written: File too large: '.*run\.pt'") as caught:
            Checkpoint(path).save({"epoch": 2, "weight": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert Checkpoint(path).load()["epoch"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


class Interrupted:
    """A file during whose third write somebody presses Ctrl-C."""

    def __init__(self, file):
        self.file, self.writes = file, 0

    def write(self, content):
        self.writes += 1
        if self.writes == 3:
            raise KeyboardInterrupt
        return self.file.write(content)


def test_an_interrupt_during_a_write_stays_an_interrupt(tmp_path, monkeypatch):
    path, save = tmp_path / "run.pt", torch.save
    Checkpoint(path).save({"epoch": 1})
    monkeypatch.setattr(torch, "save", lambda state, file: save(state, Interrupted(file)))
    with pytest.raises(KeyboardInterrupt):
        Checkpoint(path).save({"epoch": 2, "weight": torch.zeros(1000)})
    assert Checkpoint(path).load()["epoch"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.parametrize(("mine", "other"), [("run[ab].pt", "runa.pt"), ("run*", "run.pt"), ("run", "run.pt")])
def test_the_temporary_file_of_another_run_stays(mine, other, tmp_path):
    kept, left = (tmp_path / f".{name}.0123456789abcdef.partial" for name in (other, mine))
    kept.touch()
    left.touch()
    with Checkpoint(tmp_path / mine):
        assert kept.exists()
        assert not left.exists()


@pytest.mark.parametrize("kind", ["folder", "pipe", "empty", "number"])
def test_a_path_that_is_no_file_is_refused_before_anything_is_set_up(kind, tmp_path):
    path = {"empty": "", "number": 3}.get(kind, tmp_path / kind)
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    model, guide = problem()
    with pytest.raises(ValueError, match=r"checkpoint must be (a regular file, got .*, a folder|the path of a)"):
        trained(model, guide, checkpoint=path)
    assert guide.prototype_trace is None


def test_temporary_names_differ(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(os, "replace", lambda one, other: names.append(one.name))
    for _ in range(2):
        Checkpoint(tmp_path / "run.pt").save({"epoch": 1})
    assert len(set(names)) == 2


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        trained(*problem(), checkpoint=tmp_path / "file" / "run.pt", callback=pytest.fail)

    def full(*args):
        raise OSError("disk full")

    for resumed in (False, True):
        if resumed:
            trained(*problem(), epochs=1, checkpoint=tmp_path / "run.pt")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            patch.setattr(training_run.TrainingRun, "step", lambda self: pytest.fail("a step"))
            with pytest.raises(OSError, match="disk full"):
                trained(*problem(), checkpoint=tmp_path / "run.pt")


def test_numbers_of_numpy_in_the_optimizer_are_written_as_they_are_read(tmp_path):
    path = tmp_path / "run.pt"
    options = {"optim": partial(torch.optim.Adam, lr=np.float64(0.01), betas=(np.float64(0.5), 0.9))}
    expected, _ = trained(*problem(), **options)
    trained(*problem(), epochs=1, checkpoint=path, **options)
    state, _ = trained(*problem(), checkpoint=path, **options)
    assert_same(state, expected)


def test_what_cannot_be_read_back_is_found_before_the_first_step(tmp_path, monkeypatch):
    class Rate(float):
        """A number of a class that no checkpoint can hold."""

    monkeypatch.setattr(training_run.TrainingRun, "step", lambda self: pytest.fail("a step"))
    with pytest.raises(ValueError, match=r"run\.pt can hold only tensors and plain values"):
        trained(*problem(), optim=partial(torch.optim.Adam, lr=Rate(0.01)), checkpoint=tmp_path / "run.pt")


def test_the_lock_of_a_stream_lasts_until_its_end(tmp_path, monkeypatch):
    seen = []
    original = MODULE.fit

    def watched(*args, **kwargs):
        seen.append((tmp_path / ".stream.pt.lock").exists())
        return original(*args, **kwargs)

    monkeypatch.setattr(MODULE, "fit", watched)
    learn(checkpoint=tmp_path)
    assert seen == [True, True]
    assert [file.name for file in tmp_path.iterdir()] == ["stream.pt"]
