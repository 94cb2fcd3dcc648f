# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Steps of CompiledSVI are those of Pyro's SVI: all that has a gradient there has the same one here."""

import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from pyro.distributions.transforms import iterated, planar
from pyro.infer import (
    SVI,
    EnergyDistance,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_ELBO,
    Trace_MMD,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
    TraceTMC_ELBO,
)
from pyro.infer.autoguide import AutoNormalizingFlow
from pyro.nn import PyroModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyro_radial import AutoMeanField, CompiledSVI, NaturalGradient, TermsELBO
from pyro_radial.infer.step.loss_evaluation import AS_IT_IS

X, Y = torch.linspace(-1.0, 1.0, 20), torch.linspace(-2.0, 3.0, 20)
SGD = {"lr": 1e-4}
recorded = partial(CompiledSVI, compile=False)


def line(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(w[..., 0] * x + w[..., 1], 0.5), obs=y)


def both(program, steps=5):
    """What a program gives after some steps of SVI and of CompiledSVI on the same noise, and the latter."""
    outcomes = []
    for make in (SVI, recorded):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        step, watched = program(make)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            for seed in range(steps):
                pyro.set_rng_seed(seed)
                svi = step()
        outcomes.append([tensor for tensor in watched() if tensor is not None])
    assert len(outcomes[0]) == len(outcomes[1]) > 0
    for own, their in zip(*outcomes, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-4, atol=1e-6)
    return svi


def of_svi(svi, *args):
    svi.step(*args)
    return svi


def losses():
    many = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 1}
    yield from (Trace_ELBO, TraceMeanField_ELBO, TraceGraph_ELBO, TermsELBO)
    # A first run that finds the nesting of plates would draw noise.
    yield from (partial(TraceEnum_ELBO, max_plate_nesting=1), partial(TraceTMC_ELBO, max_plate_nesting=1))
    yield from (partial(RenyiELBO, alpha=0.5, **many), partial(ReweightedWakeSleep, **many))
    yield from (partial(TraceTailAdaptive_ELBO, **many), partial(Trace_ELBO, retain_graph=True))
    yield partial(Trace_MMD, kernel=RBF(1), num_particles=2, max_plate_nesting=1)
    yield partial(EnergyDistance, num_particles=2, max_plate_nesting=2)


@pytest.mark.parametrize("make_loss", list(losses()), ids=lambda made: getattr(made, "func", made).__name__)
def test_each_loss_moves_as_in_svi(make_loss):
    def program(make):
        guide = AutoMeanField(line)
        guide.setup(X, Y)
        svi = make(line, guide, pyro.optim.SGD(SGD), make_loss())
        return partial(of_svi, svi, X, Y), lambda: list(guide.parameters())

    both(program, 12)


class WithPenalty(Trace_ELBO):
    def loss_and_grads(self, model, guide, *args, **kwargs):
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        loss = loss + 100.0 * sum(p.square().sum() for p in guide.parameters())
        loss.backward()
        return loss.item()


class TermsWithPenalty(TermsELBO):
    loss_and_grads = WithPenalty.loss_and_grads


@pytest.mark.parametrize("loss", [WithPenalty, TermsWithPenalty])
def test_own_gradients_of_a_subclass_count(loss):
    def program(make):
        guide = AutoMeanField(line)
        guide.setup(X, Y)
        return partial(of_svi, make(line, guide, pyro.optim.SGD(SGD), loss()), X, Y), lambda: list(guide.parameters())

    assert "loss_and_grads" in both(program).eager_reasons[0]


def plain_network(make, *, where):
    """A network that no param statement names: in the model, in the optimizer too, or before the model."""
    net = nn.Linear(1, 1)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        f = x if where == "before" else net(x[:, None])[:, 0]
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(f + w, 0.5), obs=y)

    guide = AutoMeanField(model)
    guide.setup(X, Y)
    optim = pyro.optim.SGD(SGD)
    if where == "optimizer":
        optim = torch.optim.SGD([*net.parameters(), *guide.parameters()], **SGD)
    svi = recorded(model, guide, optim, Trace_ELBO())
    if make is SVI:
        svi = SVI(model, guide, pyro.optim.SGD(SGD), Trace_ELBO())
    by_hand = torch.optim.SGD(net.parameters(), **SGD)

    def step():
        svi.step(net(X[:, None])[:, 0] if where == "before" else X, Y)
        # SVI leaves these gradients to the user.
        if make is SVI or where != "optimizer":
            by_hand.step()
            by_hand.zero_grad()
        return svi

    return step, lambda: [*net.parameters(), *guide.parameters()]


