# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks as chains: others are refused by name; weights and operations are counted."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from pyro_radial.compression.graph import IndexSelect, count_flops, count_weights
from pyro_radial.compression.scores import Cut
from pyro_radial.compression.surgery import complete_cut, cut_network
from tests.helpers.chains import keep, lenet

MNIST = (1, 28, 28)


class Skip(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner or nn.Linear(3, 3)

    def forward(self, x):
        return x + self.inner(x)


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class OddLinear(nn.Linear):
    pass


class WithBuffer(nn.Sequential):
    def __init__(self, *modules):
        super().__init__(*modules)
        self.register_buffer("number", torch.zeros(()))


def tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


def twice():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def pruned():
    net = nn.Sequential(nn.Linear(3, 3))
    prune.identity(net[0], "weight")
    return net


def between(*modules, first=None, last=None):
    return nn.Sequential(first or nn.Conv2d(1, 2, 3), *modules, last or nn.Linear(8, 3))


SELECT = IndexSelect(torch.tensor([0, 2]), size=3)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(3, 3), r"net must be a plain nn\.Sequential .* got Linear\. .* Torch-Pruning"),
        (Skip(), r"got Skip\. .* skip connections, use the library Torch-Pruning"),
        (Doubled(nn.Linear(3, 3)), r"got Doubled\."),
        (nn.Sequential(nn.Linear(3, 3), nn.Sequential(Skip())), r"got Skip at '1\.0'\. .* Torch-Pruning"),
        (nn.Sequential(Skip(nn.GroupNorm(1, 3))), r"got Skip at '0'\. .* Torch-Pruning"),
        (nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3)), "got LSTM at '1'"),
        (nn.Sequential(nn.MultiheadAttention(4, 2)), "got MultiheadAttention at '0'"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "got LayerNorm at '1'"),
        (nn.Sequential(OddLinear(3, 3)), "got OddLinear at '0'"),
        (nn.Sequential(nn.LazyLinear(3)), "got LazyLinear at '0'"),
        (nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3))), "got ParametrizedLinear at '0'"),
        (nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), "groups=1 in the Conv2d '0', got 2"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2, return_indices=True)), "in the MaxPool2d '1', got True"),
        (pruned(), r"the weight of '0', got one made of \['weight_orig'\]"),
        (nn.Sequential(WithBuffer(nn.Linear(3, 3))), "tensors in known layers only, got WithBuffer at '0'"),
        (tied(), "no shared tensors, got one in '0' and '2'"),
        (twice(), "no shared tensors, got one in '0' and '2'"),
        (nn.Sequential(nn.ReLU()), "net must hold a linear layer or a convolution"),
        (between(), r"an nn\.Flatten between '0' and '1'"),
        (between(nn.Flatten(), last=nn.Conv2d(2, 2, 3)), "channels with positions between"),
        (between(nn.Flatten(), last=nn.Linear(9, 3)), "fit the 2 units of '0' at '2', got 9 inputs"),
        (between(first=nn.Linear(2, 4)), "fit the 4 units of '0' at '1', got 8 inputs"),
        (between(nn.Flatten(), first=nn.Linear(2, 4)), "fit the 4 units of '0' at '2', got 8 inputs"),
        (between(last=nn.Conv2d(4, 2, 3)), "fit the 2 units of '0' at '1', got 4 inputs"),
        (between(nn.Flatten(2)), r"start_dim=1 and end_dim=-1, got '1', Flatten\(start_dim=2, end_dim=-1\)"),
        (between(nn.Flatten(1, 2)), r"start_dim=1 and end_dim=-1, got '1', Flatten\(start_dim=1, end_dim=2\)"),
        (between(nn.Flatten(), nn.MaxPool1d(2)), "mix the units of '0', got '2', MaxPool1d"),
        (between(nn.AvgPool1d(2), first=nn.Linear(2, 16)), "mix the units of '0', got '1', AvgPool1d"),
        (between(nn.Softmax(1), nn.Flatten()), r"mix the units of '0', got '1', Softmax\(dim=1\)"),
        (between(nn.BatchNorm2d(3), nn.Flatten()), "fit the 2 units of '0' at '1', got BatchNorm2d"),
        (between(nn.Flatten(), nn.BatchNorm1d(2)), "fit the 2 units of '0' at '2', got BatchNorm1d"),
        (nn.Sequential(SELECT, nn.ReLU(), nn.Linear(2, 1)), r"none after '0', IndexSelect\(2 of 3, dim=-1\)"),
        (nn.Sequential(nn.Linear(2, 3), SELECT), "none after '1', IndexSelect"),
        (nn.Sequential(SELECT, nn.Linear(3, 1)), "inputs of '1' that fit, Linear.* got '0', IndexSelect"),
        (nn.Sequential(SELECT, nn.Conv1d(2, 1, 1)), "inputs of '1' that fit, Conv1d.* got '0', IndexSelect"),
    ],
)
def test_what_is_no_chain_is_refused_by_name(net, message):
    for function in (lambda net: complete_cut(net, Cut()), lambda net: cut_network(net, Cut())):
        with pytest.raises(ValueError, match=message):
            function(net)


