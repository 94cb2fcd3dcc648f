# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A checkpoint is whole or not there, and refused where it does not belong."""

import errno
import os
import resource
from functools import partial

import numpy as np
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from pyro_radial import AutoMeanField, TermsELBO
from pyro_radial.infer.training import checkpoint as checkpoint_module
from pyro_radial.infer.training import training_run
from pyro_radial.infer.training.checkpoint import Checkpoint, copy_state, plain_settings
from pyro_radial.nn import likelihoods
from tests.helpers.kills import flip_bits
from tests.helpers.runs import ROWS, assert_same, data, problem, regression, state_of, targets, trained


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


def checkpoint(path):
    return Checkpoint(path, training_run.CHECKPOINT_FORMAT)


def files(path):
    return [file.name for file in path.parent.iterdir()]


# ------------------------------------------------------------------------------------------------------- writing


def test_a_checkpoint_of_fit_is_read_with_weights_only_and_holds_what_it_says(tmp_path):
    path = tmp_path / "deep" / "folder" / "run.pt"
    model, guide = problem()
    _, result = trained(model, guide, epochs=1, checkpoint=path, validation=data(4))
    state = torch.load(path, weights_only=True)
    assert state["epoch"] == 1
    assert state["history"] == result.history
    assert_same(state["guide"], dict(guide.state_dict()))
    assert files(path) == ["run.pt"]


@pytest.mark.parametrize("call", ["os.replace", "os.fsync", "torch.save"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt("disk full")])
def test_a_write_that_fails_leaves_the_old_checkpoint(call, error, path, monkeypatch):
    checkpoint(path).save({"epoch": 1})

    def fail(*args):
        raise error

    owner, name = call.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(checkpoint_module, owner), name, fail)
        with pytest.raises(type(error), match="disk full"):
            checkpoint(path).save({"epoch": 2})
    assert checkpoint(path).load()["epoch"] == 1
    assert files(path) == ["run.pt"]
    # What a kill during a write leaves does not disturb the next one.
    path.with_name("run.pt.partial").write_bytes(b"half a file")
    checkpoint(path).save({"epoch": 3})
    assert checkpoint(path).load()["epoch"] == 3
    assert files(path) == ["run.pt"]


