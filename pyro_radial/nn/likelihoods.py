# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Likelihoods: the distribution of the targets given the output of a network."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroParam
from pyro.nn.module import pyro_method
from torch import Tensor

from pyro_radial._pyro.checks import positive_float
from pyro_radial.nn.likelihood import FUNCTION_SITE, Likelihood, check_values
from pyro_radial.nn.priors.normal import check_positive_scalar_distribution
from pyro_radial.nn.site_priors import Following

__all__ = ["Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian", "Likelihood", "MaskedGaussian", "Poisson"]


class Categorical(Likelihood):
    r"""One of K classes, with probabilities ``softmax(f)``.

    ``f`` is ``[*draws, B, K]`` and ``y`` holds ``B`` integers from 0 to K-1. The classes are always the last dim: for
    many labels per point, as with ``event_dim=3``, ``f`` is ``[B, H, W, K]`` and ``y`` is ``[B, H, W]``.

    :param int num_data: as of :class:`Likelihood`.
    :param int event_dim: as there; the classes count as one dim.

    Example::

        >>> Categorical(num_data=100).inverse_link(torch.tensor([[0.0, 0.0]]))
        tensor([[0.5000, 0.5000]])
    """

    is_discrete = True
    min_event_dim = 1

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """The categorical distribution with logits ``f``."""
        return dist.Categorical(logits=f).to_event(self.event_dim - 1)

    def inverse_link(self, f: Tensor) -> Tensor:
        """The probabilities of the classes."""
        return f.softmax(-1)

    def predictive_entropy(self, mean: Tensor) -> Tensor:
        r""":math:`-\sum_k p_k \log p_k`, summed over the labels of a point."""
        return _sum_last(torch.special.entr(mean), self.event_dim)

    def target_shape(self, f: Tensor) -> torch.Size:
        """``[B]``, or ``[B, *labels]``."""
        return super().target_shape(f)[:-1]

    def check_target(self, f: Tensor, y: Tensor) -> Tensor:
        """The labels, or a ValueError that names ``y``."""
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"y must hold integer labels for site 'y', got {y.dtype}")
        if y.shape != self.target_shape(f):
            raise ValueError(
                f"y must have shape {tuple(self.target_shape(f))} for site 'y', since the network's output has "
                f"shape {tuple(f.shape)} with the classes last, got {tuple(y.shape)}"
            )
        self.check_target_values(f, y)
        return y

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` for a label out of range."""
        number = f.shape[-1]
        check_values((y >= 0) & (y < number), y, f"labels from 0 to {number - 1}, of {number} classes,")


class Bernoulli(Likelihood):
    r"""Zero or one, independently for each output: ``y`` is one with probability ``sigmoid(f)``.

    :param int num_data: as of :class:`Likelihood`.
    :param int event_dim: as there.

    Example::

        >>> Bernoulli(num_data=100).predictive_entropy(torch.tensor([[0.5], [1.0]]))
        tensor([0.6931, 0.0000])
    """

    is_discrete = True

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """The Bernoulli distribution with logits ``f``."""
        return dist.Bernoulli(logits=f).to_event(self.event_dim)

    def inverse_link(self, f: Tensor) -> Tensor:
        """The probability of a one."""
        return f.sigmoid()

    def predictive_entropy(self, mean: Tensor) -> Tensor:
        r""":math:`-p \log p - (1-p) \log (1-p)`, summed over the outputs."""
        return _sum_last(torch.special.entr(mean) + torch.special.entr(1 - mean), self.event_dim)

    def check_target_dtype(self, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` if it is complex."""
        if y.is_complex():
            raise ValueError(f"y must hold zeros and ones for site 'y', got {y.dtype}")

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` for a number that is neither zero nor one."""
        check_values((y == 0) | (y == 1), y, "zeros and ones")


class Gaussian(Likelihood):
    r"""Real numbers with one noise level: :math:`y \sim N(f, \sigma^2)` for each output.

    The noise level is fixed at ``scale``. With ``learn_scale`` it is a parameter that starts there. With
    ``precision_prior`` it is random: :math:`\sigma = \tau^{-1/2}` with :math:`\tau` the site ``"precision"``, for
    example under the ``Gamma(6, 6)`` of Hernández-Lobato and Adams (2015), "Probabilistic Backpropagation". The
    deterministic site ``"noise_scale"`` records it, in the units of ``y``.

    :param int num_data: as of :class:`Likelihood`.
    :param int event_dim: as there.
    :param float scale: the noise's standard deviation, or its first value; 1 by default.
    :param bool learn_scale: whether to train it.
    :param precision_prior: a distribution of shape ``()`` on the positive numbers, for :math:`1/\sigma^2`.
    :raises ValueError: naming an argument out of range, or given together with ``precision_prior``.

    Example::

        >>> likelihood = Gaussian(num_data=100, scale=0.1)
        >>> likelihood.observation(torch.zeros(5, 1), scale=torch.tensor(0.1)).batch_shape
        torch.Size([5])
    """

    noise_sites = {"scale": "noise_scale"}

    def __init__(
        self,
        num_data: int | None = None,
        event_dim: int = 1,
        *,
        scale: float | None = None,
        learn_scale: bool = False,
        precision_prior: TorchDistributionMixin | None = None,
    ) -> None:
        super().__init__(num_data, event_dim)
        self.precision_prior: Following | None = None
        if precision_prior is not None:
            if scale is not None or learn_scale:
                raise ValueError("precision_prior must be given alone, got scale or learn_scale too")
            check_positive_scalar_distribution("precision_prior", precision_prior)
            self.precision_prior = Following(precision_prior)
            return
        self.scale: Any = positive_float("scale", 1.0 if scale is None else scale)
        if learn_scale:
            initial = torch.tensor(self.scale)
            del self.scale
            self.scale = PyroParam(initial, constraints.softplus_positive)

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """The normal distribution around ``f``; ``scale`` broadcasts with ``[*draws, B]``."""
        scale = noise["scale"]
        return dist.Normal(f, scale.reshape(scale.shape + (1,) * self.event_dim)).to_event(self.event_dim)

    def inverse_link(self, f: Tensor) -> Tensor:
        """``f`` itself."""
        return f

    @pyro_method
    def noise(self, f: Tensor) -> dict[str, Tensor]:
        """The standard deviation as ``scale``, of shape ``()`` or that of the draws."""
        if self.precision_prior is not None:
            scale = pyro.sample("precision", self.precision_prior(f)).rsqrt()
        elif isinstance(self.scale, float):
            scale = torch.full((), self.scale, dtype=f.dtype, device=f.device)
        else:
            scale = self.scale.to(f.device, f.dtype)
        return {"scale": pyro.deterministic("noise_scale", scale)}


