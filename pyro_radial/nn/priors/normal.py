# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Normal priors with fixed scales, and the scale mixture of two."""

import math

import pyro.distributions as dist
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_radial._pyro.checks import positive_float, proper_fraction

__all__ = ["FanIn", "ScaleMixture"]


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

    def __call__(self, name: str, parameter: Tensor) -> TorchDistributionMixin:
        """The prior of one element of ``parameter``, of shape ``()``."""
        if parameter.dim() < 2:
            return dist.Normal(0.0, self.bias_scale)
        return dist.Normal(0.0, self.gain / math.sqrt(math.prod(parameter.shape[1:])))


class ScaleMixture:
    r"""The mixture of a wide and a narrow normal, independently for each element.

    .. math:: p(w) = \pi N(w; 0, \sigma_1^2) + (1 - \pi) N(w; 0, \sigma_2^2)

    It has no closed-form KL to a normal or radial posterior; losses estimate it by Monte Carlo.

    Source: Blundell et al. (2015), "Weight Uncertainty in Neural Networks", eq. 7.

    :param float pi: the weight of the first normal, between zero and one.
    :param float scale1: the standard deviation of the first.
    :param float scale2: the standard deviation of the second.
    :raises ValueError: if an argument is out of its range.

    Example::

        >>> import torch
        >>> ScaleMixture()("weight", torch.zeros(3)).log_prob(torch.zeros(())).exp()
        tensor(80.6719)
    """

    def __init__(self, pi: float = 0.5, scale1: float = 1.0, scale2: float = math.exp(-6)) -> None:
        self.pi = proper_fraction("pi", pi)
        self.scale1 = positive_float("scale1", scale1)
        self.scale2 = positive_float("scale2", scale2)

    def __call__(self, name: str, parameter: Tensor) -> TorchDistributionMixin:
        """The prior of one element of ``parameter``, of shape ``()``."""
        weights = dist.Categorical(probs=parameter.new_tensor([self.pi, 1.0 - self.pi]))
        normals = dist.Normal(parameter.new_zeros(2), parameter.new_tensor([self.scale1, self.scale2]))
        return _RealMixture(weights, normals)


class _RealMixture(dist.MixtureSameFamily):
    # torch knows no transform to the support of a mixture, so autoguides could not start.
    support = constraints.real
