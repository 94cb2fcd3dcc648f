# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints: whole or not there, and refused where they do not belong."""

import warnings
from contextlib import nullcontext
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.gp.kernels import RBF
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import Dataset, TensorDataset

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FunctionalELBO, SupervisedModel, TermsELBO, fit
from pyro_radial.functional import GaussianKL, GaussianProcess
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.training import checkpoint as checkpoint_module
from pyro_radial.infer.training.checkpoint import Checkpoint, copy_state
from pyro_radial.nn import likelihoods
from tests.helpers.damage import flip_bits
from tests.helpers.runs import trained

ROWS = 12


def data(rows=ROWS):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(3))
    return x, x.sum(-1, keepdim=True)


def problem(width=4, guide=AutoRadial, likelihood=likelihoods.Gaussian, activation=nn.Tanh, prior=1.0, dtype=None):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, width), activation(), nn.Linear(width, 1)).to(dtype)
    model = SupervisedModel(BayesianModule(net, dist.Normal(0.0, prior)), likelihood())
    return model, guide(model)


def train(path, pair=None, epochs=1, rows=ROWS, **kwargs):
    settings = {"batch_size": 6, "seed": 0, "data": data(rows), **kwargs}
    return trained(*(pair or problem()), epochs=epochs, checkpoint=path, **settings)[1]


def test_a_checkpoint_of_fit_is_read_with_weights_only_and_holds_what_it_says(tmp_path):
    path = tmp_path / "deep" / "folder" / "run.pt"
    model, guide = problem()
    result = train(path, (model, guide), validation=data(4))
    state = torch.load(path, weights_only=True)
    assert state["epoch"] == 1
    assert state["history"] == result.history
    assert all(torch.equal(value, guide.state_dict()[name]) for name, value in state["guide"].items())
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"]


@pytest.mark.parametrize("broken", ["os.replace", "os.fsync", "torch.save"])
def test_a_write_that_fails_leaves_the_old_checkpoint(broken, tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    Checkpoint(path).save({"epoch": 1})

    def fail(*args):
        if broken == "torch.save":
            args[1].write(b"half")
        raise OSError("disk full")

    owner, name = broken.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(checkpoint_module, owner), name, fail)
        with pytest.raises(OSError, match="disk full"):
            Checkpoint(path).save({"epoch": 2})
    assert Checkpoint(path).load()["epoch"] == 1
    Checkpoint(path).save({"epoch": 3})
    assert Checkpoint(path).load()["epoch"] == 3
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def truncated(path):
    path.write_bytes(path.read_bytes()[:-200])


def shortened_to(size):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def text(path):
    path.write_text("loss: 0.5\n")


def foreign(path):
    torch.save({"state_dict": {}}, path)


def bare_tensor(path):
    torch.save(torch.zeros(3), path)


def code(path):
    torch.save({"format": 1, "model": nn.Linear(1, 1)}, path)


@pytest.mark.parametrize(
    "spoil",
    [truncated, shortened_to(0), shortened_to(3), shortened_to(500), text, foreign, bare_tensor, code],
    ids=["truncated", "empty", "3 bytes", "500 bytes", "text", "foreign", "bare tensor", "pickled module"],
)
def test_a_file_that_is_no_checkpoint_is_named(spoil, tmp_path):
    path = tmp_path / "run.pt"
    train(path)
    spoil(path)
    with pytest.raises(ValueError, match=r"checkpoint .*run\.pt is (damaged|not from)"):
        train(path, epochs=2)


def test_a_flipped_bit_is_refused_and_changes_nothing(tmp_path):
    outcomes = flip_bits(tmp_path, count=40)
    assert outcomes["named"] == 40
    assert outcomes["refused"] == 40


def test_a_checkpoint_that_lacks_what_a_run_needs_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    Checkpoint(path).save({"epoch": 1})
    with pytest.raises(ValueError, match=r"checkpoint .*run\.pt is not from this version of this function: it lacks"):
        train(path)


def only_weights(model):
    return AutoRadial(poutine.block(model, hide=["0.bias"]))


