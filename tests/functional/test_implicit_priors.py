# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import copy
import math

import pyro
import pyro.contrib.gp.kernels as gp_kernels
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoNormal
from scipy.integrate import quad
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.functional import (
    BNNPrior,
    GaussianProcess,
    ImplicitProcess,
    Mixture,
    PiecewiseConstant,
    PiecewiseLinear,
    Sum,
)
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import LearnedScale, RadialDirectionalPrior

NUM_SAMPLES = 20_000


def column(*values):
    return torch.tensor(values, dtype=torch.double).unsqueeze(-1)


def gaussian_process(lengthscale=1.0, mean=0.0):
    return GaussianProcess(gp_kernels.RBF(1, lengthscale=torch.tensor(lengthscale)), mean=mean, noise=0.3)


# Any function that draws.


def test_an_implicit_process_passes_draws_on_with_or_without_a_dim_for_outputs():
    x = torch.rand(4, 2)
    one = ImplicitProcess(lambda x, s: torch.arange(s)[:, None] + x[:, 0])
    torch.testing.assert_close(one.sample(x, 3)[2, :, 0], 2 + x[:, 0])
    several = ImplicitProcess(lambda x, s: torch.ones(s, len(x), 5, dtype=torch.double))
    assert several.sample(x, 3, num_outputs=5).dtype == torch.float32


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda x, s: torch.zeros(s, 3), r"shape \(2, 4, 1\)"),
        (lambda x, s: torch.zeros(s, 4, 2), r"shape \(2, 4, 1\)"),
        (lambda x, s: torch.zeros(s, 4, dtype=torch.long), "floating-point"),
        (lambda x, s: torch.zeros(s, 4, dtype=torch.cfloat), "floating-point"),
        (lambda x, s: torch.full((s, 4), math.nan), "NaN"),
        (lambda x, s: [0.0] * s, "sampler must return a tensor"),
    ],
)
def test_draws_that_are_none_are_refused_by_name(sampler, words):
    with pytest.raises(ValueError, match=words):
        ImplicitProcess(sampler).sample(torch.rand(4, 2), 2)


def test_a_sampler_that_is_no_function_is_refused_by_name():
    with pytest.raises(ValueError, match="sampler"):
        ImplicitProcess(torch.zeros(3))


@pytest.mark.parametrize("prior", [PiecewiseConstant(), ImplicitProcess(lambda x, s: torch.zeros(s, len(x)))])
def test_what_has_no_density_says_so(prior):
    with pytest.raises(NotImplementedError, match=type(prior).__name__):
        prior.score(torch.zeros(2, 3, 1), torch.zeros(3, 1))
    with pytest.raises(NotImplementedError, match=type(prior).__name__):
        prior.moments(torch.zeros(3, 1))


# Functions of random pieces.


@pytest.mark.parametrize("kind", [PiecewiseConstant, PiecewiseLinear])
def test_pieces_have_outputs_and_draws_that_are_independent_and_the_dtype_of_the_points(kind):
    f = kind().sample(torch.rand(5, 1), NUM_SAMPLES, num_outputs=2)
    assert f.shape == (NUM_SAMPLES, 5, 2)
    assert f.dtype == torch.float32
    between = torch.corrcoef(f.permute(2, 1, 0).reshape(10, -1))[:5, 5:]
    assert float(between.abs().max()) < 5 / math.sqrt(NUM_SAMPLES)


@pytest.mark.parametrize(("low", "high", "rate"), [(0.0, 1.0, 3.0), (-2.0, 3.0, 1.5)])
def test_a_step_function_has_uniform_values_that_agree_while_no_change_point_lies_between(low, high, rate):
    t = torch.tensor([0.1, 0.15, 0.4, 0.9], dtype=torch.double)
    f = PiecewiseConstant(low, high, rate).sample(column(*(low + (high - low) * t)), NUM_SAMPLES)[..., 0]
    tolerance = 5 * math.sqrt(1 / 12 / NUM_SAMPLES)
    torch.testing.assert_close(f.mean(0), torch.full((4,), 0.5).double(), rtol=0, atol=tolerance)
    assert float(f.min()) >= 0
    assert float(f.max()) <= 1
    same = (f.unsqueeze(1) == f.unsqueeze(2)).double().mean(0)
    expected = torch.exp(-rate * (t - t[:, None]).abs())
    torch.testing.assert_close(same, expected, rtol=0, atol=2.5 / math.sqrt(NUM_SAMPLES))
    torch.testing.assert_close(f.T.cov(), expected / 12, rtol=0, atol=5 * 0.1 / math.sqrt(NUM_SAMPLES))