@pytest.mark.parametrize("where", ["model", "optimizer", "before"])
def test_parameters_without_a_param_statement_have_gradients(where):
    svi = both(partial(plain_network, where=where))
    reasons = {"model": ["no param statement names it"], "optimizer": [], "before": ["requires a gradient"]}[where]
    assert len(svi.eager_reasons) == len(reasons)
    assert all(reason in said for reason, said in zip(reasons, svi.eager_reasons, strict=True))


class Tied(PyroModule):
    def __init__(self):
        super().__init__()
        self.a, self.b = PyroModule[nn.Linear](1, 1), PyroModule[nn.Linear](1, 1)
        self.b.weight = self.a.weight

    def forward(self, x, y):
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(self.b(torch.tanh(self.a(x[:, None])))[:, 0], 1.0), obs=y)


def test_a_parameter_with_two_names_has_one_gradient():
    def program(make):
        model = Tied()

        def nothing(x, y):
            pass

        svi = make(model, nothing, pyro.optim.SGD(SGD), Trace_ELBO())

        def step():
            svi.loss_and_grads(model, nothing, X, Y)
            return svi

        return step, lambda: [parameter.grad for parameter in model.parameters()]

    both(program)


def test_a_flow_takes_one_step_at_a_time():
    def program(make):
        guide = AutoNormalizingFlow(line, partial(iterated, 2, planar))
        guide(X, Y)
        return partial(of_svi, make(line, guide, pyro.optim.SGD(SGD), Trace_ELBO()), X, Y), lambda: [
            *guide.parameters()
        ]

    both(program)


class Checkpointed(PyroModule):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b = PyroModule[nn.Linear](1, 8), PyroModule[nn.Linear](8, 1)
        self.dropout, self.reentrant = nn.Dropout(0.5), reentrant

    def hidden(self, x):
        return torch.tanh(self.dropout(self.a(x)))

    def forward(self, x, y):
        hidden = checkpoint(self.hidden, x.requires_grad_(self.reentrant), use_reentrant=self.reentrant)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(self.b(hidden)[:, 0], 1.0), obs=y)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_with_dropout(reentrant):
    def program(make):
        model = Checkpointed(reentrant)

        def nothing(x, y):
            pass

        svi = make(model, nothing, pyro.optim.SGD(SGD), Trace_ELBO())
        x = X[:, None].clone()
        return (lambda: of_svi(svi, x.detach(), Y)), lambda: list(model.parameters())

    svi = both(program)
    assert len(svi.eager_reasons) == 1
    assert not svi.compiled


def with_a_gradient_of_its_argument(make):
    def model(x, y):
        line(x.requires_grad_(), y)

    guide = AutoMeanField(line)
    guide.setup(X, Y)
    svi = make(model, lambda x, y: guide(x, y), pyro.optim.SGD(SGD), Trace_ELBO())
    return lambda: of_svi(svi, X.clone(), Y), guide.parameters


def test_a_program_that_lets_its_argument_require_a_gradient_runs_as_it_is():
    svi = both(with_a_gradient_of_its_argument)
    assert "requires a gradient" in svi.eager_reasons[0]
    assert not svi.compiled


@pytest.mark.parametrize("later", [False, True])
def test_hooks_hold_where_the_step_is_in_the_graph(later):
    pyro.clear_param_store()
    guide = AutoMeanField(line)
    guide.setup(X, Y)
    loc = dict(guide.named_parameters())["locs.w_unconstrained"]
    svi = recorded(line, guide, NaturalGradient(0.05), TermsELBO())
    for _ in range(4 if later else 0):
        svi.step(X, Y)
    before, calls = loc.detach().clone(), []

    def no_gradient_of_the_first(parameter):
        calls.append(parameter)
        parameter.grad[0] = 0.0

    loc.register_post_accumulate_grad_hook(no_gradient_of_the_first)
    for _ in range(4):
        svi.step(X, Y)
    assert len(calls) == 4
    # What the first steps have averaged goes on.
    assert later or loc[0] == before[0]
    assert loc[1] != before[1]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr"])
