# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The ELBO of functions, on a model whose functions are a Gaussian process."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoIAFNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel
from pyro_radial.functional import (
    FunctionalELBO,
    GaussianKL,
    GaussianProcess,
    ImplicitProcess,
    LinearizedKL,
    SteinKL,
    UniformBox,
)
from pyro_radial.nn import likelihoods

NUM_FEATURES, NOISE = 12, 0.3
GENERATOR = torch.Generator().manual_seed(0)
# As many points as features, so that the divergence of functions is that of weights, whose posterior is known.
X = torch.randn(NUM_FEATURES, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(2 * X[:, 0]) + NOISE * torch.randn(NUM_FEATURES, generator=GENERATOR, dtype=torch.float64)
FREQUENCY = 2 * torch.randn(3, NUM_FEATURES, generator=GENERATOR, dtype=torch.float64)
PHASE = 2 * math.pi * torch.rand(NUM_FEATURES, generator=GENERATOR, dtype=torch.float64)


def features(x):
    return (x @ FREQUENCY + PHASE).cos() * (2 / NUM_FEATURES) ** 0.5


def kernel(a, b):
    """That of the functions below: they are linear in standard normal weights."""
    return features(a) @ features(b).T


def linear_model(x, y=None):
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(NUM_FEATURES), 1.0).to_event(1))
    f = weight.reshape(-1, NUM_FEATURES) @ features(x).T
    f = f[0] if weight.dim() == 1 else f
    with pyro.plate("data", len(x), dim=-1):
        pyro.deterministic("f", f)
        pyro.sample("y", dist.Normal(f, NOISE), obs=y)


PHI = features(X)
PRECISION = PHI.T @ PHI / NOISE**2 + torch.eye(NUM_FEATURES, dtype=torch.float64)
COVARIANCE = PRECISION.inverse()
MEAN = COVARIANCE @ PHI.T @ Y / NOISE**2


class FullNormal(nn.Module):
    """The exact posterior, with deviations some times as large, sampled directly."""

    def __init__(self, times=1.0):
        super().__init__()
        self.loc = nn.Parameter(MEAN.clone())
        self.factor = nn.Parameter(times * torch.linalg.cholesky(COVARIANCE))

    def forward(self, x, y=None):
        pyro.sample("weight", dist.MultivariateNormal(self.loc, self.factor @ self.factor.T))


def full_auxiliary(times):
    guide = AutoMultivariateNormal(linear_model)
    guide(X, Y)
    factor = times * torch.linalg.cholesky(COVARIANCE)
    guide.loc.data = MEAN.clone()
    guide.scale = factor.diagonal()
    guide.scale_tril = factor / factor.diagonal()[:, None]
    return guide


def factorized(guide_type):
    """The best guide of independent normals, with the diagonal of the precision."""

    def make(times):
        guide = guide_type(linear_model)
        guide(X, Y)
        scales = times * PRECISION.diagonal().rsqrt()
        if isinstance(guide, AutoNormal):
            guide.locs.weight.data = MEAN.clone()
            guide.scales.weight = scales
        else:
            guide.load_means({"weight": MEAN})
            guide.set_stddevs({"weight": scales})
        return guide

    return make


def log_evidence():
    covariance = kernel(X, X) + NOISE**2 * torch.eye(len(X), dtype=torch.float64)
    return dist.MultivariateNormal(torch.zeros(len(X), dtype=torch.float64), covariance).log_prob(Y)


def test_with_all_training_inputs_and_the_exact_posterior_it_is_the_log_evidence():
    elbo = FunctionalELBO(GaussianProcess(kernel), divergence=GaussianKL(), num_functions=10_000)
    pyro.set_rng_seed(0)
    with torch.no_grad():
        loss = elbo(linear_model, FullNormal())(X, Y)
        # It bounds the log evidence for any other guide.
        wider = elbo(linear_model, FullNormal(1.5))(X, Y)
    assert abs(float(loss) + float(log_evidence())) < 0.03
    assert float(wider) > -float(log_evidence()) + 1.0


@pytest.mark.parametrize(
    ("make", "divergence"),
    [
        (FullNormal, GaussianKL()),
        (full_auxiliary, LinearizedKL()),
        (factorized(AutoNormal), LinearizedKL()),
        (factorized(AutoMeanField), GaussianKL()),
    ],
)
def test_it_is_stationary_at_the_best_posterior_of_the_guide_and_not_beside_it(make, divergence):
    largest = {}
    for times in (1.0, 1.3):
        guide = make(times)
        elbo = FunctionalELBO(GaussianProcess(kernel), divergence=divergence, num_functions=100)
        loss = elbo(linear_model, guide)
        gradients = []
        for seed in range(10):
            pyro.set_rng_seed(seed)
            gradient = torch.autograd.grad(loss(X, Y), list(guide.parameters()), allow_unused=True)
            gradients.append(torch.cat([value.flatten() for value in gradient if value is not None]))
        gradients = torch.stack(gradients)
        scores = gradients.mean(0) / (gradients.std(0) / 10**0.5 + 1e-6)
        largest[times] = float(scores.abs().max())
    assert largest[1.0] < 5
    assert largest[1.3] > 10
    # An auxiliary site that leads to the function alone is no term of the loss.
    assert list(elbo.terms.kl_by_site) == ["f"]


