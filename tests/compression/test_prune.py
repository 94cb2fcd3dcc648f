# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The plain network at the center of a posterior, and the smaller one that pruning makes of it."""

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch_pruning
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention

from pyro_radial import AutoMeanField, AutoRadialDirectional, BayesianModule, SupervisedModel
from pyro_radial.compression import PosteriorImportance, mean_network, prune
from pyro_radial.compression.prune import (
    ChannelGroup,
    count_weights_and_flops,
    nested_cuts,
    removable_groups,
    remove_channels,
)
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior
from tests.helpers.networks import Net

X = torch.zeros(1, 3)


def test_its_weights_are_the_mean_of_the_posterior_where_radii_are_sure():
    bnn = BayesianModule(nn.Linear(3, 4), RadialDirectionalPrior())
    guide = AutoRadialDirectional(bnn, init_stddev=1e-4, init_mean_cosine=0.6)
    guide.setup(X)
    draws = torch.stack([bnn.to_module(guide(X)).weight.detach() for _ in range(40)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - mean_network(bnn, guide).weight).abs() <= 4 * error).all()


def test_without_directions_it_is_the_network_at_the_median():
    bnn = BayesianModule(nn.Linear(3, 4))
    guide = AutoMeanField(bnn)
    guide.setup(X)
    assert torch.equal(mean_network(bnn, guide).weight, guide.median()["weight"])


class Block(nn.Module):
    """Two convolutions with batch norm beside a convolution of single pixels, or beside the identity."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        return relu(self.norms[1](self.conv2(relu(self.norms[0](self.conv1(x))))) + self.shortcut(x))


class Attention(nn.Module):
    """An attention written by a user, between skip connections."""

    def __init__(self):
        super().__init__()
        self.embed, self.queries, self.keys, self.values = (nn.Linear(size, 6) for size in (3, 6, 6, 6))
        self.out, self.up, self.down, self.head = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x, mask=None):
        stream = self.embed(x)
        heads = [layer(stream).unflatten(-1, (2, 3)).mT for layer in (self.queries, self.keys, self.values)]
        stream = stream + self.out(scaled_dot_product_attention(*heads, mask).mT.flatten(-2))
        return self.head((stream + self.down(relu(self.up(stream)))).mean(1))


def encoder():
    """Torch's own layer, of two heads."""
    layers = {"embed": nn.Linear(3, 8), "layer": nn.TransformerEncoderLayer(8, 2, 6, batch_first=True)}
    return Net(lambda net, x: net.head(net.layer(net.embed(x)).mean(1)), **layers, head=nn.Linear(8, 2))


def skip_from_inputs():
    """A network whose last hidden layer must fit the inputs."""
    layers = {"up": nn.Linear(4, 7), "down": nn.Linear(7, 4), "head": nn.Linear(4, 2)}
    return Net(lambda net, x: net.head(x + net.down(relu(net.up(x)))), **layers)


def lenet():
    features = [nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.Sigmoid(), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(20, 7), nn.PReLU(7), nn.Dropout(), nn.Linear(7, 2))


def residual():
    start = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*start, Block(4, 4), Block(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


#: A network, the shape of a row, and, for each layer that may lose channels, those that read them.
NETWORKS = {
    "chain": (lenet, (1, 8, 8), {"0": ["2"], "2": ["5"], "5": ["8"]}),
    "skips": (
        residual,
        (1, 6, 6),
        {
            "0": ["3.conv1", "4.conv1", "4.shortcut"],
            "3.conv1": ["3.conv2"],
            "4.conv1": ["4.conv2"],
            "4.shortcut": ["7"],
        },
    ),
    "attention": (Attention, (5, 3), {"down": ["queries", "keys", "values", "up", "head"], "up": ["down"]}),
    "encoder": (encoder, (5, 3), {"layer.linear1": ["layer.linear2"], "layer.linear2": None}),
    "inputs": (skip_from_inputs, (4,), {"up": ["down"]}),
}


def points(number):
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(1)), torch.arange(number) % 2


def untrained(net=None, x=None):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)) if net is None else net
    torch.manual_seed(0)
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if tensor.is_floating_point():
            tensor.data = 0.5 * torch.randn_like(tensor) + (0 if "weight" in name and tensor.ndim > 1 else 1.5)
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical())
    guide = AutoMeanField(model)
    guide.setup(points(4)[0] if x is None else x)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, guide


