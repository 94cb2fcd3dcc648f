# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pyro and torch move what they do not document; each such name does here what we use it for."""

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceGraph_ELBO
from pyro.nn import PyroModule, PyroParam
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pyro_radial
from pyro_radial._pyro import compat
from tests.helpers.devices import CountHostReads

Point = namedtuple("Point", ["x", "y"])


def test_a_scheduler_takes_an_optimizer_for_one_that_has_taken_steps():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    compat.mark_stepped(optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_trace_is_told_from_a_run():
    seen = []
    torch.fx.experimental.proxy_tensor.make_fx(lambda x: seen.append(compat.is_traced()) or 2.0 * x)(torch.ones(2))
    assert seen == [True]
    assert not compat.is_traced()


def test_helpful_support_errors_names_a_discrete_site():
    site = {"name": "coin", "fn": dist.Bernoulli(0.5)}
    with pytest.raises(ValueError, match="coin"), compat.helpful_support_errors(site):
        raise NotImplementedError


def test_periodic_repeat_cycles_through_rows():
    assert torch.equal(compat.periodic_repeat(torch.arange(3), 5, 0), torch.tensor([0, 1, 2, 0, 1]))


def test_tensors_that_are_differentiated_are_told_from_others():
    seen = []

    def total(x):
        seen.append(compat.is_differentiated(x))
        return x.sum()

    torch.func.vmap(torch.func.grad(total))(torch.ones(2, 3))
    torch.func.vmap(total)(torch.ones(2, 3))
    total(torch.ones(3, requires_grad=True))
    assert seen == [True, False, False]


def test_standard_gamma_draws_each_shape_s_own_and_has_a_batching_rule():
    shapes = torch.tensor([0.5, 4.0, 100.0], dtype=torch.float64)
    draws = torch.func.vmap(lambda _: compat.standard_gamma(shapes), randomness="different")(torch.empty(20_000))
    error = (shapes / 20_000).sqrt()
    assert bool(((draws.mean(0) - shapes).abs() < 4.5 * error).all())
    torch.testing.assert_close(draws.var(0), shapes, rtol=0.1, atol=0.0)


def test_kinds_of_sites_are_told_apart():
    def model():
        pyro.deterministic("f", torch.zeros(2))
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 5, subsample_size=2):
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))

    nodes = pyro.poutine.trace(model).get_trace().nodes

    def chosen(function):
        return [name for name in ("f", "w", "rows", "y") if function(nodes[name])]

    assert chosen(compat.is_deterministic) == ["f"]
    assert chosen(compat.is_subsample) == ["rows"]
    assert chosen(compat.prototype_hide_fn) == ["f", "rows", "y"]


def test_trees_are_of_named_tuples_lists_and_dicts_and_none_is_a_leaf():
    tree = Point(torch.ones(2), [None, {"b": 3, "a": torch.zeros(1)}])
    leaves = compat.tree_leaves(tree)
    assert leaves[0] is tree.x
    assert leaves[1:3] == [None, 3]
    assert leaves[3] is tree.y[1]["a"]
    mapped = compat.tree_map_only(torch.Tensor, len, tree)
    assert mapped == Point(2, [None, {"b": 3, "a": 1}])
    assert type(mapped) is Point


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_a_call_are_seen(register):
    module = torch.nn.Linear(2, 1)
    module.register_full_backward_hook(lambda *args: None)
    assert not compat.has_hooks(module)
    handle = getattr(module, register)(lambda *args: None)
    assert compat.has_hooks(module)
    handle.remove()
    assert not compat.has_hooks(module)


def test_a_module_has_a_name_in_the_store_and_may_get_another():
    class Named(PyroModule):
        def forward(self):
            return compat.stored_name(self, "weight")

    module = Named("root")
    assert compat.stored_name(module) == "root"
    assert module() == "root.weight"
    compat.adopt(module, "other")
    assert compat.stored_name(module) == "other"
    assert module() == "other.weight"