def gaussian_with_a_trained_scale(**kwargs):
    return likelihoods.Gaussian(learn_scale=True, **kwargs)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (
            partial(problem, width=5),
            r"another guide: 6 entries differ \(locs.0.bias_unconstrained: here \(5,\) torch.float32,",
        ),
        (partial(problem, guide=AutoDelta), "another guide"),
        (partial(problem, guide=only_weights), r"another guide: 2 entries differ \(locs.0.bias.*here None"),
        (partial(problem, guide=AutoMeanField), "made with guide='AutoRadial', this run has guide='AutoMeanField'"),
        (partial(problem, likelihood=gaussian_with_a_trained_scale), "another model: 1 entries differ"),
        (partial(problem, likelihood=likelihoods.Poisson), "made with likelihood='Gaussian', .* likelihood='Poisson'"),
    ],
)
def test_a_checkpoint_of_another_model_or_guide_is_refused_and_changes_nothing(pair, message, tmp_path):
    path = tmp_path / "run.pt"
    train(path)
    model, guide = pair()
    x, y = data()
    made = guide(x, y.abs().round())
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    with pytest.raises(ValueError, match=rf"checkpoint .*run\.pt .*{message}"):
        fit(model, guide, (x, y.abs().round()), epochs=2, checkpoint=path, batch_size=6, seed=0, progress=False)
    assert made
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 4}, "batch_size=6, this run has batch_size=4"),
        ({"seed": 1}, "seed=0, this run has seed=1"),
        ({"accumulate": 2}, "accumulate=1, this run has accumulate=2"),
        ({"mean_only_epochs": 1}, "mean_only_epochs=0, this run has mean_only_epochs=1"),
        ({"rows": 11}, "num_data=12, this run has num_data=11"),
        ({"validation": data(4)}, "validation=False, this run has validation=True"),
        ({"optim": partial(SGD, lr=0.1)}, r"optimizer=.Adam\(.*this run has optimizer=.SGD"),
        ({"optim": partial(Adam, betas=(0.8, 0.9))}, r"'betas': \(0.9, 0.999\).*this run has .*'betas': \(0.8, 0.9\)"),
        (
            {"loss": TermsELBO(kl_weight=0.5)},
            r"loss settings\.kl_weight=1.0, .*kl_weight=0.5",
        ),
        (
            {"loss": TermsELBO(num_particles=2)},
            r"loss settings\.num_particles=1, .*num_particles=2",
        ),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_by_their_name(settings, message, tmp_path):
    path = tmp_path / "run.pt"
    train(path)
    pair = problem()
    pair[1].setup(*data())
    before = {name: value.clone() for name, value in pair[1].state_dict().items()}
    with pytest.raises(ValueError, match=rf"checkpoint .*run\.pt was made with .*{message}"):
        train(path, pair, epochs=2, **settings)
    assert all(torch.equal(value, before[name]) for name, value in pair[1].state_dict().items())


def relabeled():
    x, y = data()
    return x, y.index_fill(0, torch.tensor([7]), 0.5)


def kernel(length):
    return GaussianProcess(RBF(3, lengthscale=torch.tensor(length)))


def functional(length):
    return FunctionalELBO(kernel(length), divergence=GaussianKL(), num_functions=30)


def tight(**kwargs):
    return likelihoods.Gaussian(scale=0.1, **kwargs)


def warm_up(step, steps):
    return min(1.0, step / steps)


class Student(families.LocScale):
    """A family of a user's own, with a setting that no parameter shows."""

    def __init__(self, df):
        super().__init__()
        self.df = df

    def distribution(self, site, *, loc, scale):
        return dist.StudentT(self.df, loc, scale, validate_args=False).to_event(site.event_dim)


def one_of(family):
    return partial(AutoRadial, families={"0.weight": family})


OTHERS = {
    "family": (
        {},
        {"guide": one_of(families.Normal())},
        r"families\.0\.weight='Radial', this run has families\.0\.weight='Normal'",
    ),
    "event of a radius": (
        {},
        {"guide": partial(AutoRadial, event_dim=1)},
        r"families\.0\.weight\.event_dim=None, .*=1",
    ),
    "setting of a family": ({"guide": one_of(Student(3.0))}, {"guide": one_of(Student(4.0))}, r"families.*\.df=3\.0"),
    "labels": ({}, {"pair": relabeled}, r"data\.y="),
    "inputs": ({}, {"pair": lambda: (data()[0] * 2, data()[1])}, r"data\.x="),
    "dtype of the data": ({}, {"pair": lambda: (data()[0], data()[1].double())}, r"data\.y='torch.float32"),
    "validation": ({"validation": data(4)}, {"validation": (data(4)[0], data(5)[1][1:])}, r"validation data\.y="),
    "dataset": (
        {"pair": lambda: TensorDataset(*data())},
        {"pair": lambda: TensorDataset(*relabeled())},
        r"data\.y=",
    ),
    "prior scale": (
        {},
        {"prior": 2.0},
        r"prior\.0\.weight\.scale='torch.float32 \(4, 3\) of 1.0', this run has .* of 2.0'",
    ),
    "likelihood scale": ({}, {"likelihood": tight}, r"likelihood\.scale=1.0, this run has .*=0.1"),
    "kernel": ({"loss": lambda: functional(1.0)}, {"loss": lambda: functional(2.0)}, r"loss settings\.state\..*length"),
    "schedule": (
        {"loss": lambda: TermsELBO(kl_weight=partial(warm_up, steps=7))},
        {"loss": lambda: TermsELBO(kl_weight=partial(warm_up, steps=70))},
        r"loss settings\.kl_weight\.steps=7",
    ),
    "dtype of the model": (
        {},
        {"dtype": torch.float64},
        r"another guide.*here .* torch.float64, there .* torch.float32",
    ),
}


