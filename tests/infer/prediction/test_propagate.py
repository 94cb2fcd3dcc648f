# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions by means and variances: exact where the rules say so, near draws elsewhere, clear errors for the rest."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.nn import functional as F

from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    PriorChain,
    SupervisedModel,
    predict,
)
from pyro_radial.distributions import HypersphericalUniform
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.prediction.propagate import UncertainTensor, calibrated, even_normals, propagated_moments
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior
from tests.helpers.networks import Net
from tests.helpers.predictions import CLASSES, GAMMA, POINTS, X, problem

DRAWS = 20_000
IMAGES = torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(2))


def guided(net, guide_type=AutoMeanField, x=X, likelihood=None, **options):
    """A model of a network and a guide with a width of 0.3 for each weight."""
    pyro.set_rng_seed(3)
    model = SupervisedModel(BayesianModule(net), likelihood or likelihoods.Categorical(num_data=len(x)))
    guide = guide_type(model, **({} if options else {"init_stddev": 0.3}), **options)
    guide.setup(x, torch.zeros(len(x), dtype=torch.long))
    return model, guide


def moments_of_draws(model, guide, x, number=DRAWS):
    """Mean and variance of the outputs for draws of all weights, and the standard errors of both."""
    pyro.set_rng_seed(0)
    draws = {site: posterior.sample((number,)) for site, posterior in guide.posterior().items()}
    with torch.no_grad():
        return moments_of_samples(model.eval().bnn.at(draws, x).detach())


def moments_of_samples(samples):
    samples = samples.double()
    variance = samples.var(0)
    fourth = (samples - samples.mean(0)).pow(4).mean(0)
    number = len(samples)
    return samples.mean(0), variance, (variance / number).sqrt(), ((fourth - variance.square()) / number).sqrt()


def check(mean, variance, of_samples, approximation=0.0):
    """Both moments to 5 standard errors and, relative to deviation and variance, the error of the approximation."""
    sample_mean, sample_variance, mean_error, variance_error = of_samples
    rounding = 1e-6 + 1e-5 * sample_mean.abs()
    allowed = 5 * mean_error + approximation * sample_variance.sqrt() + rounding
    assert bool(((mean - sample_mean).abs() < allowed).all())
    allowed = 5 * variance_error + approximation * sample_variance + rounding
    assert bool(((variance - sample_variance).abs() < allowed).all())


@torch.no_grad()
def propagated(model, guide, x):
    """Mean and variance of the outputs, before calibration."""
    mean, own, shared = propagated_moments(model, guide, x[:1])(x)
    return mean, own + shared.diagonal(dim1=1, dim2=2)


# ---------------------------------------------------------------------------------------------------- a whole network


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField])
def test_a_linear_model_has_the_closed_form(guide_type, outputs):
    likelihood = likelihoods.Gaussian(num_data=POINTS, scale=0.4)
    model = SupervisedModel(BayesianModule(nn.Linear(2, outputs)), likelihood)
    guide = guide_type(model, init_stddev=0.3)
    guide.setup(X, torch.zeros(POINTS, outputs))
    weight, bias = guide.posterior()["weight"], guide.posterior()["bias"]
    mean = X @ weight.mean.mT + bias.mean
    variance = X.square() @ weight.variance.mT + bias.variance
    prediction = predict(model, guide, X, method="propagate")
    torch.testing.assert_close(prediction.mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prediction.epistemic_variance, variance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prediction.variance, variance + 0.16, rtol=1e-4, atol=1e-5)
    if outputs == 1:
        # With noise around them, 64 equally likely values are close to the normal distribution.
        deviation = (variance + 0.16).sqrt()
        y = mean + deviation * torch.linspace(-2, 2, POINTS).unsqueeze(-1)
        exact = dist.Normal(mean, deviation).log_prob(y).sum(-1)
        torch.testing.assert_close(prediction.log_prob(y), exact, rtol=0.0, atol=0.05)


