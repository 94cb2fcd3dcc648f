# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The power spherical distribution of a direction, which is drawn without rejection."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.compat import standard_gamma
from pyro_radial.distributions import special
from pyro_radial.distributions.beta_formulas import (
    complement_slope,
    log_rise,
    log_rise_curvature,
    log_rise_slope,
    nodes_and_weights,
)
from pyro_radial.distributions.rotationally_symmetric import RotationallySymmetric, accumulated, check_same_sphere
from pyro_radial.distributions.vmf.sphere_sampling import sample_direction
from pyro_radial.distributions.von_mises_fisher import HypersphericalUniform, VonMisesFisherStable

__all__ = [
    "PowerSpherical",
    "kl_power_spherical_to_uniform",
    "kl_power_spherical_to_von_mises_fisher",
    "kl_uniform_to_power_spherical",
]

# Points with which the integrals below are good to 1e-15 up to a concentration of beta.
_NUM_NODES = 10


class PowerSpherical(RotationallySymmetric):
    r"""A random direction around a mean direction, whose cosine to it is that of a beta variable.

    .. math:: p(x) = \frac1N (1 + \mu \cdot x)^\kappa, \quad \|x\| = 1, \qquad
        \log N = (\alpha + \beta) \log 2 + \beta \log \pi + \log\Gamma(\alpha) - \log\Gamma(\alpha + \beta),

    with :math:`\beta = (m - 1) / 2`, :math:`\alpha = \beta + \kappa`, with respect to the area of the unit sphere of
    :math:`R^m`. So :math:`(1 + \mu \cdot x) / 2` is of Beta(:math:`\alpha, \beta`), the mean is
    :math:`\kappa / (\kappa + m - 1)\, \mu`, and nothing needs a Bessel function. With :math:`\kappa = 0` it is the
    uniform distribution. Near the mean it falls off as a von Mises-Fisher distribution of :math:`\kappa / 2`; opposite
    to it the density is zero, and the gradient there is defined as zero.

    Source: De Cao and Aziz (2020), "The Power Spherical distribution". Their density, sampler, moments and entropy hold
    as they stand. Their reflection, along :math:`e_1 - \mu`, vanishes at :math:`\mu = e_1`; the one here does nowhere.
    The gradient of the draw in the concentration is the exact one of implicit reparameterization
    (:func:`~pyro_radial.distributions.beta_formulas.complement_slope`), where that of torch's beta distribution is an
    approximation, and can be differentiated again. There is a KL in closed form to
    :class:`~pyro_radial.distributions.HypersphericalUniform` and
    :class:`~pyro_radial.distributions.VonMisesFisherStable`, but none to another power spherical distribution:
    :math:`E \log(1 + \mu_p \cdot x)` has one only where the mean directions agree.

    :param Tensor loc: :math:`\mu`, the mean direction: unit vectors, ``[*batch, m]`` with m at least 2.
    :param concentration: :math:`\kappa`, at least 0 and finite, ``[*batch]``; broadcasts with the batch of ``loc``.
    :raises ValueError: if an argument is not floating point, the shapes do not broadcast, m is less than 2, or (under
        validation) ``loc`` is not of length 1, or ``concentration`` negative or not finite.

    Example::

        >>> from torch.nn.functional import normalize
        >>> distribution = PowerSpherical(normalize(torch.ones(800, 500), dim=-1), torch.tensor(499.0))
        >>> distribution.batch_shape, distribution.event_shape
        (torch.Size([800]), torch.Size([500]))
        >>> float((distribution.mean * distribution.mode).sum(-1)[0])  # the mean cosine
        0.5...
    """

    @property
    def mean(self) -> Tensor:
        r""":math:`\kappa / (\kappa + m - 1)\, \mu`, which is shorter than 1."""
        concentration = accumulated(self)
        return self.loc * self._column(concentration / (concentration + (self.dim - 1)))

    @property
    def variance(self) -> Tensor:
        r"""Of each coordinate, with :math:`s = \alpha + \beta`.

        .. math:: (1 - \mu_i^2) \frac{2 \alpha}{s (s + 1)} + \mu_i^2 \frac{4 \alpha \beta}{s^2 (s + 1)}
        """
        beta = self._beta
        alpha = accumulated(self) + beta
        total = alpha + beta
        across = 2.0 * alpha / (total * (total + 1.0))
        squared = self.loc.square()
        return self._column(across) * (1.0 - squared) + self._column(across * (2.0 * beta / total)) * squared

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """A draw through which gradients flow to ``loc`` and ``concentration``, ``[*sample_shape, *batch, m]``.

        That in ``loc`` is right along the sphere, as for the result of ``torch.nn.functional.normalize``.
        """
        shape = self._extended_shape(torch.Size(sample_shape))
        half_gap = _HalfGap.apply(accumulated(self).expand(shape[:-1]), self._beta)
        return sample_direction(self.loc.expand(shape), 2.0 * half_gap)

    def log_prob(self, value: Tensor) -> Tensor:
        r"""The normalized log-density, ``[*sample, *batch]``.

        It takes the cosine as :math:`\log \frac{1 + \mu \cdot x}2 = -\log(1 + \|x - \mu\|^2 / \|x + \mu\|^2)`, which
        keeps its digits near the mean and opposite to it.
        """
        if self._validate_args:
            self._validate_sample(value)
        concentration = accumulated(self)
        near, far = ((value + side).square().sum(-1, dtype=concentration.dtype) for side in (-self.loc, self.loc))
        opposite = far == 0.0
        log_half = -(near / torch.where(opposite, 1.0, far)).log1p()
        constant = _log_mean_power(concentration, self._beta) + special.log_sphere_area(self.dim)
        density = torch.where(opposite, 0.0, concentration * log_half) - constant
        return torch.where(opposite & (concentration > 0.0), -math.inf, density).to(self.loc.dtype)

    def entropy(self) -> Tensor:
        """Exact differential entropy in nats, ``[*batch]``: the sphere's log-area less the KL to the uniform."""
        kl = _kl_to_uniform(accumulated(self), self._beta)
        return (special.log_sphere_area(self.dim) - kl).to(self.loc.dtype)

    @property
    def _beta(self) -> float:
        return 0.5 * (self.dim - 1)


