# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A second process compiles a graph while training goes on by replays, also where that process fails.

A fake compiler writes files that a fake loader takes for the graph; three tests start real processes.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pyro
import pytest
import torch
from torch import nn

from pyro_radial import AutoRadial, CompiledSVI, TermsELBO, fit
from pyro_radial.infer import FitOptions
from pyro_radial.infer.compiler import background
from pyro_radial.infer.compiler.background import USES_BEFORE_COMPILING, BackgroundCode, compile_job
from pyro_radial.infer.step.evaluation import Mode
from tests.helpers.networks import classifier, data
from tests.helpers.programs import PROGRAMS, Graphed, assert_same_steps, compiled_svi, eager_svi, prepared, take_steps

X, Y = data(8)
SECONDS = 900
#: A training without a guard of the main module, and with the cache of the test; it stops after the code is used.
SCRIPT = """
import os, sys, time
import torch
torch.set_num_threads(1)
from pyro_radial import AutoRadial, TermsELBO
from pyro_radial.infer.compiler import background
from tests.helpers.networks import classifier, data
from tests.helpers.programs import Graphed

X, Y = data(8)

def trained(steps, **settings):
    model = classifier(net=torch.nn.Linear(3, 2))
    loss = Graphed(model, AutoRadial(model), TermsELBO(), compile_now=None, **settings)
    for _ in range(steps):
        loss((X, Y))
    return loss.latest.mode

print(trained(1), "torch._inductor.compile_fx" in sys.modules)
# A process whose imports take long.
background.PROGRAM = background.PROGRAM.replace("from", "time.sleep(6000)\\nfrom")
trained(10, options={"cpp.max_horizontal_fusion_size": 15})
(process,) = background._processes.values()
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def second_process(monkeypatch, tmp_path):
    """Graphs are compiled in the background, and the cache is empty; returns its folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(background, "_processes", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    yield tmp_path / "cache" / "pyro_radial"
    for process in background._processes.values():
        process.kill()


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """The cache of a process that has compiled the classifier; no step waited for it."""
    folder = tmp_path_factory.mktemp("code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setattr(background, "_processes", {})
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        torch.set_num_threads(1)
        loss = on_a_classifier()
        # The fixture of all tests replaces the method only after those of modules.
        modes = [loss.latest.mode for _ in range(USES_BEFORE_COMPILING) if loss((X, Y))]
        (process,) = background._processes.values()
        wait_until(lambda: bool(loss((X, Y))) and loss.latest.mode == Mode.COMPILED)
        assert set(modes) == {Mode.RECORDED}
        assert process.poll() == 0
        process.communicate()
    return folder


@pytest.fixture
def started(monkeypatch):
    """A compiler that writes files at once; the list of its jobs."""
    jobs = []

    def start(job):
        jobs.append(job)
        write_code(job.folder)
        return ended(0)

    monkeypatch.setattr(background, "_start", start)
    monkeypatch.setattr(background, "load_library", lambda _: jobs[-1].module)
    return jobs


@pytest.fixture
def sleeping():
    """A process that ends only when it is killed."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def write_code(folder):
    folder.mkdir(parents=True)
    (folder / "code.so").write_bytes(bytes(64))
    (folder / background.DIGEST).write_text(background._digest(folder))


def ended(code, text=""):
    return SimpleNamespace(poll=lambda: code, returncode=code, communicate=lambda: (text, None), kill=lambda: None)


def small_classifier():
    return classifier(net=nn.Linear(3, 2))


def on_a_classifier(**settings):
    model = small_classifier()
    return Graphed(model, AutoRadial(model), TermsELBO(), compile_now=None, **settings)


def modes_of(loss, steps):
    modes = []
    for _ in range(steps):
        loss((X, Y))
        modes.append(loss.latest.mode)
    return modes


def wait_until(is_done):
    limit = time.monotonic() + SECONDS
    while not is_done():
        assert time.monotonic() < limit
        time.sleep(0.05)


def reasons_of(loss):
    return loss.graphs.fallback_reasons


# --- real processes


def test_compiled_steps_are_those_of_the_program_in_a_later_run_at_once(compiled_once, second_process, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled_once))
    monkeypatch.setattr(subprocess, "Popen", None)
    loss = on_a_classifier()
    loss((X, Y))
    for seed in range(3):
        pyro.set_rng_seed(seed)
        compiled, gradients = loss((X, Y))
        assert loss.latest.mode == Mode.COMPILED
        noise = torch.get_rng_state()
        pyro.set_rng_seed(seed)
        expected = TermsELBO()(loss.model, loss.guide)(X, Y)
        assert torch.equal(torch.get_rng_state(), noise)
        torch.testing.assert_close(compiled, expected.detach(), rtol=1e-4, atol=1e-4)
        expected_gradients = torch.autograd.grad(expected, [parameter for parameter, _ in gradients])
        for (_, gradient), expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-4)


def test_a_later_run_needs_no_inductor_and_a_killed_one_leaves_no_process(compiled_once, second_process):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(compiled_once)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout.readline().split() == [Mode.COMPILED, "False"]
        compiler = int(parent.stdout.readline())
        assert os.getpgid(compiler) == compiler
        assert Path(f"/proc/{compiler}").exists()
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not group_exists(compiler))
    # The folder of its code is the only one.
    wait_until(lambda: len([*(compiled_once / "pyro_radial").iterdir()]) == 1)


def group_exists(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_without_a_compiler_the_graph_runs_as_recorded_and_says_why(second_process, monkeypatch):
    monkeypatch.setenv("CXX", "/no/compiler")
    loss = on_a_classifier()
    assert set(modes_of(loss, USES_BEFORE_COMPILING)) == {Mode.RECORDED}
    (process,) = background._processes.values()
    wait_until(lambda: process.poll() is not None)
    with pytest.warns(UserWarning, match=r"a graph is not compiled: its compilation failed with 1: .*[cC]ompiler"):
        loss((X, Y))
    (reason,) = reasons_of(loss)
    assert "compilation failed" in reason
    assert set(modes_of(loss, 3)) == {Mode.RECORDED}
    assert not [*second_process.iterdir()]


# --- when a process starts


def test_a_process_starts_at_the_tenth_use(second_process, started):
    loss = on_a_classifier()
    modes = modes_of(loss, USES_BEFORE_COMPILING)
    assert set(modes) == {Mode.RECORDED}
    assert len(started) == 1
    assert modes_of(loss, 2) == [Mode.COMPILED] * 2
    assert len(started) == 1
    assert not reasons_of(loss)


def test_a_graph_with_few_uses_is_not_compiled(second_process, started):
    modes_of(on_a_classifier(), USES_BEFORE_COMPILING - 1)
    assert not started


@pytest.mark.parametrize("setting", ["one core", "compile=False", "frozen program"])
def test_no_process_starts(second_process, started, monkeypatch, setting):
    if setting == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    elif setting == "frozen program":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    loss = on_a_classifier(compile=setting != "compile=False")
    assert set(modes_of(loss, 30)) == {Mode.RECORDED}
    assert not started
    assert not reasons_of(loss)


def test_processes_take_turns(second_process, started, sleeping):
    background._processes[Path("other")] = sleeping
    loss = on_a_classifier()
    modes_of(loss, 30)
    assert not started
    sleeping.kill()
    sleeping.wait()
    modes_of(loss, 1)
    assert len(started) == 1


def test_a_graph_that_is_recorded_again_waits_for_the_same_process(second_process, started, sleeping, monkeypatch):
    monkeypatch.setattr(background, "_start", lambda job: started.append(job) or sleeping)
    for _ in range(2):
        pyro.clear_param_store()
        assert set(modes_of(on_a_classifier(), 20)) == {Mode.RECORDED}
    assert len(started) == 1


def test_fit_compiles_before_its_first_step_and_nothing_in_the_background(recorded_only, monkeypatch):
    monkeypatch.setattr(BackgroundCode, "__init__", None)
    model = classifier(num_data=len(X), net=nn.Linear(3, 2))
    fit(model, AutoRadial(model), (X, Y), epochs=20, batch_size=4, progress=False, options=FitOptions(compile=True))
    assert len(recorded_only) == 1


# --- what a folder of code is for


def test_code_is_for_the_same_graph_settings_and_machine(second_process, monkeypatch):
    loss = on_a_classifier()
    loss((X, Y))
    (program,) = loss.programs
    tensors = [*program.constants, torch.ones(()), X, Y]

    def folder(**options):
        return BackgroundCode(program.graph, tensors, options)._jobs[0].folder

    usual = folder()
    assert usual.parent == second_process
    assert folder() == usual
    folders = [usual, folder(max_autotune=True)]
    torch.set_num_threads(2)
    folders.append(folder())
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    folders.append(folder())
    torch.set_default_dtype(torch.float32)
    assert folder() == usual
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True}, raising=False)
    folders.append(folder())
    monkeypatch.setattr(torch, "__version__", "2.99")
    folders.append(folder())
    tensors[-2] = X.double()
    folders.append(folder())
    assert len({*folders}) == len(folders)


# --- bad input: training goes on, with one warning that says what is lost


@pytest.mark.parametrize("damage", ["truncated", "no digest", "not a folder"])
def test_damaged_code_is_compiled_again(second_process, started, damage):
    modes_of(on_a_classifier(), USES_BEFORE_COMPILING)
    (job,) = started
    background._processes.clear()
    if damage == "truncated":
        (job.folder / "code.so").write_bytes(bytes(63))
    elif damage == "no digest":
        (job.folder / background.DIGEST).unlink()
    else:
        shutil.rmtree(job.folder)
    pyro.clear_param_store()
    loss = on_a_classifier()
    assert set(modes_of(loss, USES_BEFORE_COMPILING)) == {Mode.RECORDED}
    assert len(started) == 2
    assert modes_of(loss, 1) == [Mode.COMPILED]
    assert not reasons_of(loss)


def lambda_in_options(monkeypatch):
    return {"joint_graph_constant_folding": lambda: None}


def no_space(monkeypatch):
    monkeypatch.setattr(background, "TemporaryFile", raising(OSError(28, "No space left on device")))


def no_python(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")


def failed(monkeypatch):
    monkeypatch.setattr(background, "_start", lambda _: ended(1, "OSError: No space left on device\n"))


def killed(monkeypatch):
    monkeypatch.setattr(background, "_start", lambda _: ended(-9))


def unloadable(monkeypatch):
    def start(job):
        write_code(job.folder)
        return ended(0)

    monkeypatch.setattr(background, "_start", start)
    monkeypatch.setattr(background, "load_library", raising(RuntimeError("failed to map\nmore")))


def raising(error):
    def function(*_, **__):
        raise error

    return function


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda_in_options, "pickle"),
        (no_space, "No space left"),
        (no_python, "No such file"),
        (failed, "No space left"),
        (killed, "its compilation failed with -9"),
        (unloadable, "its code cannot be loaded: RuntimeError: failed to map"),
    ],
)
def test_training_goes_on_with_one_warning(second_process, monkeypatch, fault, reason):
    loss = on_a_classifier(options=fault(monkeypatch))
    with pytest.warns(UserWarning, match="^a graph is not compiled: ") as warned:
        modes = modes_of(loss, 20)
    assert set(modes) == {Mode.RECORDED}
    assert len(warned) == 1
    assert reason in str(warned[0].message)
    assert reasons_of(loss) == [str(warned[0].message)]
    pyro.set_rng_seed(0)
    replayed, _ = loss((X, Y))
    pyro.set_rng_seed(0)
    torch.testing.assert_close(replayed, TermsELBO()(loss.model, loss.guide)(X, Y).detach())


def test_a_user_reads_the_reason(second_process, monkeypatch):
    failed(monkeypatch)
    model = small_classifier()
    svi = CompiledSVI(model, AutoRadial(model), partial(torch.optim.Adam, lr=0.01), TermsELBO())
    for _ in range(USES_BEFORE_COMPILING):
        svi.step(X, Y)
    with pytest.warns(UserWarning, match="No space left"):
        svi.step(X, Y)
    assert "No space left" in svi.eager_reasons[0]


@pytest.mark.parametrize("num_wrong", [1, 2])
def test_wrong_code_is_not_used(second_process, started, monkeypatch, num_wrong):
    def load(_):
        module = started[-1].module
        if len(started) > num_wrong:
            return module
        return lambda *tensors: [1.1 * out if out.is_floating_point() else out for out in module(*tensors)]

    monkeypatch.setattr(background, "load_library", load)
    loss = on_a_classifier()
    if num_wrong == 1:
        modes = modes_of(loss, 20)
        assert modes[-1] == Mode.COMPILED
        assert not reasons_of(loss)
    else:
        with pytest.warns(UserWarning, match="gives other numbers than the graph"):
            modes_of(loss, 20)
    assert [job.options.get("cpp.simdlen") for job in started] == [None, 1]


def test_a_forked_process_trains_on(second_process, sleeping, monkeypatch):
    monkeypatch.setattr(background, "_start", lambda _: sleeping)
    loss = on_a_classifier()
    modes_of(loss, USES_BEFORE_COMPILING)
    child = os.fork()
    if not child:
        # Anything else, such as an error or a wait for the process, ends in another way.
        os._exit(7 if set(modes_of(loss, 3)) == {Mode.RECORDED} else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert sleeping.poll() is None


# --- the second process


def run_job(monkeypatch, job, compile_library):
    """Run the second process's function here."""
    monkeypatch.setattr(background, "compile_library", compile_library)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=BytesIO(pickle.dumps(job))))
    compile_job()


