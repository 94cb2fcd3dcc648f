# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train networks of the same shape side by side as one model, one for each data set, such as a split.

Networks share no parameter and no row, the loss is the sum of their losses, and Adam works by element. So each network
trains as it would alone. Training takes a small part of the time, because the arrays of one network are far too small
to keep a processor busy.
"""

from collections.abc import Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.nn.functional import normalize

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, BayesianModule, SupervisedModel
from pyro_radial.distributions import HypersphericalUniform
from pyro_radial.distributions.half_cauchy import half_cauchy_factors, half_cauchy_value
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
        super().__init__(num_data=num_data)
        self.scale = PyroParam(torch.full((number,), scale), constraints.softplus_positive)

    def observation(self, f: Tensor, **noise: Tensor) -> Any:
        """The normal distribution around ``f``."""
        return dist.Normal(f, self.scale).to_event(1)

    def inverse_link(self, f: Tensor) -> Tensor:
        """``f`` itself."""
        return f


class StackedNormals:
    """A prior: each weight is normal with ``gain`` over the root of its layer's inputs, each bias with ``gain``."""

    def __init__(self, gain: float) -> None:
        self.gain = gain

    def sample_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """The site of a parameter."""
        scale = self.gain * (parameter.shape[-1] ** -0.5 if name.startswith("weight") else 1.0)
        return pyro.sample(name, dist.Normal(0.0, scale).expand(parameter.shape).to_event(parameter.dim()))


class StackedDirections(StackedNormals):
    """The same, but for the first layer: a direction and a half-Cauchy radius a row, and one radius a network.

    It is :class:`~pyro_radial.nn.priors.RadialDirectionalPrior` with rows, whose tensors have one such radius each.
    """

    def sample_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """The sites of a parameter; those of the first layer start at the network's own rows."""
        if name != "weight1":
            return super().sample_parameter(name, parameter)
        norm = parameter.detach().norm(dim=-1)
        typical = norm.log().mean(-1).exp()
        first = {"initial_value": normalize(parameter.detach(), dim=-1)}
        uniform = HypersphericalUniform(parameter.shape[-1]).expand(norm.shape).to_event(2)
        directions = pyro.sample(f"{name}.direction", uniform, infer=first)
        rows = _half_cauchy(f"{name}.local_radius", norm / typical[:, None])
        networks = _half_cauchy(f"{name}.global_radius", typical)
        return directions * rows[..., None] * networks[..., None, None]


def _half_cauchy(name: str, first: Tensor) -> Tensor:
    """Radii of scale one, from the two sites of their squares, which start at a value."""
    values = (first.square() / (1.0 + first.square()), 1.0 + first.square())
    factors = half_cauchy_factors(first.new_tensor(1.0))
    gamma, inverse_gamma = (
        pyro.sample(f"{name}_{kind}", factor.expand(first.shape).to_event(first.dim()), infer={"initial_value": value})
        for kind, factor, value in zip(("gamma", "inverse_gamma"), factors, values, strict=True)
    )
    return half_cauchy_value(gamma, inverse_gamma)


def stacked_model(
    num_data: int, number: int, inputs: int, hidden: int, *, noise: float, prior: StackedNormals
) -> SupervisedModel:
    """Networks with a prior, and noise that starts there."""
    network = StackedNetworks(number, inputs, hidden)
    return SupervisedModel(BayesianModule(network, prior), StackedGaussian(num_data, number, noise))


def stacked_radial(model: SupervisedModel) -> AutoRadial:
    """One radius for each tensor of each network."""
    return AutoRadial(model, event_dim=EVENT_DIMS)


def stacked_mean_field(model: SupervisedModel) -> AutoMeanField:
    """An independent normal for each weight."""
    return AutoMeanField(model)


def stacked_directional(model: SupervisedModel, init_mean_cosine: float) -> AutoRadialDirectional:
    """A direction of its own concentration, and a radius, for each row of the first layer; normals elsewhere."""
    return AutoRadialDirectional(model, shared_concentration=False, init_mean_cosine=init_mean_cosine)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """The rows ``[N, ...]`` of each network as one tensor ``[N, K, ...]``."""
    return torch.stack(list(parts), 1)
