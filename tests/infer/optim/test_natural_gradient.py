# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Natural gradients: the point at rest, and everything that a training can be asked for."""

import copy
import itertools
import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from torch import nn
from torch.distributions import transform_to
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, CompiledSVI, SupervisedModel, TermsELBO, fit, predict
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.compiler import cache
from pyro_radial.infer.optim import natural_gradient
from pyro_radial.infer.optim.joint import JointOptimizer
from pyro_radial.infer.optim.natural_gradient import NaturalGradient, by_log_scale
from pyro_radial.infer.training.options import FitOptions
from pyro_radial.nn import likelihoods
from tests.helpers.runs import ROWS, assert_same, data, function_problem, problem, run_on, trained

# Most runs here are too short for widths.
pytestmark = pytest.mark.filterwarnings("ignore:.*has not arrived:UserWarning")

DOUBLE = torch.float64
GUIDES = {
    "normal": AutoMeanField,
    "radial": AutoRadial,
    "a radius for each row": partial(AutoRadial, event_dim=1),
    "normal, one scale": partial(AutoMeanField, families={"": families.Normal(shared_scale=True)}),
    "radial, one scale": partial(AutoMeanField, families={"": families.Radial(shared_scale=True)}),
}


@pytest.fixture
def double():
    torch.set_default_dtype(DOUBLE)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def regression(rows=40, inputs=(2, 2), noise=1.0):
    """Linear regression with known noise, its data, the exact mean and the diagonal of the exact precision."""
    size = math.prod(inputs)
    x = torch.randn(rows, size)
    y = x @ torch.randn(size) + noise * torch.randn(rows)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.3, 0.8).expand(inputs).to_event(2))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal((w.flatten(-2) * x).sum(-1), noise), obs=y)

    precision = x.T @ x / noise**2 + torch.eye(size) / 0.8**2
    mean = torch.linalg.solve(precision, x.T @ y / noise**2 + 0.3 / 0.8**2)
    return model, (x, y), mean.reshape(inputs), precision.diagonal().reshape(inputs)


def train(model, guide, data, optim, steps, particles):
    """The averages of mean and precision over the last third of a training."""
    elbo = TermsELBO(particles, vectorize_particles=True, max_plate_nesting=1)(model, guide)
    optimizer = optim.optimizer(model, guide, *data)
    moments = []
    for step in range(steps):
        optimizer.zero_grad()
        elbo(*data).backward()
        optimizer.step()
        if step >= steps * 2 // 3:
            posterior = guide.posterior()["w"]
            moments.append(torch.stack([posterior.mean, posterior.variance.reciprocal()]))
    return torch.stack(moments).mean(0)


@pytest.mark.parametrize("kind", GUIDES)
def test_linear_regression_rests_at_the_exact_mean_and_the_diagonal_of_the_precision(double, kind):
    """The loss is quadratic in the weights, so the radial posterior has the same best variances.

    One scale for all D weights has the variance D / trace(precision).
    """
    model, data, mean, precision = regression()
    if kind.endswith("one scale"):
        precision = precision.mean().expand_as(precision)
    means, precisions = train(model, GUIDES[kind](model), data, NaturalGradient(), steps=200, particles=2000)
    assert bool(((means - mean).abs() < 0.025 * precision.rsqrt()).all())
    torch.testing.assert_close(precisions, precision, rtol=0.025, atol=0.0)


def test_one_scale_moves_as_equal_scales_with_equal_derivatives(double):
    model, data, *_ = regression()
    scales = []
    for is_shared in (False, True):
        guide = AutoMeanField(model, families={"w": families.Normal(shared_scale=is_shared)})
        optimizer = NaturalGradient().optimizer(model, guide, *data)
        site = guide.loc_scale_sites()["w"]
        for derivative in (0.3, -0.1, 0.2):
            site.scale.grad = torch.full_like(site.scale, derivative * site.loc.numel() / site.scale.numel())
            optimizer.step()
        scales.append(site.scale.detach().flatten()[:1])
    torch.testing.assert_close(*scales)


