# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import copy
import pickle
from functools import partial
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, CompiledSVI, TermsELBO
from tests.helpers.devices import CountHostReads
from tests.helpers.networks import classifier, data, mlp

X, Y = data(8)
ADAM = partial(torch.optim.Adam, lr=0.01)


def problem():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = classifier(net=mlp())
    guide = AutoRadial(model)
    guide.setup(X, Y)
    pyro.set_rng_seed(1)
    return model, guide


recorded = partial(CompiledSVI, compile=False)


def values(guide):
    return {name: value.detach().clone() for name, value in guide.named_parameters()}


def assert_equal(one, other):
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_step_returns_the_loss_as_a_number_and_an_evaluation_takes_no_step():
    model, guide = problem()
    svi = recorded(model, guide, ADAM, TermsELBO())
    initial = values(guide)
    assert type(svi.evaluate_loss(X, Y)) is float
    assert svi.loss.step == 0
    assert_equal(initial, values(guide))
    assert type(svi.step(X, Y)) is float
    assert svi.loss.step == 1
    assert all(not torch.equal(initial[name], value) for name, value in values(guide).items())


def line(x):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w, 1.0), obs=x)


def guide_of_line(x):
    pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(())), 1.0))


def with_gradients(model, guide, *args):
    loss = Trace_ELBO().differentiable_loss(model, guide, *args)
    loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore:the program runs uncompiled")
def test_a_function_of_the_gradients_takes_the_steps_of_svi():
    outcomes = []
    for make in (SVI, recorded):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        loss = lambda *args: Trace_ELBO().loss(*args)  # noqa: E731
        svi = make(line, guide_of_line, pyro.optim.SGD({"lr": 0.01}), loss, loss_and_grads=with_gradients)
        losses = [float(svi.step(X[:, 0])) for _ in range(3)]
        outcomes.append([*losses, float(svi.evaluate_loss(X[:, 0])), float(pyro.param("loc").detach())])
    assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-5)
    assert not svi.compiled
    assert svi.eager_reasons


def test_other_parts_are_used_from_the_next_step_on():
    svi = recorded(line, guide_of_line, pyro.optim.SGD({"lr": 0.01}), Trace_ELBO())
    svi.step(X[:, 0])
    svi.model, svi.loss = pyro.poutine.scale(line, scale=0.5), TraceMeanField_ELBO()
    svi.optim = pyro.optim.SGD({"lr": 0.0})
    loc = float(pyro.param("loc").detach())
    pyro.set_rng_seed(0)
    loss = svi.step(X[:, 0])
    assert float(pyro.param("loc").detach()) == loc
    pyro.set_rng_seed(0)
    expected = svi.loss.differentiable_loss(svi.model, guide_of_line, X[:, 0])
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert svi.num_graphs == 2


def test_another_optimizer_takes_no_gradients_of_earlier_steps():
    locs = []
    for make in (SVI, recorded):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = make(line, guide_of_line, pyro.optim.SGD({"lr": 0.01}), Trace_ELBO())
        for _ in range(3):
            svi.optim = pyro.optim.SGD({"lr": 0.01})
            svi.step(X[:, 0])
        locs.append(float(pyro.param("loc").detach()))
    assert locs[1] == pytest.approx(locs[0], rel=1e-5)


def test_a_torch_optimizer_trains_networks_that_no_param_statement_names():
    net = nn.Linear(3, 1)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(net(x)[:, 0] + w, 0.5), obs=y)

    state = {name: value.clone() for name, value in net.state_dict().items()}
    outcomes = []
    for make in (SVI, recorded):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        net.load_state_dict(state)
        guide = AutoMeanField(model)
        guide.setup(X, X[:, 0])
        optimizer = torch.optim.SGD([*net.parameters(), *guide.parameters()], lr=1e-4)
        if make is SVI:
            svi = SVI(model, guide, pyro.optim.SGD({"lr": 1e-4}), Trace_ELBO())
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        else:
            svi = recorded(model, guide, optimizer, Trace_ELBO())
        for _ in range(4):
            svi.step(X, X[:, 0])
            if make is SVI:
                # SVI leaves these gradients to the user.
                optimizer.step()
                optimizer.zero_grad()
        outcomes.append([parameter.detach().clone() for parameter in (*net.parameters(), *guide.parameters())])
    torch.testing.assert_close(*outcomes, rtol=1e-5, atol=1e-6)
    assert svi.compiled
    assert svi.optimizer is optimizer


