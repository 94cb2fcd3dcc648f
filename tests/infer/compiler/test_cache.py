# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A graph gives what its program gives: the same loss, gradients, buffers and noise."""

import functools
import itertools
import re
import sys
import types
import warnings
from contextvars import ContextVar, copy_context
from functools import partial
from queue import SimpleQueue

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from torch import nn

from benchmarks.guides.pyro_examples import PROGRAMS as PYRO_EXAMPLES
from benchmarks.guides.pyro_examples import TARGET, measure
from pyro_radial import AutoMeanField, AutoRadial, CompiledSVI, TermsELBO, fit
from pyro_radial.infer import CompiledELBO, FitOptions
from pyro_radial.infer.compiler import cache, inductor
from pyro_radial.infer.step.evaluation import Mode
from pyro_radial.poutine import mean_only
from tests.helpers.devices import capture_on_cpu
from tests.helpers.networks import classifier, data, mlp
from tests.helpers.programs import (
    EAGER_LOSSES,
    PROGRAMS,
    Graphed,
    assert_same_steps,
    compiled_svi,
    eager_svi,
    prepared,
    take_steps,
)
from tests.helpers.runs import assert_same

X, Y = data(8)
#: Programs of each kind that a stand-in for a device captures, after the compiler has got their noise.
CAPTURED_TOO = (
    "AutoRadial, TermsELBO",
    "four particles, vectorized",
    "residual net with batch norm",
    "attention with dropout",
    "pyro.param and subsampling",
    "PriorChain, exact",
    "FunctionalELBO, SteinKL",
    "TraceEnum_ELBO",
    "TraceTailAdaptive_ELBO",
    "attribute set to a parameter",
)
# Inductor takes seconds for each.
COMPILED_TOO = ("residual net with batch norm", "TraceEnum_ELBO")
CASES = [(name, Mode.RECORDED) for name in (*PROGRAMS, *EAGER_LOSSES)]
CASES += [(name, Mode.CAPTURED) for name in CAPTURED_TOO]
CASES += [(name, Mode.COMPILED) for name in COMPILED_TOO]


@functools.cache
def steps_of_the_program(name):
    program = prepared((PROGRAMS | EAGER_LOSSES)[name])
    return take_steps(eager_svi(program), program)


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.filterwarnings("ignore:the program runs uncompiled. .* computes its gradients in loss_and_grads")
@pytest.mark.filterwarnings("ignore:Found no sample sites configured for enumeration")
def test_steps_on_a_graph_are_those_of_the_program(name, mode, monkeypatch):
    if mode == Mode.CAPTURED:
        capture_on_cpu(monkeypatch)
    expected = steps_of_the_program(name)
    program = prepared((PROGRAMS | EAGER_LOSSES)[name])
    svi = compiled_svi(program, compile=mode != Mode.RECORDED)
    if mode == Mode.COMPILED:
        svi.graphs.compile_now = True
    found = take_steps(svi, program)
    # Inductor sums in another order, and the bias before a batch norm has a gradient of rounding alone.
    assert_same_steps(found, expected, 1e-3 if mode == Mode.COMPILED else 1e-4)
    assert svi._latest.mode == (Mode.AS_IT_IS if name in EAGER_LOSSES else mode)
    assert svi.num_graphs == (name in PROGRAMS)
    assert len(svi.eager_reasons) == (name in EAGER_LOSSES)
    # No step has the noise of another one. The tail-adaptive loss is infinite.
    sums = {sum(float(value.double().nan_to_num(posinf=0.0).sum()) for value in outcome.values()) for outcome in found}
    assert len(sums) == len(found)


# Quick programs after Pyro's examples, of each kind; ``make soak`` runs all.
QUICK_EXAMPLES = {
    "eight_schools, LocScaleReparam",
    "neutra, AutoIAFNormal",
    "AutoStructured",
    "AutoGuideList",
    "lkj",
    "coin",
    "sir_hmc, SVI",
    "vae",
    "sparse_gamma_def, EasyGuide",
    "svgp",
}
# A shape depends on values, in a line of Pyro's or of the program's.
WITH_SHAPES_BY_VALUES = {"AutoNormalizingFlow", "cvae"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK_EXAMPLES | WITH_SHAPES_BY_VALUES else pytest.mark.slow)
        for name in PYRO_EXAMPLES
    ],
)
def test_programs_after_pyros_examples_get_right_gradients(name):
    row = measure(name, 1, compile=False)
    if name in QUICK_EXAMPLES:
        assert row["eagerly"] == ""
    if name in WITH_SHAPES_BY_VALUES:
        assert re.search(r"a shape that depends on values.* \(\w+\.py, line \d+\)$", row["eagerly"])
    assert "fails" in row or float(row["error"]) <= TARGET


