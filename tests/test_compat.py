# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pyro and torch move what they do not document; each such name does here what we use it for."""

from collections import namedtuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule

from pyro_radial import _compat

Point = namedtuple("Point", ["x", "y"])


def test_deep_setattr_makes_the_modules_between():
    module = PyroModule("m")
    _compat.deep_setattr(module, "0.weight", torch.nn.Parameter(torch.ones(2)))
    assert dict(module.named_parameters()).keys() == {"0.weight"}


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
