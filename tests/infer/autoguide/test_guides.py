# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math
import warnings

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.distributions import RadialNormal
from pyro_radial.infer.autoguide import init_to_fan_in, init_to_network
from pyro_radial.infer.autoguide.auto_radial import _GuideRadialNormal
from pyro_radial.nn import likelihoods, priors

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def matrix_model(x=None):
    pyro.sample("weight", dist.Normal(0.0, 1.0).expand([5, 4]).to_event(2))
    pyro.sample("bias", dist.Normal(0.0, 1.0).expand([5]).to_event(1))


def test_the_whole_event_shares_one_radius():
    guide = AutoRadial(matrix_model)
    guide()
    posterior = guide.posterior()
    assert isinstance(posterior["weight"], RadialNormal)
    assert posterior["weight"].num_elements == 20
    assert posterior["bias"].num_elements == 5


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
    law = rows.posterior()["weight"]
    assert law.event_shape == (5, 4)
    assert law.base_dist.num_elements == 4
    mapped = AutoRadial(matrix_model, event_dim={"weight": 1})
    mapped.setup()
    assert mapped.posterior()["weight"].base_dist.num_elements == 4
    assert mapped.posterior()["bias"].num_elements == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"init_scale": 0.0}, "init_scale"),
        ({"init_scale": math.inf}, "init_scale"),
        ({"init_stddev": -1.0}, "init_stddev"),
        ({"init_stddev": math.nan}, "init_stddev"),
        ({"init_scale": "0.1"}, "init_scale"),
        ({"init_scale": 0.1, "init_stddev": 0.1}, "not both"),
    ],
)
def test_bad_initial_scales_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        AutoRadial(matrix_model, **arguments)


@pytest.mark.parametrize(
    ("event_dim", "words"), [(3, "event_dim=3"), (-1, "event_dim=-1"), ({"weight": 3}, "weight"), ({"wait": 1}, "wait")]
)
def test_an_event_dim_that_no_site_has_is_refused_and_leaves_no_half_made_guide(event_dim, words):
    guide = AutoRadial(matrix_model, event_dim=event_dim)
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            guide.setup()


def test_the_mean_field_guide_refuses_a_bad_scale():
    with pytest.raises(ValueError, match="init_scale"):
        AutoMeanField(matrix_model, init_scale=0)


def test_an_init_that_is_not_finite_names_the_site():
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    guide = AutoRadial(model, init_loc_fn=lambda site: torch.full((2,), math.inf))
    with pytest.raises(ValueError, match="'w'"):
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


def test_the_default_start_of_a_network_is_its_own_weights():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(10))
    for guide in (AutoRadial(model), AutoMeanField(model)):
        guide.setup(X, torch.randn(6, 1))
        for name, parameter in net.named_parameters():
            assert torch.equal(guide.median()[name], parameter)


def test_the_start_of_a_bare_model_follows_the_fan_in():
    def model():
        pyro.sample("weight", dist.Normal(0.0, 1.0).expand([400, 100]).to_event(2))
        pyro.sample("bias", dist.Normal(0.0, 1.0).expand([400]).to_event(1))
        pyro.sample("rate", dist.LogNormal(0.0, 1.0).expand([3, 3]).to_event(2))

    guide = AutoRadial(model)
    guide.setup()
    # He's initialisation; the standard error of a standard deviation of n normals is sd / sqrt(2n).
    assert guide.median()["weight"].std() == pytest.approx((2 / 100) ** 0.5, rel=4 / (2 * 40_000) ** 0.5)
    assert bool((guide.median()["bias"] == 0).all())
    assert bool((guide.median()["rate"] > 0).all())
    own = AutoRadial(model, init_loc_fn=init_to_fan_in(gain=1.0))
    own.setup()
    assert own.median()["weight"].std() == pytest.approx(0.1, rel=4 / (2 * 40_000) ** 0.5)


def test_init_to_network_takes_another_networks_weights():
    net, trained = nn.Linear(4, 2), nn.Linear(4, 2)
    guide = AutoRadial(BayesianModule(net), init_loc_fn=init_to_network(net=trained))
    guide.setup(X)
    assert torch.equal(guide.median()["weight"], trained.weight)


@pytest.mark.parametrize("likelihood", [likelihoods.Gaussian(10), likelihoods.Bernoulli(10)])
def test_targets_that_are_not_given_are_no_latent_site(likelihood):
    model = SupervisedModel(BayesianModule(nn.Linear(4, 2)), likelihood)
    for guide in (AutoRadial(model), AutoMeanField(model)):
        guide.setup(X)
        assert set(guide(X)) == {"weight", "bias"}
        RadialELBO(strict_kl=True)(model, guide)(X, torch.zeros(6, 2))


def test_weights_inside_a_plate_all_start_at_the_network():
    bnn = BayesianModule(nn.Linear(4, 2))

    def model(x):
        with pyro.plate("members", 3, dim=-2):
            bnn(x)

    guide = AutoRadial(model)
    guide.setup(X)
    assert guide.median()["weight"].shape == (3, 1, 2, 4)
    assert torch.equal(guide.median()["weight"][2, 0], bnn._initial["weight"])


