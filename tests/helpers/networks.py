# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small pieces that the tests of networks share."""

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods


def draws_of(bnn: BayesianModule, *shape: int, scale: float = 0.3) -> dict[str, Tensor]:
    """Values of every site, with ``shape`` as leading dims."""
    with torch.no_grad():
        initial = bnn.sample_parameters()
    return {name: scale * torch.randn(*shape, *value.shape) for name, value in initial.items()}


def at(draws: dict[str, Tensor], *index: int) -> dict[str, Tensor]:
    return {name: value[index] for name, value in draws.items()}


def call_with(bnn: BayesianModule, draws: dict[str, Tensor], *args, **kwargs):
    """The output of ``bnn`` with the sites at given values, without a check of densities."""
    return poutine.condition(bnn, data=draws)(*args, **kwargs)


def mlp(inputs: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def normed_mlp(inputs: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, outputs))


def classifier(num_data: int = 40, net: nn.Module | None = None, **kwargs) -> SupervisedModel:
    return SupervisedModel(BayesianModule(net or normed_mlp(), **kwargs), likelihoods.Categorical(num_data=num_data))


def data(size: int = 10) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 3)
    return x, (x[:, 0] > 0).long()


class Net(nn.Module):
    """Layers by name, and a function of the network and its inputs that says how it calls them."""

    def __init__(self, call, **layers):
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs, **inputs_by_name):
        return self.call(self, *inputs, **inputs_by_name)


def encoder() -> Net:
    """A layer of a transformer on sequences ``[B, T, 4]``, with two outputs."""
    layers = {"layer": nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), "output": nn.Linear(4, 2)}
    return Net(lambda net, x: net.output(net.layer(x).mean(1)), **layers)


class Adapter(nn.Module):
    """Weights beside those of a layer, which it shows as its own."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer, self.added = layer, nn.Parameter(torch.zeros_like(layer.weight))

    weight = property(lambda self: self.layer.weight)
    bias = property(lambda self: self.layer.bias)

    def forward(self, x):
        return self.layer(x) + x @ self.added.T


def adapted_encoder() -> Net:
    """An encoder with an adapter where torch's fast path reads the weight and does not call the layer."""
    net = encoder()
    net.layer.linear1 = Adapter(net.layer.linear1)
    return net


def is_added(name: str, parameter: Tensor) -> bool:
    return name.endswith("added")


class WithForce(nn.Module):
    """The network on the page about several outputs."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        def total(x):
            energy = self.net(x)
            return energy.sum(), energy

        gradient, energy = torch.func.grad(total, has_aux=True)(x)
        return {"energy": energy, "force": -gradient}