def one_hidden_layer(unit):
    return nn.Sequential(nn.Linear(2, 6), unit, nn.Linear(6, CLASSES))


@pytest.mark.parametrize("unit", [nn.ReLU(), nn.LeakyReLU(0.2), nn.Tanh(), nn.GELU()], ids=repr)
def test_one_hidden_layer_is_exact_for_independent_normal_weights(unit):
    """The inputs of the units are then normal and independent, so only the draws have an error."""
    model, guide = guided(one_hidden_layer(unit))
    check(*propagated(model, guide, X), moments_of_draws(model, guide, X))


def test_two_linear_layers_are_exact_for_a_radial_posterior():
    """Its weights are uncorrelated, which is all that layers without units between them need."""
    model, guide = guided(one_hidden_layer(nn.Identity()), AutoRadial)
    check(*propagated(model, guide, X), moments_of_draws(model, guide, X))


def test_moments_alone_count_of_a_radial_posterior():
    """Its weights share a radius, so outputs of draws have another distribution than those of independent weights."""
    net = one_hidden_layer(nn.ReLU())
    model, radial = guided(net, AutoRadial)
    other_model, normal = guided(net)
    for moment, other_moment in zip(propagated(model, radial, X), propagated(other_model, normal, X), strict=True):
        torch.testing.assert_close(moment, other_moment)
    check(*propagated(model, radial, X), moments_of_draws(model, radial, X), approximation=0.4)


def deep():
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Dropout(0.5), nn.Linear(16, 8), nn.LayerNorm(8), nn.Sequential(nn.SiLU(), nn.Identity())),
        nn.Linear(8, CLASSES),
    )


class Residual(nn.Module):
    """A residual block with a forward of its own, in the words that users have for it."""

    def __init__(self, in_place=False, by_method=False):
        super().__init__()
        pyro.set_rng_seed(5)
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(4), nn.Linear(4 * 16, CLASSES)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.relu, self.by_method = nn.ReLU(in_place), by_method

    def forward(self, x):
        x = self.first(x)
        beside = x
        x = self.norm(self.second(F.relu(x)))
        if self.relu.inplace:
            x += beside
        else:
            x = beside + x
        x = F.max_pool2d(x.relu() if self.by_method else self.relu(x), 2)
        return self.last(x.view(x.shape[0], -1) if self.by_method else torch.flatten(x, 1))


@pytest.mark.parametrize("make", [deep, Residual])
def test_a_deep_network_comes_near_draws(make):
    """Units are correlated there: variances are off by less than a factor of 2, means by less than 0.3 deviations."""
    model, guide = guided(make(), x=IMAGES, init_stddev=0.05)
    mean, variance = propagated(model, guide, IMAGES)
    sample_mean, sample_variance, *_ = moments_of_draws(model, guide, IMAGES, 2_000)
    assert float(((mean - sample_mean).abs() / sample_variance.sqrt()).max()) < 0.3
    ratio = variance.mean() / sample_variance.mean()
    assert 0.5 < float(ratio) < 2.0


@pytest.mark.parametrize("words", [{"in_place": True}, {"by_method": True}])
def test_the_words_of_a_forward_do_not_matter(words):
    moments = propagated(*guided(Residual(), x=IMAGES), IMAGES)
    torch.testing.assert_close(propagated(*guided(Residual(**words), x=IMAGES), IMAGES), moments)


def test_one_width_for_a_tensor_gives_what_equal_widths_give():
    for groups in (1, 2):
        net = nn.Sequential(nn.Conv2d(2, 4, 3, groups=groups), nn.ReLU(), nn.Conv2d(4, 2, 3, groups=groups))
        net = nn.Sequential(net, nn.Flatten(), nn.Linear(32, CLASSES))
        model, guide = guided(net, x=IMAGES, widths="predictive")
        one_width = propagated(model, guide, IMAGES)
        values = {}
        for site, posterior in guide.posterior().items():
            # Not one number any more.
            stddev = posterior.stddev.clone()
            stddev.view(-1)[0] *= 1 + 1e-6
            values[site] = dist.Normal(posterior.mean, stddev).to_event(stddev.dim())
        guide.posterior = lambda values=values: values
        torch.testing.assert_close(propagated(model, guide, IMAGES), one_width, rtol=1e-4, atol=1e-5)