def test_select_of_the_users_own_is_cut_through():
    net = nn.Sequential(nn.Linear(2, 3), IndexSelect(torch.tensor([2, 0, 2]), size=3), nn.Linear(3, 1))
    cut = Cut(outputs={"0": torch.tensor([True, True, False])})
    small = cut_network(net, cut)
    # Unit 2 is cut, unit 1 was never used, and what is left needs no choice.
    assert [type(module) for module in small] == [nn.Linear, nn.Linear]
    assert torch.equal(small[0].weight, net[0].weight[[0]])
    assert torch.equal(small[1].weight, net[2].weight[:, [1]])


def test_select_picks_along_its_dimension():
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(IndexSelect(torch.tensor([2, 0]), size=3, dim=-3)(x), x[:, [2, 0]])
    assert torch.equal(IndexSelect(torch.tensor([2, 0]), size=3, dim=-3)(x[0]), x[0, [2, 0]])


def cut_lenet(first, second, inputs, third):
    """LeNet-5-Caffe cut to a-b-c-d, where c counts the inputs of the first linear layer."""
    positions = torch.zeros(800, dtype=torch.bool)
    positions[:inputs] = True
    # Every channel that is kept must keep a position: those dropped are spread over the channels.
    positions[: 16 * second] = True
    positions[torch.arange(16 * second).reshape(second, 16).t().flatten()[inputs:]] = False
    outputs = {"0": keep(20, range(first)), "2": keep(50, range(second)), "5": keep(500, range(third))}
    return Cut(outputs, {"5": positions})


@pytest.mark.parametrize(
    ("architecture", "flops", "weights"),
    [
        ((4, 7, 110, 66), 113.1, 8.7),
        ((8, 13, 88, 13), 288.3, 4.1),
        ((5, 10, 76, 16), 156.9, 2.8),
        ((2, 7, 112, 478), 111.6, 58.7),
        ((3, 8, 128, 499), 153.2, 69.5),
        ((3, 12, 192, 500), 204.8, 102.0),
        ((7, 13, 208, 16), 254.8, 5.9),
        ((3, 18, 284, 283), 216.0, 84.6),
    ],
)
def test_rows_of_table_2_recounted(architecture, flops, weights):
    small = cut_network(lenet(), cut_lenet(*architecture))
    assert count_flops(small, MNIST) / 1e3 == pytest.approx(flops, abs=0.05)
    assert count_weights(small) / 1e3 == pytest.approx(weights, abs=0.05)


def test_counting_changes_nothing():
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 1)).double()
    state = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    count_flops(net, (1, 4))
    assert net.training
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, state[key])


@pytest.mark.parametrize(("shape", "layer"), [((1, 20, 20), "5"), ((3, 28, 28), "0")])
def test_inputs_that_do_not_fit_are_refused(shape, layer):
    expected = re.escape(f"data: x must fit the network, got rows of shape {[*shape]}, which fails at '{layer}'")
    with pytest.raises(ValueError, match=expected):
        count_flops(lenet(), shape)
