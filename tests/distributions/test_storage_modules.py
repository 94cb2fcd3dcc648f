# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import copy
import pickle

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.storage import StoredDistribution, StoredDistributions, describe
from tests.helpers.files import through_a_file

EXP = dist.transforms.ExpTransform
DISTRIBUTIONS = {
    "normal": dist.Normal(torch.rand(3), 1.0).to_event(1),
    "radial": RadialNormal(torch.rand(2, 3), torch.rand(2, 3) + 0.1, 2),
    "log radial": dist.TransformedDistribution(RadialNormal(torch.rand(3), torch.ones(3)), [EXP(cache_size=1)]),
    "gamma": dist.Gamma(torch.tensor(2.0), 1.0),
}
NAMES = ["w", "a.b", "a/b", "100%", "%2F", "a%2Fb", "a%b", "a%25b", "[x]", "distributions", "training", " "]
NAMES += ["a.b.c", "a%2Fb.c/d", "_empty_on_device"]


def stored(distributions):
    module = StoredDistributions()
    module.update({name: StoredDistribution(*describe(distribution)) for name, distribution in distributions.items()})
    return module


def tensors_of(distribution):
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
    return {id(value) for value in vars(distribution).values() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_a_distribution_comes_back_from_a_file_loaded_without_code(distribution):
    module, fresh = stored({"w": distribution}), StoredDistributions()
    fresh.load_state_dict(through_a_file(module.state_dict()))
    value = distribution.sample().clone()
    for other in (module["w"], fresh["w"], copy.deepcopy(module)["w"], pickle.loads(pickle.dumps(module))["w"]):
        assert (other.batch_shape, other.event_shape) == (distribution.batch_shape, distribution.event_shape)
        torch.testing.assert_close(other.log_prob(value), distribution.log_prob(value))


def test_the_copy_is_frozen():
    loc = torch.zeros(3, requires_grad=True)
    module = stored({"w": dist.Normal(loc, 1.0).to_event(1)})
    with torch.no_grad():
        loc.fill_(9.0)
    assert module["w"].mean.tolist() == [0.0, 0.0, 0.0]
    assert not module["w"].mean.requires_grad
    assert list(module.parameters()) == []


def test_any_names_of_sites_survive_and_stay_apart():
    module, fresh = stored({name: dist.Normal(float(i), 1.0) for i, name in enumerate(NAMES)}), StoredDistributions()
    fresh.load_state_dict(through_a_file(module.state_dict()))
    assert list(fresh) == list(module) == NAMES
    assert [float(fresh[name].mean) for name in NAMES] == list(range(len(NAMES)))


def test_the_distributions_are_on_the_buffers_and_follow_them():
    module = stored(DISTRIBUTIONS)
    for name, distribution in ((name, module[name]) for name in module):
        assert distribution is module[name]
        if name == "radial":
            assert tensors_of(distribution) <= {id(buffer) for buffer in module.buffers()}
    module.double()
    for name, distribution in ((name, module[name]) for name in module):
        assert distribution.sample().dtype == torch.float64, name
    module.float()
    assert module["radial"].loc.dtype == torch.float32
    meta = copy.deepcopy(module).to("meta")
    assert all(buffer.is_meta for buffer in meta.buffers())
    # From the meta device a state with its values brings it back.
    meta.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(meta["radial"].loc, DISTRIBUTIONS["radial"].loc)


def test_loading_replaces_the_sites_that_were_there():
    zero, unit = (dist.Normal(torch.full((2,), mean), 1.0).to_event(1) for mean in (0.0, 1.0))
    one = stored({"a": DISTRIBUTIONS["normal"], "b": DISTRIBUTIONS["gamma"], "same": zero})
    two = stored({"b": DISTRIBUTIONS["radial"], "c": DISTRIBUTIONS["normal"], "same": unit})
    assert one["same"].mean.sum() == 0.0
    holder, other = nn.ModuleDict({"distributions": one}), nn.ModuleDict({"distributions": two})
    holder.load_state_dict(other.state_dict())
    assert sorted(one) == ["b", "c", "same"]
    assert one["b"].event_shape == (2, 3)
    assert one["same"].mean.sum() == 2.0
    holder.load_state_dict(nn.ModuleDict({"distributions": StoredDistributions()}).state_dict())
    assert list(one) == []
    assert sorted(two) == ["b", "c", "same"]


def test_a_description_that_cannot_be_read_names_the_site():
    module = stored({"a.b": DISTRIBUTIONS["normal"]})
    state = module.state_dict()
    structure = copy.deepcopy(state["[a/b]._extra_state"])
    structure["arguments"]["base_distribution"]["class"][1] = "Gauss9"
    state["[a/b]._extra_state"] = structure
    module.load_state_dict(state)
    with pytest.raises(ValueError, match=r"site 'a\.b'.*Gauss9"):
        [module[name] for name in module]