def test_a_job_that_fails_says_why_and_leaves_nothing(second_process, started, monkeypatch, capsys):
    modes_of(on_a_classifier(), USES_BEFORE_COMPILING)
    (job,) = started
    shutil.rmtree(job.folder)
    with pytest.raises(SystemExit, match="1"):
        run_job(monkeypatch, job, raising(OSError(28, "No space left on device")))
    assert capsys.readouterr().out == "OSError: [Errno 28] No space left on device\n"
    assert not [*second_process.iterdir()]


def test_two_trainings_may_compile_the_same_graph(second_process, started, monkeypatch, capsys):
    def compile_library(module, examples, options, folder):
        assert [example.shape for example in examples] == [metadata.shape for metadata in job.inputs]
        (folder / "code.so").write_bytes(bytes(128))

    loss = on_a_classifier()
    modes_of(loss, USES_BEFORE_COMPILING)
    (job,) = started
    before = background._digest(job.folder)
    # The other training is ready first, so this one's code is not kept, and the process fails.
    with pytest.raises(SystemExit):
        run_job(monkeypatch, job, compile_library)
    assert [*second_process.iterdir()] == [job.folder]
    assert background._digest(job.folder) == before
    background._processes[job.folder] = ended(1, capsys.readouterr().out)
    assert modes_of(loss, 1) == [Mode.COMPILED]
    shutil.rmtree(job.folder)
    run_job(monkeypatch, job, compile_library)
    assert (job.folder / background.DIGEST).read_text() == background._digest(job.folder) != before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual net with batch norm", "AutoMultivariateNormal, Trace_ELBO"])
def test_compiled_steps_are_those_of_the_program(name, second_process):
    """One changes buffers, the other one has operations that inductor leaves to torch."""
    program = prepared(PROGRAMS[name])
    svi = compiled_svi(program)
    take_steps(svi, program, USES_BEFORE_COMPILING)
    wait_until(lambda: all(process.poll() is not None for process in background._processes.values()))
    program = prepared(PROGRAMS[name])
    expected = take_steps(eager_svi(program), program)
    program = prepared(PROGRAMS[name])
    svi = compiled_svi(program)
    assert_same_steps(take_steps(svi, program), expected, 1e-3)
    assert svi._latest.mode == Mode.COMPILED
