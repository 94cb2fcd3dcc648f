# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from scipy import stats
from scipy.integrate import quad
from scipy.optimize import minimize

from pyro_radial import AutoMeanField, TermsELBO
from pyro_radial.distributions.half_cauchy import half_cauchy_factors, sqrt_product
from pyro_radial.infer import HalfCauchyReparam

NUM_SAMPLES = 40_000
SITES = ("radius_gamma", "radius_inverse_gamma")
MASK = torch.tensor([True, False, True])


def reparameterized(distribution, plates=()):
    """A model that is one half-Cauchy site, inside plates of these sizes."""

    @poutine.reparam(config={"radius": HalfCauchyReparam()})
    def model():
        with pyro.plate_stack("plates", plates):
            return pyro.sample("radius", distribution)

    return model


def trace_of(model):
    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    return trace


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_the_distribution_of_the_site_stays_half_cauchy(scale):
    draws = reparameterized(dist.HalfCauchy(scale).expand([NUM_SAMPLES]).to_event(1))()
    assert stats.kstest(draws.numpy(), stats.halfcauchy(scale=scale).cdf).pvalue > 1e-3


DISTRIBUTIONS = {
    "scalar": (dist.HalfCauchy(0.5), ()),
    "event": (dist.HalfCauchy(0.5).expand([4]).to_event(1), ()),
    "event of its own scales": (dist.HalfCauchy(torch.rand(2, 4)).to_event(2), ()),
    "in a plate": (dist.HalfCauchy(0.5), (3,)),
    "event in a plate": (dist.HalfCauchy(0.5).expand([4]).to_event(1), (3,)),
    "in two plates": (dist.HalfCauchy(torch.rand(3)), (2, 3)),
    "masked": (dist.HalfCauchy(torch.rand(3)).mask(MASK), (3,)),
    "masked event": (dist.HalfCauchy(torch.rand(3, 4)).to_event(1).mask(MASK), (3,)),
    "event of masked": (dist.HalfCauchy(torch.rand(3)).mask(MASK).to_event(1), ()),
    "masked with False": (dist.HalfCauchy(0.5).expand([4]).to_event(1).mask(False), ()),
    "generally expanded": (ExpandedDistribution(dist.HalfCauchy(torch.rand(4)), (3, 4)).to_event(1), ()),
}


