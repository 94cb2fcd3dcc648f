# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_value
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.distributions import RadialNormal
from pyro_radial.infer import HalfCauchyReparam
from pyro_radial.nn import likelihoods, priors

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=GENERATOR), torch.randn(8, 1, generator=GENERATOR)


def network(prior=None, num_data=40):
    bnn = BayesianModule(nn.Linear(3, 1), *([] if prior is None else [prior]))
    return SupervisedModel(bnn, likelihoods.Gaussian(num_data))


def mean_and_error(loss, model, guide, *args, count=400):
    with torch.no_grad():
        draws = torch.tensor([float(loss.loss(model, guide, *args)) for _ in range(count)])
    return draws.mean(), draws.std() / count**0.5


def assert_same_in_expectation(first, second, model, guide, *args):
    (a, a_error), (b, b_error) = (mean_and_error(loss, model, guide, *args) for loss in (first, second))
    assert abs(a - b) <= 4 * (a_error**2 + b_error**2).sqrt() + 1e-5 * abs(a)


def test_the_terms_add_up_to_the_loss_for_the_whole_data_set():
    model = network()
    guide = AutoRadial(model, init_stddev=0.1)
    elbo = RadialELBO(kl_weight=0.3)
    pyro.set_rng_seed(0)
    loss = elbo(model, guide)(X, Y)
    terms = elbo.terms
    torch.testing.assert_close(loss.detach(), terms.negative_log_likelihood + 0.3 * terms.kl)
    torch.testing.assert_close(loss.detach(), terms.loss)
    assert terms.num_data == 40
    torch.testing.assert_close(terms.per_datum().loss * 40, terms.loss)
    # By hand: the likelihood of these 8 of 40 points at the same draw, and the KL of the guide's posteriors.
    pyro.set_rng_seed(0)
    trace = poutine.trace(guide).get_trace(X, Y)
    f = X @ trace.nodes["weight"]["value"].T + trace.nodes["bias"]["value"]
    by_hand = -40 / 8 * dist.Normal(f, 1.0).log_prob(Y).sum()
    torch.testing.assert_close(terms.negative_log_likelihood, by_hand.detach())
    posterior = guide.posterior()
    prior = {name: dist.Normal(0.0, 1.0).expand(q.event_shape).to_event(q.event_dim) for name, q in posterior.items()}
    kl = sum(torch.distributions.kl_divergence(posterior[name], prior[name]) for name in posterior)
    torch.testing.assert_close(terms.kl, kl)


def test_kl_splits_into_cross_entropy_and_entropy():
    model = network()
    guide = AutoRadial(model, init_stddev=0.1)
    elbo = RadialELBO()
    elbo(model, guide)(X, Y)
    entropy = sum(q.entropy() for q in guide.posterior().values())
    torch.testing.assert_close(elbo.terms.entropy, entropy)
    torch.testing.assert_close(elbo.terms.cross_entropy, elbo.terms.kl + entropy)


def test_without_an_entropy_there_is_no_split():
    def model():
        pyro.sample("rate", dist.LogNormal(0.0, 1.0))

    elbo = RadialELBO()
    elbo(model, AutoMeanField(model, init_stddev=0.5))()
    assert elbo.terms.entropy is None
    assert elbo.terms.cross_entropy is None


@pytest.mark.parametrize("vectorize", [False, True])
def test_particles_are_averaged_in_loss_and_terms(vectorize):
    model = network()
    guide = AutoRadial(model, init_stddev=0.1)
    guide.setup(X, Y)
    elbo = RadialELBO(num_particles=7, vectorize_particles=vectorize, max_plate_nesting=1)
    loss = elbo(model, guide)(X, Y)
    torch.testing.assert_close(loss.detach(), elbo.terms.loss)
    single = RadialELBO()
    single(model, guide)(X, Y)
    # The KL has no noise, so it is that of one particle whatever their number.
    torch.testing.assert_close(elbo.terms.kl, single.terms.kl)
    assert elbo.terms.num_data == 40