def steps_on_a_classifier(net=None, loss=None, **settings):
    model = classifier(net=net)
    return Graphed(model, AutoRadial(model), loss or TermsELBO(), compile=False, **settings)


def assert_as_the_program(loss, args=(X, Y)):
    """The loss of a replay, which is the program's on the same noise."""
    pyro.set_rng_seed(3)
    replayed, _ = loss(args)
    pyro.set_rng_seed(3)
    expected = loss.loss.differentiable_loss(loss.model, loss.guide, *args).detach()
    torch.testing.assert_close(replayed, expected)
    assert loss.replayed


def test_parameters_and_buffers_that_change_in_place_are_inputs():
    program = PROGRAMS["PriorChain, normal"]()
    loss = Graphed(program.model, program.guide, program.loss, compile=False)
    loss(program.args)
    with torch.no_grad():
        for tensor in (*program.guide.parameters(), *program.model.chained.buffers()):
            tensor.mul_(1.1)
    assert_as_the_program(loss, program.args)
    assert len(loss.programs) == 1


def test_a_parameter_that_is_replaced_by_its_like_needs_no_new_graph():
    with pyro.settings.context(module_local_params=True):
        loss = steps_on_a_classifier()
        loss((X, Y))
        graph = loss.programs[0].graph
        state = {name: value + 0.1 for name, value in loss.guide.state_dict().items()}
        loss.guide.load_state_dict(state, assign=True)
        assert_as_the_program(loss)
    assert loss.programs[0].graph is graph


def test_a_load_of_pyros_store_is_seen(tmp_path):
    loss = steps_on_a_classifier()
    loss((X, Y))
    pyro.get_param_store().save(tmp_path / "store")
    saved = {name: parameter.detach().clone() for name, parameter in loss.parameters.items()}
    with torch.no_grad():
        for parameter in loss.guide.parameters():
            parameter.add_(1.0)
    pyro.get_param_store().load(tmp_path / "store")
    loss((X, Y))
    assert all(torch.equal(saved[name], parameter) for name, parameter in loss.parameters.items())


def test_a_hook_of_all_modules_has_a_graph_of_its_own():
    loss = steps_on_a_classifier()
    loss((X, Y))
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        loss((X, Y))
    finally:
        hook.remove()
    loss((X, Y))
    assert len(loss.graphs.programs) == 2


def test_a_weight_of_the_kl_is_an_input_and_zero_has_another_graph():
    weights = [0.0, 0.25, 0.5, 1.0]
    loss = steps_on_a_classifier(loss=TermsELBO(kl_weight=lambda step: weights[step]))
    for weight in weights:
        value, _ = loss((X, Y))
        terms = loss.loss.terms
        assert (terms.kl_weight, terms.num_data, loss.loss.step) == (weight, 40, weights.index(weight) + 1)
        torch.testing.assert_close(value, terms.negative_log_likelihood + weight * terms.kl)
    assert len(loss.programs) == 2


def test_a_handler_around_the_call_is_at_work():
    loss = steps_on_a_classifier()
    loss((X, Y))
    with mean_only(), pytest.warns(UserWarning, match="runs inside of MeanOnlyMessenger, a handler of Pyro"):
        values = [loss((X, Y))[0] for _ in range(2)]
    assert torch.equal(*values)
    assert not loss.replayed


def test_with_too_many_signatures_the_rest_runs_as_usual_after_one_warning(monkeypatch):
    monkeypatch.setattr(cache, "RECORDING_SHARE", 0.0)
    monkeypatch.setattr(cache, "FREE_RECORDINGS", 0)
    loss = steps_on_a_classifier(max_signatures=2)
    loss((X, Y))
    loss((X[:5], Y[:5]))
    with pytest.warns(UserWarning, match="of more than max_signatures = 2 kinds") as caught:
        loss((X[:4], Y[:4]))
    assert len(caught) == 1
    loss((X[:3], Y[:3]))
    assert not loss.replayed
    assert_as_the_program(loss)


