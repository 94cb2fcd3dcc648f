# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch

from pyro_radial.distributions.kl_formulas.log_distance import (
    log_distance,
    log_of_square,
    shrinkage,
    slopes_of_log_distance,
)

A = torch.tensor([0.01, 0.4, 1.0, 1.7, 30.0], dtype=torch.double)
C = torch.tensor([1e-3, 0.2, 1.0, 8.0, 1e4], dtype=torch.double)


def lines():
    """Every a with every c, and b on both sides, of up to nearly the root of a c."""
    a, c, part = torch.meshgrid(A, C, torch.tensor([-0.99, -0.3, 0.0, 0.6, 0.99], dtype=torch.double), indexing="ij")
    return a.contiguous(), part * (a * c).sqrt(), c.contiguous()


def by_quadrature(a, b, c):
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    r = torch.tensor(nodes)
    logs = (a[..., None] * r.square() + 2.0 * b[..., None] * r + c[..., None]).log()
    return 0.5 * logs @ torch.tensor(weights / weights.sum())


def test_it_is_that_of_quadrature_away_from_the_center():
    a, b, c = lines()
    at_center = -0.5 * (np.euler_gamma + math.log(2.0))
    away = c > 7.0 * a
    value, expected = log_distance(a, b, c) + at_center, by_quadrature(a, b, c)
    torch.testing.assert_close(value[away & (b == 0)], expected[away & (b == 0)], rtol=0, atol=1e-4)


def test_at_the_center_it_is_half_the_log_of_a():
    zero = torch.zeros_like(A)
    torch.testing.assert_close(log_distance(A, zero, zero), 0.5 * A.log())
    torch.testing.assert_close(log_distance(A, zero, zero, A - 1.0), 0.5 * A.log())


def test_its_slopes_are_its_derivatives():
    a, b, c = (tensor.requires_grad_() for tensor in lines())
    expected = torch.autograd.grad(log_distance(a, b, c).sum(), (a, b, c))
    torch.testing.assert_close(slopes_of_log_distance(a.detach(), b.detach(), c.detach()), expected)
    torch.autograd.gradcheck(log_distance, (a, b, c))


def test_at_the_tip_of_the_cone_the_slope_is_that_along_the_line():
    one, zero = torch.ones(1, dtype=torch.double), torch.zeros(1, dtype=torch.double)
    assert [slope.tolist() for slope in slopes_of_log_distance(one, zero, zero)] == [[0.5], [0.0], [0.0]]


@pytest.mark.parametrize("above", [-0.999999, -0.5, -1e-9, 0.0, 1e-12, 3.0])
def test_the_log_of_a_square_keeps_its_digits_near_one(above):
    root = torch.tensor(1.0 + above, dtype=torch.double).sqrt()
    value = float(log_of_square(root, torch.tensor(above, dtype=torch.double)))
    assert value == pytest.approx(math.log1p(above), rel=1e-12 if above > -0.9 else 1e-9)


def test_a_parabola_is_kept_where_a_square_hardly_varies():
    assert shrinkage(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([1.0, 0.2])