def test_particles_share_the_kl_of_distributions_that_do_not_depend_on_them(monkeypatch):
    sizes = []

    def counted(q, p):
        sizes.append(q.batch_shape.numel())
        return torch.distributions.kl_divergence(q, p)

    monkeypatch.setattr("pyro_radial.infer.elbo.kl_divergence", counted)
    model = network()
    elbo = RadialELBO(num_particles=7, vectorize_particles=True, max_plate_nesting=1)
    elbo(model, AutoMeanField(model))(X, Y)
    assert sizes == [1, 1]


def test_particles_have_kls_of_their_own_where_a_prior_depends_on_a_draw():
    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        pyro.sample("weight", dist.Normal(0.0, scale))

    guide = AutoMeanField(model, init_stddev=0.5)
    guide.setup()
    elbo = RadialELBO(num_particles=20_000, vectorize_particles=True, max_plate_nesting=1)
    elbo(model, guide)()
    q = guide.posterior()["weight"]
    inverse_variance = torch.tensor(2 * 0.5**2).exp() * (-2 * guide.median()["scale"].log()).exp()
    # E KL, with E log scale the guide's location and E 1 / scale^2 that of a log-normal.
    expected = guide.median()["scale"].log() - q.scale.log() - 0.5
    expected = expected + 0.5 * (q.scale**2 + q.loc**2) * inverse_variance
    torch.testing.assert_close(elbo.terms.kl_by_site["weight"], expected.detach(), rtol=0.03, atol=0.0)


def test_a_handler_around_the_loss_has_its_say_in_the_kl_of_particles():
    model = network()
    guide = AutoMeanField(model)
    guide.setup(X, Y)
    wide = {name: dist.Normal(0.0, 5.0) for name in ("weight", "bias")}

    class Widen(poutine.messenger.Messenger):
        def _pyro_sample(self, msg):
            if msg["name"] in wide and not msg["infer"].get("is_auxiliary") and msg["fn"].stddev.min() == 1:
                msg["fn"] = (
                    wide[msg["name"]]
                    .expand(msg["fn"].batch_shape + msg["fn"].event_shape)
                    .to_event(msg["fn"].event_dim)
                )

    elbo = RadialELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)
    with Widen():
        elbo(model, guide)(X, Y)
    q = guide.posterior()
    expected = sum(torch.distributions.kl_divergence(q[n].base_dist, wide[n]).sum() for n in wide)
    torch.testing.assert_close(elbo.terms.kl, expected.detach())


def test_the_gradient_is_that_of_trace_mean_field_elbo():
    model = network()
    guide = AutoRadial(model, init_stddev=0.1)
    guide.setup(X, Y)
    gradients = []
    for elbo in (RadialELBO(), TraceMeanField_ELBO()):
        pyro.set_rng_seed(1)
        guide.zero_grad()
        elbo(model, guide)(X, Y).backward()
        gradients.append([p.grad.clone() for p in guide.parameters()])
    for ours, pyros in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, pyros)


def test_the_kl_weight_reaches_the_gradient_of_the_scales():
    model = network()
    guide = AutoRadial(model, init_stddev=0.1)
    guide.setup(X, Y)

    def gradient(weight):
        pyro.set_rng_seed(1)
        guide.zero_grad()
        RadialELBO(kl_weight=weight)(model, guide)(X, Y).backward()
        return torch.cat([p.grad.flatten() for p in guide.parameters()])

    none, half, full = gradient(0.0), gradient(0.5), gradient(1.0)
    torch.testing.assert_close(half, (none + full) / 2, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(none, full)


def test_a_weight_of_zero_leaves_out_a_kl_that_is_infinite():
    def model():
        w = pyro.sample("w", RadialNormal(torch.zeros(3), torch.ones(3)))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(1.0))

    # The point estimate starts at the pole of the radial prior, as a guide in a chain of posteriors does.
    guide = AutoDelta(model, init_loc_fn=lambda site: torch.zeros(3))
    elbo = RadialELBO(kl_weight=0.0)
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
    elbo = RadialELBO(num_particles=2, kl_weight=lambda step: asked.append(step) or min(1.0, step / 2))
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