def logistic(x, y):
    """Logistic regression with two weights and a Student-t prior, which is no normal."""

    def model(x, y=None):
        w = pyro.sample("w", dist.StudentT(3.0, 0.2, 0.5).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Bernoulli(logits=(w * x).sum(-1)), obs=y)

    return model


def nodes(kind):
    """Noise of unit variance in the plane and its weights: a product of Gauss-Hermite rules, or angles and radii."""
    import numpy as np

    points, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(40))
    weights = weights / weights.sum()
    if kind == "normal":
        return torch.cartesian_prod(points, points), torch.outer(weights, weights).flatten()
    # The rule is even, so a signed radius and half a turn are a half-normal radius and a whole one.
    angles = torch.arange(64) * (math.pi / 64)
    units = torch.stack([angles.cos(), angles.sin()], -1)
    noise = math.sqrt(2.0) * points[:, None, None] * units
    return noise.reshape(-1, 2), weights.repeat_interleave(64) / 64


def best_logistic(x, y, kind):
    """The best mean and marginal precision for :func:`logistic`, by quadrature."""
    noise, weights = nodes(kind)
    best = torch.tensor([0.0, 0.0, -1.0, -1.0], requires_grad=True)
    optimizer = torch.optim.LBFGS([best], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        w = best[:2] + best[2:].exp() * noise
        logits = w @ x.T
        nll = nn.functional.binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="none").sum(-1)
        value = weights @ (nll - dist.StudentT(3.0, 0.2, 0.5).log_prob(w).sum(-1)) - best[2:].sum()
        value.backward()
        return value

    optimizer.step(loss)
    return best.detach()[:2], (-2 * best.detach()[2:]).exp()


@pytest.mark.parametrize("kind", ["normal", "radial"])
def test_a_prior_of_another_family_leads_to_the_best_posterior_by_quadrature(double, kind):
    """The rate of widths falls, so after 150 steps they are still a little off."""
    x = torch.randn(12, 2)
    y = (x @ torch.tensor([1.0, -0.5]) + torch.randn(12) > 0).double()
    mean, precision = best_logistic(x, y, kind)
    model = logistic(x, y)
    guide = GUIDES[kind](model, init_stddev=1.0)
    means, precisions = train(model, guide, (x, y), NaturalGradient(), steps=150, particles=2000)
    assert bool(((means - mean).abs() < 0.03 * precision.rsqrt()).all())
    torch.testing.assert_close(precisions, precision, rtol=0.03, atol=0.0)


def exact(x, noise):
    """The mean and the best standard deviations of a linear regression under the prior N(0, 1), without an offset."""
    inputs, targets = x
    precision = inputs.T @ inputs / noise**2 + torch.eye(inputs.shape[1])
    mean = torch.linalg.solve(precision, inputs.T @ targets / noise**2)
    return mean.T, precision.diagonal().rsqrt()


def layer(rows=200, features=4, noise=0.5, correlation=0.0, scales=1.0):
    """A linear layer as a model, and its data."""
    x = math.sqrt(1 - correlation) * torch.randn(rows, features) + math.sqrt(correlation) * torch.randn(rows, 1)
    x = x * torch.as_tensor(scales)
    y = x @ torch.randn(features, 1) + noise * torch.randn(rows, 1)
    net = nn.Linear(features, 1, bias=False)
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(scale=noise)), (x, y)


SEVERAL_DRAWS = TermsELBO(4, vectorize_particles=True, max_plate_nesting=1)
# Each guide, each start and each setting, not each combination of them.
ARRIVALS = {
    "narrow, clipped": {"guide": {"init_stddev": 0.001}, "clip_norm": 1.0},
    "wide, batches": {"kind": "a radius for each row", "guide": {"init_stddev": 1.0}, "batch_size": 50, "epochs": 100},
    "narrow, local": {"kind": "normal", "guide": {"init_stddev": 0.007}, "is_local": True, "epochs": 300},
    "narrow, one scale": {"kind": "radial, one scale", "guide": {"init_stddev": 0.007}, "epochs": 300},
    "wide, several draws": {"guide": {"init_stddev": 0.6}, "loss": SEVERAL_DRAWS, "epochs": 300},
    "correlated features": {"layer": {"correlation": 0.8, "scales": [0.1, 1.0, 3.0, 10.0]}, "epochs": 500},
}