def test_a_full_disk_is_an_error_of_the_operating_system_with_the_name_of_the_file(path):
    checkpoint(path).save({"epoch": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"checkpoint cannot be written: File too large: '.*run\.pt'") as caught:
            checkpoint(path).save({"epoch": 2, "weight": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert checkpoint(path).load()["epoch"] == 1
    assert files(path) == ["run.pt"]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", ""])
def test_a_path_that_is_no_file_is_refused_before_anything_is_set_up(kind, tmp_path):
    path = tmp_path / kind if kind else ""
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "link":
        path.symlink_to(tmp_path / "run.pt")
    model, guide = problem()
    with pytest.raises(ValueError, match=r"checkpoint must be a regular file, got .*, a folder, link or pipe"):
        trained(model, guide, checkpoint=path)
    assert guide.prototype_trace is None


class Rate(float):
    """A number of a class that no checkpoint can hold."""


def test_what_cannot_be_written_or_read_back_is_found_before_the_first_step(path, monkeypatch):
    monkeypatch.setattr(training_run.TrainingRun, "step", lambda self: pytest.fail("a step"))
    with pytest.raises(ValueError, match=r"run\.pt can hold only tensors and plain values; get_extra_state"):
        trained(*problem(), optim=partial(Adam, lr=Rate(1e-3)), checkpoint=path)

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        trained(*problem(), checkpoint=path)
    assert not path.exists()


def test_numbers_of_numpy_in_the_optimizer_are_written_as_they_are_read(path):
    options = {"optim": partial(Adam, lr=np.float64(0.01), betas=(np.float64(0.5), 0.9))}
    expected, _ = trained(*problem(), **options)
    trained(*problem(), epochs=1, checkpoint=path, **options)
    assert_same(trained(*problem(), checkpoint=path, **options)[0], expected)


# ------------------------------------------------------------------------------------------------------- damage


def shortened_to(size):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


DAMAGE = {
    "truncated": shortened_to(-200),
    "empty": shortened_to(0),
    "3 bytes": shortened_to(3),
    "text": lambda path: path.write_text("loss: 0.5\n"),
    "foreign": lambda path: torch.save({"state_dict": {}}, path),
    "pickled module": lambda path: torch.save({"model": nn.Linear(1, 1)}, path),
    "of a stream": lambda path: Checkpoint(path, "train_stream 5").save({"epoch": 1}),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_is_no_checkpoint_is_named(kind, path):
    checkpoint(path).save({"weight": torch.zeros(100)})
    DAMAGE[kind](path)
    with pytest.raises(ValueError, match=r"checkpoint .*run\.pt is (damaged|not from this version of this function)"):
        checkpoint(path).load()


def test_a_flipped_bit_is_refused_and_changes_nothing(tmp_path):
    assert flip_bits(tmp_path, count=8) == {"refused": 8, "named": 8}


# ------------------------------------------------------------------------------------------------------- other runs


def learned_scale():
    return problem(likelihood=likelihoods.Gaussian(num_data=ROWS, learn_scale=True), guide=AutoMeanField)


def in_double():
    model, guide = regression()
    return model.double(), guide.double()


OTHER_MODELS = {
    "guide": (partial(regression, AutoDelta), r"guide: .* entries differ \(0.bias_unconstrained: here \(6,\) torch"),
    "dtype": (in_double, r"guide: .*here \(.*\) torch.float64, there \(.*\) torch.float32"),
    "parameter of the likelihood": (learned_scale, r"model: 1 entries differ \(likelihood"),
}


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_a_checkpoint_of_another_model_or_guide_is_refused_and_changes_nothing(kind, path):
    make, message = OTHER_MODELS[kind]
    trained(*regression(), data=targets(), epochs=1, checkpoint=path)
    model, guide = make()
    rows = targets()
    if kind == "dtype":
        rows = tuple(part.double() for part in rows)
    guide(*rows)
    before = copy_state(guide.state_dict())
    with pytest.raises(ValueError, match=rf"checkpoint .*run\.pt is from another {message}"):
        trained(model, guide, data=rows, epochs=2, checkpoint=path)
    assert_same(dict(guide.state_dict()), before)


OTHER_SETTINGS = {
    "batch_size": ({"batch_size": 4}, "batch_size=6, this run has batch_size=4"),
    "seed": ({"seed": 1}, "seed=5, this run has seed=1"),
    "accumulate": ({"accumulate": 2}, "accumulate=1, this run has accumulate=2"),
    "mean_only_epochs": ({"mean_only_epochs": 1}, "mean_only_epochs=0, this run has mean_only_epochs=1"),
    "clip_norm": ({"clip_norm": 1.0}, "clip_norm=None, this run has clip_norm=1.0"),
    "autocast": ({"autocast": torch.bfloat16}, "autocast='None', this run has autocast='torch.bfloat16'"),
    "rows": ({"data": targets(11), "num_data": ROWS}, "rows=20, this run has rows=11"),
    "validation": ({"validation": targets(4)}, "validation=False, this run has validation=True"),
    "loss": ({"loss": TermsELBO(kl_weight=0.5)}, r"loss\.kl_weight=1.0, this run has loss\.kl_weight=0.5"),
    "particles": ({"loss": TermsELBO(2)}, r"loss\.num_particles=1, this run has loss\.num_particles=2"),
    "optimizer": ({"optim": partial(SGD, lr=0.1)}, "optimizer='Adam', this run has optimizer='SGD'"),
    "betas": ({"optim": partial(Adam, betas=(0.8, 0.9))}, r"optimizer\.betas=\(0.9, 0.999\), .*=\(0.8, 0.9\)"),
    "groups": (
        {"optim": lambda ps: Adam([{"params": ps[:2]}, {"params": ps[2:]}], fused=True)},
        r"sizes of parameter groups=\(8,\), this run has sizes of parameter groups=\(2, 6\)",
    ),
    "scheduler": ({"scheduler": partial(StepLR, step_size=1)}, "scheduler='NoneType', this run has scheduler='StepLR'"),
}


@pytest.mark.parametrize("setting", OTHER_SETTINGS)
def test_a_checkpoint_of_other_settings_is_refused_by_their_name(setting, path):
    settings, message = OTHER_SETTINGS[setting]
    trained(*regression(), data=targets(), epochs=1, checkpoint=path)
    model, guide = regression()
    guide.setup(*targets())
    before = state_of(model, guide)
    with pytest.raises(ValueError, match=rf"checkpoint .*run\.pt was made with .*{message}"):
        trained(model, guide, **{"data": targets(), "epochs": 2, "checkpoint": path, **settings})
    assert_same(state_of(model, guide), before)


def test_another_likelihood_or_guide_of_the_same_parameters_is_refused_by_its_name(path):
    trained(*problem(), epochs=1, checkpoint=path)
    with pytest.raises(ValueError, match="made with guide='AutoRadial', this run has guide='AutoMeanField'"):
        trained(*problem(guide=AutoMeanField), epochs=2, checkpoint=path)
    with pytest.raises(ValueError, match="made with likelihood='Categorical', this run has likelihood='Gaussian'"):
        trained(*problem(likelihood=likelihoods.Gaussian(num_data=ROWS)), data=targets(), epochs=2, checkpoint=path)


def test_settings_are_compared_if_they_are_plain():
    settings = {"lr": np.float64(0.1), "name": None, "betas": (0.9, 0.5), "tensor": torch.ones(2), "call": print}
    assert plain_settings(settings, prefix="a.") == {"a.lr": 0.1, "a.name": None, "a.betas": (0.9, 0.5)}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(3,), (4, 4)])
def test_an_optimizer_state_of_another_shape_is_refused_and_changes_nothing(shape, fused, path):
    """torch's fused steps would write past its end, also where only the file says that the step is fused."""
    optim = partial(Adam, lr=0.01, fused=fused)
    trained(*problem(), epochs=1, checkpoint=path, optim=optim)
    state = checkpoint(path).load()
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(shape)
    state["optimizer"]["param_groups"][0]["fused"] = True
    checkpoint(path).save(state)
    model, guide = problem()
    guide.setup(*data())
    before = state_of(model, guide)
    with pytest.raises(ValueError, match=r"another optimizer: exp_avg of parameter 0 must have shape \("):
        trained(model, guide, epochs=2, checkpoint=path, optim=optim)
    assert_same(state_of(model, guide), before)


def test_an_optimizer_state_of_other_strides_resumes_as_the_same_values(path):
    trained(*problem(), epochs=1, checkpoint=path)
    state = checkpoint(path).load()
    expected, _ = trained(*problem(), epochs=2, checkpoint=path)
    for entries in state["optimizer"]["state"].values():
        entries["exp_avg"] = entries["exp_avg"].t().contiguous().t()
    checkpoint(path).save(state)
    assert_same(trained(*problem(), epochs=2, checkpoint=path)[0], expected)
