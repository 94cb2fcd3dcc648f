# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The process of a posterior, against functions that are linear in their weights."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.functional import GaussianKL, GaussianProcess, PosteriorProcess
from pyro_radial.nn import likelihoods
from tests.helpers.linear_models import WIDTH, by_hand, features, inputs, network, of_functions, posterior

each_kind = pytest.mark.parametrize("kind", ["full", "radial", "normal"])
MODELS = {"by hand": (lambda: by_hand, "weight"), "network": (lambda: network(bias=False), "1.weight")}
each_model = pytest.mark.parametrize("name", MODELS)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def process_of(name, kind):
    make, site = MODELS[name]
    given, mean, covariance = posterior(kind, site)
    return PosteriorProcess(make(), given), mean, covariance


@each_model
@each_kind
def test_moments_are_those_of_the_functions_of_the_posterior(name, kind):
    process, mean, covariance = process_of(name, kind)
    x = inputs()
    expected, expected_covariance = of_functions(mean, covariance, x)
    found, found_covariance = process.moments(x, num_outputs=2)
    close(found, expected)
    close(found_covariance, expected_covariance)
    found, variance = process.marginals(x)
    close(found, expected)
    close(variance, expected_covariance.diagonal(dim1=-2, dim2=-1).mT)


@pytest.mark.parametrize("rank", [None, 3])
def test_one_normal_of_all_weights_is_taken_in_the_networks_order(rank):
    model, size = network(), 2 * WIDTH + 2
    root = torch.randn(size, rank or size, dtype=torch.double)
    mean, variance = torch.randn(size, dtype=torch.double), torch.rand(size, dtype=torch.double)
    covariance = root @ root.mT + variance.diag()
    given = dist.MultivariateNormal(mean, covariance)
    if rank is not None:
        given = dist.LowRankMultivariateNormal(mean, root, variance)
    x = inputs()
    # Of the weight, two rows, and of the bias.
    wide = torch.cat([features(x), torch.zeros(7, WIDTH), torch.ones(7, 1), torch.zeros(7, 1)], -1)
    rows = torch.stack([wide, wide.roll(WIDTH, -1)])
    rows[1, :, :WIDTH] = 0.0
    rows[1, :, WIDTH : 2 * WIDTH] = features(x)
    rows[1, :, 2 * WIDTH :] = torch.tensor([0.0, 1.0])
    found, found_covariance = PosteriorProcess(model, given).moments(x)
    close(found, (rows @ mean).mT)
    torch.testing.assert_close(found_covariance, rows @ covariance @ rows.mT)


def test_density_score_draws_and_divergences_are_those_of_the_gaussian_process_that_it_is():
    given, mean, covariance = posterior("full", "weight")
    # As many weights as points, or the covariance would be singular.
    process, x = PosteriorProcess(by_hand, given), inputs(4)
    kernels = [lambda a, b, c=c: features(a) @ c @ features(b).mT for c in covariance]
    reference = GaussianProcess(kernels, mean=lambda a: features(a) @ mean.mT)
    f = reference.sample(x, 400, 2)
    for method in ("score", "log_prob"):
        torch.testing.assert_close(
            getattr(process, method)(f, x), getattr(reference, method)(f, x), rtol=1e-6, atol=1e-6
        )
    torch.testing.assert_close(
        GaussianKL()(f, x, process).value, GaussianKL()(f, x, reference).value, rtol=1e-6, atol=1e-6
    )
    drawn = process.sample(x, 40_000, 2)
    error = (drawn.mean(0) - features(x) @ mean.mT).abs() / drawn.std(0) * 200
    assert bool((error < 4.5).all())
    torch.testing.assert_close(process.moments(x, 2)[1], reference.moments(x, 2)[1])


def trained_network():
    net = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=20))
    guide = AutoRadial(model, init_stddev=0.1)
    guide.setup(torch.randn(8, 2), torch.randint(3, (8,)))
    return model, guide