@pytest.mark.filterwarnings("ignore:The data have inputs:UserWarning")
@pytest.mark.parametrize("name", ARRIVALS)
def test_the_default_arrives(double, name, recorded_only):
    settings = {"epochs": 400, "batch_size": 200, "compile": True, **ARRIVALS[name]}
    model, data = layer(**settings.pop("layer", {}))
    model.local_reparameterization = settings.pop("is_local", False)
    guide = GUIDES[settings.pop("kind", "radial")](model.double(), **settings.pop("guide", {}))
    trained(model, guide, data=data, optim=NaturalGradient(), **settings)
    mean, stddev = exact(data, 0.5)
    posterior = guide.posterior()["weight"]
    assert bool(((posterior.mean - mean).abs() < 0.6 * stddev).all()), (posterior.mean - mean) / stddev
    # The noise of widths is about the root of three in two times the number of steps; this is five times that.
    assert bool(((posterior.stddev / stddev).log().abs() < 0.31).all()), posterior.stddev / stddev


@pytest.mark.parametrize("frozen", ["locs", "scales"])
def test_means_and_widths_arrive_while_the_others_are_frozen(double, frozen):
    model, data = layer()
    guide = AutoMeanField(model.double(), init_stddev=0.05)
    guide.setup(*data)
    mean, stddev = exact(data, 0.5)
    if frozen == "locs":
        guide.load_means({"weight": mean})
    getattr(guide, frozen).requires_grad_(False)
    frozen_values = copy.deepcopy(getattr(guide, frozen).state_dict())
    loss = TermsELBO(20, vectorize_particles=True, max_plate_nesting=1)
    trained(model, guide, data=data, optim=NaturalGradient(), loss=loss, epochs=120, batch_size=200)
    assert_same(getattr(guide, frozen).state_dict(), frozen_values)
    posterior = guide.posterior()["weight"]
    assert bool(((posterior.mean - mean).abs() < 0.5 * stddev).all())
    # Five times the noise of widths that average 20 draws in each of 120 steps.
    assert frozen == "scales" or bool(((posterior.stddev / stddev).log().abs() < 0.13).all())


def test_a_network_with_batch_norm_in_eval_mode_learns(double):
    """The layer then divides by its first statistics, so the inputs stay on their own scale."""
    x = 20 * torch.randn(200, 5)
    data = x, (x[:, 0] > x[:, 1]).long()
    net = nn.Sequential(nn.Linear(5, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2)).double()
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical()).eval()
    guide = AutoMeanField(model)
    trained(model, guide, data=data, optim=NaturalGradient(), epochs=20, batch_size=50)
    correct = predict(model, guide, x, num_samples=16).mean.argmax(-1) == data[1]
    assert float(correct.double().mean()) > 0.9


def test_rates_of_widths_fall_from_a_half_to_one_in_a_hundred_thousand():
    rates = [natural_gradient.width_rate(step, 4.0) for step in (1, 6, 46, 4_996, 10_000_000)]
    assert rates == pytest.approx([0.5, 0.5, 0.1, 1e-3, 1e-5])


def test_a_mark_of_means_and_widths_is_a_quarter_to_a_half_of_the_steps_old(double):
    model, batch, *_ = regression()
    guide = AutoMeanField(model)
    optimizer = NaturalGradient().optimizer(model, guide, *batch)
    (site,) = optimizer.sites
    for step in range(1, 1000):
        with torch.no_grad():
            site.loc.fill_(step)
        optimizer._count_steps([(True, True)], optimizer.next_rates())
        progress = optimizer.progress()["w"]
        trail, marked = progress["trail"], progress["marked"]
        assert float(progress["before"][0, 0]) == trail[marked][0] or marked == 0
        assert trail[-1][0] == step > trail[-2][0]
        assert step < 100 or 0.25 * step < step - trail[marked][0] < 0.52 * step