def test_fixed_parameters_and_points_have_no_variance():
    net = one_hidden_layer(nn.Tanh())
    pyro.set_rng_seed(3)
    model = SupervisedModel(BayesianModule(net, select="weight"), likelihoods.Categorical(num_data=POINTS))
    guide = AutoMeanField(model, families={"0.weight": families.Delta()}, init_stddev=0.5)
    guide.setup(X, torch.zeros(POINTS, dtype=torch.long))
    hidden = torch.tanh(F.linear(X, guide.posterior()["0.weight"].mean, net[0].bias.detach()))
    _, variance = propagated(model, guide, X)
    torch.testing.assert_close(variance, hidden.square() @ guide.posterior()["2.weight"].variance.mT)


# --------------------------------------------------------------------------------------------------------- the rules


def uncertain(*shape, shift=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = shift + torch.randn(shape, generator=generator)
    return UncertainTensor.of(means, 0.1 + torch.rand(shape, generator=generator))


def sampled(tensor, seed, shared=False, number=DRAWS):
    pyro.set_rng_seed(seed)
    noise = torch.randn(number, *(1 if shared else size for size in tensor.means.shape))
    return tensor.means + tensor.variances.sqrt() * noise


def check_rule(function, *tensors, approximation=0.0, shared=False, number=DRAWS):
    """A rule has the moments of the function for independent normal arguments, or for fully correlated ones."""
    output = function(*tensors)
    draws = [sampled(tensor, seed, shared, number) for seed, tensor in enumerate(tensors, 1)]
    samples = torch.func.vmap(function)(*draws)
    check(output.means, output.variances, moments_of_samples(samples), approximation)


FIXED = torch.randn(4, 3, generator=torch.Generator().manual_seed(9))
UNITS = [
    *(torch.relu, F.leaky_relu, lambda x: F.leaky_relu(x, 1.5), torch.tanh, torch.sigmoid, F.gelu, F.silu, F.softplus),
    *(F.mish, F.selu, lambda x: F.elu(x, 0.5)),
]
SMOOTH_ENOUGH = {F.selu: 0.02}


@pytest.mark.parametrize("unit", UNITS)
def test_units_have_the_moments_for_a_normal_input(unit):
    """The kink of SELU at zero costs the quadrature up to 2 %."""
    check_rule(unit, uncertain(4, 3), approximation=SMOOTH_ENOUGH.get(unit, 1e-4))


def test_a_rectifier_keeps_its_digits_far_from_zero():
    x = UncertainTensor.of(torch.tensor([100.0, -100.0, 3.0, 0.0, 5.0]), torch.tensor([1e-4, 1.0, 0.0, 0.0, 1e-9]))
    output = torch.relu(x)
    torch.testing.assert_close(output.means, torch.tensor([100.0, 0.0, 3.0, 0.0, 5.0]))
    torch.testing.assert_close(output.variances, torch.tensor([1e-4, 0.0, 0.0, 0.0, 1e-9]), rtol=1e-4, atol=1e-12)


ARITHMETIC = {
    "sums": lambda x, y: 1.0 + x - y + FIXED,
    "differences": lambda x, y: 2.0 - x + -y,
    "shapes": lambda x, y: torch.cat([x.transpose(0, 1)[1:], y.reshape(3, 4)[:1], FIXED.T]).unsqueeze(0),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_exact_for_independent_numbers(name):
    check_rule(ARITHMETIC[name], uncertain(4, 3), uncertain(4, 3, seed=1))


def test_layers_are_exact_for_independent_inputs_and_weights():
    check_rule(F.linear, uncertain(4, 3), uncertain(2, 3, seed=1), uncertain(2, seed=2))
    check_rule(lambda x, w: F.conv1d(x, w, None, 2, 1), uncertain(2, 3, 6), uncertain(2, 3, 3, seed=1))
    check_rule(
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2),
        *(uncertain(2, 4, 3, 3), uncertain(2, 2, 3, 3, seed=1), uncertain(2, seed=2)),
    )
    check_rule(lambda x, w: F.conv3d(x, w), uncertain(1, 1, 3, 3, 3), uncertain(2, 1, 2, 2, 2, seed=1))
    check_rule(lambda x: F.conv2d(x, torch.ones(1, 2, 2, 2), torch.ones(1)), uncertain(2, 2, 3, 3))
    check_rule(lambda w: F.embedding(torch.tensor([1, 0]), w), uncertain(3, 2))


def test_batch_norm_is_exact():
    norm = nn.BatchNorm2d(3).eval()
    norm.running_mean.copy_(torch.tensor([1.0, -1.0, 0.5]))
    norm.running_var.copy_(torch.tensor([0.5, 2.0, 1.0]))
    norm.weight.data.copy_(torch.tensor([1.0, 2.0, -3.0]))
    check_rule(norm, uncertain(2, 3, 4, 4))
    check_rule(nn.BatchNorm1d(3, affine=False).eval(), uncertain(2, 3))


def test_norms_of_many_units_are_near():
    """Their divisor is a random number, nearly the root of the expected square; off by the inverse number of units."""
    x = uncertain(1, 64, 16)
    check_rule(lambda x: F.layer_norm(x, (64, 16), torch.full((64, 16), 2.0)), x, approximation=0.06, number=2_000)
    check_rule(lambda x: F.group_norm(x, 2, torch.arange(64.0), torch.ones(64)), x, approximation=0.06, number=2_000)


POOLS = [
    *(lambda x: F.avg_pool2d(x, 2), lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: x.mean((2, 3))),
    *(lambda x: F.avg_pool1d(x.flatten(2), 4), lambda x: F.adaptive_avg_pool1d(x.flatten(2), 2)),
]


@pytest.mark.parametrize("pool", POOLS)
def test_an_average_is_exact_for_fully_correlated_pixels(pool):
    check_rule(pool, uncertain(2, 3, 4, 4), shared=True)


@pytest.mark.parametrize("pool", [F.max_pool2d, F.adaptive_max_pool2d])
def test_the_largest_pixel_is_exact_where_it_leads_by_far(pool):
    means = torch.arange(32.0).reshape(1, 2, 4, 4)[:, :, :, torch.tensor([2, 0, 3, 1])] * 9.0
    x = UncertainTensor.of(means, uncertain(1, 2, 4, 4).variances)
    check_rule(lambda x: pool(x, 2), x)


def test_dropout_that_is_off_does_nothing():
    check_rule(lambda x: F.dropout(x, 0.5, training=False), uncertain(2, 3))


# --------------------------------------------------------------------------------------------------- the predictions


def test_even_normals_have_exact_moments_and_are_not_correlated():
    values = even_normals(64, 10, torch.zeros(1, dtype=torch.double))
    torch.testing.assert_close(values.mean(0), torch.zeros(10, dtype=torch.double))
    torch.testing.assert_close(values.mT @ values / 64, torch.eye(10, dtype=torch.double))
    torch.testing.assert_close(even_normals(64, 10, values), values)
    exact = torch.special.ndtri((torch.arange(64, dtype=torch.double) + 0.5) / 64)
    # Decorrelated, they are still near the quantiles.
    torch.testing.assert_close(values.sort(0).values, exact.unsqueeze(1).expand(64, 10), rtol=0.0, atol=0.6)
    assert even_normals(1, 3, values).abs().max() == 0.0
    assert even_normals(5, 9, values).shape == (5, 9)


def test_outputs_share_their_hidden_units_and_one_factor_gives_the_variance_of_draws():
    model, guide = guided(one_hidden_layer(nn.ReLU()))
    with torch.no_grad():
        moments = propagated_moments(model, guide, X[:1])
        pyro.set_rng_seed(0)
        posterior = guide.posterior()
        samples = {site: posterior[site].sample((DRAWS,)) for site in posterior}
        draws = model.eval().bnn.at(samples, X)
        mean, covariance = calibrated(moments, X, draws)(X)
        exact = calibrated(moments, X, 2.0 * draws)(X)[1] - calibrated(moments, X, draws)(X)[1]
    centered = draws - draws.mean(0)
    of_draws = torch.einsum("snk,snj->nkj", centered, centered) / DRAWS
    error = of_draws.diagonal(dim1=1, dim2=2).max() * 5 * math.sqrt(3 / DRAWS)
    torch.testing.assert_close(mean, draws.mean(0), rtol=0.0, atol=0.05)
    torch.testing.assert_close(covariance, of_draws, rtol=0.0, atol=float(error))
    # With four times the variance, all that is missing comes from the covariance that outputs share.
    _, _, shared = moments(X)
    ratio = exact.diagonal(dim1=1, dim2=2) / shared.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio), rtol=1e-3, atol=1e-3)
    variance = draws.var(0).mean()
    torch.testing.assert_close(exact.diagonal(dim1=1, dim2=2).mean(), 3.0 * variance, rtol=1e-3, atol=0.0)


