# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws on the unit sphere, uniform and von Mises-Fisher, and their gradients.

A von Mises-Fisher draw takes two differentiable steps: first the cosine to the mean direction, kept as d = 1 - cosine
because at a high concentration the cosine itself has no digits left for it; then a direction uniform around the first
axis, which a reflection takes to the mean.
"""

import math
from fractions import Fraction
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.polynomial import polynomial as poly
from torch import Tensor

# Its sum is pairwise, unlike a norm's, and so good to float32 in 1e5 dimensions.
from torch.linalg import vecdot

from pyro_radial._pyro.compat import constant_in_graphs
from pyro_radial.distributions.numerics import accumulation_dtype
from pyro_radial.distributions.vmf.bessel import expansion_polynomials, uniform_variables
from pyro_radial.distributions.vmf.functions import mean_cosine_gap

# A proposal is rejected with at most this probability, so all of them are with a probability below 1e-11.
MOST_REFUSED = 0.3423
NUM_PROPOSALS = 24
FIRST_PROPOSALS = 3
# From this lambda on, 13 terms are good to 1e-11 down to 6 standard deviations below the mean.
LEAST_SLOPE_LAMBDA = 12.0
NUM_SLOPE_TERMS = 13
_TERM_TOLERANCE = 1e-13
# The number of terms is chosen for draws at these numbers of standard deviations from the mean.
_STDDEVS = (-6.0, 0.0, 4.0)
# Rounding takes g out of its range by less than this.
_SLACK = 1e-6


def sample_uniform_direction(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Draw uniform unit vectors of this shape, in the dtype and on the device of ``like``."""
    normal = _normal(shape, _widen(like))
    return normal.mul_(as_column(vecdot(normal, normal).rsqrt(), normal)).to(like.dtype)


def sample_one_minus_cosine(concentration: Tensor, dim: int) -> Tensor:
    """Draw 1 - cosine, strictly between 0 and 2, for each concentration; differentiable by implicit slopes."""
    return _OneMinusCosine.apply(concentration.to(accumulation_dtype(concentration)), dim)


def sample_direction(loc: Tensor, one_minus_cosine: Tensor) -> Tensor:
    r"""Draw a unit vector at a given angle to ``loc``, uniform among those; differentiable in both arguments.

    With :math:`s = \mathrm{sign}(\mu_1)` the reflection along :math:`\mu + s e_1` takes :math:`-s e_1` to :math:`\mu`.
    The vector :math:`\mu + s e_1` is never shorter than :math:`\sqrt 2`; the :math:`\mu - e_1` of Davidson et al.
    (2018) vanishes at :math:`\mu = e_1`.
    """
    return _Direction.apply(_widen(loc), one_minus_cosine).to(loc.dtype)