@pytest.mark.parametrize("guide_class", [AutoRadial, AutoMeanField])
def test_widths_start_where_the_guide_has_them_and_the_first_step_is_one_of_adam_in_their_units(
    double, guide_class, monkeypatch
):
    monkeypatch.setattr(natural_gradient, "MOST_SHARE", 1.0)
    model, _ = problem()
    x, y = data()
    guide = guide_class(model.double(), init_stddev=0.03)
    optimizer = NaturalGradient(lr=0.5).optimizer(model, guide, x.double(), y)
    assert all(torch.allclose(q.stddev, torch.tensor(0.03)) for q in guide.posterior().values())
    before = {name: site.loc.detach().clone() for name, site in guide.loc_scale_sites().items()}
    TermsELBO()(model, guide)(x.double(), y).backward()
    optimizer.step()
    for name, site in guide.loc_scale_sites().items():
        torch.testing.assert_close(before[name] - site.loc, 0.5 * 0.03 * site.loc.grad.sign())


def test_means_take_the_steps_of_adam_in_units_of_a_fixed_width(double, monkeypatch):
    """Without travel and with widths held, a mean divided by its width is what Adam trains."""
    monkeypatch.setattr(natural_gradient, "TRAVEL", 0.0)
    monkeypatch.setattr(natural_gradient, "MOST_SHARE", 1.0)
    model, _ = problem()
    x, y = data()
    guide = AutoMeanField(model.double(), init_stddev=0.03)
    optimizer = NaturalGradient(lr=0.5).optimizer(model, guide, x.double(), y)
    site = guide.loc_scale_sites()["0.weight"]
    scaled = (site.loc.detach() / 0.03).requires_grad_()
    adam = torch.optim.Adam([scaled], lr=0.5, betas=(0.9, 0.95), eps=0.0)
    elbo = TermsELBO()(model, guide)
    for _ in range(20):
        optimizer.zero_grad()
        elbo(x.double(), y).backward()
        scaled.grad = 0.03 * site.loc.grad
        for own in guide.loc_scale_sites().values():
            own.scale.grad = None
        optimizer.step()
        adam.step()
    torch.testing.assert_close(site.loc, 0.03 * scaled, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("guide_class", [AutoRadial, AutoMeanField])
def test_a_mean_moves_by_at_most_a_tenth_of_the_root_mean_square_of_its_site(double, guide_class):
    model, _ = problem()
    x, y = data()
    guide = guide_class(model.double(), init_stddev=2.0)
    optimizer = NaturalGradient().optimizer(model, guide, x.double(), y)
    before = {name: q.mean for name, q in guide.posterior().items()}
    TermsELBO()(model, guide)(x.double(), y).backward()
    optimizer.step()
    for name, q in guide.posterior().items():
        most = 0.1 * (before[name].square() + 4.0).mean().sqrt()
        torch.testing.assert_close((q.mean - before[name]).abs(), most.expand_as(q.mean))


@pytest.mark.parametrize(("steps", "limit"), [(100, 0.1), (20_000, 0.02)])
def test_widths_take_steps_of_a_known_size_and_rare_large_derivatives_hold_them(double, steps, limit):
    """Of twenty derivatives, 19 are -1 and one is 38. Cut off at the limit, they would let widths grow."""
    model, batch, *_ = regression()
    optim, guide = NaturalGradient(), AutoMeanField(model)
    optimizer = optim.optimizer(model, guide, *batch)
    optim.scheduler(optimizer, steps)
    (site,) = optimizer.sites
    scale = site.to_scale(site.scale.detach())
    falls = []
    for step in range(800):
        (rates,) = optimizer.next_rates()
        derivative = 1e4 * (38.0 if step % 20 == 7 else -1.0)
        with torch.no_grad():
            by_log, before = by_log_scale(site.to_scale, site.scale, scale), site.scale.clone()
            natural_gradient._update_scale(site, derivative / by_log, rates, scale)
            falls.append((2.0 * (before - site.scale) / by_log)[0, 0])
            site.scale.copy_(before)
        optimizer._count_steps([(True, True)], [rates])
    late = torch.stack(falls[400:])
    assert 0.7 * limit < late.square().mean().sqrt() < limit
    assert 0.05 * limit < late.mean() < 0.2 * limit


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("guide_class", [AutoRadial, AutoMeanField])
def test_a_deep_network_under_a_wide_prior_does_not_diverge(guide_class):
    torch.manual_seed(0)
    x = torch.randn(1_000, 20)
    y = (x @ torch.randn(20, 5)).argmax(-1)
    widths = (20, 50, 50, 50, 50)
    layers = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(50, 5))
    model = SupervisedModel(BayesianModule(net, prior=dist.Normal(0.0, 1.0)), likelihoods.Categorical())
    history = fit(model, guide_class(model), (x, y), epochs=10, optim=NaturalGradient(), progress=False).history
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]


