# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The cut network computes what the network does without the units."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from pyro_radial.compression.graph import IndexSelect
from pyro_radial.compression.scores import Cut, Scores
from pyro_radial.compression.surgery import complete_cut, cut_network
from tests.helpers.chains import keep, masked, random_chain, random_cut, weight_layers

CHAINS = range(30)


def parts(net, kind):
    return {name: module for name, module in net.named_modules() if isinstance(module, kind)}


def without_cut_units(net, x, cut):
    """The outputs of a network whose layers see zeros from the units that are cut, by hooks of the test's own."""
    hooks = []
    before = None
    for name, module in weight_layers(net):

        def zero(module, inputs, name=name, before=before):
            (x,) = inputs
            x = x.clone()
            if name in cut.inputs:
                x[:, ~cut.inputs[name]] = 0
            if before in cut.outputs:
                mask = cut.outputs[before]
                x.view(len(x), len(mask), -1)[:, ~mask] = 0
            return x

        hooks.append(module.register_forward_pre_hook(zero))
        before = name
    with torch.no_grad():
        y = net(x)
    for hook in hooks:
        hook.remove()
    return y


def cut_silently(net, cut):
    """The network with zeros and the cut one; small chains are often cut to nothing, which is another test's matter."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return masked(net, cut), cut_network(net, cut), bool(caught)


@pytest.mark.parametrize("seed", CHAINS)
def test_cut_network_computes_what_the_network_does_without_the_units(seed):
    net, x = random_chain(seed)
    cut = random_cut(net, seed)
    zeroed, small, rescued = cut_silently(net, cut)
    expected = zeroed(x)
    torch.testing.assert_close(small(x), expected, rtol=1e-10, atol=1e-10)
    if not rescued:
        torch.testing.assert_close(expected, without_cut_units(net, x, cut), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(10))
def test_cut_of_a_cut_is_exact(seed):
    net, x = random_chain(seed)
    _, small, _ = cut_silently(net, random_cut(net, seed, share=0.8))
    zeroed, smaller, _ = cut_silently(small, random_cut(small, seed + 1, share=0.8))
    torch.testing.assert_close(smaller(x), zeroed(x), rtol=1e-10, atol=1e-10)
    assert len(parts(smaller, IndexSelect)) <= len(weight_layers(net))


def test_original_is_neither_written_nor_shared():
    net, _ = random_chain(5)
    before, text = copy.deepcopy(net.state_dict()), repr(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = cut_network(net, random_cut(net, 5))
    for tensor in (*small.parameters(), *small.buffers()):
        tensor.data.fill_(7)
    assert repr(net) == text
    for key, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, before[key], rtol=0, atol=0)


def test_weights_that_are_not_numbers_go_with_their_units():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].weight.data[1] = torch.nan
    assert cut_network(net, Cut(outputs={"0": keep(2, [0])}))(torch.randn(3, 2)).isfinite().all()


def test_unit_without_a_use_goes():
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 2))
    # No position of channel 1 is used, and only two of channel 2.
    whole = complete_cut(net, Cut(inputs={"3": keep(12, [0, 1, 2, 3, 8, 10])}))
    assert whole.outputs["0"].tolist() == [True, False, True]
    small = cut_network(net, Cut(inputs={"3": keep(12, [0, 1, 2, 3, 8, 10])}))
    assert small[0].weight.shape == (2, 2, 1)
    assert small[1].num_features == 2
    (select,) = parts(small, IndexSelect).values()
    assert (select.index.tolist(), select.size, select.dim) == ([0, 1, 2, 3, 4, 6], 8, -1)


@pytest.mark.parametrize(
    ("net", "shape", "dim"),
    [
        (nn.Sequential(nn.Linear(3, 2)), (5, 3), -1),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), (5, 3, 1), -1),
        (nn.Sequential(nn.Conv1d(3, 2, 1)), (5, 3, 4), -2),
        (nn.Sequential(nn.Conv2d(3, 2, 1)), (5, 3, 4, 4), -3),
        (nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(3, 2, 1)), (5, 3, 4, 4), -3),
    ],
)
def test_inputs_of_the_network_are_cut(net, shape, dim):
    x = torch.randn(shape)
    name = weight_layers(net)[0][0]
    cut = Cut(inputs={name: keep(3, [0, 2])})
    small = cut_network(net, cut)
    (select,) = parts(small, IndexSelect).values()
    assert (select.index.tolist(), select.size, select.dim) == ([0, 2], 3, dim)
    torch.testing.assert_close(small(x), masked(net, cut)(x))
    y = x.clone()
    y[:, 1] = torch.nan
    assert small(y).isfinite().all()


def test_batch_norm_is_exact_while_training():
    net = nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    cut = Cut(outputs={"0": keep(4, [0, 3])})
    zeroed, small = masked(net, cut), cut_network(net, cut)
    torch.testing.assert_close(small(x), zeroed(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(small[1].running_var, zeroed[1].running_var[[0, 3]])
    assert small[1].num_batches_tracked == 1
    small(x).sum().backward()
    assert small[1].weight.grad.shape == (2,)


def test_cut_network_can_be_traced_saved_and_compiled_to_a_graph():
    net = nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(6, 2))
    small = cut_network(net, Cut(inputs={"2": keep(6, [0, 4, 5])}))
    x = torch.randn(2, 1, 3)
    torch.testing.assert_close(torch.fx.symbolic_trace(small)(x), small(x))
    torch.testing.assert_close(torch.jit.trace(small, x)(x), small(x))
    torch.testing.assert_close(torch.export.export(small, (x,)).module()(x), small(x))
    stream = io.BytesIO()
    torch.save(small, stream)
    stream.seek(0)
    torch.testing.assert_close(torch.load(stream, weights_only=False)(x), small(x))
    other = cut_network(net, Cut(inputs={"2": keep(6, [1, 3, 5])}))
    other.load_state_dict(small.state_dict())
    torch.testing.assert_close(other(x), small(x))


@pytest.mark.parametrize("scores", [None, Scores(outputs={"0": torch.tensor([0.0, 1.0, 5.0, 2.0])})])
def test_layer_cut_to_nothing_keeps_its_best_unit(scores):
    net = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Flatten(), nn.Linear(12, 2))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([1.0, 2.0, 1.0, 1.0]).reshape(4, 1, 1).expand_as(net[0].weight))
        net[2].weight.fill_(1)
    cut = Cut(outputs={"0": keep(4, [])})
    best = 1 if scores is None else 2
    with pytest.warns(UserWarning, match=f"layer '0' would be cut to nothing; its unit {best} is kept") as caught:
        small = cut_network(net, cut, scores)
    assert caught[0].filename == __file__
    assert torch.equal(small[0].weight[0], net[0].weight[best])
    assert small[2].in_features == 3
    with pytest.warns(UserWarning, match="cut to nothing"):
        zeroed = masked(net, cut, scores)
    x = torch.randn(3, 2, 3)
    torch.testing.assert_close(zeroed(x), small(x))


def test_kept_units_without_kept_uses_leave_the_best_pair():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    cut = Cut(outputs={"0": keep(3, [0])}, inputs={"1": keep(3, [1, 2])})
    # Of each unit the lower of its two scores counts: 0, 1 and 2.
    scores = Scores(outputs={"0": torch.tensor([0.0, 9.0, 2.0])}, inputs={"1": torch.tensor([9.0, 1.0, 3.0])})
    with pytest.warns(UserWarning, match="its unit 2 is kept"):
        whole = complete_cut(net, cut, scores)
    assert whole.outputs["0"].tolist() == whole.inputs["1"].tolist() == [False, False, True]


def test_inputs_of_the_network_cut_to_nothing_keep_the_best():
    net = nn.Sequential(nn.Linear(3, 2))
    scores = Scores(inputs={"0": torch.tensor([0.0, 1.0, -1.0])})
    with pytest.warns(UserWarning, match="all inputs of the network would be cut; input 1 is kept"):
        small = cut_network(net, Cut(inputs={"0": keep(3, [])}), scores)
    assert torch.equal(small[-1].weight, net[0].weight[:, [1]])


@pytest.mark.parametrize(
    ("cut", "scores", "message"),
    [
        (Cut(outputs={"1": keep(3, [0])}), None, r"cut.outputs must be of the layers \['0', '2'\], got '1'"),
        (Cut(inputs={"2": keep(4, [0])}), None, r"cut.inputs\['2'\] must be of 3 units, got 4"),
        (Cut(outputs={"2": keep(2, [0])}), None, r"cut.outputs\['2'\] must keep all outputs of the network"),
        (Cut(), Scores(outputs={"0": torch.zeros(2)}), r"scores.outputs\['0'\] must be of 3 units, got 2"),
        (Cut(), Scores(inputs={"5": torch.zeros(2)}), r"scores.inputs must be of the layers .*, got '5'"),
    ],
)
@pytest.mark.parametrize("surgery", [cut_network, complete_cut])
def test_bad_input(surgery, cut, scores, message):
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=message):
        surgery(net, cut, scores)