def test_load_means_takes_a_trained_network_and_leaves_the_scales():
    net = nn.Linear(4, 2)
    model = SupervisedModel(BayesianModule(nn.Linear(4, 2), priors.HyperScale()), likelihoods.Gaussian(10))
    guide = AutoRadial(model)
    guide.setup(X, torch.randn(6, 2))
    with pytest.raises(ValueError, match="weight_prior_scale"):
        guide.load_means(net.state_dict())
    missing = guide.load_means(net.state_dict(), strict=False)
    assert set(missing.missing_sites) == {"weight_prior_scale", "bias_prior_scale"}
    assert torch.equal(guide.median()["weight"], net.weight)
    assert guide.scale_change()["weight"] == pytest.approx(0.0, abs=1e-6)
    guide.load_means({"weight_prior_scale": torch.tensor(0.7)}, strict=False)
    assert guide.median()["weight_prior_scale"] == pytest.approx(0.7)
    with pytest.raises(ValueError, match="'weight'"):
        guide.load_means(nn.Linear(3, 2).state_dict(), strict=False)
    with pytest.raises(RuntimeError, match="setup"):
        AutoRadial(model).load_means(net.state_dict())


def test_the_guides_density_is_the_posteriors_away_from_the_pole_and_its_mean_at_it():
    loc, scale = torch.randn(7, dtype=torch.double), 0.3 + torch.rand(7, dtype=torch.double)
    exact, guides = RadialNormal(loc, scale), _GuideRadialNormal(loc, scale)
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
    optim = pyro.optim.ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.05}, "gamma": 0.993})
    svi = SVI(
        model, guide, optim, TraceMeanField_ELBO(num_particles=200, vectorize_particles=True, max_plate_nesting=1)
    )
    for _ in range(1000):
        svi.step()
        optim.step()
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
    for _ in range(600):
        loss = svi.step()
    torch.testing.assert_close(guide.posterior()["w"].scale, torch.full((dim,), 2 * dim**0.5), rtol=1e-3, atol=0)
    assert loss == pytest.approx(4.43, abs=5e-3)


class NegativeExponential(dist.Exponential):
    support = constraints.less_than(0.0)

    def rsample(self, sample_shape=torch.Size()):
        return -super().rsample(sample_shape)

    def log_prob(self, value):
        return super().log_prob(-value)


def test_a_decreasing_transform_keeps_quantiles_in_order():
    guide = AutoMeanField(lambda: pyro.sample("w", NegativeExponential(1.0)), init_scale=0.5)
    guide()
    low, high = guide.quantiles([0.1, 0.9])["w"]
    assert low < high < 0


def test_the_density_of_a_constrained_draw_does_not_suffer_from_inverting_its_transform():
    # log q of the guide's own draw moves with loc through the Jacobian alone, here exactly 1 per element. Inverting
    # exp in float32 would move the draw by a good part of so small a scale, and the gradient with it.
    guide = AutoRadial(
        lambda: pyro.sample("w", dist.LogNormal(0.0, 1.0).expand([50]).to_event(1)),
        init_loc_fn=lambda site: torch.full((50,), 150.0),
        init_scale=1e-5,
    )
    poutine.trace(guide).get_trace().log_prob_sum().backward()
    gradient = guide.locs.w_unconstrained.grad
    torch.testing.assert_close(gradient, -torch.ones(50))


def test_quantiles_outside_the_unit_interval_are_refused():
    guide = AutoRadial(matrix_model)
    guide()
    with pytest.raises(ValueError, match="between 0 and 1"):
        guide.quantiles([0.0])


@pytest.mark.parametrize("method", ["median", "posterior", "scale_change"])
def test_a_guide_without_parameters_says_to_set_it_up(method):
    with pytest.raises(RuntimeError, match="setup"):
        getattr(AutoRadial(matrix_model), method)()


def test_scale_change_is_the_log_ratio_to_the_start():
    guide = AutoRadial(matrix_model)
    guide.setup()
    assert guide.scale_change()["weight"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        raw = guide.scales.weight_unconstrained
        scale = nn.functional.softplus(raw)
        raw.copy_((2 * scale).expm1().log())
    assert guide.scale_change()["weight"] == pytest.approx(math.log(2.0), rel=1e-4)


def test_subsampled_rows_are_selected_not_averaged():
    def model(rows):
        with pyro.plate("rows", 5, subsample=rows):
            pyro.sample("local", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    guide = AutoRadial(model, create_plates=lambda rows: pyro.plate("rows", 5, subsample=rows))
    guide.setup(torch.arange(5))
    with torch.no_grad():
        guide.locs.local_unconstrained.copy_(torch.arange(5.0)[:, None].expand(5, 3))
    law = poutine.trace(guide).get_trace(torch.tensor([3, 1])).nodes["local"]["fn"]
    assert torch.equal(law.loc.detach(), torch.tensor([[3.0] * 3, [1.0] * 3]))


def test_a_loaded_guide_without_its_model_still_samples():
    import io

    guide = AutoRadial(matrix_model)
    guide()
    buffer = io.BytesIO()
    torch.save(guide, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded()["weight"].shape == (5, 4)
    assert guide.model is not None


def test_names_in_the_store_do_not_repeat():
    first, second = AutoRadial(matrix_model), AutoRadial(matrix_model)
    first()
    second()
    assert len(pyro.get_param_store().keys()) == 8


def test_no_memory_of_the_store_survives_clearing_it():
    guide = AutoRadial(matrix_model)
    guide()
    before = guide.median()["weight"].clone()
    pyro.clear_param_store()
    guide()
    assert torch.equal(guide.median()["weight"], before)


@pytest.mark.cuda
def test_a_network_trains_on_cuda():
    model = SupervisedModel(BayesianModule(nn.Linear(4, 1)), likelihoods.Gaussian(6)).cuda()
    guide = AutoRadial(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), RadialELBO())
    x, y = X.cuda(), torch.randn(6, 1).cuda()
    losses = [svi.step(x, y) for _ in range(100)]
    assert sum(losses[-10:]) < sum(losses[:10])
    assert guide.median()["weight"].is_cuda
