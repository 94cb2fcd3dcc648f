# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A normal prior with fixed scales."""

import math

import pyro.distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_radial._pyro.checks import positive_float


class FanIn:
    r"""A normal prior under which a layer's output has the same size at any width.

    .. math:: W_{ij\ldots} \sim N(0, \mathrm{gain}^2 / \mathrm{fan\_in}), \qquad b_i \sim N(0, \mathrm{bias\_scale}^2)

    W is a parameter of two or more dims, b one of fewer. The fan-in is the number of elements in one slice of the first
    dim: the inputs of one unit of ``nn.Linear`` and ``nn.Conv*d``, or the width of an ``nn.Embedding``.

    Source: Neal (1996), "Bayesian Learning for Neural Networks", chapter 2.

    :param float gain: the standard deviation of a unit's output for inputs of mean square one.
    :param float bias_scale: the standard deviation of biases and other vectors.
    :raises ValueError: if an argument is not positive and finite.

    Example::

        >>> import torch
        >>> FanIn(gain=2.0)("weight", torch.zeros(10, 16)).scale
        tensor(0.5000)
    """

    def __init__(self, gain: float = 1.0, bias_scale: float = 1.0) -> None:
        self.gain = positive_float("gain", gain)
        self.bias_scale = positive_float("bias_scale", bias_scale)

    def __repr__(self) -> str:
        return f"FanIn({self.gain:g}, {self.bias_scale:g})"

    def __call__(self, name: str, parameter: Tensor) -> TorchDistributionMixin:
        """Return the prior of one element of ``parameter``, of shape ``()``."""
        if parameter.dim() < 2:
            return dist.Normal(0.0, self.bias_scale)
        return dist.Normal(0.0, self.gain / math.sqrt(math.prod(parameter.shape[1:])))
