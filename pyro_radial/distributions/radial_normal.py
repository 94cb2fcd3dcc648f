# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The radial normal distribution: a uniform direction times a half-normal radius."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor

from pyro_radial._pyro.checks import (
    check_shape,
    joint_shape,
    non_negative_integer,
)
from pyro_radial.distributions.constraints import finite_positive
from pyro_radial.distributions.numerics import (
    MEAN_LOG_HALF_NORMAL,
    append_dims,
    begin_expand,
    check_float,
    event_norm,
    event_sum,
    log_sphere_area,
    to_accumulation_dtype,
)
from pyro_radial.distributions.radial_marginal import radial_marginal_quantile
from pyro_radial.distributions.wrappers import drop_repeats


class RadialNormal(TorchDistribution):
    r"""Multiply a uniform direction by a half-normal radius, then scale and shift elementwise.

    .. math::
        w = \mathrm{loc} + \mathrm{scale} \odot u\, r, \qquad u \sim \mathrm{Uniform}(S^{D-1}),
        \quad r \sim \mathrm{HalfNormal}(1),

    where D is the number of elements in the last ``event_dim`` dimensions. A mean-field normal in D dimensions puts its
    mass in a thin shell at distance :math:`\sigma\sqrt{D}` from the mean; here the distance does not grow with D.
    With :math:`\rho = \|(w - \mathrm{loc}) / \mathrm{scale}\|` and S the log-area of the unit sphere,

    .. math::
        \log p(w) = \tfrac12 \log\tfrac2\pi - \tfrac12 \rho^2 - (D-1) \log\rho - S - \sum_i \log \mathrm{scale}_i.

    For D = 1 this is exactly ``Normal(loc, scale)``. For D >= 2 the density is +inf at ``loc``; the gradient there is
    defined as zero.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", eq. 8 and appendix A. Their eq. 26 is
    not normalized (no factor 2 for the half-normal, no area of the sphere); the density above integrates to one.

    :param Tensor loc: the mean, ``[*batch, *event]``; broadcasts with ``scale``.
    :param Tensor scale: positive and finite, ``[*batch, *event]``, the paper's sigma. The standard deviation of one
        element is ``scale / sqrt(D)``.
    :param int event_dim: how many of the last dimensions share one radius: 1 for a vector, 2 for a whole weight
        matrix. ``RadialNormal(loc, scale, event_dim=1).to_event(1)`` has one radius per row of a matrix.
    :raises ValueError: if an argument is not floating point, the shapes do not broadcast, ``event_dim`` exceeds the
        rank, an event is empty, or (under validation) ``scale`` is not positive and finite or ``loc`` is NaN.

    Example::

        >>> weight = RadialNormal(torch.zeros(200, 784), 0.01 * torch.ones(200, 784), event_dim=2)
        >>> weight.event_shape
        torch.Size([200, 784])
        >>> torch.allclose(weight.stddev, torch.tensor(0.01 / 156_800 ** 0.5))
        True
    """

    # Pyro's LocScaleReparam makes the distribution again from these arguments, so event_dim is among them.
    arg_constraints = {
        "loc": constraints.real,
        "scale": finite_positive,
        "event_dim": constraints.dependent,
    }
    has_rsample = True

    # The log-density of direction and radius at loc itself; for D >= 2 the density there is infinite.
    _log_density_at_loc = math.inf

    def __init__(
        self, loc: Any, scale: Any, event_dim: int = 1, *, validate_args: bool | None = None
    ) -> None:
        check_float("RadialNormal", "loc", loc)
        check_float("RadialNormal", "scale", scale)
        batch_shape, event_shape = self.infer_shapes(
            getattr(loc, "shape", torch.Size()), getattr(scale, "shape", torch.Size()), event_dim
        )
        if event_shape.numel() == 0:
            raise ValueError(
                f"RadialNormal: loc and scale must have elements in their event, got event shape {tuple(event_shape)}"
            )
        self.loc, self.scale = torch.distributions.utils.broadcast_all(loc, scale)
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:  # noqa: D102
        return constraints.independent(constraints.real, self.event_dim)

    @staticmethod
    def infer_shapes(  # type: ignore[override]
        loc: torch.Size = torch.Size(()), scale: torch.Size = torch.Size(()), event_dim: int = 1
    ) -> tuple[torch.Size, torch.Size]:
        """Return batch and event shape from the shapes of the arguments, without making a distribution."""
        shape = joint_shape("RadialNormal", loc=loc, scale=scale)
        if non_negative_integer("RadialNormal: event_dim", event_dim) > len(shape):
            raise ValueError(
                f"RadialNormal: event_dim must be at most {len(shape)}, the rank of loc and scale of shape "
                f"{tuple(shape)}, got {event_dim}"
            )
        split = len(shape) - event_dim
        return shape[:split], shape[split:]

    def expand(
        self, batch_shape: Sequence[int], _instance: "RadialNormal | None" = None
    ) -> "RadialNormal":
        """Return the same distribution with a larger batch shape; it shares memory."""
        expanded = begin_expand(self, RadialNormal, batch_shape, _instance)
        expanded.loc = self.loc.expand(expanded.batch_shape + self.event_shape)
        expanded.scale = self.scale.expand(expanded.batch_shape + self.event_shape)
        return expanded

    @property
    def num_elements(self) -> int:
        """Return D, the number of elements that share one radius."""
        return self.event_shape.numel()

    @property
    def mean(self) -> Tensor:  # noqa: D102
        return self.loc

    mode = mean

    @property
    def variance(self) -> Tensor:
        """Return ``scale**2 / D``; the elements are uncorrelated, but not independent."""
        variance = drop_repeats(self.scale).square() / self.num_elements
        return variance.expand_as(self.scale)

    @property
    def stddev(self) -> Tensor:
        """Return ``scale / sqrt(D)``."""
        return self.scale / math.sqrt(self.num_elements)

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draw a sample with gradients to ``loc`` and ``scale``, ``[*sample_shape, *batch, *event]``."""
        shape = self._extended_shape(check_shape("sample_shape", sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        if self.num_elements > 1:
            norm = event_norm(noise, self.event_dim)
            radius = torch.randn(norm.shape, dtype=norm.dtype, device=norm.device).abs_()
            noise.mul_(append_dims(radius / norm, self.event_dim).to(noise.dtype))
        return torch.addcmul(self.loc, self.scale, noise)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the normalized log-density, ``[*sample, *batch]``; +inf at ``loc`` for D >= 2."""
        # Torch cannot check the support of a tensor without elements.
        if self._validate_args and not (isinstance(value, Tensor) and value.numel() == 0):
            self._validate_sample(value)
        if self.num_elements == 1:
            # As for a normal: the distance has no derivative at loc, its square has two.
            squares = to_accumulation_dtype((value - self.loc) / self.scale).square()
            unit_density = event_sum(-0.5 * squares, self.event_dim) - 0.5 * math.log(2.0 * math.pi)
        else:
            rho = _Distance.apply(value, self.loc, self.scale, self.event_dim)
            constant = 0.5 * math.log(2.0 / math.pi) - log_sphere_area(self.num_elements)
            away = rho > 0
            # log(1) at the pole keeps its gradient zero rather than NaN.
            log_rho = torch.where(away, rho, 1.0).log()
            density_away = constant - 0.5 * rho.square() - (self.num_elements - 1) * log_rho
            unit_density = torch.where(away, density_away, self._log_density_at_loc)
        return (unit_density - event_sum(self.scale.log(), self.event_dim)).to(self.loc.dtype)

    def entropy(self) -> Tensor:
        r"""Return the exact differential entropy in nats, ``[*batch]``.

        .. math:: H = \sum_i \log \mathrm{scale}_i + S + \tfrac12\log\tfrac\pi2 + \tfrac12
            - \tfrac{D-1}{2}(\gamma + \log 2)

        Source: Farquhar, Osborne and Gal (2020), eq. 29 to 39, with corrected constants (theirs are wrong for every D).
        """
        return self.accumulated_entropy().to(self.loc.dtype)

    def accumulated_entropy(self) -> Tensor:
        """Return the entropy in the accumulation dtype, for differences of large numbers."""
        return event_sum(self.scale.log(), self.event_dim) + self.unit_entropy

    @property
    def unit_entropy(self) -> float:
        """Return the entropy at scale one, which depends on the dimension alone."""
        constant = log_sphere_area(self.num_elements) + 0.5 * math.log(math.pi / 2.0) + 0.5
        return constant + (self.num_elements - 1) * MEAN_LOG_HALF_NORMAL

    def marginal_quantiles(self, probabilities: Sequence[float]) -> Tensor:
        """Return quantiles of each element's marginal distribution.

        The marginal is not normal for D >= 2: it is sharper at the mean and heavier in the tails.

        :param probabilities: numbers strictly between 0 and 1.
        :returns: the quantiles, ``[len(probabilities), *batch, *event]``.
        """
        numbers = torch.as_tensor(probabilities, dtype=torch.float64).flatten().tolist()
        standard = [radial_marginal_quantile(p, self.num_elements) for p in numbers]
        return torch.stack([self.loc + self.scale * z for z in standard])