def test_a_module_of_another_context_reads_none_of_the_store():
    class Apart:
        active = False

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    pyro.get_param_store()["m.scale"] = torch.tensor(3.0)
    module = PyroModule("m")
    module.scale = PyroParam(torch.tensor(1.0))
    compat.set_context(module, Apart())
    assert float(module.scale.detach()) == 1.0


@pytest.mark.parametrize("mask", [True, False, torch.tensor([True, False])])
def test_a_masked_distribution_has_its_mask(mask):
    assert compat.own_mask(dist.Normal(torch.zeros(2), 1.0).mask(mask)) is mask


@pytest.mark.parametrize(("name", "methods"), compat.OVERRIDDEN.items(), ids=compat.OVERRIDDEN.keys())
def test_what_ours_override_is_there(name, methods):
    cls = getattr(pyro.infer, name, None) or getattr(pyro.infer.autoguide, name)
    for method in methods:
        assert callable(getattr(cls, method))


def test_no_other_private_method_of_pyros_is_overridden():
    listed = {method for methods in compat.OVERRIDDEN.values() for method in methods}
    for module in pkgutil.walk_packages(pyro_radial.__path__, "pyro_radial."):
        for cls in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(cls) or cls.__module__ != module.name:
                continue
            bases = [base for base in cls.__mro__ if base.__module__.startswith("pyro.")]
            theirs = {name for base in bases for name in vars(base) if private(name)}
            ours = {name for name in vars(cls) if private(name)}
            assert ours & theirs <= listed, cls


def private(name):
    # The sample statement's hook is Pyro's documented way to write a handler; the other is Python's own.
    return re.match(r"_[a-z]", name) and name not in ("_pyro_sample", "_abc_impl")


def test_no_private_attribute_of_pyros_is_read_elsewhere():
    for path in Path(pyro_radial.__file__).parent.rglob("*.py"):
        if path.name == "compat.py":
            continue
        read = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        # A handler may call the hook of the handler that it extends.
        assert not [name for name in read - {"_pyro_sample"} if name == "_mask" or name.startswith("_pyro_")], path


def test_everything_of_a_module_leaves_the_store_and_nothing_else():
    store = pyro.get_param_store()
    for name in ("net.weight", "net.below.weight", "net$$$bias", "network.weight", "net"):
        pyro.param(name, torch.ones(2))
    # What a parameter was before it got replaced stays in the store, under the same name.
    store["net.weight"] = torch.zeros(2)
    assert len(store._param_to_name) == 6
    compat.forget_stored("net")
    assert sorted(store.keys()) == sorted(store._constraints) == ["net", "network.weight"]
    assert sorted(store._param_to_name.values()) == ["net", "network.weight"]
    compat.forget_stored("net")


def test_a_function_is_marked_as_constant_as_torch_marks_it():
    def ours():
        return 2.0

    def torchs():
        return 2.0

    compat.constant_in_graphs(ours)
    torch.compiler.assume_constant_result(torchs)
    assert vars(ours) == vars(torchs)


def test_a_graph_is_compiled_to_what_it_does():
    def function(x):
        return [x.sin() + torch.rand(3)]

    graph = make_fx(function)(torch.ones(3))
    code = compat.compile_graph(graph, [torch.ones(3)], {"fallback_random": True})
    x = torch.tensor([0.1, 0.2, 0.3])
    torch.manual_seed(0)
    (result,) = code(x)
    torch.manual_seed(0)
    torch.testing.assert_close(result, function(x)[0])


def test_a_graph_that_was_compiled_before_is_found_on_disk():
    counters = torch._dynamo.utils.counters["inductor"]
    hits = counters["fxgraph_cache_hit"]
    for _ in range(2):
        graph = make_fx(lambda x: [x.cos() + 2.0])(torch.ones(7))
        code = compat.compile_graph(graph, [torch.ones(7)], {})
    assert counters["fxgraph_cache_hit"] > hits
    torch.testing.assert_close(code(torch.zeros(7))[0], torch.full((7,), 3.0))


def test_a_missing_compiler_has_an_error_of_its_own(monkeypatch):
    def no_compiler(*args, **kwargs):
        raise torch._inductor.exc.InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.compile", no_compiler)
    with pytest.raises(compat.CompilerMissingError):
        compat.compile_graph(None, [], {})