def test_class_probabilities_are_means_over_normal_logits():
    model, guide = guided(nn.Linear(2, 1), likelihood=likelihoods.Bernoulli(num_data=POINTS))
    mean, variance = propagated(model, guide, X)
    nodes = torch.linspace(-8, 8, 2001)
    weights = dist.Normal(0.0, 1.0).log_prob(nodes).softmax(0)
    exact = ((mean + variance.sqrt() * nodes).sigmoid() * weights).sum(-1, keepdim=True)
    prediction = predict(model, guide, X, method="propagate")
    torch.testing.assert_close(prediction.mean, exact, rtol=0.0, atol=2e-3)
    assert bool((prediction.mutual_information > 0).all())
    torch.testing.assert_close(prediction.log_prob(torch.ones(POINTS, 1)), exact.log()[:, 0], rtol=0.0, atol=1e-2)


def test_chunks_modes_and_numbers_of_samples():
    model, guide = guided(deep(), x=IMAGES)
    model.train()
    pyro.set_rng_seed(1)
    prediction = predict(model, guide, IMAGES, 10, method="propagate")
    assert prediction.samples.shape == (10, 5, CLASSES)
    pyro.set_rng_seed(1)
    in_chunks = predict(model, guide, IMAGES, 10, chunk_size=2, method="propagate")
    torch.testing.assert_close(in_chunks.samples, prediction.samples)
    assert all(module.training for module in model.bnn.skeleton.modules())