def test_a_new_graph_replaces_the_one_that_was_not_used_for_longest(monkeypatch):
    monkeypatch.setattr(cache, "RECORDING_SHARE", 0.0)
    loss = steps_on_a_classifier(max_signatures=2)
    # Four recordings are free: those of 8, 6, 4 and again 6 rows.
    for rows in (8, 6, 8, 4, 8, 4, 6, 4):
        loss((X[:rows], Y[:rows]))
        assert loss.replayed
        assert len(loss.graphs.programs) <= 2
    assert loss.graphs._num_recordings == 4
    with pytest.warns(UserWarning, match="of more than max_signatures = 2 kinds"):
        loss((X, Y))
    assert not loss.replayed


def test_methods_are_keyed_by_function_and_object():
    class Line(nn.Module):
        def model(self, x):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with pyro.plate("rows", len(x)):
                pyro.sample("y", dist.Normal(w, 1.0), obs=x)

        def guide(self, x):
            pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(())), 1.0))

    elbo = CompiledELBO(Trace_ELBO(), compile=False)
    lines = Line(), Line()
    for line in lines * 3:
        elbo.differentiable_loss(line.model, line.guide, X[:, 0]).backward()
        assert elbo.compiled
    assert elbo.num_graphs == 2


def test_errors_of_the_model_are_its_own():
    with pytest.raises(ValueError, match="y must have shape"):
        steps_on_a_classifier()((X, Y[:3]))
    guide = AutoMeanField(classifier(net=nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"guide must have latent site '0.weight'"):
        Graphed(classifier(net=nn.Sequential(nn.Linear(3, 2))), guide, TermsELBO())((X, Y))


def test_like_graphs_share_compiled_code(recorded_only):
    model = classifier()
    for _ in range(2):
        pyro.clear_param_store()
        loss = Graphed(model, AutoRadial(model), TermsELBO(), compile_now=True)
        for rows in (8, 8, 5, 8, 5):
            loss((X[:rows], Y[:rows]))
        assert len(loss.programs) == 2
    assert len(recorded_only) == 2


# --- the program runs instead of its graph at some steps, and both are compared

CHANGED = "a graph gave something else than its program, at site 'y'"


def steps_by(read, loss):
    """A model whose noise is what a function reads, and its compiled steps, which change nothing."""
    pyro.clear_param_store()

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(w, read()), obs=x)

    guide = AutoMeanField(model, init_stddev=1e-3)
    return CompiledSVI(model, guide, pyro.optim.SGD({"lr": 0.0}), loss, compile=False)


def unseen_reads():
    """Ways to read a number that no guard follows, each with a change of it."""
    order = {"a": 1.0, "b": 3.0}
    module = types.ModuleType("a_module_of_settings")
    module.sd = 1.0
    sys.modules["a_module_of_settings"] = module
    variable = ContextVar("sd", default=1.0)

    def imported():
        from a_module_of_settings import sd

        return sd

    return {
        "an import in a function": (imported, lambda: setattr(module, "sd", 3.0)),
        "the order of a dict": (lambda: next(iter(order.values())), lambda: order.update(a=order.pop("a"))),
        "a context variable": (variable.get, lambda: variable.set(3.0)),
    }