@pytest.mark.parametrize(("distribution", "plates"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_both_sites_have_the_shape_of_the_site_and_the_value_is_the_root_of_their_product(distribution, plates):
    def bare():
        with pyro.plate_stack("plates", plates):
            return pyro.sample("radius", distribution)

    expected, trace = trace_of(bare).nodes["radius"], trace_of(reparameterized(distribution, plates))
    site = trace.nodes["radius"]
    assert site["value"].shape == expected["value"].shape
    assert site["is_observed"]
    assert float(site["log_prob_sum"]) == 0.0
    product = 1.0
    for name in SITES:
        node = trace.nodes[name]
        assert not node["is_observed"]
        assert (node["fn"].batch_shape, node["fn"].event_shape) == (
            expected["fn"].batch_shape,
            expected["fn"].event_shape,
        )
        # What is masked in the site is masked in both.
        assert torch.equal(node["log_prob"] == 0, expected["log_prob"] == 0)
        product = product * node["value"]
    torch.testing.assert_close(site["value"].square(), product)
    assert set(trace.stochastic_nodes) - set(SITES) == {f"plates_{i}" for i in range(len(plates))}


def test_each_site_has_the_distribution_of_its_factor():
    scale = torch.tensor([0.2, 1.0, 7.0])
    trace = trace_of(reparameterized(dist.HalfCauchy(scale).to_event(1)))
    for name, distribution in zip(SITES, half_cauchy_factors(scale), strict=True):
        site = trace.nodes[name]
        torch.testing.assert_close(site["log_prob"], distribution.log_prob(site["value"]).sum())


def test_an_observed_site_is_refused_by_name():
    def model():
        pyro.sample("radius", dist.HalfCauchy(1.0), obs=torch.tensor(1.0))

    with pytest.raises(ValueError, match=r"'radius' must be latent .*, got an observed site"):
        poutine.reparam(model, config={"radius": HalfCauchyReparam()})()


@pytest.mark.parametrize("distribution", [dist.HalfNormal(1.0), dist.Gamma(torch.ones(3), 1.0).to_event(1)])
def test_another_distribution_is_refused_by_name(distribution):
    with pytest.raises(ValueError, match="'radius' must be HalfCauchy"):
        reparameterized(distribution)()


DATA = torch.tensor([0.3, -1.2, 0.8, 2.0, -0.5, 0.1, -0.9, 1.4])


@poutine.reparam(config={"radius": HalfCauchyReparam()})
def scale_model():
    """The scale of a normal distribution, whose posterior is a one-dimensional integral away."""
    radius = pyro.sample("radius", dist.HalfCauchy(0.5))
    with pyro.plate("data", len(DATA)):
        pyro.sample("y", dist.Normal(0.0, radius), obs=DATA)


def log_evidence():
    """By quadrature over log radius."""

    def joint(t):
        radius = torch.tensor(t, dtype=torch.double).exp()
        log_prior = dist.HalfCauchy(torch.tensor(0.5, dtype=torch.double)).log_prob(radius) + t
        return float((log_prior + dist.Normal(0.0, radius).log_prob(DATA.double()).sum()).exp())

    return math.log(quad(joint, -10, 10, points=[0.0])[0])


def exact_elbo(parameters):
    """Of independent log-normal factors a and b: all of it is closed, since r^-2 = 1 / (a b)."""
    locs, log_scales = torch.tensor(parameters, dtype=torch.double).reshape(2, 2)
    variances = (2 * log_scales).exp()
    mean_log_radius, mean_precision = locs.sum() / 2, (variances.sum() / 2 - locs.sum()).exp()
    log_likelihood = -len(DATA) * (mean_log_radius + 0.5 * math.log(2 * math.pi))
    log_likelihood -= 0.5 * DATA.double().square().sum() * mean_precision
    # Minus the cross-entropy to Gamma(1/2, 4) and to InverseGamma(1/2, 1), each in the logarithm.
    exponents = torch.stack([math.log(4.0) + locs[0], -locs[1]])
    log_prior = (0.5 * exponents - (exponents + variances / 2).exp() - 0.5 * math.log(math.pi)).sum()
    return float(log_likelihood + log_prior + log_scales.sum() + math.log(2 * math.pi) + 1)


@pytest.mark.parametrize("elbo", [TraceMeanField_ELBO, partial(TermsELBO, strict_kl=True)])
def test_svi_with_analytic_kls_finds_the_best_of_its_family(elbo):
    best = minimize(lambda parameters: -exact_elbo(parameters), [0.0, 0.0, -0.5, -0.5], tol=1e-8)
    assert -best.fun < log_evidence()
    guide = AutoMeanField(scale_model, init_stddev=0.3)
    loss = elbo(num_particles=64, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(scale_model, guide, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.96}), loss)
    for _ in range(120):
        svi.step()
    gamma, inverse_gamma = (guide.posterior()[name].base_dist for name in SITES)
    found = [gamma.loc, inverse_gamma.loc, gamma.scale.log(), inverse_gamma.scale.log()]
    assert exact_elbo([float(x) for x in found]) == pytest.approx(-best.fun, abs=0.03)
    draws = torch.tensor([-svi.evaluate_loss() for _ in range(20)])
    assert float(draws.mean()) == pytest.approx(-best.fun, abs=0.03 + 4 * float(draws.std()) / 20**0.5)
    # The posterior of the two factors is also one of the radius itself.
    radius = sqrt_product(
        *(dist.LogNormal(distribution.loc, distribution.scale) for distribution in (gamma, inverse_gamma))
    )
    assert float(radius.loc) == pytest.approx((best.x[0] + best.x[1]) / 2, abs=0.05)


def test_pyros_own_guide_prediction_and_nuts_take_it():
    guide = AutoNormal(scale_model)
    SVI(scale_model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO()).step()
    draws = Predictive(scale_model, guide=guide, num_samples=5)()
    torch.testing.assert_close(draws["radius"], (draws[SITES[0]] * draws[SITES[1]]).sqrt())
    mcmc = MCMC(NUTS(scale_model), num_samples=3, warmup_steps=3, disable_progbar=True)
    mcmc.run()
    assert set(mcmc.get_samples()) == set(SITES)
