# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The truncated normal against quadrature, its limits, and what the generic tests cannot know."""

import math

import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from torch.distributions import kl_divergence

from pyro_radial.distributions import RadialNormal, TruncatedNormal

LOC, SCALE, CENTER, UNIT = 0.3, 0.7, -0.4, 1.3


def truncated(truncation, loc=LOC, scale=SCALE, dtype=torch.float64):
    return TruncatedNormal(torch.tensor(loc, dtype=dtype), torch.tensor(scale, dtype=dtype), truncation)


def normal(loc, scale):
    return dist.Normal(torch.tensor(loc, dtype=torch.float64), scale)


def expectation(truncation, function):
    """Under the truncated normal, by quadrature of SciPy's density."""
    density = stats.truncnorm(-truncation, truncation, LOC, SCALE).pdf
    ends = LOC - truncation * SCALE, LOC + truncation * SCALE
    return integrate.quad(lambda w: density(w) * function(w), *ends, epsabs=1e-13)[0]


@pytest.mark.parametrize("truncation", [0.05, 0.5, 1.0, 2.0, 6.0])
def test_moments_entropy_and_kl_are_those_of_quadrature(truncation):
    q, prior = truncated(truncation), normal(CENTER, UNIT)
    own = stats.truncnorm(-truncation, truncation, LOC, SCALE).logpdf
    other = stats.norm(CENTER, UNIT).logpdf
    # SciPy's own density is exact to about ten digits at truncations this narrow.
    assert float(q.variance) == pytest.approx(expectation(truncation, lambda w: (w - LOC) ** 2), rel=1e-9)
    assert float(q.entropy()) == pytest.approx(expectation(truncation, lambda w: -own(w)), abs=1e-9)
    assert float(kl_divergence(q, prior)) == pytest.approx(
        expectation(truncation, lambda w: own(w) - other(w)), abs=1e-9
    )


def test_far_out_it_is_the_normal_and_close_in_the_uniform_distribution():
    whole, prior = normal(LOC, SCALE), normal(0.0, 1.0)
    far, close = truncated(9.0), truncated(1e-4)
    assert float(far.entropy()) == pytest.approx(float(whole.entropy()), abs=1e-12)
    assert float(kl_divergence(far, prior)) == pytest.approx(float(kl_divergence(whole, prior)), abs=1e-12)
    assert float(close.entropy()) == pytest.approx(math.log(2e-4 * SCALE), abs=1e-8)
    assert float(close.variance) == pytest.approx((1e-4 * SCALE) ** 2 / 3, rel=1e-7)


def test_gradients_of_the_kl_are_those_of_the_formula():
    loc, scale = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (LOC, SCALE))
    q = TruncatedNormal(loc, scale, 1.0)
    kl_divergence(q, normal(CENTER, UNIT)).backward()
    assert float(loc.grad) == pytest.approx((LOC - CENTER) / UNIT**2, rel=1e-12)
    assert float(scale.grad) == pytest.approx(-1 / SCALE + q.unit_variance * SCALE / UNIT**2, rel=1e-12)


def test_the_kl_of_masked_rows_is_that_of_the_others():
    q, p = TruncatedNormal(torch.zeros(3, 2), 0.5, 1.0).to_event(1), dist.Normal(torch.ones(3, 2), 1.0).to_event(1)
    whole = kl_divergence(q, p)
    mask = torch.tensor([True, False, True])
    assert float(whole.min()) > 0
    torch.testing.assert_close(kl_divergence(q.mask(mask), p.mask(mask)), torch.where(mask, whole, 0.0))


def test_to_a_radial_distribution_no_kl_is_claimed():
    with pytest.raises(NotImplementedError):
        kl_divergence(
            TruncatedNormal(torch.zeros(3), 1.0, 1.0).to_event(1), RadialNormal(torch.zeros(3), torch.ones(3))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("truncation", [0.1, 1.0, 4.0, 8.0])
def test_draws_have_a_finite_density_also_where_rounding_takes_them_beyond_the_edge(truncation, dtype):
    # A mean of ten thousand scales: an ulp of it is more than one of the truncation.
    q = truncated(truncation, loc=1.0, scale=1e-4, dtype=dtype)
    draws = q.sample((100_000,))
    assert bool(draws.isfinite().all())
    assert bool(q.log_prob(draws).isfinite().all())
    assert q.log_prob(torch.tensor(1.0 + 1.2e-4 * truncation, dtype=dtype)) == -math.inf


def test_quantiles_are_scipys():
    levels = torch.tensor([0.01, 0.3, 0.5, 0.99], dtype=torch.float64)
    expected = stats.truncnorm(-1.5, 1.5, LOC, SCALE).ppf(levels.numpy())
    torch.testing.assert_close(truncated(1.5).icdf(levels), torch.as_tensor(expected))


@pytest.mark.parametrize("truncation", [0.0, -1.0, math.inf, math.nan, None, True])
def test_a_truncation_that_is_not_positive_and_finite_is_refused(truncation):
    with pytest.raises(ValueError, match="truncation must be a positive finite number"):
        TruncatedNormal(0.0, 1.0, truncation)