def test_the_number_of_steps_is_poisson():
    f = PiecewiseConstant().sample(torch.linspace(0, 1, 2001).unsqueeze(-1), 4000)[..., 0]
    changes = (f.diff(dim=-1) != 0).sum(-1).double()
    # Two change points within one cell of the grid are seen as one: about 9 / 2 / 2000 of them.
    assert float(changes.mean()) == pytest.approx(3.0, abs=5 * math.sqrt(3.0 / 4000) + 0.005)
    assert float(changes.var()) == pytest.approx(3.0, rel=5 * math.sqrt(2.4 / 4000))
    assert float((changes == 0).double().mean()) == pytest.approx(math.exp(-3), abs=5 * math.sqrt(0.05 / 4000))


def test_a_piecewise_linear_function_is_continuous_with_poisson_many_kinks():
    x = torch.linspace(0, 1, 2001, dtype=torch.double).unsqueeze(-1)
    f = PiecewiseLinear().sample(x, 2000)[..., 0]
    # A kink between two points of the grid bends the function at one or two of them.
    kinks = (f.diff(n=2, dim=-1).abs() > 1e-9).double()
    number = (kinks[:, 1:] * (1 - kinks[:, :-1])).sum(-1) + kinks[:, 0]
    assert float(number.mean()) == pytest.approx(3.0, abs=5 * math.sqrt(3.0 / 2000) + 0.02)
    assert float(f.min()) >= 0
    assert float(f.max()) <= 1
    slopes = f.diff(dim=-1).abs() / 0.0005
    # The steepest pieces are short ones; a jump of a step function would be 1 / 0.0005 everywhere it happens.
    assert float((slopes > 200).double().mean()) < 0.01


@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 1.0])
def test_a_piecewise_linear_function_has_the_variance_of_a_point_between_two_uniform_values(t):
    f = PiecewiseLinear(rate=3.0).sample(column(t), NUM_SAMPLES)[:, 0, 0]

    # The distance to the next knot on either side is exponential, cut off at the end of the interval.
    def mean_over_distance(function, end):
        inside = quad(lambda a: 3.0 * math.exp(-3.0 * a) * function(a), 0.0, end)[0] if end > 0 else 0.0
        return inside + math.exp(-3.0 * end) * function(end)

    def squares(a, b):
        return (a * a + b * b) / (a + b) ** 2 if a + b > 0 else 1.0

    expected = mean_over_distance(lambda a: mean_over_distance(lambda b: squares(a, b), 1 - t), t) / 12
    assert float(f.mean()) == pytest.approx(0.5, abs=5 * math.sqrt(expected / NUM_SAMPLES))
    assert float(f.var()) == pytest.approx(expected, rel=5 * math.sqrt(2.0 / NUM_SAMPLES))


def test_outermost_pieces_go_on_beyond_the_interval():
    x = column(-1.0, 0.0, 1.0, 2.0)
    constant = PiecewiseConstant().sample(x, 500)[..., 0]
    assert bool((constant[:, 0] == constant[:, 1]).all())
    assert bool((constant[:, 2] == constant[:, 3]).all())
    linear = PiecewiseLinear(rate=1e-6).sample(x, 500)[..., 0]
    torch.testing.assert_close(linear.diff(n=2, dim=-1), torch.zeros(500, 2).double(), rtol=0, atol=1e-12)
    assert bool(PiecewiseLinear(rate=20.0).sample(x, 500).isfinite().all())


@pytest.mark.parametrize(
    ("arguments", "words"), [((1.0, 0.0), "low"), ((0.0, math.inf), "high"), ((0.0, 1.0, 0.0), "rate")]
)
def test_intervals_and_rates_that_do_not_fit_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        PiecewiseLinear(*arguments)


