# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Normal priors, and the scale mixture of two, with scales that are fixed, learned or random."""

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule, PyroParam
from torch import Tensor

from pyro_radial._pyro.checks import positive_float, proper_fraction
from pyro_radial._pyro.compat import deep_setattr
from pyro_radial.nn.site_priors import Following

__all__ = ["FanIn", "HyperScale", "LearnedScale", "ScaleMixture", "check_positive_scalar_distribution"]


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


class LearnedScale(PyroModule):
    r"""A normal prior with a learned standard deviation for each parameter tensor: empirical Bayes.

    .. math:: w_i \sim N(0, \sigma^2), \qquad \sigma \text{ maximizes the ELBO}

    The scales are trained with the guide. Make a new object for each network.

    :param float init_scale: the first value of every scale.
    :raises ValueError: if it is not positive and finite.

    Example::

        >>> from torch import nn
        >>> from pyro_radial.nn import BayesianModule
        >>> prior = LearnedScale(init_scale=0.5)
        >>> bnn = BayesianModule(nn.Linear(3, 2), prior)
        >>> prior.scale("weight")
        tensor(0.5000, grad_fn=<...>)
    """

    def __init__(self, init_scale: float = 1.0) -> None:
        super().__init__()
        self.init_scale = positive_float("init_scale", init_scale)
        self.scales = PyroModule()

    def setup(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Make the scales. :class:`~pyro_radial.nn.BayesianModule` calls this once; again it raises a ValueError."""
        if list(self.scales.parameters()):
            raise ValueError("prior must be a new LearnedScale for each network, got one that has a network already")
        for name, parameter in named_parameters:
            scale = parameter.new_full((), self.init_scale)
            deep_setattr(self.scales, name, PyroParam(scale, constraints.softplus_positive))

    def scale(self, name: str) -> Tensor:
        """The standard deviation of one site, or a ValueError if it has none."""
        try:
            return attrgetter(name)(self.scales)
        except AttributeError as error:
            raise ValueError(f"name must be a site with a learned scale, got {name!r}") from error

    def sample_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """Sample the site ``name``, ``[*draws, *parameter.shape]``."""
        return _sample_normal(name, parameter, self.scale(name))


class HyperScale:
    r"""A normal prior with a random standard deviation for each parameter tensor.

    .. math:: \sigma \sim p(\sigma), \qquad w_i \sim N(0, \sigma^2)

    The scale of the parameter ``0.weight`` is the site ``0.weight_prior_scale``.

    :param scale_prior: a distribution of shape ``()`` on the positive numbers.
    :raises ValueError: if it is not.

    Example::

        >>> from torch import nn
        >>> from pyro import poutine
        >>> from pyro_radial.nn import BayesianModule
        >>> bnn = BayesianModule(nn.Linear(3, 2), HyperScale(dist.HalfNormal(0.5)))
        >>> list(poutine.trace(bnn).get_trace(torch.zeros(1, 3)).stochastic_nodes)
        ['weight_prior_scale', 'weight', 'bias_prior_scale', 'bias']
    """

    def __init__(self, scale_prior: TorchDistributionMixin | None = None) -> None:
        scale_prior = dist.HalfNormal(1.0) if scale_prior is None else scale_prior
        check_positive_scalar_distribution("scale_prior", scale_prior)
        self.scale_prior = Following(scale_prior)

    def sample_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """Sample the sites ``name_prior_scale`` and ``name``, ``[*draws, *parameter.shape]``."""
        scale = pyro.sample(f"{name}_prior_scale", self.scale_prior(parameter))
        return _sample_normal(name, parameter, scale)


def _sample_normal(name: str, parameter: Tensor, scale: Tensor) -> Tensor:
    """Sample N(0, scale^2) for every element; ``scale`` has the shape of the draws."""
    scale = scale.reshape(scale.shape + (1,) * parameter.dim())
    normal = dist.Normal(torch.zeros_like(parameter), scale).to_event(parameter.dim())
    infer: Any = {"initial_value": parameter}
    return pyro.sample(name, normal, infer=infer)


def check_positive_scalar_distribution(argument: str, distribution: Any) -> None:
    """Raise a ValueError that names the argument, unless it is a distribution of one positive number."""
    if not isinstance(distribution, TorchDistributionMixin):
        raise ValueError(f"{argument} must be a distribution, got {type(distribution).__name__}")
    if distribution.shape() != torch.Size():
        raise ValueError(f"{argument} must have shape (), got {tuple(distribution.shape())}")
    lower = getattr(distribution.support, "lower_bound", None)
    if lower is None or lower < 0:
        raise ValueError(
            f"{argument} must be a distribution of positive numbers, got one with support {distribution.support}"
        )
