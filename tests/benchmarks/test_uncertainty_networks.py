# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from torch import nn

from benchmarks.uncertainty._networks import VGG4, MeanAndMaxPool, vgg


def numbers(net):
    return sum(parameter.numel() for parameter in net.parameters())


def test_it_has_the_weights_of_vgg16_but_for_its_fully_connected_layers():
    # 14,714,688 in all convolutions of VGG-16 and their biases, and an output of each of two classes.
    assert numbers(vgg()) == 14_714_688 + 2 * (2 * 512 + 1)
    # With two parameters for each weight, 46 channels are the paper's 15 million.
    assert 2 * numbers(vgg(width=46)) == pytest.approx(15.2e6, rel=0.005)


@pytest.mark.parametrize(("size", "width", "classes"), [(28, 4, 2), (45, 3, 5)])
def test_any_width_and_size_will_do(size, width, classes):
    assert vgg(width=width, blocks=VGG4, classes=classes)(torch.rand(2, 3, size, size)).shape == (2, classes)
    assert vgg(width=1)(torch.rand(2, 3, 64, 48)).shape == (2, 2)
    assert vgg(width=2, blocks=VGG4, channels=1)(torch.rand(2, 1, size, size)).shape == (2, 2)


def test_both_pools_are_there():
    x = torch.rand(2, 3, 4, 5)
    expected = torch.cat([x.mean((2, 3)), x.flatten(2).max(-1).values], 1)
    torch.testing.assert_close(MeanAndMaxPool()(x), expected)


def test_dropout_ends_each_block():
    assert [layer.p for layer in vgg(0.3, width=1).modules() if isinstance(layer, nn.Dropout)] == [0.3] * 5
    assert not any(isinstance(layer, nn.Dropout) for layer in vgg(width=1).modules())


def test_signals_keep_their_size_through_all_layers():
    torch.manual_seed(0)
    features = vgg(width=16)[:-2](torch.randn(8, 3, 32, 32))
    assert 0.2 < features.square().mean().sqrt() < 5