class _HalfGap(torch.autograd.Function):
    """(1 - cosine) / 2: of Beta(beta, alpha), in which it keeps its digits at a high concentration."""

    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: Tensor, beta: float) -> Tensor:
        # Two gamma variables make a beta one.
        low, high = standard_gamma(torch.full_like(concentration, beta)), standard_gamma(concentration + beta)
        draw = low / (low + high)
        # At the poles themselves the gradient would be 0 * inf.
        limits = torch.finfo(draw.dtype)
        return draw.clamp(limits.tiny**0.5, 1.0 - limits.eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        concentration, ctx.beta = inputs
        ctx.save_for_backward(concentration, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        concentration, draw = ctx.saved_tensors
        # Of operations on the saved output, so that a second derivative goes through the draw as well.
        return -grad * draw * (1.0 - draw) * complement_slope(concentration + ctx.beta, draw, ctx.beta), None


def kl_power_spherical_to_uniform(q: PowerSpherical, p: HypersphericalUniform) -> Tensor:
    r"""KL to the uniform distribution: what the entropy lacks to the log-area of the sphere."""
    check_same_sphere(q, p)
    kl = _kl_to_uniform(accumulated(q), q._beta).to(q.loc.dtype)
    return kl.expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def kl_power_spherical_to_von_mises_fisher(q: PowerSpherical, p: VonMisesFisherStable) -> Tensor:
    r"""KL to a von Mises-Fisher distribution, of which no more than the mean of q enters.

    .. math:: KL = -H(q) - \log C_m(\kappa_p) - \kappa_p A\, \mu_q \cdot \mu_p, \qquad
        A = \frac{\kappa_q}{\kappa_q + m - 1}.
    """
    check_same_sphere(q, p)
    q_rows, p_rows = accumulated(q), accumulated(p)
    total = q_rows + (q.dim - 1)
    gap = 0.5 * (q.loc - p.loc).square().sum(-1, dtype=q_rows.dtype)
    # 1 - A cos, without that difference.
    distance = ((q.dim - 1) + q_rows * gap) / total
    kl = _kl_to_uniform(q_rows, q._beta) + (p_rows * distance - special.log_vmf_peak(p_rows, q.dim))
    return kl.to(q.loc.dtype)


def kl_uniform_to_power_spherical(q: HypersphericalUniform, p: PowerSpherical) -> Tensor:
    r"""KL from the uniform distribution, where the cosine to any mean has one distribution."""
    check_same_sphere(q, p)
    concentration, beta = accumulated(p), p._beta
    start = torch.full_like(concentration, beta)
    apart = _log_mean_power(concentration, beta) + concentration * log_rise_slope(start, beta)
    kl = torch.where(concentration < beta, _moment(concentration, beta, from_end=True), apart)
    return kl.to(q.like.dtype).expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def _log_mean_power(concentration: Tensor, beta: float) -> Tensor:
    r"""The log of the mean of :math:`((1 + u_1) / 2)^\kappa` over the sphere: the density's constant."""
    return log_rise(torch.full_like(concentration, beta), beta) - log_rise(concentration + beta, beta)


def _kl_to_uniform(concentration: Tensor, beta: float) -> Tensor:
    """The KL to the uniform distribution; where that would cancel, as an integral whose terms have one sign."""
    apart = -concentration * log_rise_slope(concentration + beta, beta) - _log_mean_power(concentration, beta)
    return torch.where(concentration < beta, _moment(concentration, beta, from_end=False), apart)


def _moment(concentration: Tensor, beta: float, from_end: bool) -> Tensor:
    r"""The integral of :math:`v\, \mathrm{Var}_v \log(1 + \mu \cdot x)` from 0 to the concentration.

    ``from_end`` has the distance to the concentration in the place of v. Second derivatives of the constant's
    logarithm are variances, so these are KL divergences.
    """
    nodes, weights = nodes_and_weights(_NUM_NODES, concentration)
    arms = 1.0 - nodes if from_end else nodes
    terms = weights * arms * log_rise_curvature(concentration * nodes + beta, beta)
    return concentration.square() * terms.sum(0)