class _Distance(torch.autograd.Function):
    """The norm of (value - loc) / scale over an event; it keeps only its arguments for the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, loc: Tensor, scale: Tensor, event_dim: int) -> Tensor:
        return event_norm((value - loc) / scale, event_dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
        ctx.event_dim = inputs[3]
        ctx.save_for_backward(*inputs[:3], output)
        ctx.save_for_forward(*inputs[:3], output)

    @staticmethod
    def jvp(
        ctx: Any, value_tangent: Tensor, loc_tangent: Tensor, scale_tangent: Tensor, _: None
    ) -> Tensor:
        value, loc, scale, rho = ctx.saved_tensors
        inverse_rho = torch.where(rho > 0, 1.0 / torch.where(rho > 0, rho, 1.0), 0.0)
        unit = (value - loc) / scale
        change = unit * ((value_tangent - loc_tangent - unit * scale_tangent) / scale)
        return inverse_rho * event_sum(change, ctx.event_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        value, loc, scale, rho = ctx.saved_tensors
        # At the pole the direction is undefined; the gradient there is defined as zero.
        factor = torch.where(rho > 0, grad / torch.where(rho > 0, rho, 1.0), 0.0)
        unit = (value - loc) / scale
        by_value = unit * append_dims(factor, ctx.event_dim).to(unit.dtype) / scale
        return (
            by_value.sum_to_size(value.shape),
            -by_value.sum_to_size(loc.shape),
            (-by_value * unit).sum_to_size(scale.shape),
            None,
        )
