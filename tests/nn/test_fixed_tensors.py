# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The tensors of a network that are not random, and the state of a BayesianModule, which holds them."""

import copy

import pyro
import pytest
import torch
from torch import nn

from pyro_radial.nn import BayesianModule
from pyro_radial.nn.fixed_tensors import FixedTensors
from tests.helpers.files import through_a_file
from tests.helpers.networks import call_with, draws_of


def make():
    return BayesianModule(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


def test_parameters_are_trained_and_frozen_ones_and_buffers_are_not():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net[1].bias.requires_grad_(False)
    tensors = FixedTensors(net, random=["0.weight"])
    with tensors.root._pyro_context:
        trained = tensors.trained()
    assert list(trained) == ["0.bias", "1.weight"]
    assert list(tensors.untrained()) == ["1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    for name, copied in {**trained, **tensors.untrained()}.items():
        original = net.state_dict()[name]
        assert torch.equal(copied, original)
        assert copied.data_ptr() != original.data_ptr()


def test_buffers_that_a_call_assigned_are_kept():
    net = nn.BatchNorm1d(4)
    tensors = FixedTensors(net, random=[])
    assigned = tensors.untrained() | {"running_mean": torch.ones(4, requires_grad=True)}
    tensors.keep_new_buffers(assigned)
    assert tensors.untrained()["running_mean"].tolist() == [1.0] * 4
    assert not tensors.untrained()["running_mean"].requires_grad


def test_the_state_dict_has_the_networks_names_and_its_round_trip_reads_weights_only():
    bnn, other = make(), make()
    bnn(torch.randn(8, 3) + 2)
    with torch.no_grad():
        bnn.net.get_submodule("1").weight.normal_()
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert set(bnn.state_dict()) == {f"net.1.{name}" for name in tensors}
    other.load_state_dict(through_a_file(bnn.state_dict()))
    draw, x = draws_of(bnn), torch.randn(5, 3)
    torch.testing.assert_close(call_with(other.eval(), draw, x), call_with(bnn.eval(), draw, x))


def test_a_deepcopy_is_independent():
    bnn, x = make(), torch.randn(8, 3)
    bnn(x)
    twin = copy.deepcopy(bnn)
    draw = draws_of(bnn)
    with torch.no_grad():
        twin.net.get_submodule("1").weight.fill_(7.0)
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    twin(x + 5)
    twin.eval()
    assert bnn._functional.skeleton.training
    assert (twin.net.get_submodule("1").weight == 7.0).all()
    for name, value in bnn.state_dict().items():
        assert torch.equal(value, before[name])
    assert not torch.allclose(call_with(bnn.eval(), draw, x), call_with(twin, draw, x))


@pytest.mark.parametrize("draws", [(), (3,)], ids=["one draw", "three draws"])
def test_a_module_with_two_names_leaves_nothing_of_a_call_behind(draws):
    shared = nn.Linear(3, 3)
    bnn = BayesianModule(nn.Sequential(shared, nn.Tanh(), shared))
    before = dict(bnn.skeleton.named_parameters())
    with pyro.plate_stack("draws", draws):
        bnn(torch.zeros(2, 3))
    assert all(parameter is before[name] for name, parameter in bnn.skeleton.named_parameters())
    copy.deepcopy(bnn)