@pytest.mark.parametrize("weight", [-0.1, math.inf, math.nan, "1", None])
def test_a_weight_that_is_no_number_of_at_least_zero_is_refused(weight):
    with pytest.raises(ValueError, match="kl_weight"):
        RadialELBO(kl_weight=weight)


def test_a_schedule_that_returns_a_bad_weight_is_refused():
    model = network()
    with pytest.raises(ValueError, match="kl_weight"):
        RadialELBO(kl_weight=lambda step: -1.0)(model, AutoRadial(model))(X, Y)


def test_terms_before_a_loss_say_so():
    with pytest.raises(RuntimeError, match="no loss"):
        RadialELBO().terms  # noqa: B018


def test_strict_kl_passes_closed_forms():
    model = network(priors.FanIn())
    for guide in (AutoRadial(model), AutoRadial(model, event_dim=1), AutoMeanField(model), AutoDelta(model)):
        RadialELBO(strict_kl=True)(model, guide)(X, Y)


def test_strict_kl_names_the_site_that_would_be_sampled():
    model = network(priors.ScaleMixture())
    with pytest.raises(ValueError, match=r"'weight'.*closed-form"):
        RadialELBO(strict_kl=True)(model, AutoRadial(model))(X, Y)


def test_strict_kl_names_the_auxiliary_site_of_pyros_guide():
    model = network()
    with pytest.raises(ValueError, match="auxiliary"):
        RadialELBO(strict_kl=True)(model, AutoNormal(model))(X, Y)


def test_a_sampled_kl_agrees_with_trace_elbo():
    model = network(priors.ScaleMixture())
    guide = AutoRadial(model, init_stddev=0.1)
    guide.setup(X, Y)
    assert_same_in_expectation(RadialELBO(), Trace_ELBO(), model, guide, X, Y)


def test_pyros_autonormal_gets_the_right_loss_on_constrained_sites():
    def model():
        pyro.sample("rate", dist.LogNormal(2.0, 1.0).expand([3]).to_event(1))

    start = init_to_value(values={"rate": torch.full((3,), math.e**2)})
    guide = AutoNormal(model, init_scale=0.5, init_loc_fn=start)
    guide()
    assert_same_in_expectation(RadialELBO(), Trace_ELBO(), model, guide)
    # Pyro's own loss is off by the log-Jacobian, here 3 x 2, which is why ours handles a Delta itself.
    (ours, _), (pyros, _) = (mean_and_error(e, model, guide) for e in (RadialELBO(), TraceMeanField_ELBO()))
    assert abs(ours - pyros) > 5


@pytest.mark.parametrize(
    "handler", [lambda m: poutine.scale(m, scale=0.1), lambda m: poutine.mask(m, mask=torch.tensor(False))]
)
def test_a_handler_around_the_model_alone_counts_as_in_trace_elbo(handler):
    inner = network()
    guide = AutoRadial(inner, init_stddev=0.1)
    guide.setup(X, Y)
    model = handler(inner)
    assert_same_in_expectation(RadialELBO(), Trace_ELBO(), model, guide, X, Y)
    with pytest.raises(ValueError, match="differently"):
        RadialELBO(strict_kl=True)(model, guide)(X, Y)


def test_scaling_model_and_guide_alike_scales_the_analytic_kl():
    inner = network()
    guide = AutoRadial(inner, init_stddev=0.1)
    guide.setup(X, Y)
    plain, scaled = RadialELBO(), RadialELBO(strict_kl=True)
    plain(inner, guide)(X, Y)
    scaled(poutine.scale(inner, scale=0.1), poutine.scale(guide, scale=0.1))(X, Y)
    torch.testing.assert_close(scaled.terms.kl, 0.1 * plain.terms.kl)


