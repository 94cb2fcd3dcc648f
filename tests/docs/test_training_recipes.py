# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The recipes for Accelerate and Lightning train in one and in two processes, and resume as if nothing had happened."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 3
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
# How to start two processes: the launcher, and options of the program.
IN_TWO = {"accelerate": (TORCHRUN, ()), "lightning": ((), ("--processes", "2"))}


def train(library, *options, launcher=()):
    """Run a recipe; returns the accuracy that it prints once, and its whole output."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = str(ROOT / "tutorials" / f"train_with_{library}.py")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, *launcher, program, "--epochs", str(EPOCHS), *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    (accuracy,) = re.findall(r"^accuracy (\d\.\d+)$", process.stdout, flags=re.MULTILINE)
    return float(accuracy)


@pytest.mark.parametrize(("library", "options"), [("accelerate", ("--mixed-precision", "bf16")), ("lightning", ())])
def test_a_recipe_trains_in_one_process(library, options):
    # A tenth by guessing.
    assert train(library, *options) > 0.7


def epochs_in(folder):
    """What is saved of each epoch."""
    return sorted(path for path in folder.iterdir() if path.name.startswith("epoch"))


def saved_in(path):
    """The parameters, the state of the optimizer, and other tensors and numbers of a checkpoint."""
    if path.is_dir():
        states = [torch.load(file, weights_only=False) for file in sorted(path.glob("*.bin"))]
        random = [file.read_bytes() for file in sorted(path.glob("random_states_*.pkl"))]
        return [(path / "model.safetensors").read_bytes(), *random, *tree_leaves(states)]
    state = torch.load(path, weights_only=False)
    return tree_leaves([state[name] for name in ("state_dict", "optimizer_states", "lr_schedulers")])


@pytest.mark.parametrize("library", IN_TWO)
def test_two_processes_resume_from_a_checkpoint_and_end_as_undisturbed_ones(library, tmp_path):
    launcher, options = IN_TWO[library]
    options = (*options, "--checkpoint", tmp_path)
    accuracy = train(library, *options, launcher=launcher)
    assert accuracy > 0.7
    first, *later = epochs_in(tmp_path)
    assert len(later) == EPOCHS - 1
    expected = saved_in(later[-1])
    # A run that is killed in its second epoch leaves the first.
    for path in later:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert train(library, *options, launcher=launcher) == accuracy
    assert epochs_in(tmp_path) == [first, *later]
    resumed = saved_in(later[-1])
    assert len(resumed) == len(expected) > 8
    for one, other in zip(resumed, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else repr(one) == repr(other)


def test_the_recipe_for_scvi_tools_trains_as_its_own_training_plan_does():
    if importlib.util.find_spec("scvi") is None:
        pytest.skip("scvi-tools is not installed")
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tutorials" / "scvi_tools.py"), "--epochs", "5"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    losses = re.findall(r"^\w*LDA: .* s, loss (\S+)$", process.stdout, flags=re.MULTILINE)
    theirs, ours = map(float, losses)
    # Of one start, on the same random numbers.
    assert ours == pytest.approx(theirs, rel=1e-3)
