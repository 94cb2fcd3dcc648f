# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Distributions of a direction: von Mises-Fisher and uniform, on the unit sphere of any dimension, and their KLs."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor

from pyro_radial._pyro.checks import check_shape, joint_shape
from pyro_radial.distributions.constraints import finite_nonnegative
from pyro_radial.distributions.numerics import (
    begin_expand,
    check_float,
    log_sphere_area,
    to_accumulation_dtype,
)
from pyro_radial.distributions.vmf import functions
from pyro_radial.distributions.vmf.sampling import (
    as_column,
    sample_direction,
    sample_one_minus_cosine,
    sample_uniform_direction,
)


class VonMisesFisherStable(TorchDistribution):
    r"""Make a random direction around a mean direction, stable in any dimension and at any concentration.

    .. math:: p(x) = C_m(\kappa)\, e^{\kappa \mu \cdot x}, \quad \|x\| = 1, \qquad
        \log C_m(\kappa) = -S - L(\kappa), \quad L(\kappa) = \log {}_0F_1(; \tfrac m2; \tfrac{\kappa^2}4),

    a density with respect to the area of the unit sphere of :math:`R^m`; S is the log of that area. With :math:`\kappa
    = 0` it is the uniform distribution. The mean is :math:`A \mu` with :math:`A = L' = I_{m/2}(\kappa) /
    I_{m/2-1}(\kappa)`.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors for Bayesian Neural Networks". They
    approximate A by the mean of two bounds, and the logarithm of the Bessel function piecewise (theorems 1 to 3), which
    is off by up to 72 nats at m = 500. Both are exact here, and no formula is a difference of large numbers.
    ``rsample`` is differentiable in both parameters, by implicit reparameterization for the concentration. It needs no
    correction term such as their eq. 20, which has a factor 1/2 in place of (m-3)/2.

    :param Tensor loc: :math:`\mu`, the mean direction: unit vectors, ``[*batch, m]`` with m at least 2.
    :param concentration: :math:`\kappa`, at least 0 and finite, ``[*batch]``; broadcasts with the batch of ``loc``.
    :raises ValueError: if an argument is not floating point, the shapes do not broadcast, m is less than 2, or (under
        validation) ``loc`` does not have length 1 or ``concentration`` is negative or not finite.

    Example::

        >>> from torch.nn.functional import normalize
        >>> distribution = VonMisesFisherStable(normalize(torch.ones(800, 500), dim=-1), torch.tensor(500.0))
        >>> distribution.batch_shape, distribution.event_shape
        (torch.Size([800]), torch.Size([500]))
        >>> float((distribution.mean * distribution.mode).sum(-1)[0])  # the mean cosine
        0.618...
    """

    arg_constraints = {"loc": constraints.sphere, "concentration": finite_nonnegative}
    support = constraints.sphere
    has_rsample = True

    def __init__(self, loc: Tensor, concentration: Any, validate_args: bool | None = None) -> None:
        name = type(self).__name__
        if loc.dim() == 0:
            raise ValueError(f"{name}: loc must be a tensor of unit vectors, got {loc!r}")
        check_float(name, "loc", loc)
        check_float(name, "concentration", concentration)
        dtype = None if isinstance(concentration, Tensor) else loc.dtype
        concentration = torch.as_tensor(concentration, device=loc.device, dtype=dtype)
        _check_dim(name, "the last dimension of loc", loc.shape[-1])
        batch_shape = joint_shape(name, loc=loc.shape[:-1], concentration=concentration.shape)
        self.loc = loc.expand(batch_shape + loc.shape[-1:])
        self.concentration = concentration.expand(batch_shape)
        super().__init__(batch_shape, torch.Size(loc.shape[-1:]), validate_args=validate_args)

    @staticmethod
    def infer_shapes(  # type: ignore[override]
        loc: torch.Size, concentration: torch.Size = torch.Size(())
    ) -> tuple[torch.Size, torch.Size]:
        """Return batch and event shape from the shapes of the arguments, without making a distribution."""
        rows = check_shape("loc", loc, torch.Size([1]))
        batch_shape = joint_shape(
            "VonMisesFisherStable", loc=rows[:-1], concentration=concentration
        )
        return batch_shape, rows[-1:]

    def expand(
        self, batch_shape: Sequence[int], _instance: "VonMisesFisherStable | None" = None
    ) -> "VonMisesFisherStable":
        """Return the same distribution with a larger batch shape; it shares memory."""
        expanded = begin_expand(self, VonMisesFisherStable, batch_shape, _instance)
        expanded.loc = self.loc.expand(expanded.batch_shape + self.event_shape)
        expanded.concentration = self.concentration.expand(expanded.batch_shape)
        return expanded

    @property
    def dim(self) -> int:
        """Return m, the dimension of the space that contains the sphere."""
        # A plain number also under a compiler with open shapes: it selects the formulas.
        return operator.index(self.event_shape[0])

    @property
    def mode(self) -> Tensor:  # noqa: D102
        return self.loc

    @property
    def mean(self) -> Tensor:
        r"""Return :math:`A \mu`, which is shorter than 1."""
        return self.loc * as_column(functions.mean_cosine(self.concentration, self.dim), self.loc)

    @property
    def variance(self) -> Tensor:
        r"""Return :math:`(1 - \mu_i^2) A / \kappa + \mu_i^2 A'` for each coordinate."""
        # A / kappa; its limit at 0 is 1 / m.
        across = 1.0 / (
            self.dim + self.concentration * functions.mean_cosine(self.concentration, self.dim + 2)
        )
        along = functions.cosine_variance(self.concentration, self.dim)
        squared = self.loc.square()
        return as_column(across, squared) * (1.0 - squared) + as_column(along, squared) * squared

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draw a sample with gradients to ``loc`` and ``concentration``, ``[*sample_shape, *batch, m]``.

        The gradient in ``loc`` is right along the sphere, as for a result of ``torch.nn.functional.normalize``.
        """
        shape = self._extended_shape(check_shape("sample_shape", sample_shape))
        gap = sample_one_minus_cosine(self.concentration.expand(shape[:-1]), self.dim)
        return sample_direction(self.loc.expand(shape), gap)

    def log_prob(self, value: Tensor) -> Tensor:
        r"""Return the normalized log-density, ``[*sample, *batch]``.

        It is :math:`-S + (\kappa - L) - \kappa \|x - \mu\|^2 / 2`. On the sphere this equals
        :math:`\log C_m + \kappa \mu \cdot x`, without the cancellation of those two terms.
        """
        if self._validate_args:
            self._validate_sample(value)
        # In the accumulation dtype here and below, so that results are rounded once.
        concentration = to_accumulation_dtype(self.concentration)
        distance = (value - self.loc).square().sum(-1, dtype=concentration.dtype)
        peak = functions.log_vmf_peak(concentration, self.dim) - log_sphere_area(self.dim)
        return (peak - 0.5 * concentration * distance).to(self.loc.dtype)

    def entropy(self) -> Tensor:
        """Return the exact entropy in nats, ``[*batch]``: the sphere's log-area minus the KL to the uniform."""
        kl = functions.vmf_kl_to_uniform(to_accumulation_dtype(self.concentration), self.dim)
        return (log_sphere_area(self.dim) - kl).to(self.loc.dtype)


