# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss is a bound on the evidence, weighted and averaged as it says; its errors name the culprit."""

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO, diagnose
from pyro_radial.distributions import RadialNormal
from pyro_radial.infer import HalfCauchyReparam
from pyro_radial.nn import MultiHead, likelihoods, use_head
from tests.helpers.models import X, Y, mean_and_error, network


@pytest.mark.parametrize("vectorize", [False, True])
def test_particles_are_averaged_in_loss_and_terms(vectorize):
    model = network()
    guide = AutoRadial(model, init_stddev=0.1)
    guide.setup(X, Y)
    elbo = TermsELBO(num_particles=7, vectorize_particles=vectorize, max_plate_nesting=1)
    loss = elbo(model, guide)(X, Y)
    torch.testing.assert_close(loss.detach(), elbo.terms.loss)
    single = TermsELBO()
    single(model, guide)(X, Y)
    # The KL has no noise, so it is that of one particle whatever their number.
    torch.testing.assert_close(elbo.terms.kl, single.terms.kl)
    assert elbo.terms.num_data == 40


def test_the_gradient_is_that_of_trace_mean_field_elbo_and_linear_in_the_kl_weight():
    model = network()
    guide = AutoRadial(model, init_stddev=0.1)
    guide.setup(X, Y)

    def gradient(elbo):
        pyro.set_rng_seed(1)
        guide.zero_grad()
        elbo(model, guide)(X, Y).backward()
        return torch.cat([p.grad.flatten() for p in guide.parameters()])

    none, half, full = (gradient(TermsELBO(kl_weight=weight)) for weight in (0.0, 0.5, 1.0))
    torch.testing.assert_close(full, gradient(TraceMeanField_ELBO()))
    torch.testing.assert_close(half, (none + full) / 2, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(none, full)


def test_a_weight_of_zero_leaves_out_a_kl_that_is_infinite():
    def model():
        w = pyro.sample("w", RadialNormal(torch.zeros(3), torch.ones(3)))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(1.0))

    # The point estimate starts at the pole of the radial prior, as a guide in a chain of posteriors does.
    guide = AutoDelta(model, init_loc_fn=lambda site: torch.zeros(3))
    elbo = TermsELBO(kl_weight=0.0)
    with pyro.validation_enabled(False):
        loss = elbo(model, guide)()
    loss.backward()
    assert bool(torch.isfinite(loss.detach()))
    torch.testing.assert_close(elbo.terms.loss, loss.detach())
    assert all(bool(torch.isfinite(p.grad).all()) for p in guide.parameters())


def test_a_schedule_is_asked_once_per_training_loss():
    model = network()
    guide = AutoRadial(model)
    asked = []
    elbo = TermsELBO(num_particles=2, kl_weight=lambda step: asked.append(step) or min(1.0, step / 2))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
    weights = []
    for _ in range(4):
        svi.step(X, Y)
        weights.append(elbo.terms.kl_weight)
        svi.evaluate_loss(X, Y)
    assert weights == [0.0, 0.5, 1.0, 1.0]
    # An evaluation without gradients does not count as a step.
    assert elbo.step == 4
    assert asked == [0, 1, 1, 2, 2, 3, 3, 4]


def test_a_schedule_that_returns_a_bad_weight_is_refused():
    model = network()
    with pytest.raises(ValueError, match="kl_weight"):
        TermsELBO(kl_weight=lambda step: -1.0)(model, AutoRadial(model))(X, Y)


def test_terms_before_a_loss_say_so():
    with pytest.raises(RuntimeError, match="got no loss yet"):
        TermsELBO().terms  # noqa: B018


def test_a_latent_site_with_dims_of_no_plate_is_found_without_its_log_density():
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0))
        with pyro.plate("rows", 2):
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.zeros(2))

    def guide():
        pyro.sample("w", dist.Normal(torch.zeros(2), pyro.param("scale", torch.ones(2))))

    with pytest.raises(ValueError, match=r'at site "w"'):
        TermsELBO()(model, guide)()


@poutine.reparam(config={"scale": HalfCauchyReparam()})
def reparameterized_model():
    with pyro.plate("groups", 4):
        pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("data", 10):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.zeros(10))


def test_a_reparameterized_site_is_no_observation():
    elbo = TermsELBO(strict_kl=True)
    elbo(reparameterized_model, AutoMeanField(reparameterized_model))()
    assert elbo.terms.num_data == 10
    assert set(elbo.terms.nll_by_site) == {"y"}


