# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.distributions import RadialNormal
from pyro_radial.infer.autoguide.families.radial import GuideRadialNormal
from pyro_radial.nn import likelihoods
from tests.helpers.models import matrix_model, train_to_convergence

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_init_scale_is_sigma_and_init_stddev_the_marginal_standard_deviation():
    by_sigma, by_stddev = AutoRadial(matrix_model, init_scale=0.3), AutoRadial(matrix_model, init_stddev=0.3)
    by_sigma.setup()
    by_stddev.setup()
    for name, elements in (("weight", 20), ("bias", 5)):
        torch.testing.assert_close(by_sigma.posterior()[name].scale, torch.full_like(by_sigma.median()[name], 0.3))
        torch.testing.assert_close(by_stddev.posterior()[name].stddev, torch.full_like(by_sigma.median()[name], 0.3))
        torch.testing.assert_close(
            by_stddev.posterior()[name].scale, torch.full_like(by_sigma.median()[name], 0.3 * elements**0.5)
        )


def test_event_dim_narrows_the_radius():
    rows = AutoRadial(matrix_model, event_dim=1)
    rows.setup()
    distribution = rows.posterior()["weight"]
    assert distribution.event_shape == (5, 4)
    assert distribution.base_dist.num_elements == 4
    mapped = AutoRadial(matrix_model, event_dim={"weight": 1})
    mapped.setup()
    assert mapped.posterior()["weight"].base_dist.num_elements == 4
    assert mapped.posterior()["bias"].num_elements == 5


def test_two_initial_widths_are_refused():
    with pytest.raises(ValueError, match="init_scale or init_stddev, not both"):
        AutoRadial(matrix_model, init_scale=0.1, init_stddev=0.1)


@pytest.mark.parametrize(
    ("event_dim", "words"),
    [(3, "event_dim must be at most 2, .*got 3"), ({"weight": 3}, "weight"), ({"wait": 1}, "wait")],
)
def test_an_event_dim_that_no_site_has_is_refused_and_leaves_no_half_made_guide(event_dim, words):
    guide = AutoRadial(matrix_model, event_dim=event_dim)
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            guide.setup()


def test_sites_of_one_element_warn_that_this_is_mean_field():
    def forgot_to_event():
        with pyro.plate("inputs", 4):
            pyro.sample("w", dist.Normal(0.0, 1.0))

    with pytest.warns(UserWarning, match="mean field"):
        AutoRadial(forgot_to_event).setup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoRadial(matrix_model).setup()


def test_the_guides_density_is_the_posteriors_away_from_the_pole_and_its_mean_at_it():
    loc, scale = torch.randn(7, dtype=torch.double), 0.3 + torch.rand(7, dtype=torch.double)
    exact, guides = RadialNormal(loc, scale), GuideRadialNormal(loc, scale)
    value = exact.sample((5,))
    assert torch.equal(exact.log_prob(value), guides.log_prob(value))
    torch.testing.assert_close(guides.log_prob(loc), -exact.entropy())
    assert torch.equal(guides.expand((3,)).log_prob(loc), guides.log_prob(loc).expand(3))


def test_in_one_dimension_it_reaches_the_exact_evidence_and_posterior():
    # y_i ~ N(w, 1), w ~ N(0, 1): posterior N(sum y / (n + 1), 1 / (n + 1)).
    y = torch.randn(20, dtype=torch.double) + 1.0

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(1, dtype=torch.double), 1.0).to_event(1))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(w.squeeze(-1), 1.0), obs=y)

    guide = AutoRadial(model, init_scale=0.2)
    with pytest.warns(UserWarning, match="mean field"):
        guide.setup()
    train_to_convergence(model, guide, num_steps=300, num_particles=200, max_plate_nesting=1)
    posterior = guide.posterior()["w"]
    # Within one per cent of the posterior's standard deviation: the noise of 200 particles at the last step sizes.
    assert float(posterior.loc) == pytest.approx(float(y.sum() / 21), abs=0.01 * 21**-0.5)
    assert float(posterior.scale) == pytest.approx(21**-0.5, rel=5e-3)
    evidence = dist.MultivariateNormal(
        torch.zeros(20, dtype=torch.double), torch.eye(20, dtype=torch.double) + 1
    ).log_prob(y)
    # At the exact posterior log p(w, y) - log q(w) is constant, so the noise of a sampled KL vanishes with the error.
    elbo = Trace_ELBO(num_particles=4000, vectorize_particles=True, max_plate_nesting=1)
    assert -float(elbo.loss(model, guide)) == pytest.approx(float(evidence), abs=2e-3)


def test_in_many_dimensions_it_reaches_the_optimum_known_in_closed_form():
    # With the prior as target the best radial posterior has scale t sqrt(D), and the loss is the KL floor.
    dim = 10

    def model():
        pyro.sample("w", dist.Normal(0.0, 2.0).expand([dim]).to_event(1))

    guide = AutoRadial(model, init_scale=1.0)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceMeanField_ELBO())
    for _ in range(300):
        loss = svi.step()
    torch.testing.assert_close(guide.posterior()["w"].scale, torch.full((dim,), 2 * dim**0.5), rtol=1e-3, atol=0)
    assert loss == pytest.approx(4.43, abs=5e-3)


@pytest.mark.cuda
def test_a_network_trains_on_cuda():
    model = SupervisedModel(BayesianModule(nn.Linear(4, 1)), likelihoods.Gaussian(num_data=6)).cuda()
    guide = AutoRadial(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TermsELBO())
    x, y = X.cuda(), torch.randn(6, 1).cuda()
    losses = [svi.step(x, y) for _ in range(100)]
    assert sum(losses[-10:]) < sum(losses[:10])
    assert guide.median()["weight"].is_cuda
