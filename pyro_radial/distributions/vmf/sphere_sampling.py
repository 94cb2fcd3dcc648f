# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws on the unit sphere: uniform ones, and of the von Mises-Fisher distribution in two differentiable steps."""

import math
from typing import Any

import torch
from torch import Tensor

from pyro_radial.distributions.special import accumulation_dtype
from pyro_radial.distributions.vmf.cosine_gradient import implicit_slope
from pyro_radial.distributions.vmf.formulas import uniform_variables

__all__ = ["sample_direction", "sample_one_minus_cosine", "sample_uniform_direction"]

# The probability that a proposal is refused is at most this, so that for all of them it is below 1e-11.
MOST_REFUSED = 0.3423
NUM_PROPOSALS = 24
FIRST_PROPOSALS = 3


def sample_uniform_direction(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uniform unit vectors of this shape, in the dtype and on the device of ``like``."""
    normal = _normal(shape, _widened(like))
    return normal.mul_(_column(_dot(normal, normal).rsqrt(), normal)).to(like.dtype)


def sample_one_minus_cosine(concentration: Tensor, dim: int) -> Tensor:
    r"""One draw of 1 - cosine for each concentration, differentiable in it by implicit reparameterization.

    First the cosine between the draw and the mean direction, kept as d = 1 - cosine: at a high concentration the cosine
    itself has no digits left for it. Then a direction uniform around the first axis, which a reflection takes to the
    mean.

    :param Tensor concentration: :math:`\kappa \ge 0`, ``[*shape]``.
    :param int dim: m, at least 2.
    :returns: between 0 and 2, neither included, ``[*shape]``, in float64 where the device has it.
    """
    return _OneMinusCosine.apply(concentration.to(accumulation_dtype(concentration)), dim)


def sample_direction(loc: Tensor, one_minus_cosine: Tensor) -> Tensor:
    r"""A unit vector at a given angle to ``loc``, uniform among those; differentiable in both.

    With :math:`s = \mathrm{sign}(\mu_1)` the reflection along :math:`\mu + s e_1` takes :math:`-s e_1` to :math:`\mu`.
    The vector that it is along is never shorter than :math:`\sqrt 2`, where the :math:`\mu - e_1` of Davidson et al.
    (2018) vanishes at :math:`\mu = e_1`.

    :param Tensor loc: :math:`\mu`, unit vectors, ``[*shape, m]``; the gradient is that along the sphere.
    :param Tensor one_minus_cosine: between 0 and 2, neither included, ``[*shape]``.
    """
    value: Tensor = _Direction.apply(_widened(loc), one_minus_cosine)
    return value.to(loc.dtype)


class _OneMinusCosine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: Tensor, dim: int) -> Tensor:
        gap = _in_three_dimensions(concentration) if dim == 3 else _by_rejection(concentration, dim)
        # At the poles themselves the gradient would be 0 * inf.
        limits = torch.finfo(gap.dtype)
        return gap.clamp(limits.tiny**0.5, 2.0 - 2.0 * limits.eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        concentration, ctx.dim = inputs
        ctx.save_for_backward(concentration, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        concentration, gap = ctx.saved_tensors
        # Of operations on the saved output, so that a second derivative goes through the draw as well.
        return -grad * gap * (2.0 - gap) * implicit_slope(concentration, gap, ctx.dim), None


def _in_three_dimensions(concentration: Tensor) -> Tensor:
    """On the sphere of three dimensions the cosine has an elementary distribution function."""
    # At zero the formula is 0 / 0, and this close to it its limit.
    concentration = concentration.clamp(min=1e-30)
    uniform = torch.rand(concentration.shape, dtype=concentration.dtype, device=concentration.device)
    return -(uniform * (-2.0 * concentration).expm1()).log1p() / concentration


def _by_rejection(concentration: Tensor, dim: int) -> Tensor:
    """A few proposals for each row, then many for the few rows that are left, of which there is a bound.

    So all shapes are known in advance, and nothing synchronizes with the device to count rows.
    """
    variables = uniform_variables(concentration.flatten(), 0.5 * (dim - 1))
    a, one_minus_a = variables.a0, variables.one_minus_a0
    gap, accepted = _propose(a, one_minus_a, dim, FIRST_PROPOSALS)
    # The bound takes rows that have a draw along with those that have none; theirs is replaced by another one.
    rows = accepted.to(torch.uint8).topk(_most_refused(len(gap)), largest=False, sorted=False).indices
    again, _ = _propose(a[rows], one_minus_a[rows], dim, NUM_PROPOSALS)
    return gap.scatter(0, rows, again).view(concentration.shape)


def _most_refused(count: int) -> int:
    """What the number of rows without an accepted proposal exceeds with a probability below 1e-12."""
    mean = count * MOST_REFUSED**FIRST_PROPOSALS
    return min(count, math.ceil(mean + 8.0 * math.sqrt(mean) + 8.0))


def _propose(a: Tensor, one_minus_a: Tensor, dim: int, count: int) -> tuple[Tensor, Tensor]:
    r"""The first accepted of so many proposals in each row, as d, and whether there is one.

    Wood's (1994) proposal is :math:`w = (y + a_0) / (1 + a_0 y)`, y symmetric beta, here as Ulrich's (1984) function of
    two uniform variables. His constant :math:`b = (1 - a_0) / (1 + a_0)` is a difference of large numbers where the
    concentration is high; :math:`a_0` and :math:`1 - a_0` are not. The logarithm of the ratio of densities is at most
    0, and of order 1 in any dimension.
    """
    uniform = torch.rand((3, count, *a.shape), dtype=a.dtype, device=a.device)
    level, radial = uniform[:2].log().unbind(0)
    y = (2.0 * math.pi * uniform[2]).cos()
    if dim > 2:
        y = y * (-(radial * (2.0 / (dim - 2))).expm1()).sqrt()
    ay = a * y
    denominator = 1.0 + ay
    # The first of the largest is the first that is accepted.
    accepted, first = ((dim - 1) * (ay / denominator - ay.log1p()) >= level).max(0)
    gap = one_minus_a * (1.0 - y) / denominator
    return gap.gather(0, first.unsqueeze(0)).squeeze(0), accepted


class _Direction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(loc: Tensor, gap: Tensor) -> Tensor:
        normal = _normal(loc.shape, loc)
        normal.select(-1, 0).zero_()
        sign, first, q = _reflection(loc, gap)
        cosine = 1.0 - gap
        length = (gap * (2.0 - gap) / _dot(normal, normal)).sqrt()
        across = length * _dot(loc, normal)
        value = torch.addcmul(normal.mul_(_column(length, loc)), loc, _column(cosine - across / q, loc))
        value.select(-1, 0).copy_(cosine * first - sign * across)
        return value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        loc, gap, value = ctx.saved_tensors
        cosine, along = 1.0 - gap, _dot(loc, grad)
        by_loc = by_gap = None
        if ctx.needs_input_grad[0]:
            sign, _, q = _reflection(loc, gap)
            alpha = (cosine + sign * value.select(-1, 0)) / q
            beta = (along + sign * grad.select(-1, 0)) / q
            # A multiple of loc is left out: it would be the gradient in the length, which is 1.
            by_loc = torch.addcmul(grad * _column(alpha, loc), value, _column(-beta, loc))
        if ctx.needs_input_grad[1]:
            tangent = _dot(value, grad) - cosine * along
            by_gap = cosine / (gap * (2.0 - gap)) * tangent - along
        return by_loc, by_gap


def _reflection(loc: Tensor, gap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sign s of the first coordinate, that coordinate, and half the squared length of loc + s e_1."""
    first = loc.select(-1, 0).to(gap.dtype)
    return torch.ones_like(first).copysign(first), first, 1.0 + first.abs()


def _widened(tensor: Tensor) -> Tensor:
    """In a dtype that holds a normal vector's squared length, as float16 does up to 65,504 elements."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _normal(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Standard normal rows, of which none is zero but for its first element."""
    normal = torch.randn(shape, dtype=like.dtype, device=like.device)
    # An exact zero is not rare enough in float32 for a row of one free element.
    normal.select(-1, -1).add_(torch.finfo(like.dtype).eps ** 2)
    return normal


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Inner products of rows. Its sum is pairwise, unlike that of a norm, and so good to float32 in 1e5 dimensions."""
    return torch.linalg.vecdot(first, second)


def _column(rows: Tensor, like: Tensor) -> Tensor:
    return rows.to(like.dtype).unsqueeze(-1)