def test_local_sites_of_a_mini_batch_are_scaled_to_the_data_set():
    def model(data):
        with pyro.plate("rows", 10, subsample_size=5) as index:
            local = pyro.sample("local", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            pyro.sample("obs", dist.Normal(local, 1.0).to_event(1), obs=data[index])

    guide = AutoRadial(model, init_stddev=0.1)
    elbo = TermsELBO()
    elbo(model, guide)(torch.randn(10, 2))
    q = guide.posterior()["local"]
    kl = torch.distributions.kl_divergence(q, dist.Normal(0.0, 1.0).expand([10, 2]).to_event(1))
    # All rows start alike in scale and differ in loc only by the init, which is zero here.
    torch.testing.assert_close(elbo.terms.kl, kl.sum())
    assert elbo.terms.num_data == 10


def test_the_elbo_bounds_the_log_evidence():
    # One latent normal and n observations: log p(y) = log N(y; 0, I + 11').
    y = torch.randn(5)

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    evidence = dist.MultivariateNormal(torch.zeros(5), torch.eye(5) + 1).log_prob(y)
    for scale in (0.1, 0.4, 2.0):
        mean, error = mean_and_error(TermsELBO(), model, AutoMeanField(model, init_stddev=scale))
        assert -mean <= evidence + 4 * error


def test_normals_under_different_masks_have_the_kl_that_sampling_has_on_average():
    """Pyro's rule counts only where both masks are set; so does the loss that asks torch's registry."""
    q, p = dist.Normal(torch.tensor([0.5, -0.5, 1.0]), 0.5), dist.Normal(torch.zeros(3), 1.0)
    q_mask, p_mask = torch.tensor([True, True, False]), torch.tensor([True, False, True])

    def model():
        with pyro.plate("rows", 3):
            pyro.sample("w", p.mask(p_mask))

    def guide():
        with pyro.plate("rows", 3):
            pyro.sample("w", q.mask(q_mask))

    entropy, kl = q.entropy(), torch.distributions.kl_divergence(q, p)
    expected = kl[0] - entropy[1] + kl[2] + entropy[2]
    assert TermsELBO(strict_kl=True).loss(model, guide) == pytest.approx(float(expected), rel=1e-6)
    draws = torch.tensor([-Trace_ELBO().loss(model, guide) for _ in range(400)])
    assert abs(float(draws.mean() + expected)) < 4 * float(draws.std()) / 20


LABELS = torch.arange(8) % 2


def two_heads():
    net = MultiHead(nn.Linear(3, 4), [nn.Linear(4, 2), nn.Linear(4, 2)])
    return SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=8))


def test_a_guide_made_before_use_head_is_told_what_to_call():
    model = two_heads()
    guide = AutoRadial(model)
    TermsELBO()(model, guide)(X, LABELS)
    use_head(model, 1)
    words = r"site 'heads.1.weight' of the model, got none; .*after use_head: make a new guide"
    for run in (lambda: TermsELBO()(model, guide)(X, LABELS), lambda: diagnose(model, guide, (X, LABELS))):
        with pytest.raises(ValueError, match=words):
            run()
    # Both of the cures.
    assert TermsELBO()(model, AutoRadial(model))(X, LABELS).isfinite()
    use_head(model, 0)
    assert TermsELBO()(model, guide)(X, LABELS).isfinite()


def test_a_guide_that_lacks_a_site_alone_has_nothing_to_do_with_heads():
    model = two_heads()

    def guide(x, y=None):
        pyro.sample("trunk.weight", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))

    with pytest.raises(ValueError, match=r"'trunk.bias' of the model, got none$"):
        TermsELBO()(model, guide)(X, LABELS)


@pytest.mark.parametrize("family", [AutoRadial, AutoMeanField, AutoNormal])
def test_a_parameter_of_the_guide_that_is_nan_is_named(family):
    model = two_heads()
    guide = family(model)
    guide(X, LABELS)
    with torch.no_grad():
        dict(guide.named_parameters())["locs.trunk.bias_unconstrained"][1] = math.nan
    with pytest.raises(ValueError, match=r"guide must have finite parameters, .*locs.trunk.bias'"):
        TermsELBO()(model, guide)(X, LABELS)
    with pytest.raises(ValueError, match=r"guide must have finite parameters, .*locs.trunk.bias"):
        diagnose(model, guide, (X, LABELS))
