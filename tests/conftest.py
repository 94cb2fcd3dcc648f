# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every test starts from the same seed, an empty parameter store, one thread, and with validation."""

import os
import sys
from pathlib import Path
from threading import RLock

import pyro
import pytest
import torch
from torch.distributions import Distribution
from tqdm.auto import tqdm

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# Processes share tqdm's lock with those they fork. One that is forked while tqdm's monitor holds it, or that is killed
# while it holds it itself, keeps it for good, and each process that makes a bar from then on waits without end.
os.register_at_fork(after_in_child=lambda: tqdm.set_lock(RLock()))

# A compiler's stand-in for a CUDA device, where torch is built for CUDA and there is none, gives autograd threads, and
# then no forked process may differentiate. The first derivative of a process decides which threads there are.
torch.zeros((), requires_grad=True).backward()


@pytest.fixture(autouse=True)
def clean_start():
    torch.set_num_threads(1)
    # torch's compiler turns it off for the whole process.
    Distribution.set_default_validate_args(__debug__)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    pyro.clear_param_store()


@pytest.fixture(autouse=True)
def no_second_process(request, monkeypatch):
    """Nothing is compiled in the background, and code of former runs is not used, unless a test asks for it."""
    if "second_process" not in request.fixturenames:
        from pyro_radial.infer.compiler.background import BackgroundCode

        monkeypatch.setattr(BackgroundCode, "code", lambda *_: None)


@pytest.fixture
def data_dir():
    """The folder of real data, or a skip that says so."""
    folder = Path(os.environ.get("PYRO_RADIAL_DATA", SHARED_DATA))
    if not (folder / "images" / "mnist.npz").exists():
        pytest.skip("no folder of real data here; set PYRO_RADIAL_DATA to run this test")
    return folder


@pytest.fixture
def impatient_threads():
    """Threads that Python switches between as often as it can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture
def recorded_only(monkeypatch):
    """Graphs that would be compiled run as recorded; the list of those."""
    # Most tests compile nothing, and need no compiler's modules.
    from pyro_radial.infer.compiler import inductor

    made = []
    monkeypatch.setattr(inductor, "compile_graph", lambda module, *_: made.append(module) or module)
    monkeypatch.setattr(inductor, "_code_by_key", {})
    return made
