# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch
from scipy.integrate import quad

from pyro_radial.functional import PiecewiseConstant, PiecewiseLinear
from tests.helpers.processes import NUM_SAMPLES, column


@pytest.mark.parametrize("kind", [PiecewiseConstant, PiecewiseLinear])
def test_pieces_have_outputs_and_draws_that_are_independent_and_the_dtype_of_the_points(kind):
    f = kind().sample(torch.rand(5, 1), NUM_SAMPLES, num_outputs=2)
    assert f.shape == (NUM_SAMPLES, 5, 2)
    assert f.dtype == torch.float32
    between = torch.corrcoef(f.permute(2, 1, 0).reshape(10, -1))[:5, 5:]
    assert float(between.abs().max()) < 5 / math.sqrt(NUM_SAMPLES)


@pytest.mark.parametrize(("low", "high", "rate"), [(0.0, 1.0, 3.0), (-2.0, 3.0, 1.5)])
def test_a_step_function_has_uniform_values_that_agree_while_no_change_point_lies_between(low, high, rate):
    t = torch.tensor([0.1, 0.15, 0.4, 0.9], dtype=torch.double)
    f = PiecewiseConstant(low, high, rate).sample(column(*(low + (high - low) * t)), NUM_SAMPLES)[..., 0]
    tolerance = 5 * math.sqrt(1 / 12 / NUM_SAMPLES)
    torch.testing.assert_close(f.mean(0), torch.full((4,), 0.5).double(), rtol=0, atol=tolerance)
    assert float(f.min()) >= 0
    assert float(f.max()) <= 1
    same = (f.unsqueeze(1) == f.unsqueeze(2)).double().mean(0)
    expected = torch.exp(-rate * (t - t[:, None]).abs())
    torch.testing.assert_close(same, expected, rtol=0, atol=2.5 / math.sqrt(NUM_SAMPLES))
    torch.testing.assert_close(f.T.cov(), expected / 12, rtol=0, atol=5 * 0.1 / math.sqrt(NUM_SAMPLES))


def test_the_number_of_steps_is_poisson():
    f = PiecewiseConstant().sample(torch.linspace(0, 1, 2001).unsqueeze(-1), 4000)[..., 0]
    changes = (f.diff(dim=-1) != 0).sum(-1).double()
    # Two change points within one cell of the grid are seen as one: about 9 / 2 / 2000 of them.
    assert float(changes.mean()) == pytest.approx(3.0, abs=5 * math.sqrt(3.0 / 4000) + 0.005)
    assert float(changes.var()) == pytest.approx(3.0, rel=5 * math.sqrt(2.4 / 4000))
    assert float((changes == 0).double().mean()) == pytest.approx(math.exp(-3), abs=5 * math.sqrt(0.05 / 4000))


def test_a_piecewise_linear_function_is_continuous_with_poisson_many_kinks():
    x = torch.linspace(0, 1, 2001, dtype=torch.double).unsqueeze(-1)
    f = PiecewiseLinear().sample(x, 2000)[..., 0]
    # A kink between two points of the grid bends the function at one or two of them.
    kinks = (f.diff(n=2, dim=-1).abs() > 1e-9).double()
    number = (kinks[:, 1:] * (1 - kinks[:, :-1])).sum(-1) + kinks[:, 0]
    assert float(number.mean()) == pytest.approx(3.0, abs=5 * math.sqrt(3.0 / 2000) + 0.02)
    assert float(f.min()) >= 0
    assert float(f.max()) <= 1
    slopes = f.diff(dim=-1).abs() / 0.0005
    # The steepest pieces are short ones; a jump of a step function would be 1 / 0.0005 everywhere it happens.
    assert float((slopes > 200).double().mean()) < 0.01


@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 1.0])
def test_a_piecewise_linear_function_has_the_variance_of_a_point_between_two_uniform_values(t):
    f = PiecewiseLinear(rate=3.0).sample(column(t), NUM_SAMPLES)[:, 0, 0]

    # The distance to the next knot on either side is exponential, cut off at the end of the interval.
    def mean_over_distance(function, end):
        inside = quad(lambda a: 3.0 * math.exp(-3.0 * a) * function(a), 0.0, end)[0] if end > 0 else 0.0
        return inside + math.exp(-3.0 * end) * function(end)

    def squares(a, b):
        return (a * a + b * b) / (a + b) ** 2 if a + b > 0 else 1.0

    expected = mean_over_distance(lambda a: mean_over_distance(lambda b: squares(a, b), 1 - t), t) / 12
    assert float(f.mean()) == pytest.approx(0.5, abs=5 * math.sqrt(expected / NUM_SAMPLES))
    assert float(f.var()) == pytest.approx(expected, rel=5 * math.sqrt(2.0 / NUM_SAMPLES))


def test_outermost_pieces_go_on_beyond_the_interval():
    x = column(-1.0, 0.0, 1.0, 2.0)
    constant = PiecewiseConstant().sample(x, 500)[..., 0]
    assert bool((constant[:, 0] == constant[:, 1]).all())
    assert bool((constant[:, 2] == constant[:, 3]).all())
    linear = PiecewiseLinear(rate=1e-6).sample(x, 500)[..., 0]
    torch.testing.assert_close(linear.diff(n=2, dim=-1), torch.zeros(500, 2).double(), rtol=0, atol=1e-12)
    assert bool(PiecewiseLinear(rate=20.0).sample(x, 500).isfinite().all())


@pytest.mark.parametrize(
    ("arguments", "words"), [((1.0, 0.0), "low"), ((0.0, math.inf), "high"), ((0.0, 1.0, 0.0), "rate")]
)
def test_intervals_and_rates_that_do_not_fit_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        PiecewiseLinear(*arguments)


def test_pieces_refuse_points_with_several_inputs():
    with pytest.raises(ValueError, match=r"x must have shape \[N, 1\] for PiecewiseConstant"):
        PiecewiseConstant().sample(torch.zeros(4, 2), 3)
