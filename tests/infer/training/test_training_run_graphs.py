# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

from functools import partial
from itertools import pairwise

import pyro
import pytest
import torch
from torch import nn
from torch.optim import SGD

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.infer.compiler import inductor as code
from pyro_radial.nn import likelihoods
from tests.helpers.devices import CountHostReads
from tests.helpers.runs import assert_same, data, killed, problem, trained

# Four batches of six, so a run records one graph.
ROWS = 24


def final_state(rows=ROWS, net="plain", **settings):
    pyro.set_rng_seed(0)
    model, guide = problem(net, likelihood=likelihoods.Categorical())
    _, result = trained(model, guide, data=data(rows), **settings)
    return result.history, {**dict(guide.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize(
    "settings",
    [
        {"net": "batch norm", "rows": 23},
        {"accumulate": 3, "loss": partial(TermsELBO, kl_weight=lambda step: min(1.0, step / 4))},
        {"loss": partial(TermsELBO, 2), "clip_norm": 5.0, "optim": partial(SGD, lr=1e-4)},
        {
            "mean_only_epochs": 1,
            "epochs": 2,
            "validation": data(7),
            "optim": pyro.optim.SGD(lambda name: {"lr": 2e-4 if "scales" in name else 1e-4}),
        },
        {"autocast": torch.bfloat16, "optim": partial(SGD, lr=1e-4)},
    ],
    ids=[
        "batch norm, a smaller batch",
        "in parts with a weight",
        "particles, clipped",
        "means first, validation, rates",
        "autocast",
    ],
)
def test_a_run_on_graphs_is_the_run_without(settings, recorded_only):
    outcomes = []
    for compile in (False, True):
        arguments = {name: value() if name == "loss" else value for name, value in settings.items()}
        outcomes.append(final_state(compile=compile, **arguments))
    (eager_history, eager_state), (history, state) = outcomes
    assert recorded_only
    for record, eager_record in zip(history, eager_history, strict=True):
        assert record == pytest.approx(eager_record, rel=1e-4)
    for name, value in eager_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch_size", [5, 100], ids=["the last batch is smaller", "the only batch is smaller"])
def test_batches_of_the_usual_size_are_compiled(batch_size, recorded_only):
    final_state(rows=23, batch_size=batch_size, compile=True)
    assert len(recorded_only) == 1


def check_killed_run_on_graphs(folder, monkeypatch):
    """Check that a run on graphs that is killed twice ends where an undisturbed one does, whose state is returned."""
    _, undisturbed = final_state(compile=True)
    path = folder / "run.pt"
    for number in (2, 5):
        with killed(monkeypatch, "save", number, "after"):
            final_state(compile=True, checkpoint=path, checkpoint_every=1)
    _, resumed = final_state(compile=True, checkpoint=path, checkpoint_every=1)
    assert_same(undisturbed, resumed)
    return undisturbed


def test_a_resumed_run_compiles_the_graphs_that_an_undisturbed_one_does(tmp_path, monkeypatch):
    # In place of a compiler, which takes long: results a little off tell what is compiled from what is recorded.
    def compiled(module, *_):
        return lambda *values: [out * 1.001 if out.is_floating_point() else out for out in module(*values)]

    monkeypatch.setattr(code, "_code_by_key", {})
    _, recorded = final_state(compile=False)
    monkeypatch.setattr(code, "compile_graph", compiled)
    off = check_killed_run_on_graphs(tmp_path, monkeypatch)
    assert not all(torch.equal(value, off[name]) for name, value in recorded.items())


@pytest.mark.slow
def test_a_killed_run_on_compiled_graphs_ends_where_an_undisturbed_one_does(tmp_path, monkeypatch):
    check_killed_run_on_graphs(tmp_path, monkeypatch)


def test_parameters_of_a_plain_module_are_trained_too(recorded_only):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bnn = BayesianModule(nn.Linear(3, 2))
            self.temperature = nn.Parameter(torch.ones(()))
            self.likelihood = likelihoods.Categorical()

        def forward(self, x, y=None):
            return self.likelihood(self.bnn(x) * self.temperature, y)

    temperatures = []
    for compile in (False, True):
        pyro.set_rng_seed(0)
        model = Model()
        trained(model, AutoRadial(model), data=data(ROWS), compile=compile)
        temperatures.append(float(model.temperature.detach()))
    assert temperatures[0] != 1.0
    assert temperatures[1] == pytest.approx(temperatures[0], rel=1e-3)


def test_a_number_that_is_not_finite_is_named_and_no_step_is_taken(recorded_only):
    class Overflowing(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.relu(x.max() - 50.0).exp()

    x, y = data(ROWS)
    model = SupervisedModel(BayesianModule(Overflowing(3, 2)), likelihoods.Categorical())
    guide = AutoRadial(model)
    x[10] = 500.0
    with pytest.raises(FloatingPointError, match=r"step \d: log-likelihood of site 'y'"):
        trained(model, guide, data=(x, y), compile=True)


@pytest.mark.parametrize("compile", [False, True])
def test_a_step_reads_values_from_the_device_once(compile, recorded_only):
    pyro.set_rng_seed(0)
    model, guide = problem(likelihood=likelihoods.Categorical())
    counts = []

    def count(record):
        counts.append(reads.count)

    with pyro.validation_enabled(False), CountHostReads() as reads:
        trained(model, guide, data=data(20), batch_size=4, epochs=4, compile=compile, callback=count)
    per_epoch = {after - before for before, after in pairwise(counts[1:])}
    # Five steps, and at the end of the epoch a look at each parameter.
    assert max(per_epoch) <= 5 + len(list(guide.parameters()))
