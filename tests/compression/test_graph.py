# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks read as chains: what is none is refused by name, and each is read once."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from pyro_radial.compression import (
    Cut,
    IndexSelect,
    Scores,
    complete_cut,
    count_flops,
    count_weights,
    cut_network,
    cut_path,
    evaluate_path,
    graph,
    mask_network,
)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return x + self.inner(x)


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class OddLinear(nn.Linear):
    pass


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
        (nn.Linear(3, 3), r"net must be a plain nn\.Sequential .* got a Linear\. .* Torch-Pruning"),
        (Skip(), r"got a Skip\. .* skip connections there is the library Torch-Pruning"),
        (Doubled(nn.Linear(3, 3)), r"got a Doubled\."),
        (nn.Sequential(nn.Linear(3, 3), nn.Sequential(Skip())), r"got a Skip at '1\.0'\. .* Torch-Pruning"),
        (nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3)), "got a LSTM at '1'"),
        (nn.Sequential(nn.MultiheadAttention(4, 2)), "got a MultiheadAttention at '0'"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "got a LayerNorm at '1'"),
        (nn.Sequential(OddLinear(3, 3)), "got a OddLinear at '0'"),
        (nn.Sequential(nn.LazyLinear(3)), "got a LazyLinear at '0'"),
        (nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3))), "got a ParametrizedLinear at '0'"),
        (nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), "groups=1 in the Conv2d '0', got 2"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2, return_indices=True)), "in the MaxPool2d '1', got True"),
        (pruned(), r"the weight of '0', got one made of \['weight_orig'\]"),
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
    for function in (count_weights, lambda net: complete_cut(net, Cut()), lambda net: cut_network(net, Cut())):
        with pytest.raises(ValueError, match=message):
            function(net)


@pytest.fixture
def parses(monkeypatch):
    """The networks whose modules were read, one entry for each reading."""
    read, leaves = [], graph.leaves

    def recorded(net):
        read.append(net)
        return leaves(net)

    monkeypatch.setattr(graph, "leaves", recorded)
    return read


@pytest.mark.parametrize(
    "function",
    [
        count_weights,
        lambda net: count_flops(net, (4,)),
        lambda net: complete_cut(net, Cut()),
        lambda net: mask_network(net, Cut()),
        lambda net: cut_network(net, Cut()),
    ],
    ids=["count_weights", "count_flops", "complete_cut", "mask_network", "cut_network"],
)
def test_a_network_is_parsed_once(parses, function):
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    function(net)
    assert parses == [net]


def test_on_a_path_the_network_and_each_smaller_one_are_parsed_once(parses):
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    small = []

    def loss(cut):
        small.append(cut)
        return 0.0

    path = cut_path(Scores(outputs={"0": torch.tensor([0.0, 2.0, 1.0])}))
    evaluate_path(net, path, loss, (4,), progress=False)
    assert len(small) == len(path) == 3
    assert parses == [net, *small]


def test_anything_known_may_stand_at_the_ends():
    net = nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 4, 4)),
        nn.BatchNorm2d(1),
        nn.Conv2d(1, 3, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(0, 1),
        nn.Softmax(0),
    )
    x = torch.randn(2, 16)
    torch.testing.assert_close(cut_network(net, Cut())(x), net(x))


def test_flatten_of_features_changes_nothing():
    net = nn.Sequential(nn.Linear(2, 3), nn.Flatten(), nn.Linear(3, 1))
    whole = complete_cut(net, Cut(outputs={"0": torch.tensor([True, False, True])}))
    assert whole.inputs["2"].tolist() == [True, False, True]


def test_select_of_the_users_own_is_cut_through():
    net = nn.Sequential(nn.Linear(2, 3), IndexSelect(torch.tensor([2, 0, 2]), size=3), nn.Linear(3, 1))
    cut = Cut(outputs={"0": torch.tensor([True, True, False])})
    small = cut_network(net, cut)
    # Unit 2 is cut, unit 1 was never used, and what is left needs no choice.
    assert [type(module) for module in small] == [nn.Linear, nn.Linear]
    assert torch.equal(small[0].weight, net[0].weight[[0]])
    assert torch.equal(small[1].weight, net[2].weight[:, [1]])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([0.0]), "index must be a vector of int64, got torch.float32"),
        (torch.tensor([[0]]), r"index must be a vector of int64, got torch.int64 of shape \[1, 1\]"),
        (torch.tensor([], dtype=torch.long), "index must be a vector of int64"),
        (torch.tensor([0, 3]), r"index must be in \[0, 3\)"),
        (torch.tensor([-1, 2]), r"index must be in \[0, 3\)"),
    ],
)
def test_select_of_what_is_not_there_is_refused(index, message):
    with pytest.raises(ValueError, match=message):
        IndexSelect(index, size=3)


def test_select_picks_along_its_dimension():
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(IndexSelect(torch.tensor([2, 0]), size=3, dim=-3)(x), x[:, [2, 0]])
    assert torch.equal(IndexSelect(torch.tensor([2, 0]), size=3, dim=-3)(x[0]), x[0, [2, 0]])
