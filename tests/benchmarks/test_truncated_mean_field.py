# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The truncated normal of a benchmark against SciPy and quadrature, and its guide's loss."""

import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from torch.distributions import kl_divergence

from benchmarks.guides._truncated_normal import TruncatedNormal, TruncatedNormalFamily
from pyro_radial import AutoMeanField, TermsELBO
from tests.helpers.models import matrix_model

LOC, SCALE, CENTER, UNIT = 0.3, 0.7, -0.4, 1.3


def truncated(truncation, loc=LOC, scale=SCALE, dtype=torch.float64):
    return TruncatedNormal(torch.tensor(loc, dtype=dtype), torch.tensor(scale, dtype=dtype), truncation)


@pytest.mark.parametrize("truncation", [0.05, 0.5, 1.0, 2.0, 6.0])
def test_density_variance_and_kl_are_those_of_scipy_and_of_quadrature(truncation):
    q, prior = truncated(truncation), dist.Normal(torch.tensor(CENTER, dtype=torch.float64), UNIT)
    own, other = stats.truncnorm(-truncation, truncation, LOC, SCALE), stats.norm(CENTER, UNIT)
    ends = LOC - truncation * SCALE, LOC + truncation * SCALE
    draws = q.sample((20,))
    torch.testing.assert_close(q.log_prob(draws), torch.as_tensor(own.logpdf(draws.numpy())), rtol=0.0, atol=1e-9)
    # SciPy's own density is exact to about ten digits at truncations this narrow.
    assert float(q.variance) == pytest.approx(
        integrate.quad(lambda w: own.pdf(w) * (w - LOC) ** 2, *ends, epsabs=1e-13)[0], rel=1e-9
    )
    assert float(kl_divergence(q, prior)) == pytest.approx(
        integrate.quad(lambda w: own.pdf(w) * (own.logpdf(w) - other.logpdf(w)), *ends, epsabs=1e-13)[0], abs=1e-9
    )


def test_the_family_has_a_closed_kl_in_a_guide_and_starts_as_wide_as_said():
    guide = AutoMeanField(matrix_model, init_stddev=0.2, families={".": TruncatedNormalFamily(0.8)})
    guide.setup()
    elbo = TermsELBO(2, vectorize_particles=True, max_plate_nesting=0, strict_kl=True)
    elbo.loss(matrix_model, guide)
    for name, distribution in guide.posterior().items():
        torch.testing.assert_close(distribution.stddev, torch.full(distribution.event_shape, 0.2))
        own = distribution.base_dist
        expected = kl_divergence(own, dist.Normal(0.0, 1.0)).sum()
        torch.testing.assert_close(elbo.terms.kl_by_site[name], expected, check_dtype=False)