def test_a_scheduler_of_pyros_changes_the_rate():
    optim = pyro.optim.ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.5})
    svi = recorded(line, guide_of_line, optim, TraceMeanField_ELBO())
    for _ in range(3):
        svi.step(X[:, 0])
        optim.step()
    assert [group["lr"] for group in svi.optimizer.param_groups] == pytest.approx([0.0125])
    assert all(group["fused"] for group in svi.optimizer.param_groups)


def test_a_reader_of_pyros_optimizers_is_told_which_optimizer_steps():
    optim = pyro.optim.Adam({"lr": 0.1})
    svi = recorded(line, guide_of_line, optim, TraceMeanField_ELBO())
    svi.step(X[:, 0])
    for read in (optim.get_state, lambda: list(optim.optim_objs.values()), lambda: list(optim.optim_objs)):
        with pytest.warns(UserWarning, match=r"read and change those of svi\.optimizer") as caught:
            assert not read()
        assert caught[0].filename == __file__
    # Pyro's SVI makes its own in the same place.
    SVI(line, guide_of_line, optim, TraceMeanField_ELBO()).step(X[:, 0])
    assert len(optim.optim_objs) == 1


@pytest.mark.parametrize(
    "optim", [pyro.optim.Adam({"lr": 0.01}), ADAM, pyro.optim.Adam(lambda name: {"lr": len(name)})]
)
def test_a_state_of_parameters_in_another_order_is_refused(optim):
    def guide(x, names="ab"):
        shift = sum(pyro.param(name, torch.zeros(())) for name in names)
        pyro.sample("w", dist.Normal(shift, 1.0))

    states = []
    for names in ("ab", "ab", "ba"):
        pyro.clear_param_store()
        svi = recorded(line, partial(guide, names=names), copy.copy(optim), TraceMeanField_ELBO())
        svi.step(X[:, 0])
        states.append(svi.optimizer.state_dict())
        if names == "ab":
            svi.optimizer.load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"\['b', 'a'\] in this order, got \['a', 'b'\]"):
        svi.optimizer.load_state_dict(states[0])


@pytest.mark.parametrize("reads", [True, False])
def test_hooks_on_gradients_may_read_and_keep_values(reads):
    norms = {}
    for kind in (SVI, recorded):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = kind(line, guide_of_line, pyro.optim.Adam({"lr": 0.05}), TraceMeanField_ELBO())
        svi.step(X[:, 0])
        norms[kind] = []
        pyro.param("loc").register_hook(
            lambda gradient, kept=norms[kind]: kept.append(float(gradient.norm()) if reads else gradient.norm())
        )
        for _ in range(12):
            svi.step(X[:, 0])
    assert svi.compiled
    assert len(norms[recorded]) == 12
    torch.testing.assert_close(torch.tensor(norms[recorded]), torch.tensor(norms[SVI]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda svi: pickle.loads(pickle.dumps(svi))], ids=["copy", "file"])
def test_a_copy_goes_on_as_the_original_does(copied):
    svi = recorded(*problem(), pyro.optim.Adam({"lr": 0.01}), TermsELBO())
    for _ in range(3):
        svi.step(X, Y)
    other = copied(svi)
    losses = []
    for each in (svi, other):
        pyro.set_rng_seed(2)
        losses.append([each.step(X, Y) for _ in range(3)])
        assert each.compiled
    assert losses[0] == losses[1]
    assert_equal(values(svi.guide), values(other.guide))


@pytest.mark.parametrize("optim", [pyro.optim.Adam({"lr": 0.01}), pyro.optim.AdagradRMSProp({"eta": 0.01})])
def test_a_parameter_that_appears_later_is_trained(optim):
    """The second optimizer makes a state for each parameter at once."""

    def model(x, deep):
        shift = pyro.param("shift", torch.zeros(())) if deep else 0.0
        line(x - shift)

    svi = recorded(model, AutoMeanField(lambda x, deep: model(x, False)), optim, TraceMeanField_ELBO())
    x = torch.randn(5) + 3.0
    svi.step(x, False)
    for _ in range(3):
        svi.step(x, True)
    assert float(pyro.param("shift").detach()) > 0.0


def test_an_optimizer_that_needs_a_closure_is_refused_by_name():
    with pytest.raises(ValueError, match="steps without a closure, got LBFGS"):
        recorded(line, guide_of_line, torch.optim.LBFGS, TermsELBO()).step(X[:, 0])