class _OneMinusCosine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: Tensor, dim: int) -> Tensor:
        gap = _in_three_dimensions(concentration) if dim == 3 else _by_rejection(concentration, dim)
        # At the poles themselves the gradient would be 0 * inf.
        limits = torch.finfo(gap.dtype)
        return gap.clamp(limits.tiny**0.5, 2.0 - 2.0 * limits.eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
        concentration, ctx.dim = inputs
        ctx.save_for_backward(concentration, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        concentration, gap = ctx.saved_tensors
        # Operations on the saved output: a second derivative goes through the draw as well.
        return -grad * gap * (2.0 - gap) * implicit_slope(concentration, gap, ctx.dim), None


def _in_three_dimensions(concentration: Tensor) -> Tensor:
    """Invert the cosine's distribution function, which is elementary in three dimensions."""
    # At zero the formula is 0 / 0; this close to zero it equals its limit.
    concentration = concentration.clamp(min=1e-30)
    uniform = torch.rand(
        concentration.shape, dtype=concentration.dtype, device=concentration.device
    )
    return -(uniform * (-2.0 * concentration).expm1()).log1p() / concentration


def _by_rejection(concentration: Tensor, dim: int) -> Tensor:
    """Make a few proposals for each row, then many for a fixed number of rows that includes all without a draw.

    All shapes are known in advance, so nothing synchronizes with the device to count rows.
    """
    variables = uniform_variables(concentration.flatten(), 0.5 * (dim - 1))
    a, one_minus_a = variables.a0, variables.one_minus_a0
    gap, accepted = _propose(a, one_minus_a, dim, FIRST_PROPOSALS)
    # The bound also covers some rows that have a draw already; they get another one.
    rows = (
        accepted.to(torch.uint8).topk(_most_refused(len(gap)), largest=False, sorted=False).indices
    )
    redrawn_gap, _ = _propose(a[rows], one_minus_a[rows], dim, NUM_PROPOSALS)
    return gap.scatter(0, rows, redrawn_gap).view(concentration.shape)


def _most_refused(count: int) -> int:
    """Return a number that rows without an accepted proposal exceed with a probability below 1e-12."""
    mean = count * MOST_REFUSED**FIRST_PROPOSALS
    return min(count, math.ceil(mean + 8.0 * math.sqrt(mean) + 8.0))


def _propose(a: Tensor, one_minus_a: Tensor, dim: int, count: int) -> tuple[Tensor, Tensor]:
    r"""Return the first accepted of ``count`` proposals in each row, as d, and whether there is one.

    Wood's (1994) proposal is :math:`w = (y + a_0) / (1 + a_0 y)` with y symmetric beta, here as Ulrich's (1984)
    function of two uniform variables. His constant :math:`b = (1 - a_0) / (1 + a_0)` is a difference of large numbers
    at high concentrations; :math:`a_0` and :math:`1 - a_0` are not. The logarithm of the ratio of densities is at most
    0, and of order 1 in any dimension.
    """
    uniform = torch.rand((3, count, *a.shape), dtype=a.dtype, device=a.device)
    level, radial = uniform[:2].log().unbind(0)
    y = (2.0 * math.pi * uniform[2]).cos()
    if dim > 2:
        y = y * (-(radial * (2.0 / (dim - 2))).expm1()).sqrt()
    ay = a * y
    denominator = 1.0 + ay
    # The first of the largest values is the first accepted proposal.
    accepted, first_accepted = ((dim - 1) * (ay / denominator - ay.log1p()) >= level).max(0)
    gap = one_minus_a * (1.0 - y) / denominator
    return gap.gather(0, first_accepted.unsqueeze(0)).squeeze(0), accepted


class _Direction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(loc: Tensor, gap: Tensor) -> Tensor:
        normal = _normal(loc.shape, loc)
        normal.select(-1, 0).zero_()
        sign, first_coordinate, q = _reflection(loc, gap)
        cosine = 1.0 - gap
        length = (gap * (2.0 - gap) / vecdot(normal, normal)).sqrt()
        across = length * vecdot(loc, normal)
        value = torch.addcmul(
            normal.mul_(as_column(length, loc)), loc, as_column(cosine - across / q, loc)
        )
        value.select(-1, 0).copy_(cosine * first_coordinate - sign * across)
        return value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        loc, gap, value = ctx.saved_tensors
        cosine = 1.0 - gap
        along = vecdot(loc, grad)
        by_loc = by_gap = None
        if ctx.needs_input_grad[0]:
            sign, _, q = _reflection(loc, gap)
            alpha = (cosine + sign * value.select(-1, 0)) / q
            beta = (along + sign * grad.select(-1, 0)) / q
            # The multiple of loc is left out: it would be the gradient in the length, which is fixed at 1.
            by_loc = torch.addcmul(grad * as_column(alpha, loc), value, as_column(-beta, loc))
        if ctx.needs_input_grad[1]:
            tangent = vecdot(value, grad) - cosine * along
            by_gap = cosine / (gap * (2.0 - gap)) * tangent - along
        return by_loc, by_gap


def _reflection(loc: Tensor, gap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sign s of the first coordinate, that coordinate, and half the squared length of loc + s e_1."""
    first_coordinate = loc.select(-1, 0).to(gap.dtype)
    return (
        torch.ones_like(first_coordinate).copysign(first_coordinate),
        first_coordinate,
        1.0 + first_coordinate.abs(),
    )


def _widen(tensor: Tensor) -> Tensor:
    """Convert to a dtype that holds a normal vector's squared length; float16 ends at 65,504 elements."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _normal(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Draw standard normal rows with at least one nonzero element after the first."""
    normal = torch.randn(shape, dtype=like.dtype, device=like.device)
    # An exact zero is not rare enough in float32 for a row of one free element.
    normal.select(-1, -1).add_(torch.finfo(like.dtype).eps ** 2)
    return normal


def as_column(rows: Tensor, like: Tensor) -> Tensor:
    """Return values of rows, ``[...]``, as ``[..., 1]`` in the dtype of ``like``."""
    return rows.to(like.dtype).unsqueeze(-1)


def implicit_slope(concentration: Tensor, one_minus_cosine: Tensor, dim: int) -> Tensor:
    r"""Return g in :math:`dw / d\kappa = (1 - w^2)\, g`, in differentiable operations.

    With :math:`f(w) \propto (1 - w^2)^{(m-3)/2} e^{\kappa w}` the density of the cosine and A its mean,

    .. math:: \frac{dw}{d\kappa} = \tau(w) = \frac1{f(w)} \int_w^1 (v - A) f(v)\, dv = (1 - w^2)\, g(w).

    This is implicit reparameterization (Figurnov, Mohamed and Mnih, 2018): the gradient is unbiased without a
    correction term, also for draws by rejection. Uniformly in the concentration, with :math:`\lambda = (m-1)/2`,

    .. math:: g = \frac1\lambda \sum_k \frac{\gamma_k(t, \xi)}{\lambda^k}, \qquad \gamma_0 = \frac{t \xi}2, \quad
        \gamma_k = -\frac{t \xi^2}4 \cdot
        \frac{(1-t) P_k + [2 (1+t) \xi - t (1+t) \xi^2 - 2]\, \partial_\xi \gamma_{k-1}}{1 - \xi},

    with t, :math:`a_0` and P_k of :mod:`~pyro_radial.distributions.vmf.bessel` and :math:`\xi = (1 + a_0^2) / (1 + a_0
    w)`. Each division is exact, and every power of :math:`\xi` comes with one of t. So the series is a polynomial in t
    and :math:`s = t \xi`, which is never much above 2.

    In few dimensions the expansion is used for :math:`m + 2n`, and an exact recurrence leads down:

    .. math:: g_m = \frac{(1 - A_m) + A_m d\, [1 - \kappa (2 - d)\, g_{m+2}]}{m - 1}, \qquad d = 1 - w.
    """
    lam = 0.5 * (dim - 1)
    shift = max(0, math.ceil(LEAST_SLOPE_LAMBDA - lam))
    top = dim + 2 * shift
    slope = _slope_by_expansion(concentration, one_minus_cosine, lam + shift)
    gap = mean_cosine_gap(concentration, top + 2)
    for b in range(top, dim - 1, -2):
        # From kappa (1 - A), two dimensions above, to A and 1 - A without a difference.
        complement = b - gap
        mean = concentration / (concentration + complement)
        one_minus_mean = complement / (concentration + complement)
        gap = mean * complement
        if b < top:
            inner = 1.0 - concentration * (2.0 - one_minus_cosine) * slope
            slope = (one_minus_mean + mean * one_minus_cosine * inner) / (b - 1)
    # Far in the tails the series may leave the exact range.
    least = one_minus_mean * ((1.0 - _SLACK) / (dim - 1))
    most = (1.0 + mean) * ((1.0 + _SLACK) / (dim - 1))
    return slope.clamp(least, most)


def _slope_by_expansion(concentration: Tensor, one_minus_cosine: Tensor, lam: float) -> Tensor:
    v = uniform_variables(concentration, lam)
    t = v.t
    s = 2.0 * t / ((1.0 + t) * (v.one_minus_a0 + v.a0 * (2.0 - one_minus_cosine)))
    find = _coefficients if torch.compiler.is_compiling() else _kept_coefficients
    table = find(lam, s.dtype, s.device)
    rows, columns = table.shape
    return ((_powers(t, columns) @ table.mT) * _powers(s, rows)).sum(-1)


def _powers(base: Tensor, count: int) -> Tensor:
    """Return the powers 0, 1, ... of a positive number, in a new last dimension."""
    exponents = torch.arange(count, dtype=base.dtype, device=base.device)
    return (base.log().unsqueeze(-1) * exponents).exp()


def _coefficients(lam: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the coefficients of s^j t^i in g."""
    return torch.tensor(_table(lam), dtype=dtype, device=device)


# Kept on the device: a copy from the host must not be in a captured graph or make it wait.
_kept_coefficients = lru_cache(maxsize=256)(_coefficients)


@constant_in_graphs
def _table(lam: float) -> list[list[float]]:
    """Sum as many terms as are needed."""
    scaled = (
        np.array(gamma, dtype=float) / lam ** (k + 1) for k, gamma in enumerate(slope_polynomials())
    )
    terms = list(takewhile(lambda term: _largest_ratio(term, lam) >= _TERM_TOLERANCE, scaled))
    table = np.zeros_like(terms[-1])
    for term in terms:
        table[: term.shape[0], : term.shape[1]] += term
    return table.tolist()


def _largest_ratio(term: np.ndarray, lam: float) -> float:
    """Return the largest ratio of a term to the leading one where draws lie."""
    t = np.linspace(0.01, 1.0, 100)
    stddev = 0.5 * t * np.sqrt((1.0 - t) / lam)
    largest = 0.0
    for z in _STDDEVS:
        s = t / (1.0 + z * stddev)
        ratio = np.abs(poly.polyval2d(s, t, term) * 2.0 * lam / s)
        largest = max(largest, float(ratio.max()))
    return largest


@lru_cache(maxsize=1)
def slope_polynomials() -> list[np.ndarray]:
    r"""Return :math:`\gamma_k` for k = 0, 1, ..., as exact coefficients of :math:`s^j t^i`, j along the rows."""
    exact_one = Fraction(1)
    t, one_plus_t = np.array([0 * exact_one, exact_one]), np.array([exact_one, exact_one])
    # Coefficients of powers of xi, each a polynomial in t.
    gammas = [[np.array([0 * exact_one]), t / 2]]
    for k in range(1, NUM_SLOPE_TERMS):
        bracket = [np.array([0 * exact_one])] * (len(gammas[-1]) + 1)
        bracket[0] = poly.polymul(np.array([exact_one, -exact_one]), expansion_polynomials()[0][k])
        for j, coefficient in enumerate(gammas[-1][1:]):
            slope = (j + 1) * coefficient
            bracket[j] = poly.polysub(bracket[j], 2 * slope)
            bracket[j + 1] = poly.polyadd(bracket[j + 1], 2 * poly.polymul(one_plus_t, slope))
            bracket[j + 2] = poly.polysub(
                bracket[j + 2], poly.polymul(t, poly.polymul(one_plus_t, slope))
            )
        # Division by 1 - xi is summation; the last sum is the remainder, zero.
        quotient, total = [np.array([0 * exact_one])] * 2, np.array([0 * exact_one])
        for coefficient in bracket[:-1]:
            total = poly.polyadd(total, coefficient)
            quotient.append(-poly.polymul(t, total) / 4)
        gammas.append(quotient)
    return list(map(_without_xi, gammas))


def _without_xi(gamma: list[np.ndarray]) -> np.ndarray:
    """Convert coefficients of xi^j t^i to coefficients of s^j t^i."""
    rows = [np.trim_zeros(coefficient[j:], "b") for j, coefficient in enumerate(gamma)]
    table = np.full((len(rows), max(map(len, rows))), Fraction(0))
    for row, coefficients in zip(table, rows, strict=True):
        row[: len(coefficients)] = coefficients
    return table