def test_noise_is_drawn_only_if_it_is_random():
    for likelihood, number in ((likelihoods.Gaussian(scale=0.3), 1), (likelihoods.Gaussian(precision_prior=GAMMA), 7)):
        model, guide = problem(likelihood, nn.Linear(2, 1), torch.zeros(POINTS, 1))
        noise = predict(model, guide, X, 7, method="propagate").noise["scale"]
        assert noise.shape == (7, 1)
        assert len(noise.unique()) == number


def test_a_chain_of_tasks_predicts_as_its_model():
    model, guide = problem()
    pyro.set_rng_seed(1)
    chained = predict(PriorChain(model), guide, X, method="propagate")
    pyro.set_rng_seed(1)
    torch.testing.assert_close(chained.samples, predict(model, guide, X, method="propagate").samples)


# ------------------------------------------------------------------------------------------------------------- errors


def is_refused(match, model, guide, x=X, **kwargs):
    with pytest.raises(ValueError, match=match):
        predict(model, guide, x, method="propagate", **kwargs)


NO_RULE = {
    "Softmax": ("3", lambda: nn.Sequential(*one_hidden_layer(nn.ReLU()), nn.Softmax(-1))),
    "Softshrink": ("1.inner", lambda: one_hidden_layer(Net(lambda net, x: net.inner(x), inner=nn.Softshrink()))),
    "LSTM": ("rnn", lambda: Net(lambda net, x: net.rnn(x)[0], rnn=nn.LSTM(2, CLASSES))),
}