def test_a_step_reads_no_value_on_the_host_but_the_loss():
    model, guide = problem()
    svi = recorded(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceMeanField_ELBO(), check_every=100)
    # The program itself runs in step 10.
    for _ in range(11):
        svi.step(X, Y)
    with CountHostReads() as reads:
        for _ in range(10):
            svi.step(X, Y)
    assert reads.count == 10


@pytest.mark.parametrize("later", [False, True])
def test_hooks_hold_in_replays(later):
    model, guide = problem()
    locs = [parameter for name, parameter in guide.named_parameters() if name.startswith("locs.0.bias")]
    svi = recorded(model, guide, ADAM, TermsELBO())
    for _ in range(4 if later else 0):
        svi.step(X, Y)
    (loc,) = locs
    initial, calls = loc.detach().clone(), []

    def no_gradient_of_the_first(parameter):
        calls.append(parameter)
        parameter.grad[0] = 0.0

    loc.register_post_accumulate_grad_hook(no_gradient_of_the_first)
    for _ in range(4):
        svi.step(X, Y)
    assert len(calls) == 4
    # The average of the first steps' gradients goes on.
    assert later or loc[0] == initial[0]
    assert loc[1] != initial[1]


def test_no_step_under_no_grad():
    model, guide = problem()
    svi = recorded(model, guide, ADAM, TermsELBO())
    svi.step(X, Y)
    initial = values(guide)
    with torch.no_grad():
        for _ in range(3):
            svi.step(X, Y)
    assert_equal(initial, values(guide))


@pytest.mark.cuda
def test_a_guide_that_leaves_the_device_of_its_optimizer_is_named():
    model, guide = problem()
    svi = recorded(model.cuda(), guide.cuda(), pyro.optim.Adam({"lr": 0.01}), TermsELBO())
    svi.step(X.cuda(), Y.cuda())
    model.cpu()
    guide.cpu()
    with pytest.raises(ValueError, match=r"must stay where their first step was, on cuda:0, got a parameter on cpu"):
        svi.step(X, Y)


@pytest.mark.parametrize("make_optim", [ADAM, lambda parameters: torch.optim.SGD(parameters, lr=0.01)])
def test_a_run_takes_the_steps_of_as_many_calls(make_optim):
    results = []
    for runs in (True, False):
        model, guide = problem()
        svi = recorded(model, guide, make_optim, TermsELBO())
        losses = svi.run(12, X, Y) if runs else torch.tensor([svi.step(X, Y) for _ in range(12)])
        assert svi.compiled
        results.append({"losses": losses, "noise": torch.get_rng_state(), **values(guide)})
    assert results[0]["losses"].shape == (12,)
    assert_equal(*results)


def test_a_run_sees_state_that_a_hook_changes_between_its_steps():
    losses = {}
    for kind in (SVI, recorded):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        config = SimpleNamespace(scale=1.0, steps=0)

        def scaled(x, config=config):
            pyro.sample("y", dist.Normal(pyro.sample("w", dist.Normal(0.0, 1.0)), config.scale), obs=x.sum())

        def change(_, config=config):
            config.steps += 1
            config.scale = 3.0 if config.steps > 4 else 1.0

        svi = kind(scaled, guide_of_line, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
        svi.step(X[:, 0])
        pyro.param("loc").register_hook(change)
        losses[kind] = svi.run(8, X[:, 0]) if kind is recorded else [svi.step(X[:, 0]) for _ in range(8)]
    assert svi.compiled
    torch.testing.assert_close(losses[recorded], torch.tensor(losses[SVI]))


def test_a_run_stops_at_a_loss_that_is_not_finite():
    model, guide = problem()
    svi = recorded(model, guide, ADAM, TermsELBO())
    svi.run(3, X, Y)
    with pytest.raises(FloatingPointError, match="step 3"):
        svi.run(3, X * float("nan"), Y)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "many"])
def test_a_run_needs_a_number_of_steps(steps):
    model, guide = problem()
    with pytest.raises(ValueError, match="steps must be"):
        recorded(model, guide, ADAM, TermsELBO()).run(steps, X, Y)


def test_a_run_shows_a_bar_if_it_is_asked_to(capsys):
    model, guide = problem()
    svi = recorded(model, guide, ADAM, TermsELBO())
    svi.run(2, X, Y)
    assert capsys.readouterr().err == ""
    svi.run(2, X, Y, progress=True)
    assert "2/2" in capsys.readouterr().err