class MaskedGaussian(Gaussian):
    r"""A normal likelihood that ignores unobserved targets, such as the rewards of arms that a bandit did not pull.

    .. math:: \log p(y \mid f) = \sum_{k:\ y_k \neq \mathrm{NaN}} \log N(y_k;\ f_k, \sigma^2)

    Mark unobserved elements of ``y`` by NaN. The arguments are those of :class:`Gaussian`.

    Example::

        >>> y = torch.tensor([[float("nan"), 1.0]])
        >>> MaskedGaussian().observation(torch.zeros(1, 2), scale=torch.tensor(1.0)).log_prob(y)
        tensor([-1.4189])
    """

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """The normal distribution around ``f``, with a log density of zero at NaN."""
        scale = noise["scale"]
        masked = _MaskedNormal(f, scale.reshape(scale.shape + (1,) * self.event_dim), validate_args=False)
        return masked.to_event(self.event_dim)

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError if ``y`` holds an infinite value."""
        check_values(~y.isinf(), y, "finite values, or NaN where nothing was observed")


class _MaskedNormal(dist.Normal):
    """A normal distribution that ignores NaN (unobserved) values."""

    def log_prob(self, value: Tensor) -> Tensor:
        observed = ~value.isnan()
        # The gradient of a density at NaN would be NaN even where it is masked.
        density: Tensor = super().log_prob(torch.where(observed, value, self.loc.detach()))
        return torch.where(observed, density, 0.0)


class HeteroscedasticGaussian(Likelihood):
    r"""Real numbers with their own noise level: the network returns locations and scales.

    .. math:: y_k \sim N(f_k, \sigma_k^2), \qquad \sigma_k = \mathrm{softplus}(f_{K+k}) + \mathrm{floor}

    The last dim of ``f`` has 2K elements, K locations and then K raw scales; ``y`` is ``[B, K]``. The floor bounds the
    density at points that the network fits exactly.

    :param int num_data: as of :class:`Likelihood`.
    :param int event_dim: as there; at least 1.
    :param float floor: the least standard deviation, in the units of ``y``.

    Example::

        >>> HeteroscedasticGaussian(num_data=100).inverse_link(torch.tensor([[1.0, 2.0, 0.0, 0.0]]))
        tensor([[1., 2.]])
    """

    min_event_dim = 1

    def __init__(self, num_data: int | None = None, event_dim: int = 1, *, floor: float = 1e-3) -> None:
        super().__init__(num_data, event_dim)
        self.floor = positive_float("floor", floor)

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """The normal distribution with the locations and scales in ``f``."""
        loc, raw = f.chunk(2, -1)
        scale = torch.nn.functional.softplus(raw) + self.floor
        return dist.Normal(loc, scale).to_event(self.event_dim)

    def inverse_link(self, f: Tensor) -> Tensor:
        """The locations, ``[..., K]``."""
        return f.chunk(2, -1)[0]

    def target_shape(self, f: Tensor) -> torch.Size:
        """``[B, ..., K]``."""
        shape = super().target_shape(f)
        return torch.Size((*shape[:-1], shape[-1] // 2))

    def check_output(self, f: Tensor) -> None:
        """Raise a ValueError naming ``f`` if the size of its last dim is odd."""
        super().check_output(f)
        if f.shape[-1] % 2:
            raise ValueError(
                f"f must end in a dim of even size at site {FUNCTION_SITE!r}, locations and then raw scales, "
                f"got shape {tuple(f.shape)}"
            )


class Poisson(Likelihood):
    r"""Counts, independently for each output: :math:`y \sim \mathrm{Poisson}(\exp f)`.

    :param int num_data: as of :class:`Likelihood`.
    :param int event_dim: as there.

    Example::

        >>> Poisson(num_data=100).inverse_link(torch.zeros(1, 1))
        tensor([[1.]])
    """

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """The Poisson distribution with log rate ``f``."""
        return dist.Poisson(f.exp()).to_event(self.event_dim)

    def inverse_link(self, f: Tensor) -> Tensor:
        """The rate."""
        return f.exp()

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` for a number that is not a count."""
        check_values((y >= 0) & (y == y.round()), y, "counts, 0, 1, 2, ...,")


def _sum_last(values: Tensor, dims: int) -> Tensor:
    return values.sum(tuple(range(-dims, 0))) if dims else values