@pytest.fixture(params=NETWORKS)
def case(request):
    make, shape, readers = NETWORKS[request.param]
    x = torch.randn(60, *shape, generator=torch.Generator().manual_seed(1))
    model, guide = untrained(make().eval(), x)
    return model, guide, x, readers


def without_reading(net, removed, readers):
    """A copy whose layers have zero weights for the channels that are removed."""
    zeroed = copy.deepcopy(net)
    for layer, channels in removed.items():
        width = net.get_submodule(layer).weight.shape[0]
        for reader in map(zeroed.get_submodule, readers[layer]):
            reader.weight.data.unflatten(1, (width, -1))[:, channels] = 0
    return zeroed


@torch.no_grad()
def test_the_smaller_network_computes_what_the_whole_one_does_without_the_removed_channels(case):
    model, guide, x, readers = case
    whole = mean_network(model.bnn, guide)
    groups = removable_groups(whole, x[:2], PosteriorImportance(whole, guide))
    assert {group.layer for group in groups} == readers.keys()
    removed = nested_cuts(groups, 5, per_layer=True)[2]
    # A layer norm, and the heads of torch's attention, have another scale when they are narrower.
    removed = {layer: channels for layer, channels in removed.items() if readers[layer]}
    smaller = remove_channels(whole, x[:2], removed)
    for layer, channels in removed.items():
        assert smaller.get_submodule(layer).weight.shape[0] == whole.get_submodule(layer).weight.shape[0] - len(
            channels
        )
    expected = without_reading(whole, removed, readers)(x)
    torch.testing.assert_close(smaller(x), expected)
    assert not torch.allclose(smaller(x), whole(x))


@pytest.mark.parametrize("groups", [2, 8])
@torch.no_grad()
def test_convolutions_with_groups_lose_as_many_channels_in_each(groups):
    torch.manual_seed(0)
    between = nn.Conv2d(8, 8, 3, groups=groups, bias=False)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), between, nn.ReLU(), nn.Conv2d(8, 3, 2), nn.Flatten()).eval()
    x = torch.randn(4, 1, 6, 6)
    removable = removable_groups(net, x, torch_pruning.importance.RandomImportance())
    assert [group.sections for group in removable] == ([2, 2] if groups == 2 else [1])
    for group in removable:
        channels = group.channels(torch.tensor([1]))
        zeroed = copy.deepcopy(net)
        zeroed.get_submodule(group.layer).register_forward_hook(
            lambda layer, inputs, output, channels=channels: output.index_fill(1, torch.tensor(channels), 0.0)
        )
        torch.testing.assert_close(remove_channels(net, x, {group.layer: channels})(x), zeroed(x))


def test_networks_of_all_kinds_are_pruned_within_the_tolerance(case):
    model, guide, x, _ = case
    old_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    y = mean_network(model.bnn, guide)(x).argmax(-1)
    result = prune(model, guide, (x, y), 5.0, num_cuts=4)
    whole = result.path[0]
    assert result.network.training == model.training
    assert result.record.error <= whole.error + 5.0 + 1e-9
    assert result.record.error == pytest.approx(error(result.network, (x, y)))
    assert [record.weights < whole.weights for record in result.path] == [False] + [True] * (len(result.path) - 1)
    assert (result.record.weights, result.record.flops) == count_weights_and_flops(result.network, x)
    assert all(torch.equal(tensor, old_state[name]) for name, tensor in model.state_dict().items())
    result.network(x).sum().backward()


@torch.no_grad()
def test_each_head_loses_as_many_channels():
    model, guide = untrained(encoder(), torch.zeros(2, 5, 3))
    x = torch.randn(20, 5, 3)
    result = prune(model, guide, (x, torch.arange(20) % 2), 100.0, num_cuts=9)
    assert result.network.layer.self_attn.head_dim == result.network.layer.norm1.normalized_shape[0] / 2 == 1
    for record in result.path[1:]:
        channels = torch.tensor(record.removed.get("layer.linear2", []))
        assert torch.equal(channels[channels < 4] + 4, channels[channels >= 4])


@torch.no_grad()
def error(net, rows):
    mode = net.training
    wrong = net.eval()(rows[0]).argmax(-1) != rows[1]
    net.train(mode)
    return 100 * float(wrong.double().mean())