def test_pieces_refuse_points_with_several_inputs():
    with pytest.raises(ValueError, match=r"x must have shape \[N, 1\] for PiecewiseConstant"):
        PiecewiseConstant().sample(torch.zeros(4, 2), 3)


# Priors made of priors.


def test_a_mixture_draws_whole_functions_of_its_members_in_their_shares():
    constants = [ImplicitProcess(lambda x, s, c=c: torch.full((s, len(x)), c)) for c in (0.0, 1.0, 2.0)]
    prior = Mixture(constants, weights=[1.0, 2.0, 5.0])
    f = prior.sample(torch.zeros(3, 1), NUM_SAMPLES)[..., 0]
    assert bool((f == f[:, :1]).all())
    for c, share in enumerate((0.125, 0.25, 0.625)):
        tolerance = 5 * math.sqrt(share * (1 - share) / NUM_SAMPLES)
        assert float((f[:, 0] == c).double().mean()) == pytest.approx(share, abs=tolerance)
    # Neighbors are no more alike than any two draws.
    alike = float((f[1:, 0] == f[:-1, 0]).double().mean())
    assert alike == pytest.approx(0.125**2 + 0.25**2 + 0.625**2, abs=5 * 0.5 / math.sqrt(NUM_SAMPLES))


def test_a_mixture_of_densities_has_their_mean_as_density_and_its_gradient_as_score():
    x = column(-1.0, 0.0, 0.5)
    members = [gaussian_process(1.0, mean=-1.0), gaussian_process(0.3, mean=1.5)]
    prior = Mixture(members, weights=[1.0, 3.0])
    f = torch.randn(6, 3, 2, dtype=torch.double, requires_grad=True)
    density = 0.25 * members[0].log_prob(f, x).exp() + 0.75 * members[1].log_prob(f, x).exp()
    log_prob = prior.log_prob(f, x)
    torch.testing.assert_close(log_prob, density.log())
    torch.testing.assert_close(prior.score(f, x), torch.autograd.grad(log_prob.sum(), f)[0])
    assert prior.score(f.float(), x).dtype == torch.float32


def test_a_mixture_is_not_gaussian_and_names_a_member_without_density():
    prior = Mixture([GaussianProcess(gp_kernels.RBF(1)), PiecewiseConstant()])
    with pytest.raises(NotImplementedError, match="Mixture"):
        prior.moments(torch.zeros(3, 1))
    with pytest.raises(NotImplementedError, match="PiecewiseConstant"):
        prior.score(torch.zeros(2, 3, 1), torch.zeros(3, 1))


def test_a_mixture_carries_the_noise_that_its_members_share():
    assert Mixture([gaussian_process(1.0), gaussian_process(0.3)]).noise == pytest.approx(0.3)
    white = GaussianProcess(lambda a, b: a.new_zeros(len(a), len(b)), noise=0.3)
    assert Mixture([gaussian_process(), Sum([PiecewiseConstant(), white])]).noise == pytest.approx(0.3)


def test_a_sum_of_gaussian_processes_is_the_process_of_the_summed_kernel():
    x, f = column(-1.0, 0.0, 0.5), torch.randn(4, 3, 2, dtype=torch.double)
    parts = [gaussian_process(1.0, mean=1.0), gaussian_process(0.3, mean=2.0)]
    total = Sum(parts)
    kernel = gp_kernels.Sum(gp_kernels.RBF(1), gp_kernels.RBF(1, lengthscale=torch.tensor(0.3)))
    whole = GaussianProcess(kernel, mean=3.0, noise=0.3 * math.sqrt(2))
    torch.testing.assert_close(total.moments(x, 2), whole.moments(x, 2))
    torch.testing.assert_close(total.score(f, x), whole.score(f, x))
    torch.testing.assert_close(total.log_prob(f, x), whole.log_prob(f, x))
    drawn = total.sample(x, NUM_SAMPLES)[..., 0]
    mean, covariance = whole.moments(x)
    variance = covariance[0].diagonal()
    assert bool(((drawn.mean(0) - mean[:, 0]).abs() < 5 * (variance / NUM_SAMPLES).sqrt()).all())
    deviation = ((variance[:, None] * variance + covariance[0].square()) / NUM_SAMPLES).sqrt()
    assert bool(((drawn.T.cov() - covariance[0]).abs() < 5 * deviation).all())


