# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""At some steps the program runs instead of its graph, and both are compared."""

import functools
import itertools
import operator
import sys
import types
import warnings
import weakref
from contextvars import ContextVar
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_radial import AutoMeanField, AutoRadial, CompiledSVI, NaturalGradient, TermsELBO
from pyro_radial.infer.step import loss_graphs
from pyro_radial.infer.step.loss_evaluation import AS_IT_IS, CHECKED
from tests.helpers.networks import classifier, data, mlp

X, Y = data(8)
CHANGED = "a graph gave something else than its program, at site 'y'"


def steps_of(read, loss):
    """A model whose noise is what a function reads, and its compiled steps, which take no step."""
    pyro.clear_param_store()

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(w, read()), obs=x)

    guide = AutoMeanField(model, init_stddev=1e-3)
    return CompiledSVI(model, guide, pyro.optim.SGD({"lr": 0.0}), loss, compile=False)


def ways():
    """Ways to read a number that no guard follows, each with a change of it."""
    holder, options, order = SimpleNamespace(sd=1.0), {"sd": 1.0}, {"a": 1.0, "b": 3.0}
    reference, get, look = weakref.ref(types.SimpleNamespace), options.get, operator.attrgetter("sd")
    module = types.ModuleType("a_module_of_settings")
    module.sd = 1.0
    sys.modules["a_module_of_settings"] = module
    cached = functools.cache(lambda: options["sd"])
    variable = ContextVar("sd", default=1.0)

    def imported():
        from a_module_of_settings import sd

        return sd

    assert reference() is not None
    return {
        "an import in a function": (imported, lambda: setattr(module, "sd", 3.0)),
        "attrgetter": (lambda: look(holder), lambda: setattr(holder, "sd", 3.0)),
        "a bound method": (lambda: get("sd"), lambda: options.update(sd=3.0)),
        "the order of a dict": (lambda: next(iter(order.values())), lambda: order.update(a=order.pop("a"))),
        "a context variable": (variable.get, lambda: variable.set(3.0)),
        "a computed name": (lambda: getattr(holder, "s" + "d"), lambda: setattr(holder, "sd", 3.0)),
        "a cleared cache": (cached, lambda: (options.update(sd=3.0), cached.cache_clear())),
    }


# Each way, and each loss twice or more.
@pytest.mark.parametrize(("name", "loss"), list(zip(ways(), itertools.cycle([Trace_ELBO, TermsELBO]), strict=False)))
def test_a_change_that_no_guard_sees_is_seen_by_the_program(name, loss):
    read, change = ways()[name]
    svi = steps_of(read, loss())
    x = torch.full((20,), 2.0)
    svi.guide.setup(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            svi.step(x)
        assert not caught
        change()
        losses = []
        for _ in range(9):
            losses.append(float(svi.step(x)))
    # Step 10 at the latest. A guard may be earlier, and then nothing is said.
    assert len(caught) <= 1
    assert all(str(warning.message).startswith(CHANGED if loss is TermsELBO else CHANGED[:46]) for warning in caught)
    expected = float(loss().differentiable_loss(svi.model, svi.guide, x).detach())
    assert losses[-2:] == pytest.approx([expected] * 2, rel=0.02)


def test_a_program_that_is_no_graph_runs_as_it_is_after_two_differences():
    module = sys.modules["a_module_of_settings"]

    def imported():
        from a_module_of_settings import sd

        return sd

    svi = steps_of(imported, TermsELBO())
    x = torch.full((20,), 2.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            module.sd = 1.0 + step
            svi.step(x)
    assert [str(warning.message).startswith(CHANGED) for warning in caught] == [True, False]
    assert svi.eager_reasons == ["its graph gives something else than the program, at site 'y'"]
    assert svi._latest.mode == AS_IT_IS


@pytest.mark.parametrize("optim", [pyro.optim.Adam({"lr": 0.01}), NaturalGradient(0.05)], ids=["Adam", "natural"])
def test_checked_steps_are_those_of_the_graph(optim, monkeypatch):
    ends = []
    for checked in (False, True):
        if not checked:
            monkeypatch.setattr(loss_graphs, "_is_checked", lambda step: False)
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = classifier(net=mlp())
        guide = AutoRadial(model)
        guide.setup(X, Y)
        svi = CompiledSVI(model, guide, optim, TermsELBO(), compile=False)
        found = []
        for _ in range(12):
            svi.step(X, Y)
            found.append(svi._latest.mode)
        ends.append({name: value.detach().clone() for name, value in guide.named_parameters()})
        monkeypatch.undo()
        assert [number for number, way in enumerate(found, 1) if way == CHECKED] == ([2, 10] if checked else [])
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-5)


def test_each_thousandth_step_is_checked():
    assert [step for step in range(1, 3_500) if loss_graphs._is_checked(step)] == [2, 10, 100, 1_000, 2_000, 3_000]
