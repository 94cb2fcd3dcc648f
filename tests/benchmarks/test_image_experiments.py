# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from torch import nn

from benchmarks.uncertainty import _networks, lenet5, residual_net


def weights(net):
    return sum(parameter.numel() for parameter in net.parameters())


def test_lenet_has_the_weights_of_the_published_one():
    net = lenet5.lenet(0.0)
    # Weights and biases of two convolutions and three linear layers.
    assert weights(net) == (25 * 1 + 1) * 6 + (25 * 6 + 1) * 16 + (256 + 1) * 120 + (120 + 1) * 84 + (84 + 1) * 10
    assert weights(net) == 44_426
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("blocks", [(1, 1, 1), (2, 2, 2, 2)])
def test_each_stage_has_half_the_pixels_and_twice_the_channels(blocks):
    net = residual_net.residual_net(4, blocks, "cpu", 0.0)
    shapes, x = [], torch.randn(2, 1, 28, 28)
    for layer in net:
        x = layer(x)
        if isinstance(layer, _networks.Block):
            shapes.append(tuple(x.shape[1:]))
    ends = torch.tensor(blocks).cumsum(0) - 1
    assert [shapes[end][0] for end in ends] == [4 * 2**stage for stage in range(len(blocks))]
    assert [shapes[end][1] for end in ends] == [14, 7, 4, 2][: len(blocks)]
    assert x.shape == (2, 10)


def test_the_large_form_is_resnet_18():
    size = residual_net.SIZES["paper"]
    net = residual_net.residual_net(size.width, size.blocks, "cpu", 0.0)
    # One convolution, two in each of eight blocks, one linear layer; and three that change channels.
    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == 18 + 3
    assert weights(net) == pytest.approx(11.17e6, rel=1e-3)


def test_a_block_is_the_identity_where_its_convolutions_give_nothing():
    block = _networks.Block(3, 3, 1, 0.0)
    nn.init.zeros_(block.second.weight)
    x = torch.rand(2, 3, 5, 5)
    torch.testing.assert_close(block(x), x)


@pytest.mark.parametrize("make", [lambda rate: residual_net.residual_net(2, (1, 1), "cpu", rate), lenet5.lenet])
def test_dropout_is_there_where_it_is_asked_for(make):
    assert [sum(isinstance(module, nn.Dropout) for module in make(rate).modules()) for rate in (0.0, 0.3)] == [0, 2]