def test_a_sum_carries_the_noise_of_all_its_parts():
    kernel = gp_kernels.RBF(1)
    assert Sum([GaussianProcess(kernel, noise=0.3), GaussianProcess(kernel, noise=0.4)]).noise == pytest.approx(0.5)
    assert Sum([GaussianProcess(kernel, noise=0.3), PiecewiseConstant()]).noise == pytest.approx(0.3)
    assert PiecewiseConstant().noise == 0.0


def test_a_sum_with_a_part_that_is_not_gaussian_draws_and_names_that_part():
    prior = Sum([gaussian_process(), PiecewiseConstant()])
    f = prior.sample(column(0.2, 0.7), NUM_SAMPLES)[..., 0]
    assert float(f.var(0)[0]) == pytest.approx(1.09 + 1 / 12, rel=5 * math.sqrt(2 / NUM_SAMPLES))
    for call in (lambda: prior.moments(column(0.2)), lambda: prior.score(torch.zeros(2, 1, 1), column(0.2))):
        with pytest.raises(NotImplementedError, match="PiecewiseConstant"):
            call()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sum([]), "priors"),
        (lambda: Sum([lambda x, s: x]), "priors"),
        (lambda: Mixture([]), "priors"),
        (lambda: Mixture([PiecewiseConstant()], weights=[1.0, 2.0]), "weights"),
        (lambda: Mixture([PiecewiseConstant(), gaussian_process()]), r"same noise, but theirs are \[0.0, 0.3\]"),
        (lambda: Mixture([PiecewiseConstant()], weights=[0.0]), "weights"),
    ],
)
def test_members_and_weights_that_do_not_fit_are_refused_by_name(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Networks.


def small_bnn(outputs=1, prior=None):
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, outputs))
    return BayesianModule(net, dist.Normal(0.0, 1.0) if prior is None else prior)


def test_functions_of_a_linear_network_have_the_moments_of_its_prior():
    bnn = BayesianModule(nn.Linear(2, 1), {"weight": dist.Normal(0.5, 2.0), "bias": dist.Normal(0.0, 0.3)})
    x = torch.randn(4, 2)
    f = BNNPrior(bnn).sample(x, NUM_SAMPLES)[..., 0]
    covariance = 4.0 * x @ x.T + 0.09
    variance = covariance.diagonal()
    assert bool(((f.mean(0) - 0.5 * x.sum(-1)).abs() < 5 * (variance / NUM_SAMPLES).sqrt()).all())
    deviation = ((variance[:, None] * variance + covariance.square()) / NUM_SAMPLES).sqrt()
    assert bool(((f.T.cov() - covariance).abs() < 5 * deviation).all())


@pytest.mark.parametrize("guide_class", [AutoRadial, AutoMeanField, AutoNormal, AutoLowRankMultivariateNormal])
def test_functions_under_a_guide_are_near_those_of_its_median_when_it_is_narrow(guide_class):
    bnn = small_bnn(outputs=2)
    guide = guide_class(bnn, init_scale=1e-4)
    x = torch.randn(5, 1)
    guide(x)
    f = BNNPrior(bnn, guide).sample(x, 6, num_outputs=2)
    expected = bnn.to_module(guide.median(x))(x)
    torch.testing.assert_close(f, expected.expand(6, -1, -1), rtol=0, atol=2e-2)
    assert float(f.std(0).min()) > 0


def test_a_guide_of_a_supervised_model_serves_its_network():
    model = SupervisedModel(small_bnn(), likelihoods.Gaussian(num_data=5))
    guide = AutoRadial(model)
    guide.setup(torch.zeros(5, 1), torch.zeros(5, 1))
    assert BNNPrior(model.bnn, guide).sample(torch.zeros(3, 1), 4).shape == (4, 3, 1)