def test_the_noise_of_a_prior_is_added_to_the_functions_as_well():
    def guide(x, y=None):
        pyro.sample("weight", dist.Normal(x.new_zeros(NUM_FEATURES), 1.0).to_event(1))

    elbo = FunctionalELBO(GaussianProcess(kernel, noise=0.5), divergence=GaussianKL(), num_functions=20_000)
    with torch.no_grad():
        elbo(linear_model, guide)(X, Y)
    # The guide draws functions of the prior, and their divergence from it is zero but for its own sampling error.
    assert abs(float(elbo.terms.kl_by_site["f"])) < 0.02


def regression(prior=None):
    net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 2))
    bnn = BayesianModule(net, *([] if prior is None else [prior]))
    return SupervisedModel(bnn, likelihoods.Gaussian(num_data=20, precision_prior=dist.Gamma(6.0, 6.0)))


def smooth(a, b):
    return torch.exp(-0.5 * torch.cdist(a, b).square())


class TestUse:
    data = (torch.randn(8, 2, generator=GENERATOR), torch.randn(8, 2, generator=GENERATOR))

    def elbo(self, **kwargs):
        box = UniformBox([-1.0, -1.0], [1.0, 1.0], num_points=4)
        options = {"measurement_points": box, "num_functions": 40, **kwargs}
        return FunctionalELBO(GaussianProcess(smooth), **options)

    def test_it_never_evaluates_weight_densities_and_keeps_the_kl_of_the_noise(self, monkeypatch):
        class Silent(dist.Normal):
            def log_prob(self, value):
                raise AssertionError("a weight's density was evaluated")

        model = regression(Silent(0.0, 1.0))
        elbo = self.elbo()
        elbo(model, AutoMeanField(model))(*self.data).backward()
        assert set(elbo.terms.kl_by_site) == {"f", "precision"}

    def test_it_reads_the_functions_at_the_site_that_it_is_told(self):
        def model(x, y=None):
            slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
            with pyro.plate("data", len(x), dim=-1):
                values = pyro.deterministic("values", slope[..., None] * x[:, 0])
                pyro.sample("y", dist.Normal(values, 1.0), obs=y)

        elbo = self.elbo(function_site="values", divergence=LinearizedKL(0.1))
        elbo(model, AutoMeanField(model))(self.data[0], self.data[1][:, 0])
        assert list(elbo.terms.kl_by_site) == ["values"]


def mixture():
    """A prior of weights that has no mean in closed form, and so no center."""
    return dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(0.0, torch.tensor([0.1, 1.0])))


@pytest.mark.parametrize(
    ("guide_type", "prior", "expected"),
    [
        (AutoMeanField, None, LinearizedKL),
        (AutoLowRankMultivariateNormal, None, LinearizedKL),
        (AutoIAFNormal, mixture(), SteinKL),
    ],
)
def test_the_default_divergence_is_linearized_where_the_guide_has_moments(guide_type, prior, expected):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = SupervisedModel(BayesianModule(net, prior or dist.Normal(0.0, 1.0)), likelihoods.Gaussian(scale=0.5))
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    guide = guide_type(model)
    guide(x, y)
    losses = []
    for divergence in (None, expected()):
        elbo = FunctionalELBO(GaussianProcess(smooth, noise=0.1), divergence=divergence, num_functions=20)
        pyro.set_rng_seed(1)
        losses.append([elbo.differentiable_loss(model, guide, x, y) for _ in range(2)])
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))


def without_function(x, y=None):
    pyro.sample("w", dist.Normal(0.0, 1.0))


def of_integers(x, y=None):
    pyro.deterministic("f", pyro.sample("w", dist.Normal(torch.zeros(len(x)), 1.0).to_event(1)).long())


class TestBadInput:
    @pytest.mark.parametrize(
        ("model", "args", "words"),
        [
            (without_function, (torch.randn(3, 1),), "must record a site 'f', got none"),
            (of_integers, (torch.randn(3, 1),), "real-valued"),
            (lambda: None, (), "first argument"),
        ],
    )
    def test_a_model_without_functions_of_its_inputs_is_refused(self, model, args, words):
        with pytest.raises(ValueError, match=words):
            FunctionalELBO(GaussianProcess(smooth), num_functions=1)(model, AutoMeanField(model))(*args)

    @pytest.mark.parametrize(
        ("prior", "options", "words"),
        [
            (GaussianProcess(lambda a, b: -smooth(a, b)), {}, "kernel must be positive definite"),
            (
                ImplicitProcess(lambda x, s: torch.full((s, len(x)), math.nan)),
                {},
                "a sample must be of numbers, got NaN",
            ),
            (
                GaussianProcess(smooth),
                {"num_functions": 10, "divergence": SteinKL()},
                r"num_functions = 10 functions: samples must be at least 11",
            ),
            (GaussianProcess(smooth), {"measurement_points": UniformBox([0.0] * 2, [1.0] * 2, 4)}, r"\[2\]"),
        ],
    )
    def test_what_the_divergence_cannot_use_is_named_with_the_site(self, prior, options, words):
        model = SupervisedModel(BayesianModule(nn.Linear(1, 1)), likelihoods.Gaussian(num_data=8))
        elbo = FunctionalELBO(prior, **{"num_functions": 30} | options)
        with pytest.raises(ValueError, match=words) as caught:
            elbo(model, AutoMeanField(model))(torch.randn(8, 1), torch.randn(8, 1))
        if "measurement_points" not in options:
            assert "site 'f'" in str(caught.value)


@pytest.mark.parametrize("option", [{"num_particles": 8}, {"vectorize_particles": False}])
def test_the_number_of_draws_has_one_name(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be left out, because num_functions is the number"):
        FunctionalELBO(GaussianProcess(lambda a, b: torch.exp(-(a - b.T).square())), **option)