def test_gradients_that_would_make_a_variance_negative_leave_it_positive():
    model, guide = problem()
    optimizer = NaturalGradient(lr=1e-6).optimizer(model, guide, *data())
    for size in (-1e6, -1.0, 1.0, 1e6):
        for site in guide.loc_scale_sites().values():
            site.loc.grad, site.scale.grad = torch.ones_like(site.loc), torch.full_like(site.scale, size)
        optimizer.step()
        for posterior in guide.posterior().values():
            assert bool((posterior.stddev > 0).all() & posterior.stddev.isfinite().all())


@pytest.mark.parametrize("constraint", [constraints.softplus_positive, constraints.positive])
def test_the_derivative_by_the_logarithm_of_scales_is_that_of_automatic_differentiation(
    double, constraint, monkeypatch
):
    to_scale, x = transform_to(constraint), torch.linspace(-30.0, 30.0, 13, requires_grad=True)
    scale = to_scale(x)
    slope = torch.autograd.grad(scale.sum(), x)[0]
    if constraint is constraints.softplus_positive:
        # By way of the density it takes two functions more, in each step for each weight.
        monkeypatch.delattr(type(to_scale), "log_abs_det_jacobian")
    torch.testing.assert_close(by_log_scale(to_scale, x, scale), scale / slope)