class HypersphericalUniform(TorchDistribution):
    r"""Make the uniform distribution on the unit sphere of :math:`R^m`.

    :param int dim: m, the dimension of the space that contains the sphere, at least 2.
    :param batch_shape: the shape of independent directions.
    :param Tensor like: a tensor with the dtype and device of the directions; torch's defaults without it.
    :raises ValueError: if ``dim`` is less than 2, or ``like`` is not floating point.

    Example::

        >>> import math
        >>> distribution = HypersphericalUniform(3, batch_shape=(4,), like=torch.zeros((), dtype=torch.float64))
        >>> distribution.sample().shape, distribution.sample().dtype
        (torch.Size([4, 3]), torch.float64)
        >>> abs(float(distribution.entropy()[0]) - math.log(4 * math.pi)) < 1e-15
        True
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.sphere
    has_rsample = True

    def __init__(
        self,
        dim: int,
        batch_shape: Sequence[int] = torch.Size(),
        *,
        like: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        _check_dim("HypersphericalUniform", "dim", dim)
        if like is not None:
            check_float("HypersphericalUniform", "like", like)
        batch_shape = check_shape("HypersphericalUniform: batch_shape", batch_shape)
        # A tensor of the distribution's own, which moves with it to another dtype or device.
        self.like = (
            torch.zeros(())
            if like is None
            else torch.zeros((), dtype=like.dtype, device=like.device)
        )
        super().__init__(batch_shape, torch.Size((dim,)), validate_args=validate_args)

    def expand(
        self, batch_shape: Sequence[int], _instance: "HypersphericalUniform | None" = None
    ) -> "HypersphericalUniform":
        """Return the same distribution with a larger batch shape."""
        expanded = begin_expand(self, HypersphericalUniform, batch_shape, _instance)
        expanded.like = self.like
        return expanded

    @property
    def dim(self) -> int:
        """Return m, the dimension of the space that contains the sphere."""
        return self.event_shape[0]

    @property
    def mean(self) -> Tensor:
        """Return zero."""
        return self.like.expand(self._extended_shape())

    @property
    def variance(self) -> Tensor:
        """Return 1 / m."""
        return (self.like + 1.0 / self.dim).expand(self._extended_shape())

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draw a sample, ``[*sample_shape, *batch, m]``; the distribution has no parameters for a gradient."""
        return sample_uniform_direction(
            self._extended_shape(check_shape("sample_shape", sample_shape)), self.like
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Return minus the log-area of the sphere, ``[*sample, *batch]``."""
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        return (self.like - log_sphere_area(self.dim)).expand(shape)

    def entropy(self) -> Tensor:
        """Return the log-area of the sphere, ``[*batch]``."""
        return (self.like + log_sphere_area(self.dim)).expand(self.batch_shape)


def kl_von_mises_fisher(q: VonMisesFisherStable, p: VonMisesFisherStable) -> Tensor:
    r"""Return the KL between two von Mises-Fisher distributions by ``vmf_kl``; it is never negative.

    Source: Oh, Adamczewski and Park (2019), eq. 34 and 36. Their gradients have a wrong sign in one term; the
    derivative in :math:`\kappa_q` is :math:`(\kappa_q - \kappa_p\, \mu_q \cdot \mu_p) A'(\kappa_q)`.
    """
    q_rows = to_accumulation_dtype(q.concentration)
    p_rows = to_accumulation_dtype(p.concentration)
    gap = 0.5 * (q.loc - p.loc).square().sum(-1, dtype=q_rows.dtype)
    return functions.vmf_kl(q_rows, p_rows, gap, q.dim).to(q.loc.dtype)


def kl_von_mises_fisher_to_uniform(q: VonMisesFisherStable, p: HypersphericalUniform) -> Tensor:
    """Return the KL to the uniform distribution: the log-area of the sphere minus the entropy."""
    kl = functions.vmf_kl_to_uniform(to_accumulation_dtype(q.concentration), q.dim).to(q.loc.dtype)
    return kl.expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def kl_uniform_to_von_mises_fisher(q: HypersphericalUniform, p: VonMisesFisherStable) -> Tensor:
    r"""Return the KL from the uniform to a von Mises-Fisher distribution: :math:`L(\kappa)`."""
    kl = functions.log_mean_exp_cosine(to_accumulation_dtype(p.concentration), q.dim).to(
        q.like.dtype
    )
    return kl.expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def kl_uniform(q: HypersphericalUniform, p: HypersphericalUniform) -> Tensor:
    """Return the KL between two uniform distributions on the same sphere: zero."""
    return q.like.expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def _check_dim(distribution: str, name: str, dim: int) -> None:
    """Raise a ValueError that names the class and the argument, if the dimension is less than 2."""
    if dim < 2:
        raise ValueError(
            f"{distribution}: {name} must be at least 2, got {dim}; in one dimension a direction is a sign: use a "
            "distribution of signs, such as a Rademacher or Bernoulli one, or a normal"
        )