@pytest.mark.parametrize("tolerance", [0, 3.0])
def test_nothing_that_was_tried_and_is_good_enough_is_smaller(tolerance):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 20), nn.Dropout(0.1), nn.ReLU(), nn.Linear(20, 2))
    net[0].weight.data[20:] *= 1e-3
    net[0].bias.data[20:] = 0
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical())
    guide = AutoMeanField(model)
    guide.setup(torch.zeros(1, 4))
    x = torch.randn(400, 4)
    y = net.eval()(x).argmax(-1)
    result = prune(model, guide, (x, y), tolerance, num_cuts=12)
    whole = result.path[0]
    assert whole == ({}, 0.0, 760, 5 * 30 + 31 * 20 + 21 * 2)
    assert result.record.error == pytest.approx(error(result.network, (x, y)))
    assert result.record.error <= tolerance + 1e-9
    assert result.record.weights < 760
    for record in result.path:
        assert record.weights >= result.record.weights or record.error > tolerance
    # The units with tiny weights are the first to go.
    removed = [{*record.removed.get("0", [])} for record in result.path]
    assert all(units <= {*range(20, 30)} for units in removed if len(units) < 8)
    assert f"Pruned({result.record.weights} of 760 weights" in repr(result)


def test_parameters_that_are_frozen_stay_so():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    net[1].weight.requires_grad_(False)
    model, guide = untrained(net)
    network = prune(model, guide, points(20), 100.0, num_cuts=2).network
    assert [name for name, tensor in network.named_parameters() if not tensor.requires_grad] == ["1.weight"]


def test_batch_norms_get_the_statistics_of_the_network_that_is_left():
    x, y = points(100)
    net = nn.Sequential(nn.Linear(4, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2))
    model, guide = untrained(net)
    result = prune(model, guide, (x, y), 100.0, num_cuts=4)
    signal = result.network[0](x)
    torch.testing.assert_close(result.network[1].running_mean, signal.mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            lambda: (*untrained(nn.Linear(4, 2)), points(20)),
            "model must hold a network with channels that can be removed, got none that has scores in Linear",
        ),
        (lambda: (*untrained(), ({"x": points(20)[0]}, points(20)[1])), "data: x must be one tensor, got dict"),
        (lambda: (*untrained(), (torch.zeros(20, 3), points(20)[1])), "data: mat1 and mat2 shapes"),
        (lambda: (*untrained(), (points(20)[0], torch.full((20,), 5))), "data: .*5"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        prune(*arguments(), 1.0)


def group_of(layer, scores, sections=1):
    return ChannelGroup(layer, torch.tensor(scores), sections)


def test_cuts_over_all_layers_remove_the_lowest_scores_of_all():
    groups = [group_of("a", [5.0, 1.0, 3.0]), group_of("b", [2.0, 4.0], sections=2)]
    # The channel with score 4 is the best of its layer, and stays. Each section of b loses the same channels.
    cuts = nested_cuts(groups, 50, per_layer=False)
    assert cuts == [{"a": [1]}, {"a": [1], "b": [0, 2]}, {"a": [1, 2], "b": [0, 2]}]


def test_cuts_per_layer_remove_the_same_share_of_each():
    groups = [group_of("a", [0.1 * number for number in range(8)]), group_of("b", [0.0, -9.0, -99.0, -999.0])]
    cuts = nested_cuts(groups, 50, per_layer=True)
    assert all(abs(len(removed.get("a", [])) / 8 - len(removed.get("b", [])) / 4) <= 1 / 4 for removed in cuts)


@given(
    st.lists(
        st.lists(st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=2, max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.integers(2, 12),
    st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_cuts_are_nested_up_to_one_channel_of_each_layer(layers, num_cuts, per_layer):
    groups = [group_of(str(number), scores) for number, scores in enumerate(layers)]
    cuts = nested_cuts(groups, num_cuts, per_layer=per_layer)
    assert 1 <= len(cuts) <= num_cuts
    pairs = [{(layer, channel) for layer in removed for channel in removed[layer]} for removed in cuts]
    assert all(removed < removed_next for removed, removed_next in pairwise(pairs))
    for group in groups:
        (channel,) = {*range(len(group.scores))} - {*cuts[-1][group.layer]}
        assert group.scores[channel] == group.scores.max()
