# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks of the same shape for as many data sets, such as the splits of one, which train side by side as one model.

No parameter and no row is shared, the loss is the sum of theirs, and Adam goes by element: each network is trained as
it would be alone, in a small part of the time, since the arrays of one are far too small to keep a processor busy.
"""

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.nn.likelihoods import Likelihood

#: How many dimensions of a parameter are those of one network; the first one is that of the networks.
EVENT_DIMS = {"weight1": 2, "bias1": 1, "weight2": 2, "bias2": 1}


class StackedNetworks(nn.Module):
    """K networks with one hidden layer of rectified units, from inputs ``[N, K, inputs]`` to outputs ``[N, K]``."""

    def __init__(self, number: int, inputs: int, hidden: int) -> None:
        super().__init__()
        layers = [(nn.Linear(inputs, hidden), nn.Linear(hidden, 1)) for _ in range(number)]
        for place, own in enumerate(zip(*layers, strict=True), 1):
            for name in ("weight", "bias"):
                stacked = torch.stack([getattr(layer, name).detach() for layer in own])
                self.register_parameter(f"{name}{place}", nn.Parameter(stacked))

    def forward(self, x: Tensor) -> Tensor:
        """The output of each network for its own rows."""
        hidden = torch.baddbmm(self.bias1[:, None], x.transpose(0, 1), self.weight1.mT).relu()
        return torch.baddbmm(self.bias2[:, None], hidden, self.weight2.mT)[..., 0].T


class StackedGaussian(Likelihood):
    """Targets ``[N, K]`` with a noise level for each of K networks, all trained."""

    def __init__(self, num_data: int, number: int, scale: float) -> None:
        super().__init__(num_data)
        self.scale = PyroParam(torch.full((number,), scale), constraints.softplus_positive)

    def observation(self, f: Tensor, **noise: Tensor) -> Any:
        """The normal distribution around ``f``."""
        return dist.Normal(f, self.scale).to_event(1)

    def inverse_link(self, f: Tensor) -> Tensor:
        """``f`` itself."""
        return f


def stacked_model(
    num_data: int, number: int, inputs: int, hidden: int, *, gain: float, noise: float
) -> SupervisedModel:
    """Each weight is normal with ``gain`` over the root of its layer's inputs, each bias with ``gain``."""

    def prior(name: str, parameter: Tensor) -> Any:
        scale = gain * (parameter.shape[-1] ** -0.5 if name.startswith("weight") else 1.0)
        return dist.Normal(0.0, scale)

    network = StackedNetworks(number, inputs, hidden)
    return SupervisedModel(BayesianModule(network, prior), StackedGaussian(num_data, number, noise))


def stacked_radial(model: SupervisedModel) -> AutoRadial:
    """One radius for each tensor of each network."""
    return AutoRadial(model, event_dim=EVENT_DIMS)


def stacked_mean_field(model: SupervisedModel) -> AutoMeanField:
    """An independent normal for each weight."""
    return AutoMeanField(model)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """The rows ``[N, ...]`` of each network as one tensor ``[N, K, ...]``."""
    return torch.stack(list(parts), 1)