def test_pyros_losses_can_be_evaluated_without_a_look_at_a_value():
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0))

    guide = pyro.infer.autoguide.AutoNormal(model)
    guide()
    for loss in (pyro.infer.Trace_ELBO(), pyro.infer.TraceMeanField_ELBO()):
        with CountHostReads() as without, compat.remove_host_reads(), pyro.validation_enabled(False):
            loss.differentiable_loss(model, guide)
        with CountHostReads() as usual:
            loss.differentiable_loss(model, guide)
        assert without.count == 0
        assert usual.count > 0


def test_handlers_around_are_seen_and_forgotten_ones_and_plates_are_left():
    assert not compat.handlers_around()
    with pyro.poutine.scale(scale=2.0):
        assert compat.handlers_around()
    stack, plates = pyro.poutine.runtime._PYRO_STACK, pyro.poutine.runtime._DIM_ALLOCATOR._stack
    stack.append("handler")
    plates.append("plate")
    compat.forget_handlers()
    assert (stack, plates) == ([], [])


def test_the_stores_parameters_are_unconstrained_and_live():
    pyro.param("scale", torch.tensor(2.0), constraint=dist.constraints.positive)
    stored = compat.stored_parameters()
    assert stored["scale"] is pyro.param("scale").unconstrained()
    pyro.clear_param_store()
    assert compat.stored_parameters() is not stored


def test_pyros_optimizers_say_what_a_parameter_gets():
    plain = pyro.optim.Adam({"lr": 0.1}, {"clip_norm": 2.0})
    assert compat.pyro_settings(plain, "guide$$$scale") == ({"lr": 0.1}, {"clip_norm": 2.0})
    by_name = pyro.optim.Adam(lambda name: {"lr": 0.5 if name == "guide.scale" else 0.1})
    assert compat.pyro_settings(by_name, "guide$$$scale") == ({"lr": 0.5}, {})
    by_parts = pyro.optim.Adam(lambda module, name: {"lr": 0.5 if (module, name) == ("guide", "scale") else 0.1})
    assert compat.pyro_settings(by_parts, "guide$$$scale") == ({"lr": 0.5}, {})


def test_pyros_optimizers_keep_loaded_states_until_they_are_asked_for():
    optim = pyro.optim.Adam({"lr": 0.1})
    optim.set_state({"w": "its state"})
    assert compat.optimizer_state_waiting(optim) == {"w": "its state"}


def test_a_fused_optimizer_stands_still_while_told_to():
    w = torch.zeros(2, requires_grad=True)
    w.grad = torch.ones(2)
    optimizer = torch.optim.Adam([w], lr=0.1, fused=True)
    assert compat.steps_stop(optimizer)
    compat.stop_where(optimizer, torch.ones(()))
    optimizer.step()
    assert torch.equal(w.detach(), torch.zeros(2))
    compat.stop_where(optimizer, None)
    optimizer.step()
    assert not torch.equal(w.detach(), torch.zeros(2))
    assert not compat.steps_stop(torch.optim.Rprop([w]))


def test_capturing_is_said_in_its_thread_alone():
    with compat.capturing(), ThreadPoolExecutor(1) as threads:
        assert compat.is_capturing()
        assert not threads.submit(compat.is_capturing).result()
    assert not compat.is_capturing()


def test_other_functions_are_called_in_place_of_torchs():
    with compat.ReplaceFunctions({torch.Tensor.all: lambda tensor: "all"}):
        assert torch.zeros(2).all() == "all"
        assert not torch.zeros(2).any()
    assert not torch.zeros(2).all()