def test_other_parameters_take_ordinary_steps():
    """Norm layers, a learned noise, a point and a direction, each as the other optimizer alone would move it."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=ROWS))
    guide = AutoRadial(model, families={"2.bias": families.Delta()})
    x, _ = data()
    optimizer = NaturalGradient(other_optim=partial(SGD, lr=1e-3)).optimizer(model, guide, x, x[:, :1])
    TermsELBO()(model, guide)(x, x[:, :1]).backward()
    every = dict(TermsELBO()(model, guide).named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in every.items()}
    optimizer.step()
    own = {id(p) for site in guide.loc_scale_sites().values() for p in (site.loc, site.scale)}
    ordinary = [name for name, parameter in every.items() if id(parameter) not in own]
    assert len(own) == 6
    assert len(ordinary) == 3
    for name in ordinary:
        torch.testing.assert_close(every[name], before[name] - 1e-3 * every[name].grad)


def test_parameters_outside_modules_are_trained():
    model, guide = function_problem()
    trained(model, guide, optim=NaturalGradient(), data=(data()[0], torch.randn(ROWS)))
    assert float(pyro.param("noise").detach()) != pytest.approx(0.7)


def test_it_learns_in_bfloat16_after_an_epoch_of_means():
    """Here the loss has no exact posterior; :func:`test_the_default_arrives` has the other options."""
    model, guide = problem()
    options = {"autocast": torch.bfloat16, "mean_only_epochs": 1}
    _, result = trained(model, guide, optim=NaturalGradient(), epochs=20, batch_size=10, **options)
    losses = [record["nll"] + record["kl"] for record in result.history]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert all(bool((site.scale != site.scale.flatten()[0]).any()) for site in guide.loc_scale_sites().values())


def test_the_parts_of_a_batch_give_the_step_of_the_whole(double):
    steps = []
    x, y = data()
    for accumulate in (1, 4):
        model, guide = problem()
        settings = {"optim": NaturalGradient(), "accumulate": accumulate, "batch_size": ROWS}
        steps.append(trained(model.double(), guide, data=(x.double(), y), **settings)[0])
    for name, value in steps[0].items():
        torch.testing.assert_close(value, steps[1][name], rtol=0.0, atol=1e-10)


# Options, a network, and how many parameters have gradients when an optimizer takes its step.
RECORDED = {
    "in the graph, beside other parameters": ({"batch_size": ROWS}, "batch norm", 2),
    "clipped and accumulated": ({"clip_norm": 5.0, "accumulate": 2, "batch_size": 10}, "plain", 8),
    "means first": ({"mean_only_epochs": 1, "batch_size": ROWS}, "plain", 4),
}


@pytest.mark.parametrize("setting", RECORDED)
def test_recorded_steps_are_the_steps_as_they_are(setting, recorded_only, monkeypatch):
    options, net, num_gradients = RECORDED[setting]
    monkeypatch.setattr(cache, "CHECKED_USES", ())
    apply = JointOptimizer.apply

    def watched(self, **taken):
        have_gradients.update(
            id(p) for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
        )
        apply(self, **taken)

    monkeypatch.setattr(JointOptimizer, "apply", watched)
    ends = []
    for compiled in (False, True):
        have_gradients = set()
        model, guide = problem(net)
        ends.append(trained(model, guide, optim=NaturalGradient(), compile=compiled, **options)[0])
    assert len(have_gradients) == num_gradients
    for name, value in ends[0].items():
        # Rounding in a few steps.
        torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-5)


def test_a_compiled_step_in_the_graph_is_the_step_as_it_is():
    """A single site keeps the compiled code short."""
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, data = layer(rows=ROWS)
        guide = AutoRadial(model)
        ends.append(trained(model, guide, data=data, optim=NaturalGradient(), batch_size=ROWS, compile=compiled)[0])
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-5)


def test_recorded_steps_go_on_from_a_loaded_state():
    x, y = data()
    model, guide = problem()
    svi = CompiledSVI(model, guide, NaturalGradient(lr=0.05), TermsELBO(), compile=False)
    svi.step(x, y)
    parameters, state = copy.deepcopy((guide.state_dict(), svi.optimizer.state_dict()))
    ends = []
    for _ in range(2):
        guide.load_state_dict(parameters)
        svi.optimizer.load_state_dict(copy.deepcopy(state))
        torch.manual_seed(0)
        for _ in range(3):
            svi.step(x, y)
        ends.append(copy.deepcopy({**guide.state_dict(), **svi.optimizer.state_dict()["state"][0]}))
    assert len(svi.graphs.programs) == 1
    assert ends[0].pop("steps") == ends[1].pop("steps") == 4
    assert_same(*ends)


@pytest.mark.parametrize("kind", ["fit", "CompiledSVI"])
def test_a_step_in_a_graph_on_a_loss_that_is_not_finite_changes_nothing(kind, recorded_only):
    x, y = data()
    model, guide = problem()

    def now():
        optimizer = svi.optimizer if kind == "CompiledSVI" else run.optimizer
        return copy.deepcopy({**guide.state_dict(), "optimizer": repr(optimizer.state_dict()["state"])})

    if kind == "CompiledSVI":
        svi = CompiledSVI(model, guide, NaturalGradient(), TermsELBO())
        step = svi.step
    else:
        run = run_on(model, guide, (x, y), optim=NaturalGradient(), mode="compiled")

        def step(*batch):
            run.batches.get = lambda *_: batch
            run.step()

    # The second step is checked, so it is taken outside of the graph too.
    for _ in range(2):
        step(x, y)
    before = now()
    with pytest.raises(FloatingPointError, match=r"not finite in step 2"):
        step(x.clone().fill_(math.inf), y)
    after = now()
    assert after.pop("optimizer") == before.pop("optimizer")
    assert_same(after, before)
    step(x, y)


def test_a_step_in_a_graph_on_refused_terms_changes_nothing(recorded_only):
    model, guide = problem()
    settings = {"optim": NaturalGradient(), "mode": "compiled", "options": FitOptions(num_data=ROWS + 1)}
    run = run_on(model, guide, data(), **settings)
    before = copy.deepcopy(guide.state_dict())
    with pytest.raises(ValueError, match=f"got one of size {ROWS}"):
        run.step()
    assert_same(guide.state_dict(), before)


def test_a_state_goes_on_where_it_was_saved():
    x, y = data()
    model, guide = problem("batch norm")
    optimizer, elbo = NaturalGradient().optimizer(model, guide, x, y), TermsELBO()(model, guide)

    def steps(number):
        torch.manual_seed(number)
        for _ in range(number):
            optimizer.zero_grad()
            elbo(x, y).backward()
            optimizer.step()
        return copy.deepcopy({**guide.state_dict(), **model.state_dict()})

    steps(3)
    guide_state, model_state, state = copy.deepcopy((guide.state_dict(), model.state_dict(), optimizer.state_dict()))
    expected = steps(4)
    guide.load_state_dict(guide_state)
    model.load_state_dict(model_state)
    optimizer = NaturalGradient().optimizer(model, guide, x, y)
    optimizer.load_state_dict(state)
    assert_same(steps(4), expected)


def test_rates_rise_and_then_fall_to_zero_along_a_cosine():
    model, guide = problem()
    settings = NaturalGradient(lr=0.5)
    optimizer = settings.optimizer(model, guide, *data())
    scheduler = settings.scheduler(optimizer, 200)
    rates = []
    for _ in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert rates[10:] == pytest.approx([0.25 * (1 + math.cos(math.pi * step / 190)) for step in range(190)])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


def test_a_step_calls_the_closure_that_makes_its_gradients():
    ends = []
    for given in (True, False):
        model, guide = problem()
        optimizer = NaturalGradient().optimizer(model, guide, *data())
        loss = TermsELBO()(model, guide)

        def closure(optimizer=optimizer, loss=loss):
            optimizer.zero_grad()
            value = loss(*data())
            value.backward()
            return value

        torch.manual_seed(3)
        value = optimizer.step(closure) if given else closure()
        if not given:
            assert optimizer.step() is None
        ends.append({"value": value.detach(), **copy.deepcopy(guide.state_dict())})
    assert_same(*ends)


def test_a_guide_without_a_marginal_variance_is_refused_by_name():
    model, _ = problem()
    guide = AutoRadial(model, families={".": families.Delta()})
    with pytest.raises(ValueError, match=r"guide must have a site with a normal or radial family.*'0.weight': 'Delta'"):
        trained(model, guide, optim=NaturalGradient())


def test_a_run_that_diverges_is_named_and_keeps_its_checkpoint(tmp_path):
    model, guide = problem()
    path = tmp_path / "a.pt"
    # The second epoch has a rate that no network survives.
    scheduler = partial(LambdaLR, lr_lambda=lambda epoch: 1e-30 if epoch == 0 else 1.0)
    with pytest.raises(FloatingPointError, match=r"not finite in step \d+: .*'\d\.(weight|bias)'"):
        trained(model, guide, optim=NaturalGradient(lr=1e30), scheduler=scheduler, checkpoint=path)
    assert torch.load(path, weights_only=False)["epoch"] == 1