@pytest.mark.parametrize(
    ("name", "loss"),
    [("an import in a function", Trace_ELBO), ("the order of a dict", TermsELBO), ("a context variable", Trace_ELBO)],
)
def test_a_change_that_no_guard_sees_is_seen_by_the_program(name, loss):
    read, change = unseen_reads()[name]
    svi = steps_by(read, loss())
    x = torch.full((20,), 2.0)
    svi.guide.setup(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            svi.step(x)
        assert not caught
        change()
        losses = [float(svi.step(x)) for _ in range(9)]
    # Step 10 at the latest. A guard may be earlier, and then nothing is said.
    assert len(caught) <= 1
    assert all(str(warning.message).startswith(CHANGED if loss is TermsELBO else CHANGED[:46]) for warning in caught)
    expected = float(loss().differentiable_loss(svi.model, svi.guide, x).detach())
    assert losses[-2:] == pytest.approx([expected] * 2, rel=0.02)


UNSEEN = ContextVar("sd", default=1.0)


def model_of_unseen(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(w * x, UNSEEN.get()), obs=y)


def doors():
    """For each way to a graph: a function of a model, its guide and their arguments that passes it once."""

    def svi(method):
        def make(model, guide):
            return getattr(CompiledSVI(model, guide, SGD, Trace_ELBO(), compile=False), method)

        return make

    def elbo(method):
        return lambda model, guide: partial(getattr(CompiledELBO(Trace_ELBO(), compile=False), method), model, guide)

    def epochs(model, guide):
        # Each record is one pass of the door, after the first.
        def passes(x, y):
            records = []

            def callback(record):
                records.append(record)
                if len(records) == 1:
                    UNSEEN.set(3.0)

            options = FitOptions(compile=True)
            fit(model, guide, (x, y), epochs=9, batch_size=len(x), progress=False, callback=callback, options=options)
            return len(x) * records[-1]["loss"]

        return passes

    return {
        "step": svi("step"),
        "evaluate_loss": svi("evaluate_loss"),
        "loss": elbo("loss"),
        "loss_and_grads": elbo("loss_and_grads"),
        "differentiable_loss": elbo("differentiable_loss"),
        "fit": epochs,
    }


SGD = pyro.optim.SGD({"lr": 0.0})


@pytest.mark.parametrize("door", doors())
def test_every_graph_is_compared_with_its_program(door, monkeypatch):
    monkeypatch.setattr(inductor, "compile_graph", lambda module, *_: module)
    monkeypatch.setattr(inductor, "_code_by_key", {})
    x, y = torch.linspace(-1.0, 1.0, 20), torch.full((20,), 2.0)
    guide = AutoMeanField(model_of_unseen, init_stddev=1e-3)
    guide.setup(x, y)
    evaluate = doors()[door](model_of_unseen, guide)

    def passes():
        if door != "fit":
            evaluate(x, y)
            UNSEEN.set(3.0)
        values = [torch.as_tensor(evaluate(x, y)).detach() for _ in range(1 if door == "fit" else 9)]
        return values[-1], Trace_ELBO().differentiable_loss(model_of_unseen, guide, x, y).detach()

    with pytest.warns(UserWarning, match="gave something else than its program"):
        value, expected = copy_context().run(passes)
    torch.testing.assert_close(value, expected, rtol=0.05, atol=0.0, check_dtype=False)


def test_all_graphs_of_a_wrong_one_go():
    read, change = unseen_reads()["a context variable"]
    svi = steps_by(read, Trace_ELBO())
    x = torch.full((20,), 2.0)
    svi.guide.setup(x)
    for evaluate in (svi.step, svi.evaluate_loss, lambda x: svi.evaluate_loss(x[:10])):
        evaluate(x)
    assert svi.num_graphs == 3
    change()
    with pytest.warns(UserWarning, match="gave something else than its program"):
        svi.evaluate_loss(x)
    assert svi.num_graphs == 0


def test_a_program_runs_as_it_is_after_two_differences():
    read, _ = unseen_reads()["an import in a function"]
    module = sys.modules["a_module_of_settings"]
    svi = steps_by(read, TermsELBO())
    x = torch.full((20,), 2.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            module.sd = 1.0 + step
            svi.step(x)
    assert [str(warning.message).startswith(CHANGED) for warning in caught] == [True, False]
    assert svi.eager_reasons == ["its graph gives something else than the program, at site 'y'"]
    assert svi._latest.mode == Mode.AS_IT_IS


def steps_with_runs(svi, steps, *args):
    """The numbers of the steps after the first in which the program itself runs; the content of queues is not seen."""
    runs = SimpleQueue()
    svi.model.register_forward_pre_hook(lambda *_: runs.put(None))
    counts = []
    for _ in range(steps):
        svi.step(*args)
        counts.append(runs.qsize())
    return [number for number, (before, after) in enumerate(itertools.pairwise(counts), 2) if after > before]


def test_checks_change_nothing(monkeypatch):
    final_values = []
    for uses in ([], [2, 3, 5]):
        monkeypatch.setattr(cache, "CHECKED_USES", uses)
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = classifier(net=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        guide = AutoRadial(model)
        guide.setup(X, Y)
        svi = CompiledSVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TermsELBO(), compile=False)
        assert steps_with_runs(svi, 6, X, Y) == uses
        final_values.append({**guide.state_dict(), **model.state_dict(), "noise": torch.get_rng_state()})
    assert_same(*final_values)


def test_checks_take_at_most_their_share_of_the_time(monkeypatch):
    seconds = SimpleQueue()

    def clock():
        # A check reads the clock three times, and other steps once.
        seconds.put(None)
        return float(seconds.qsize())

    monkeypatch.setattr(cache, "perf_counter", clock)
    model = classifier(net=mlp())
    svi = CompiledSVI(model, AutoRadial(model), pyro.optim.Adam({"lr": 0.01}), TermsELBO(), compile=False)
    steps = steps_with_runs(svi, 500, X, Y)
    assert steps[:2] == [2, 10]
    # One second after each hundred.
    assert [after - before for before, after in itertools.pairwise(steps[3:])] == [101] * len(steps[4:])
    assert len(steps) > 5