def run_of(path, epochs, **kwargs):
    """One run, and the model and guide that it trained or refused to train."""
    kwargs = {"pair": data, **kwargs}
    making = {
        name: kwargs.pop(name) for name in ("prior", "likelihood", "activation", "dtype", "guide") if name in kwargs
    }
    model, guide = problem(**making)
    rows, settings = kwargs.pop("pair")(), {"batch_size": 6, "seed": 0, "progress": False, **kwargs}
    if "dtype" in making:
        rows = tuple(part.to(making["dtype"]) for part in rows)
    if "loss" in settings:
        settings["loss"] = settings["loss"]()
    guide.setup(*rows if isinstance(rows, tuple) else data(2))
    before = copy_state(guide.state_dict())
    with warnings.catch_warnings():
        # Of eleven functions at a dozen points, which the estimate is fine with.
        warnings.simplefilter("ignore")
        try:
            fit(model, guide, rows, epochs=epochs, checkpoint=path, **settings)
        except ValueError:
            assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())
            raise


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(other, tmp_path):
    path = tmp_path / "run.pt"
    first, changed, message = OTHERS[other]
    run_of(path, 1, **first)
    with pytest.raises(ValueError, match=rf"checkpoint .*run\.pt .*{message}"):
        run_of(path, 2, **{**first, **changed})
    run_of(path, 2, **first)
    assert Checkpoint(path).load()["epoch"] == 2


def test_a_change_of_code_is_not_noticed(tmp_path):
    path = tmp_path / "run.pt"
    run_of(path, 1)
    run_of(path, 2, activation=nn.ReLU)
    assert Checkpoint(path).load()["epoch"] == 2


class Items(Dataset):
    """A data set that may have a fingerprint."""

    def __init__(self, shift=0.0, rows=ROWS, fingerprint=None):
        self.x, self.y = data(rows)
        self.y = self.y + shift
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Others(Items):
    pass


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Items(), Items(), None),
        (Items(), Items(rows=11), r"num_data=12, this run has num_data=11"),
        (Items(), Others(), r"data\.class='Items', this run has data\.class='Others'"),
        (Items(fingerprint="a"), Items(fingerprint="a", shift=1.0), None),
        (Items(fingerprint="a"), Items(fingerprint=lambda: "b"), r"data\.fingerprint='a', this run has .*'b'"),
    ],
)
def test_a_dataset_is_known_by_its_class_its_length_and_its_own_fingerprint(first, second, message, tmp_path):
    path = tmp_path / "run.pt"
    run_of(path, 1, pair=lambda: first)
    expected = pytest.raises(ValueError, match=rf"run\.pt was made with {message}") if message else nullcontext()
    with expected:
        run_of(path, 2, pair=lambda: second)


def test_what_could_not_be_read_back_is_refused_before_it_replaces_a_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    Checkpoint(path).save({"epoch": 1})
    with pytest.raises(ValueError, match=r"checkpoint .*run\.pt can hold only tensors .*get_extra_state"):
        Checkpoint(path).save({"epoch": 2, "model": {"_extra_state": nn.ReLU()}})
    assert Checkpoint(path).load()["epoch"] == 1


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(3,), (1,), (4, 4)])
def test_an_optimizer_state_of_another_shape_is_refused_and_changes_nothing(shape, fused, tmp_path):
    """torch's fused steps would write past its end, also where only the file says that the step is fused."""
    path, optim = tmp_path / "run.pt", {"optim": partial(Adam, lr=0.01, fused=fused)}
    train(path, **optim)
    state = Checkpoint(path).load()
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(shape)
    state["optimizer"]["param_groups"][0]["fused"] = True
    Checkpoint(path).save(state)
    model, guide = problem()
    guide.setup(*data())
    before = copy_state(guide.state_dict())
    with pytest.raises(ValueError, match=r"another optimizer: exp_avg of parameter 0 must have shape \("):
        train(path, (model, guide), epochs=2, **optim)
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())


def test_an_optimizer_state_of_other_strides_resumes_as_the_same_values(tmp_path):
    states = []
    for changed in (False, True):
        path = tmp_path / f"{changed}.pt"
        train(path)
        if changed:
            state = Checkpoint(path).load()
            for entries in state["optimizer"]["state"].values():
                entries["exp_avg"] = entries["exp_avg"].t().contiguous().t()
            Checkpoint(path).save(state)
        model, guide = problem()
        train(path, (model, guide), epochs=2)
        states.append(guide.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
