# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compiled code gets its noise, and is used only where it gives what the graph gives."""

import time
from contextlib import nullcontext

import pyro
import pytest
import torch
from torch import nn

from pyro_radial import AutoRadial, TermsELBO
from pyro_radial.infer.compiler import inductor
from tests.helpers.networks import classifier, data
from tests.helpers.programs import PROGRAMS, Graphed

X, Y = data(8)


@pytest.fixture(autouse=True)
def no_code(monkeypatch):
    monkeypatch.setattr(inductor, "_code_by_key", {})


def graphed(compile_now):
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    model = classifier(net=net)
    guide = AutoRadial(model)
    guide.setup(X, Y)
    return Graphed(model, guide, TermsELBO(), compile_now=compile_now)


def test_a_compiler_gets_no_random_numbers_to_draw(recorded_only):
    program = PROGRAMS["attention with dropout"]()
    loss = Graphed(program.model, program.guide, program.loss, compile_now=True)
    # A refusal by the check would warn.
    losses = {float(loss(program.args)[0]) for _ in range(4)}
    assert len(losses) == 4
    (module,) = recorded_only
    seeded = torch.Tag.nondeterministic_seeded
    assert not [node for node in module.graph.nodes if seeded in getattr(node.target, "tags", ())]


def test_convolutions_keep_the_memory_order_of_their_inputs_on_a_cpu_alone(monkeypatch):
    tensors = [torch.zeros(1)]
    assert [trial["layout_optimization"] for trial in inductor.trial_options({}, tensors)] == [False, False]
    assert inductor.trial_options({"layout_optimization": True}, tensors)[0]["layout_optimization"]
    monkeypatch.setattr(inductor, "_devices", lambda tensors: {0})
    assert "layout_optimization" not in inductor.trial_options({}, tensors)[0]


def test_a_machine_without_a_compiler_replays_graphs_as_recorded(monkeypatch):
    def missing(*args):
        raise inductor.CompilerMissingError("no g++")

    monkeypatch.setattr(inductor, "compile_graph", missing)
    loss = graphed(compile_now=True)
    with pytest.warns(UserWarning, match=r"no compiler on this machine.*no g\+\+"):
        loss((X, Y))
    pyro.set_rng_seed(0)
    replayed, _ = loss((X, Y))
    pyro.set_rng_seed(0)
    torch.testing.assert_close(replayed, TermsELBO()(loss.model, loss.guide)(X, Y).detach())


@pytest.mark.parametrize("fault", ["results", "results with vectors alone", "changed tensors"])
def test_wrong_code_is_not_used(monkeypatch, fault):
    loss = graphed(compile_now=False)
    loss((X, Y))
    statistic = loss.model.bnn.get_buffer("net.1.running_mean")
    vector_lengths = []

    def compile_wrongly(module, examples, options):
        vector_lengths.append(options.get("cpp.simdlen"))
        if fault == "results with vectors alone" and vector_lengths[-1] == 1:
            return module

        def code(*tensors):
            results = module(*tensors)
            if fault == "changed tensors":
                statistic.add_(1.0)
                return results
            return [1.1 * result if result.is_floating_point() else result for result in results]

        return code

    monkeypatch.setattr(inductor, "compile_graph", compile_wrongly)
    noise, buffers = torch.get_rng_state(), [buffer.clone() for buffer in loss.model.buffers()]
    graph = loss.programs[0].graph
    is_usable = fault == "results with vectors alone"
    with nullcontext() if is_usable else pytest.warns(UserWarning, match="gives other numbers"):
        code = inductor.compile_at_once(graph, [torch.ones(()), X, Y], {})
    assert vector_lengths == [None, 1]
    assert (code is graph.module) != is_usable
    assert torch.equal(torch.get_rng_state(), noise)
    assert all(map(torch.equal, loss.model.buffers(), buffers))


@pytest.mark.parametrize(("factor", "fault"), [(1.0, None), (1.5, inductor.WRONG)])
def test_code_may_differ_by_what_rounding_changes_in_the_graph(factor, fault):
    """Rounding decides on which side of an edge a number is, as in a ReLU's gradient in a deep network."""
    module = torch.fx.symbolic_trace(lambda x: (5.0 + (x / 3.0 * 3.0 >= x).to(x.dtype),))
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    exact = factor * torch.full_like(x, 6.0)
    assert inductor.relative_difference([exact], module(x)) > inductor.MOST_ROUNDING
    assert inductor.find_fault(lambda x: (exact,), module, [x]) == fault


def test_a_graph_without_edges_allows_no_more_than_rounding():
    module = torch.fx.symbolic_trace(lambda x: (x.exp().cumsum(0),))
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    noise = torch.get_rng_state()
    assert inductor.find_fault(lambda x: (1.02 * module(x)[0],), module, [x]) == inductor.WRONG
    assert torch.equal(torch.get_rng_state(), noise)


def test_what_is_not_a_number_differs_by_infinity():
    values = torch.tensor([1.0, torch.nan])
    assert inductor.relative_difference([torch.ones(2)], [values]) == torch.inf
    assert inductor.relative_difference([torch.full((2,), torch.inf)], [torch.ones(2)]) == torch.inf
    assert inductor.relative_difference([torch.zeros(2)], [torch.zeros(2)]) == 0.0


def test_right_code_that_takes_much_longer_is_slow():
    """A layer that a run changes, and code that does the same after a rest."""
    state = torch.zeros(3)
    module = torch.fx.symbolic_trace(lambda x, total: (total.add_(x).square(),))

    def resting(*tensors):
        time.sleep(0.005)
        return module(*tensors)

    tensors = [torch.ones(3), state]
    assert inductor.find_fault(resting, module, tensors, timed=True) == inductor.SLOW
    assert inductor.find_fault(resting, module, tensors) is None
    assert inductor.find_fault(lambda *tensors: module(*tensors), module, tensors, timed=True) is None
    assert not state.any()
