# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pyro and torch move what they do not document; each such name does here what we use it for."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections import namedtuple
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroParam

import pyro_radial
from pyro_radial import _compat

Point = namedtuple("Point", ["x", "y"])


def test_deep_setattr_makes_the_modules_between():
    module = PyroModule("m")
    _compat.deep_setattr(module, "0.weight", torch.nn.Parameter(torch.ones(2)))
    assert dict(module.named_parameters()).keys() == {"0.weight"}


def test_a_trace_is_told_from_a_run():
    seen = []
    torch.fx.experimental.proxy_tensor.make_fx(lambda x: seen.append(_compat.is_traced()) or 2.0 * x)(torch.ones(2))
    assert seen == [True]
    assert not _compat.is_traced()


def test_helpful_support_errors_names_a_discrete_site():
    site = {"name": "coin", "fn": dist.Bernoulli(0.5)}
    with pytest.raises(ValueError, match="coin"), _compat.helpful_support_errors(site):
        raise NotImplementedError


def test_periodic_repeat_cycles_through_rows():
    assert torch.equal(_compat.periodic_repeat(torch.arange(3), 5, 0), torch.tensor([0, 1, 2, 0, 1]))


def test_deterministic_sites_are_told_from_observations():
    def model():
        pyro.deterministic("f", torch.zeros(2))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))

    nodes = pyro.poutine.trace(model).get_trace().nodes
    assert _compat.is_deterministic(nodes["f"])
    assert not _compat.is_deterministic(nodes["y"])


def test_trees_are_of_named_tuples_lists_and_dicts_and_none_is_a_leaf():
    tree = Point(torch.ones(2), [None, {"b": 3, "a": torch.zeros(1)}])
    leaves = _compat.tree_leaves(tree)
    assert leaves[0] is tree.x
    assert leaves[1:3] == [None, 3]
    assert leaves[3] is tree.y[1]["a"]
    mapped = _compat.tree_map_only(torch.Tensor, len, tree)
    assert mapped == Point(2, [None, {"b": 3, "a": 1}])
    assert type(mapped) is Point


def test_the_hide_function_keeps_latent_sites_alone():
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))
        with pyro.plate("rows", 5, subsample_size=2):
            pass

    nodes = pyro.poutine.trace(model).get_trace().nodes
    hidden = {name: _compat.prototype_hide_fn(nodes[name]) for name in ("w", "y", "rows")}
    assert hidden == {"w": False, "y": True, "rows": True}


def test_a_module_has_a_name_in_the_store_and_may_get_another():
    class Named(PyroModule):
        def forward(self):
            return _compat.stored_name(self, "weight")

    module = Named("root")
    assert _compat.stored_name(module) == "root"
    assert module() == "root.weight"
    _compat.adopt(module, "other")
    assert _compat.stored_name(module) == "other"
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
    _compat.set_context(module, Apart())
    assert float(module.scale.detach()) == 1.0


@pytest.mark.parametrize("mask", [True, False, torch.tensor([True, False])])
def test_a_masked_distribution_has_its_mask(mask):
    assert _compat.own_mask(dist.Normal(torch.zeros(2), 1.0).mask(mask)) is mask


@pytest.mark.parametrize(("name", "methods"), _compat.OVERRIDDEN.items(), ids=_compat.OVERRIDDEN.keys())
def test_what_ours_override_is_there(name, methods):
    cls = getattr(pyro.infer, name, None) or getattr(pyro.infer.autoguide, name)
    for method in methods:
        assert callable(getattr(cls, method))


def test_no_other_private_method_of_pyros_is_overridden():
    listed = {method for methods in _compat.OVERRIDDEN.values() for method in methods}
    for module in pkgutil.walk_packages(pyro_radial.__path__, "pyro_radial."):
        for cls in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(cls) or cls.__module__ != module.name:
                continue
            bases = [base for base in cls.__mro__ if base.__module__.startswith("pyro.")]
            theirs = {name for base in bases for name in vars(base) if private(name)}
            own = {name for name in vars(cls) if private(name)}
            assert own & theirs <= listed, cls


def private(name):
    # The sample statement's hook is Pyro's documented way to write a handler; the other is Python's own.
    return re.match(r"_[a-z]", name) and name not in ("_pyro_sample", "_abc_impl")


def test_no_private_attribute_of_pyros_is_read_elsewhere():
    for path in Path(pyro_radial.__file__).parent.rglob("*.py"):
        if path.name == "_compat.py":
            continue
        read = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not [name for name in read if name == "_mask" or name.startswith("_pyro_")], path


def test_everything_of_a_module_leaves_the_store_and_nothing_else():
    store = pyro.get_param_store()
    for name in ("net.weight", "net.below.weight", "net$$$bias", "network.weight", "net"):
        pyro.param(name, torch.ones(2))
    # What a parameter was before it got replaced stays in the store, under the same name.
    store["net.weight"] = torch.zeros(2)
    assert len(store._param_to_name) == 6
    _compat.forget_stored("net")
    assert sorted(store.keys()) == sorted(store._constraints) == ["net", "network.weight"]
    assert sorted(store._param_to_name.values()) == ["net", "network.weight"]
    _compat.forget_stored("net")