@pytest.mark.parametrize("layer", NO_RULE)
def test_a_layer_without_a_rule_is_named(layer):
    name, make = NO_RULE[layer]
    is_refused(
        rf"method must be 'draws', the default, .* stops in '{name}', {layer}\(.*torch's '\w+' has no rule",
        *guided(make()),
    )


FORWARDS = {
    "'>' not supported": lambda net, x: net.layer(x) if (net.layer(x) > 0).any() else x,
    "unsupported operand type.* /": lambda net, x: 1.0 / net.layer(x),
    "unsupported operand type.* \\*": lambda net, x: net.layer(x) * net.layer(x),
    "torch's 'add_' has no rule": lambda net, x: torch.zeros(len(x), CLASSES).add_(net.layer(x)),
    "torch's 'mul_' has no rule": lambda net, x: net.layer(x).mul_(2.0),
    "torch's 'dropout' has no rule": lambda net, x: F.dropout(net.layer(x), 0.5),
}


@pytest.mark.parametrize("function", FORWARDS)
def test_a_forward_that_cannot_be_followed_is_refused(function):
    model, guide = guided(Net(FORWARDS[function], layer=nn.Linear(2, CLASSES)))
    is_refused(rf"method must be 'draws', the default.*{function}", model, guide)


def test_batch_norm_without_statistics_is_refused():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten())
    is_refused(r"stops in '1', BatchNorm2d.*torch's 'batch_norm' has no rule", *guided(net, x=IMAGES), IMAGES)


def test_guides_and_priors_that_do_not_fit_are_named():
    y = torch.zeros(POINTS, dtype=torch.long)
    model, guide = problem()
    is_refused(r"guide must be a guide for method='propagate', got samples", model, {"0.weight": X})
    is_refused(r"x must be one tensor for method='propagate', got a tuple", model, guide, (X, X))
    is_refused(r"dropout must be False for method='propagate', got True", model, guide, dropout=True)
    normal = AutoNormal(model)
    normal(X, y)
    is_refused(r"guide must have a method posterior\(\) for method='propagate'.*got AutoNormal", model, normal)
    correlated = AutoMeanField(model, families={"2.bias": families.MultivariateNormal()})
    correlated.setup(X, y)
    is_refused(r"guide must have a normal or radial posterior at site '2.bias'.*got Multi", model, correlated)
    points = AutoMeanField(model, families={".": families.Delta()})
    points.setup(X, y)
    is_refused(r"guide: posterior must have variances, got a point", model, points)


def test_directions_are_refused():
    y = torch.zeros(POINTS, dtype=torch.long)
    net = one_hidden_layer(nn.ReLU())
    own_sites = SupervisedModel(BayesianModule(net, RadialDirectionalPrior()), likelihoods.Categorical())
    guide = AutoRadialDirectional(own_sites)
    guide.setup(X, y)
    is_refused(r"guide must have a normal or radial posterior at site '0.weight'.*got none", own_sites, guide)
    prior = {"weight": HypersphericalUniform(2).expand([CLASSES]).to_event(1), "bias": dist.Normal(0.0, 1.0)}
    model = SupervisedModel(BayesianModule(nn.Linear(2, CLASSES), prior), likelihoods.Categorical())
    directions = AutoMeanField(model, families={"weight": families.VonMisesFisher()})
    directions.setup(X, y)
    is_refused(r"normal or radial posterior at site 'weight'.*got VonMises", model, directions)