@pytest.mark.parametrize("probability", [0.3, 0.0])
def test_losses_that_enumerate_are_the_same_without_looks_at_a_value(probability):
    def model():
        with pyro.plate("rows", 10, subsample_size=2):
            which = pyro.sample("which", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(which, 1.0), obs=torch.tensor([0.3, -2.0]))

    def guide():
        q = pyro.param("q", torch.tensor(probability))
        with pyro.plate("rows", 10, subsample_size=2):
            pyro.sample("which", dist.Bernoulli(q, validate_args=False), infer={"enumerate": "parallel"})

    def evaluate():
        value = loss.differentiable_loss(model, guide)
        return value, *torch.autograd.grad(value, [pyro.param("q")])

    loss = pyro.infer.TraceEnum_ELBO(max_plate_nesting=1)
    usual = evaluate()
    with CountHostReads() as reads, compat.remove_host_reads(), pyro.validation_enabled(False):
        ours = evaluate()
    torch.testing.assert_close(ours, usual)
    assert reads.count == 0


def test_a_scale_that_is_not_a_number_stays_one_among_the_scales_of_enumerated_sites():
    with compat.remove_host_reads():
        common = pyro.infer.traceenum_elbo._get_common_scale
        assert common([2.0, torch.tensor(2.0)]) == 2.0
        assert torch.isnan(common([2.0, torch.tensor(torch.nan), 2.0]))


def trained_by(step, *, groups=(("a", "b"), ("c",)), prepare=None, **settings):
    """The parameters and the state after five steps of a fused Adam, which leave out a parameter at first."""
    start = {"a": torch.ones(3), "b": torch.ones(()), "c": torch.ones(2, 2)}
    parameters = {name: torch.nn.Parameter(start[name]) for name in itertools.chain(*groups)}
    optimizer = torch.optim.Adam(
        [{"params": list(map(parameters.get, names)), "lr": 0.1 * len(names)} for names in groups],
        **{"fused": True} | settings,
    )
    if prepare is not None:
        prepare(optimizer)
    else:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(5):
        for parameter in parameters.values():
            parameter.grad = (parameter.detach() - number).sin()
        if number < 2:
            parameters["a"].grad = None
        step(optimizer)
        if prepare is None:
            scheduler.step()
    return {"parameters": parameters, "state": optimizer.state_dict()["state"]}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"amsgrad": True, "weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "maximize": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
        {"fused": False},
    ],
)
@pytest.mark.parametrize("groups", [("a", "b", "c"), (("a", "b"), ("c",))])
def test_the_kernel_of_adam_takes_the_steps_of_torch(settings, groups):
    ours = trained_by(compat.take_step, groups=groups, **settings)
    theirs = trained_by(lambda optimizer: optimizer.step(), groups=groups, **settings)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


def test_a_step_with_more_to_do_than_the_kernel_goes_through_the_optimizer():
    counts = []

    def count(*_):
        counts.append(1)

    def replace(optimizer):
        optimizer.step = count

    def hook(optimizer):
        optimizer.register_step_post_hook(count)

    for prepare in (replace, hook):
        trained_by(compat.take_step, prepare=prepare)
    with register_optimizer_step_pre_hook(count):
        trained_by(compat.take_step)
    assert len(counts) == 15


def test_the_kernel_of_adam_takes_no_step_that_is_stopped():
    stopped = trained_by(compat.take_step, prepare=lambda optimizer: compat.stop_where(optimizer, torch.ones(())))
    assert torch.equal(stopped["parameters"]["b"], torch.ones(()))


@pytest.mark.parametrize("kind", [dist.Normal, dist.Bernoulli])
def test_the_surrogate_of_a_loss_has_its_value_and_its_gradient(kind):
    def model():
        pyro.sample("y", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=torch.tensor(2.0))

    def guide():
        loc = pyro.param("loc", torch.tensor(0.5))
        pyro.sample("z", dist.Normal(loc, 1.0) if kind is dist.Normal else dist.Bernoulli(loc))

    loss = TraceGraph_ELBO()
    outcomes = []
    for evaluate in (partial(compat.surrogate_loss, loss), loss.loss_and_grads):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        value = evaluate(model, guide)
        if isinstance(value, torch.Tensor):
            value.backward()
        outcomes.append((float(torch.as_tensor(value).detach()), float(pyro.param("loc").grad)))
    assert outcomes[0] == pytest.approx(outcomes[1])