def test_its_state_is_tensors_that_another_process_loads(tmp_path):
    model, guide = trained_network()
    process, x = PosteriorProcess(model, guide.posterior()), torch.randn(5, 2)
    torch.save(process.state_dict(), tmp_path / "process.pt")
    other_model, other_guide = trained_network()
    other = PosteriorProcess(other_model, other_guide.posterior())
    assert not torch.equal(other.marginals(x)[1], process.marginals(x)[1])
    other.load_state_dict(torch.load(tmp_path / "process.pt", weights_only=True))
    for twin in (other, copy.deepcopy(process)):
        for found, expected in zip(twin.marginals(x), process.marginals(x), strict=True):
            assert torch.equal(found, expected)


class TestBadInput:
    def model(self):
        return SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(num_data=5, scale=1.0))

    normal = {"weight": dist.Normal(torch.zeros(1, 2), 1.0).to_event(2), "bias": dist.Normal(torch.zeros(1), 1.0)}

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"weight": dist.Delta(torch.zeros(1, 2)), "bias": dist.Delta(torch.zeros(1))}, "variances, got a point"),
            ({"bias": dist.Cauchy(torch.zeros(1), 1.0)}, "finite mean and variance at site 'bias', got NaN"),
            ({"bias": dist.TransformedDistribution(dist.Normal(torch.zeros(1), 1.0), [])}, "'bias', got Transformed"),
            ({"bias": dist.Normal(torch.zeros(3), 1.0)}, r"shape \(1,\) at site 'bias', got \(3,\)"),
            ({"bias": None}, "a mean and a variance at site 'bias', got none"),
        ],
    )
    def test_a_posterior_without_moments_is_named(self, changes, words):
        given = {name: d for name, d in {**self.normal, **changes}.items() if d is not None}
        with pytest.raises(ValueError, match=f"^posterior must.*{words}"):
            PosteriorProcess(self.model(), given)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ("weights", "or one MultivariateNormal of all weights, got str"),
            (dist.MultivariateNormal(torch.zeros(2), torch.eye(2)), r"the 3 weights of sites .* of shape \(2,\)"),
            (dist.MultivariateNormal(torch.full((3,), torch.nan), torch.eye(3), validate_args=False), "finite mean"),
        ],
    )
    def test_a_posterior_of_all_weights_must_be_of_all(self, given, words):
        with pytest.raises(ValueError, match=words):
            PosteriorProcess(self.model(), given)

    def test_no_points_and_other_outputs_are_named(self):
        ask = PosteriorProcess(self.model(), self.normal).moments
        with pytest.raises(ValueError, match=r"x must be points of shape \[N, D\], got shape \[0, 2\]"):
            ask(torch.zeros(0, 2))
        with pytest.raises(ValueError, match="num_outputs must be 1, the network's, got 4"):
            ask(torch.zeros(3, 2), 4)

    def test_what_cannot_be_differentiated_is_named(self):
        def model(x):
            w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.deterministic("f", (x @ w).detach())

        ask = PosteriorProcess(model, {"w": dist.Normal(torch.zeros(2), 1.0).to_event(1)}).moments
        with pytest.raises(ValueError, match=r"^model must.*can be differentiated in its weights"):
            ask(torch.zeros(3, 2))

    def test_a_network_that_looks_at_values_is_named(self):
        class Branches(nn.Linear):
            def forward(self, x):
                return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)

        bnn = BayesianModule(Branches(2, 1))
        with pytest.raises(ValueError, match=r"^model must have a network that torch\.func"):
            PosteriorProcess(bnn, self.normal).marginals(torch.zeros(3, 2))

    def test_a_site_that_the_posterior_lacks_is_named_where_the_function_needs_it(self):
        with pytest.raises(ValueError, match="mean and a variance at site 'weight' of the model"):
            PosteriorProcess(by_hand, {"noise": dist.Gamma(2.0, 2.0)}).marginals(inputs())
