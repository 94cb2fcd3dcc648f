# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The mean log-distance from a point of the plane to a normal variable on a line, and its derivatives."""

import math

import torch
from torch import Tensor

from pyro_radial.distributions.kl_formulas.mean_log_square import TERMS, excess_log_square, slopes_of_log_square

__all__ = ["log_distance", "log_of_square", "shrinkage", "slopes_of_log_distance"]


def log_distance(a: Tensor, b: Tensor, c: Tensor, above: Tensor | None = None, terms: int = TERMS) -> Tensor:
    r""":math:`\tfrac12 E \log(a r^2 + 2 b r + c)` for :math:`r \sim N(0, 1)`, less its value at a = 1, b = c = 0.

    :param Tensor a: positive.
    :param Tensor b: whose square is at most a c, up to rounding.
    :param Tensor c: at least zero.
    :param Tensor above: a - 1, where the caller knows more digits of it than a has.
    :param int terms: of the expansion by which it is found.

    Example::

        >>> one, zero = torch.ones(()), torch.zeros(())
        >>> log_distance(4.0 * one, zero, zero)
        tensor(0.6931)
    """
    offset, _, width = _offset_and_width(a, b, c)
    log_a = a.log() if above is None else log_of_square(a.sqrt(), above)
    return 0.5 * (log_a + excess_log_square(offset, width, terms))


def slopes_of_log_distance(a: Tensor, b: Tensor, c: Tensor, terms: int = TERMS) -> tuple[Tensor, Tensor, Tensor]:
    """The derivatives of :func:`log_distance` in a, b and c; that through the width is zero at the tip of the cone,
    where the line meets the point.

    Arguments as there.
    """
    offset, square, width = _offset_and_width(a, b, c)
    by_offset, by_width = slopes_of_log_square(offset, width, terms)
    by_square = torch.where(square > torch.finfo(square.dtype).tiny, by_width / width, 0.0)
    by_b = (by_offset - offset * by_square) * (0.5 / a)
    by_c = by_square * (0.25 / a)
    return 0.5 / a - (offset * by_b + (c / a) * by_c), by_b, by_c


def _offset_and_width(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where on the line the point is nearest, and its squared and plain distance, in units of the line's scale."""
    offset = b / a
    square = c / a - offset.square()
    # Rounding may have left it below zero.
    return offset, square, square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()


def log_of_square(root: Tensor, above: Tensor) -> Tensor:
    """The log of a square, from its root and from what it has above one, which keeps its digits near one.

    Example::

        >>> log_of_square(torch.tensor(1.0), torch.tensor(1e-12))
        tensor(1.0000e-12)
    """
    return above.clamp(min=-0.5).log1p() + 2.0 * (root * math.sqrt(2.0)).clamp(max=1.0).log()


def shrinkage(relative_variance: Tensor) -> Tensor:
    """Where a square varies much, a parabola overstates the bend of its log; the 4 is near the best of those tried."""
    return 1.0 / (1.0 + 4.0 * relative_variance)