@pytest.mark.parametrize("held", [False, True])
def test_sparse_tensors_run_as_they_are(layout, held):
    table = getattr(torch.eye(20)[:, :3], layout)()

    def model(a, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 1), 1.0).to_event(2))
        with pyro.plate("rows", 20):
            pyro.sample("y", dist.Normal(((table if held else a) @ w)[:, 0], 1.0), obs=y)

    def program(make):
        guide = AutoMeanField(model)
        guide.setup(table, Y)
        args = X if held else table, Y
        return partial(of_svi, make(model, guide, pyro.optim.SGD(SGD), Trace_ELBO()), *args), guide.parameters

    svi = both(program)
    assert len(svi.eager_reasons) == 1
    assert svi._latest.mode == AS_IT_IS


def test_no_step_under_no_grad():
    pyro.clear_param_store()
    guide = AutoMeanField(line)
    guide.setup(X, Y)
    for optim in (pyro.optim.SGD(SGD), NaturalGradient(0.05)):
        svi = recorded(line, guide, optim, TermsELBO())
        svi.step(X, Y)
        before = [parameter.detach().clone() for parameter in guide.parameters()]
        with torch.no_grad():
            for _ in range(3):
                svi.step(X, Y)
        assert all(map(torch.equal, before, guide.parameters()))


def test_what_can_be_recorded_but_not_replayed_runs_as_it_is():
    net = nn.LSTM(1, 2, batch_first=True)

    def model(x, y):
        pyro.module("net", net)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(net(x[:, None, None])[0][:, -1, 0], 1.0), obs=y)

    def nothing(x, y):
        pass

    svi = recorded(model, nothing, pyro.optim.SGD(SGD), Trace_ELBO())
    with pytest.warns(UserWarning, match="can record it, but not replay it"):
        svi.step(X, Y)
    svi.step(X, Y)
    assert not svi.compiled


class KeptParameter(nn.Module):
    """Decipher of scvi-tools keeps the value of a parameter so."""

    def forward(self, x):
        self.theta = pyro.param("theta", torch.ones(()), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(w, self.theta), obs=x)


def kept_parameter(make):
    model = KeptParameter()
    guide = AutoMeanField(model)
    guide.setup(X)
    svi = make(model, guide, pyro.optim.SGD(SGD), Trace_ELBO())
    return partial(of_svi, svi, X), lambda: [*guide.parameters(), pyro.param("theta"), model.theta]


def test_an_attribute_that_is_set_to_the_value_of_a_parameter_is_that_of_the_latest_step():
    svi = both(kept_parameter)
    assert svi.compiled
    assert not svi.eager_reasons


def read_before_it_is_set(make):
    model = KeptParameter()
    theta = model.__dict__

    def reading(x):
        # A number of the step before.
        if "theta" in theta:
            x = x + float(theta["theta"])
        model(x)

    guide = AutoMeanField(reading)
    guide.setup(X)
    svi = make(reading, guide, pyro.optim.SGD(SGD), Trace_ELBO())
    return partial(of_svi, svi, X), lambda: [*guide.parameters(), model.theta]


def test_an_attribute_that_is_read_before_it_is_set_keeps_a_program_from_a_graph():
    assert not both(read_before_it_is_set).compiled


def other_optimizer(make):
    guide = AutoMeanField(line)
    guide.setup(X, Y)
    svi = make(line, guide, pyro.optim.SGD(SGD), Trace_ELBO())

    def step():
        svi.optim = pyro.optim.SGD(SGD)
        return of_svi(svi, X, Y)

    return step, lambda: list(guide.parameters())


def test_another_optimizer_takes_no_gradients_of_earlier_steps():
    assert both(other_optimizer).compiled