@pytest.mark.parametrize("num_samples", [1, 2, 7])
@pytest.mark.parametrize("prior", [lambda: dist.Normal(0.0, 1.0), LearnedScale, lambda: RadialDirectionalPrior("row")])
def test_any_number_of_draws_has_its_dim_whatever_sites_the_prior_makes(num_samples, prior):
    f = BNNPrior(small_bnn(prior=prior())).sample(torch.zeros(4, 1), num_samples)
    assert f.shape == (num_samples, 4, 1)


def test_a_function_may_be_the_guide_and_what_it_leaves_out_comes_from_the_prior():
    bnn = BayesianModule(nn.Linear(1, 1), dist.Normal(0.0, 1.0))

    def guide(x):
        loc = pyro.param("loc", torch.tensor([[7.0]]))
        pyro.sample("weight", dist.Normal(loc, 1e-3).to_event(2))

    slope_and_rest = BNNPrior(bnn, guide).sample(torch.tensor([[0.0], [1.0]]), 4000)[..., 0]
    slope = slope_and_rest[:, 1] - slope_and_rest[:, 0]
    assert float((slope - 7.0).abs().max()) < 0.01
    assert float(slope_and_rest[:, 0].std()) == pytest.approx(1.0, rel=5 / math.sqrt(2 * 4000))


@pytest.mark.parametrize("guide_class", [AutoRadial, AutoNormal])
def test_the_prior_stays_where_it_is_when_guide_and_network_train_on(guide_class):
    x, y = torch.randn(20, 1), torch.randn(20, 1)
    model = SupervisedModel(small_bnn(), likelihoods.Gaussian(num_data=20))
    guide = guide_class(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    svi.step(x, y)
    prior = BNNPrior(model.bnn, guide)
    copied = copy.deepcopy(prior)

    def draw(prior):
        pyro.set_rng_seed(1)
        return prior.sample(x, 3)

    before, median = draw(prior), guide.median(x)["0.weight"].detach().clone()
    for _ in range(10):
        svi.step(x, y)
    assert float((guide.median(x)["0.weight"] - median).abs().min()) > 0.1
    assert torch.equal(draw(prior), before)
    assert torch.equal(draw(copied), before)
    pyro.clear_param_store()
    assert torch.equal(draw(prior), before)


def test_draws_within_a_training_step_leave_no_site_and_no_gradient():
    bnn = small_bnn()
    guide = AutoRadial(bnn)
    x = torch.randn(4, 1)
    guide.setup(x)
    prior = BNNPrior(bnn, guide)
    with pyro.poutine.trace() as handler, pyro.plate("outer", 5):
        f = prior.sample(x, 3)
    assert f.shape == (3, 4, 1)
    assert [name for name in handler.trace.nodes if name != "outer"] == []
    assert not f.requires_grad
    assert not any(parameter.requires_grad for parameter in prior.parameters())
    assert all(parameter.requires_grad for parameter in guide.parameters())


def test_running_statistics_and_modes_stay_as_they_are():
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    bnn = BayesianModule(net).train()
    prior = BNNPrior(bnn).train()
    before = copy.deepcopy(prior.state_dict())
    prior.sample(torch.randn(6, 1), 1)
    assert not prior.bnn.training
    assert bnn.training
    assert all(torch.equal(prior.state_dict()[name], value) for name, value in before.items())


def test_a_point_estimate_gives_the_same_function_at_every_draw():
    bnn = small_bnn()
    guide = AutoDelta(bnn)
    x = torch.randn(4, 1)
    guide(x)
    f = BNNPrior(bnn, guide).sample(x, 3)
    torch.testing.assert_close(f, f[:1].expand(3, -1, -1))


class NoPyroModule(nn.Module):
    def forward(self, x):
        return None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nn.Linear(1, 1),), "bnn must be a BayesianModule"),
        ((small_bnn(), 3), "guide must be a function"),
        ((small_bnn(), NoPyroModule()), "guide must be a PyroModule"),
        ((small_bnn(), AutoRadial(small_bnn())), "guide has no parameters"),
    ],
)
def test_networks_and_guides_that_do_not_fit_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        BNNPrior(*arguments)


def test_a_network_with_another_number_of_outputs_is_refused():
    with pytest.raises(ValueError, match=r"BNNPrior: .* shape \(3, 4, 1\)"):
        BNNPrior(small_bnn(outputs=2)).sample(torch.zeros(4, 1), 3)