def test_log_densities_of_latent_sites_are_left_alone_where_the_kl_is_analytic(monkeypatch):
    model = network()
    guide = AutoRadial(model)
    guide.setup(X, Y)
    evaluated = []
    for distribution in (RadialNormal, dist.Normal):
        monkeypatch.setattr(distribution, "log_prob", _recording(evaluated, distribution.log_prob))
    RadialELBO(strict_kl=True)(model, guide)(X, Y)
    # The observation's alone.
    assert evaluated == ["Normal"]


def _recording(evaluated, log_prob):
    def recorded(distribution, value):
        evaluated.append(type(distribution).__name__)
        return log_prob(distribution, value)

    return recorded


def test_a_guide_that_cannot_be_reparameterized_is_named():
    def model():
        pyro.sample("k", dist.Poisson(3.0))

    def guide():
        pyro.sample("k", dist.Poisson(pyro.param("rate", torch.tensor(2.0))))

    with pytest.raises(NotImplementedError, match="'k'"):
        RadialELBO()(model, guide)()


def test_a_latent_site_with_dims_of_no_plate_is_found_without_its_log_density():
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0))
        with pyro.plate("rows", 2):
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.zeros(2))

    def guide():
        pyro.sample("w", dist.Normal(torch.zeros(2), pyro.param("scale", torch.ones(2))))

    with pytest.raises(ValueError, match=r'at site "w"'):
        RadialELBO()(model, guide)()


@poutine.reparam(config={"scale": HalfCauchyReparam()})
def reparameterized_model():
    with pyro.plate("groups", 4):
        pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("data", 10):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.zeros(10))


def test_a_reparameterized_site_is_no_observation():
    elbo = RadialELBO(strict_kl=True)
    elbo(reparameterized_model, AutoMeanField(reparameterized_model))()
    assert elbo.terms.num_data == 10
    assert set(elbo.terms.nll_by_site) == {"y"}


def test_local_sites_of_a_mini_batch_are_scaled_to_the_data_set():
    def model(data):
        with pyro.plate("rows", 10, subsample_size=5) as index:
            local = pyro.sample("local", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            pyro.sample("obs", dist.Normal(local, 1.0).to_event(1), obs=data[index])

    guide = AutoRadial(model, init_stddev=0.1)
    elbo = RadialELBO()
    elbo(model, guide)(torch.randn(10, 2))
    q = guide.posterior()["local"]
    kl = torch.distributions.kl_divergence(q, dist.Normal(0.0, 1.0).expand([10, 2]).to_event(1))
    # All rows start alike in scale and differ in loc only by the init, which is zero here.
    torch.testing.assert_close(elbo.terms.kl, kl.sum())
    assert elbo.terms.num_data == 10


def test_a_latent_site_that_the_guide_lacks_is_named():
    def model():
        pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("b", dist.Normal(0.0, 1.0))

    guide = AutoMeanField(poutine.block(model, hide=["b"]))
    with pyro.validation_enabled(False), pytest.raises(ValueError, match="'b'"):
        RadialELBO()(model, guide)()


def test_without_a_plate_there_is_no_per_datum():
    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(0.0))

    elbo = RadialELBO()
    elbo(model, AutoRadial(model))()
    assert elbo.terms.num_data is None
    with pytest.raises(ValueError, match="plate"):
        elbo.terms.per_datum()


def test_the_names_of_broken_terms_are_given():
    model = network()
    guide = AutoRadial(model)
    elbo = RadialELBO()
    with pyro.validation_enabled(False), pytest.warns(UserWarning, match="NaN"):
        SVI(model, guide, pyro.optim.Adam({}), elbo).evaluate_loss(X, Y * math.nan)
    assert elbo.terms.not_finite() == ["log-likelihood of site 'y'"]


def test_the_elbo_bounds_the_log_evidence():
    # One latent normal and n observations: log p(y) = log N(y; 0, I + 11').
    y = torch.randn(5)

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    evidence = dist.MultivariateNormal(torch.zeros(5), torch.eye(5) + 1).log_prob(y)
    for scale in (0.1, 0.4, 2.0):
        mean, error = mean_and_error(RadialELBO(), model, AutoMeanField(model, init_stddev=scale))
        assert -mean <= evidence + 4 * error
