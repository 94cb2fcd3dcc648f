# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Weights and operations, by layer and in total."""

import pytest
import torch
from torch import nn

from pyro_radial.compression import Cut, IndexSelect, count_flops, count_weights, cut_network, mask_network
from tests.helpers.chains import keep, lenet

MNIST = (1, 28, 28)


def cut_lenet(first, second, inputs, third):
    """LeNet-5-Caffe cut to a-b-c-d, where c counts the inputs of the first linear layer."""
    positions = torch.zeros(800, dtype=torch.bool)
    positions[:inputs] = True
    # Every channel that is kept must keep a position: those dropped are spread over the channels.
    positions[: 16 * second] = True
    positions[torch.arange(16 * second).reshape(second, 16).t().flatten()[inputs:]] = False
    outputs = {"0": keep(20, range(first)), "2": keep(50, range(second)), "5": keep(500, range(third))}
    return Cut(outputs, {"5": positions})


def test_uncut_lenet():
    assert count_weights(lenet()).by_layer == {"0": 500, "2": 25_000, "5": 400_000, "7": 5_000}
    assert count_weights(lenet()).total == 430_500
    # 26 * 20 * 24^2, 501 * 50 * 8^2, 801 * 500, 501 * 10
    assert count_flops(lenet(), MNIST).by_layer == {"0": 299_520, "2": 1_603_200, "5": 400_500, "7": 5_010}
    assert count_flops(lenet(), MNIST).total == 2_308_230


def test_counts_of_the_network_really_cut_to_4_7_110_66():
    net = lenet()
    cut = cut_lenet(4, 7, 110, 66)
    small = cut_network(net, cut)
    assert count_weights(small).total == 8_720
    assert count_flops(small, MNIST).total == 113_148
    (select,) = (module for module in small.modules() if isinstance(module, IndexSelect))
    assert (len(select.index), select.size) == (110, 112)
    x = torch.randn(4, *MNIST)
    torch.testing.assert_close(small(x), mask_network(net, cut)(x))


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
    assert count_flops(small, MNIST).total / 1e3 == pytest.approx(flops, abs=0.05)
    assert count_weights(small).total / 1e3 == pytest.approx(weights, abs=0.05)


def test_formula_with_strides_padding_positions_and_no_bias():
    net = nn.Sequential(nn.Conv2d(2, 3, (3, 5), stride=2, padding=1, bias=False), nn.BatchNorm2d(3), nn.Dropout())
    # 9 by 9 becomes 5 by 4.
    assert count_flops(net, (2, 9, 9)).total == (2 * 3 * 5 + 1) * 3 * 5 * 4
    assert count_weights(net).total == 3 * 2 * 3 * 5
    assert count_flops(nn.Sequential(nn.Linear(4, 2)), (7, 4)).total == 7 * 5 * 2
    assert count_flops(nn.Sequential(nn.Conv1d(1, 1, 2)), (1, 4)).total == 3 * 3
    assert count_flops(nn.Sequential(nn.Conv3d(1, 1, 2)), (1, 2, 2, 2)).total == 9


def test_counting_changes_nothing():
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 1)).double()
    state = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    count_flops(net, (1, 4))
    assert net.training
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, state[key])


def test_a_single_datum_is_enough_where_a_batch_norm_is_training():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).train()
    assert count_flops(net, (4,)).by_layer == {"0": 15, "2": 4}


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"input_shape must fit the network, got \(1, 20, 20\), which fails at '5'"):
        count_flops(lenet(), (1, 20, 20))
    with pytest.raises(ValueError, match=r"input_shape must fit the network, got \(3, 28, 28\), which fails at '0'"):
        count_flops(lenet(), (3, 28, 28))


def test_every_pool_can_be_counted_through():
    for pool in (nn.FractionalMaxPool2d(2, output_size=4), nn.LPPool2d(2, 2), nn.AdaptiveMaxPool2d(4), nn.AvgPool2d(2)):
        net = nn.Sequential(nn.Conv2d(1, 2, 1), pool, nn.Conv2d(2, 1, 1))
        assert count_flops(net, (1, 8, 8)).by_layer["2"] == 3 * 16
