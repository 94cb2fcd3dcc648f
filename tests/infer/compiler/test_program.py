# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A recorded program by itself: its guards hold or refuse, and a replay is a run of the program."""

from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from torch import nn

from pyro_radial.infer.compiler.program import Program
from pyro_radial.infer.compiler.recording import record_program
from pyro_radial.infer.compiler.signature import Leaves, Numbers
from pyro_radial.infer.step.evaluation import Call, Mode, evaluate_loss

X = torch.linspace(-1.0, 2.0, 6)


def model(x, spread=1.0):
    w = pyro.sample("w", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w, spread), obs=x)


def guide(x, *_):
    pyro.sample("w", dist.Normal(pyro.param("loc", lambda: torch.ones(())), 0.5))


class Counter(nn.Module):
    """A model that counts its runs in a buffer, and whose noise is an attribute."""

    def __init__(self):
        super().__init__()
        self.spread = 1.0
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        self.runs += 1.0
        model(x, self.spread)


class Keeper(nn.Module):
    """A guide that keeps its parameter in an attribute."""

    def forward(self, x):
        self.scale = pyro.param("scale", lambda: torch.ones(()), dist.constraints.positive)
        pyro.sample("w", dist.Normal(0.0, self.scale))


def call_of(model, guide, *args):
    return Call(Trace_ELBO(), model, guide, args, {})


def leaves_of(*args):
    return Leaves.of(args, {})


def recorded(call, numbers=None):
    leaves = leaves_of(*call.args)
    _, program = record_program(call, leaves, numbers or Numbers())
    assert isinstance(program, Program), program.reason
    return program


def assert_replays(program, call):
    """Compare loss, gradients and noise of a replay with those of a run."""
    pyro.set_rng_seed(1)
    expected = evaluate_loss(call)
    noise = torch.get_rng_state()
    pyro.set_rng_seed(1)
    replayed = program.replay(call, leaves_of(*call.args), None, {})
    assert replayed.mode == Mode.RECORDED
    assert torch.equal(torch.get_rng_state(), noise)
    assert list(replayed.parameters) == list(expected.parameters)
    torch.testing.assert_close(replayed.loss, expected.loss)
    torch.testing.assert_close(replayed.gradients, expected.gradients)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_replay_is_a_run_on_other_arguments_and_parameters(scale):
    call = call_of(model, guide, X)._replace(gradient_scale=scale)
    program = recorded(call)
    pyro.param("loc").data.fill_(-3.0)
    assert program.is_valid(leaves_of(X + 5.0))
    assert_replays(program, call._replace(args=(X + 5.0,)))


def test_the_state_must_be_that_of_the_recording():
    counter = Counter()
    program = recorded(call_of(counter, guide, X))
    assert program.is_valid(leaves_of(X))
    counter.spread = 2.0
    assert not program.is_valid(leaves_of(X))
    counter.spread = 1.0
    counter.runs = torch.zeros(2)
    assert not program.is_valid(leaves_of(X))
    counter.runs = torch.zeros(())
    assert program.is_valid(leaves_of(X))


def test_pyros_store_must_be_that_of_the_recording():
    program = recorded(call_of(model, guide, X))
    assert program.is_valid(leaves_of(X))
    with pyro.get_param_store().scope():
        pyro.param("loc", torch.ones(()))
        assert not program.is_valid(leaves_of(X))


def test_tensors_that_are_replaced_by_their_likes_are_replaced_in_the_program():
    counter = Counter()
    call = call_of(counter, guide, X)
    program = recorded(call)
    counter.runs = torch.full((), 7.0)
    pyro.get_param_store()["loc"] = torch.full((), -2.0)
    parameter = pyro.param("loc").unconstrained()
    assert program.is_state_valid()
    assert program.parameters["loc"] is parameter
    assert any(constant is counter.runs for constant in program.constants)
    assert_replays(program, call)
    assert counter.runs == 9.0


def test_values_that_the_program_read_of_arguments_must_be_the_same():
    def branching(x):
        model(x, 1.0 if x.max() > 0.0 else 5.0)

    call = call_of(branching, guide, X)
    program = recorded(call)
    assert program.is_valid(leaves_of(X + 5.0))
    assert not program.is_valid(leaves_of(X - 5.0))
    assert_replays(program, call._replace(args=(X + 5.0,)))


def test_numbers_are_inputs_of_their_type():
    config = SimpleNamespace(spread=1.0)

    def scaled(x, factor):
        model(x * factor, config.spread)

    call = call_of(scaled, guide, X, 3)
    (path,) = (slot.path for slot in recorded(call).state.slots if slot.path.endswith("spread"))
    program = recorded(call, Numbers(positions={1}, paths={path}))
    config.spread = 0.5
    weight, factor, spread, x = program.inputs(call._replace(weight=0.25), leaves_of(X, 4))
    assert (weight, factor, spread) == (0.25, 4, 0.5)
    assert (factor.dtype, spread.dtype) == (torch.int64, torch.float64)
    assert x is X
    assert program.is_valid(leaves_of(X, 4))
    assert_replays(program, call._replace(args=(X, 4)))
    for other in (2, True, torch.tensor(0.5)):
        config.spread = other
        assert not program.is_valid(leaves_of(X, 4))


def test_a_rehearsal_changes_nothing():
    counter = Counter()
    call = call_of(counter, guide, X)
    program = recorded(call)
    pyro.set_rng_seed(1)
    noise = torch.get_rng_state()
    rehearsed = program.rehearse(call, leaves_of(X))
    assert torch.equal(torch.get_rng_state(), noise)
    assert counter.runs == 0.0
    replayed = program.replay(call, leaves_of(X), None, {})
    assert torch.equal(rehearsed.loss, replayed.loss)
    assert counter.runs == 1.0


def test_a_replay_stores_parameters_where_the_program_stores_them():
    keeper = Keeper()
    call = call_of(model, keeper, X)
    keeper(X)
    program = recorded(call)
    assert [name for _, name in program.parameter_slots] == ["scale"]
    pyro.get_param_store()["scale"] = torch.full((), 3.0)
    assert program.is_valid(leaves_of(X))
    program.replay(call, leaves_of(X), None, {})
    assert keeper.scale == 3.0
