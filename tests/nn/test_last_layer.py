# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The linear layer that computes a network's output, in networks that call it in different ways."""

import pytest
import torch
from torch import nn

from pyro_radial.nn.last_layer import find_output_layer, hooked
from tests.helpers.networks import Net


def body_and_head(call):
    return Net(call, body=nn.Linear(3, 3), head=nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (nn.Linear(3, 2), ("", True)),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), ("2", True)),
        (nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1)), (None, False)),
        (nn.Sequential(nn.Linear(3, 2), nn.Flatten(0)), (None, False)),
        (nn.Sequential(nn.Linear(3, 2), nn.Identity()), ("0", True)),
        (body_and_head(lambda net, x: net.head(input=net.body(x))), ("head", True)),
        (body_and_head(lambda net, x: net.body(net.head(x))), ("body", True)),
        (body_and_head(lambda net, x: net.head(net.head(x))), ("head", False)),
        (body_and_head(lambda net, x: {"f": net.head(x)}), (None, False)),
        (body_and_head(lambda net, x: net.head(x) + net.body(x)), (None, False)),
    ],
)
def test_the_layer_that_returns_the_networks_own_output_is_found(net, expected):
    assert find_output_layer(net, lambda: net(torch.ones(4, 3))) == expected


def test_a_hook_sees_input_and_output_and_may_replace_it():
    net, x, seen = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.ones(1, 3), []

    def double(place, inputs, output):
        seen.append((place, inputs, output))
        return 2.0 * output

    with hooked({"0": net[0]}, double):
        inside = net(x)
    ((place, inputs, output),) = seen
    assert (place, inputs is x) == ("0", True)
    torch.testing.assert_close(inside, (2.0 * output).tanh())


def test_hooks_are_removed_when_the_block_ends_and_when_it_fails():
    net = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="shapes"):
        find_output_layer(net, lambda: net(torch.ones(4, 7)))
    assert not net._forward_hooks
