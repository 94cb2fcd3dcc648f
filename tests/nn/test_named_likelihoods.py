# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Several named outputs of one network, each with its likelihood, and targets that are missing."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import nn

from pyro_radial import AutoMeanField, CompiledSVI, TermsELBO, diagnose, fit, predict
from pyro_radial.infer import Prediction, SampledNetwork
from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods
from pyro_radial.nn.likelihoods import MISSING_LABEL
from tests.helpers.networks import Net

NAN = math.nan
X = torch.linspace(-1.0, 1.0, 18).reshape(6, 3)
HEIGHT, KIND = X[:, :2].sin(), torch.tensor([0, 1, 2, 2, 1, 0])
Y = {"height": HEIGHT, "kind": KIND}


def split():
    """A dict of two outputs that share no weight."""
    layers = {"height": nn.Linear(3, 2), "kind": nn.Linear(3, 3)}
    return Net(lambda net, x: {"height": net.height(x), "kind": net.kind(x)}, **layers)


def named(num_data=None):
    height, kind = likelihoods.Gaussian(num_data=num_data, scale=0.5), likelihoods.Categorical(num_data=num_data)
    return SupervisedModel(BayesianModule(split()), {"height": height, "kind": kind})


def log_likelihood(model, values, x, y, site):
    trace = poutine.trace(poutine.condition(model, data=values)).get_trace(x, y)
    trace.compute_log_prob()
    return trace.nodes[site]["log_prob_sum"]


def guided():
    model = named()
    guide = AutoMeanField(model, init_stddev=0.1)
    guide.setup(X, Y)
    return model, guide


def test_the_log_likelihood_is_the_closed_form_of_the_targets_that_are_there():
    values, height, kind = named().bnn.sample_parameters(), HEIGHT.clone(), KIND.clone()
    height[0, 1] = height[2] = NAN
    kind[3:] = MISSING_LABEL
    y = {"height": height, "kind": kind}
    with torch.no_grad():
        f = poutine.condition(named().bnn, data=values)(X)
        each = dist.Normal(f["height"], 0.5).log_prob(HEIGHT)
        expected_height = each.sum() - each[0, 1] - each[2].sum()
        expected_kind = -nn.functional.cross_entropy(f["kind"][:3], KIND[:3], reduction="sum")
    model = named(30)
    torch.testing.assert_close(log_likelihood(model, values, X, y, "height.y"), 30 / 6 * expected_height)
    torch.testing.assert_close(log_likelihood(model, values, X, y, "kind.y"), 30 / 6 * expected_kind)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_recorded_step_is_the_step():
    y = {"height": torch.where(X[:, :1] > 0, NAN, HEIGHT), "kind": KIND}
    losses = []
    for make in (SVI, CompiledSVI):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = named(12)
        options = {} if make is SVI else {"compile": False}
        svi = make(model, AutoMeanField(model), pyro.optim.Adam({"lr": 1e-2}), TermsELBO(), **options)
        losses.append([float(svi.step(X, y)) for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_fit_validates_and_predicts_by_name():
    height = HEIGHT.clone()
    height[0] = NAN
    validation = (X, {"height": height, "kind": KIND})
    model, guide = guided()
    result = fit(model, guide, validation, epochs=2, validation=validation, seed=0, progress=False)
    assert model.likelihood.by_name["kind"].num_data == 6
    assert all(math.isfinite(record["validation_nll"]) for record in result.history)
    predictions = predict(model, guide, X, num_samples=5, chunk_size=4)
    assert {name: p.samples.shape for name, p in predictions.items()} == {"height": (5, 6, 2), "kind": (5, 6, 3)}
    assert predictions["height"].noise["scale"].tolist() == [[0.5]] * 5
    assert predictions["kind"].entropy.shape == (6,)
    assert SampledNetwork(model, guide, 4).predict(X)["kind"].samples.shape == (4, 6, 3)


def test_the_joint_density_averages_products_over_draws():
    model, guide = guided()
    height, kind = HEIGHT.clone(), KIND.clone()
    height[1, 0], kind[1] = NAN, MISSING_LABEL
    predictions = predict(model, guide, X, num_samples=7)
    each = dist.Normal(predictions["height"].samples, 0.5).log_prob(HEIGHT)
    each[:, 1, 0] = 0.0
    of_kind = predictions["kind"].samples.log_softmax(-1)[:, torch.arange(6), KIND]
    of_kind[:, 1] = 0.0
    expected = (each.sum(-1) + of_kind).exp().mean(0).log()
    found = predictions.log_prob({"height": height, "kind": kind})
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"y must be a dict with targets for \['height', 'kind'\], got \['height'\]"):
        predictions.log_prob({"height": height})


def test_random_noise_is_that_of_its_output():
    both = {
        "a": likelihoods.Gaussian(precision_prior=dist.Gamma(6.0, 6.0)),
        "b": likelihoods.Gaussian(precision_prior=dist.Gamma(600.0, 6.0)),
    }
    net = Net(lambda net, x: {name: net.layer(x) for name in both}, layer=nn.Linear(3, 2))
    model = SupervisedModel(BayesianModule(net), both)
    guide = AutoMeanField(model)
    guide.setup(X, {"a": HEIGHT, "b": HEIGHT})
    assert {"a.precision", "b.precision"} <= guide.chosen_families().keys()
    samples = {"a.precision": torch.tensor([0.25, 1.0, 4.0]), "layer.weight": torch.randn(3, 2, 3)}
    predictions = predict(model, samples, X)
    assert predictions["a"].noise["scale"].tolist() == [[2.0], [1.0], [0.5]]
    # Drawn from the prior, whose mean is a hundred times that of the other.
    assert predictions["b"].noise["scale"].max() < 0.2


def test_joined_predictions_have_the_draws_of_all_for_each_output():
    parts = [predict(*guided(), X, num_samples=3) for _ in range(2)]
    predictions = Prediction.joined(parts)
    assert torch.equal(predictions["height"].samples, torch.cat([part["height"].samples for part in parts]))
    density = torch.stack([part.log_prob(Y) for part in parts]).logsumexp(0) - math.log(2)
    torch.testing.assert_close(predictions.log_prob(Y), density)
    with pytest.raises(ValueError, match="predictions must hold draws of the same outputs"):
        Prediction.joined([parts[0], parts[1]["height"]])


def test_diagnose_reports_the_output_that_follows_its_inputs_least():
    model, guide = guided()
    values = {name: torch.zeros_like(value) for name, value in model.bnn.sample_parameters().items()}
    values["height.weight"] += 1.0
    guide.load_means(values)
    diagnosis = diagnose(model, guide, (X, Y))
    assert diagnosis.signal == 0.0
    assert 0.0 < diagnosis.noise < 1.0
    assert sorted(diagnosis.terms.nll_by_site) == ["height.y", "kind.y"]


def test_targets_in_large_units_are_named():
    model = named()
    data = (X, {"height": torch.where(X[:, :1] > 0.5, NAN, 1000 * HEIGHT), "kind": KIND})
    with pytest.warns(UserWarning, match=r"height targets with mean .*Standardize"):
        fit(model, AutoMeanField(model), data, epochs=1, progress=False)


@pytest.mark.parametrize(
    ("likelihood", "message"),
    [
        ({}, "likelihood must have an object of its own for each name, got {}"),
        (dict.fromkeys(("height", "kind"), likelihoods.Gaussian()), "likelihood must have an object of its own"),
        (
            {"height": likelihoods.Gaussian()},
            r"network of bnn must return a dict with outputs \['height'\], got \['height', 'kind'\]",
        ),
        ({"height": likelihoods.Gaussian(), "sort": likelihoods.Gaussian()}, r"\['height', 'sort'\], got"),
        ({"he.ight": likelihoods.Gaussian()}, "likelihood must have names without a dot"),
        ({"height": likelihoods.Gaussian(event_dim=3), "kind": likelihoods.Categorical()}, "output 'height': f must"),
    ],
)
def test_likelihoods_that_do_not_fit_are_named(likelihood, message):
    with pytest.raises(ValueError, match=message):
        SupervisedModel(BayesianModule(split()), likelihood)(X)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (
            {"height": HEIGHT},
            r"y must be a dict with targets for \['height', 'kind'\], NaN if missing, got \['height'\]",
        ),
        (HEIGHT, r"y must be a dict with targets .* got Tensor"),
        ({"height": HEIGHT, "kind": KIND.float()}, "output 'kind': y must hold integer labels"),
        ({"height": HEIGHT[:, :1], "kind": KIND}, "output 'height': y must have shape"),
        ({"height": HEIGHT, "kind": KIND + 2}, "output 'kind': y must hold labels from 0 to 2"),
        ({"height": HEIGHT * NAN, "kind": KIND * 0 + MISSING_LABEL}, "y must hold at least one target in each batch"),
        ({"height": HEIGHT / 0, "kind": KIND}, r"y\['height'\] must not hold infinity"),
    ],
)
def test_targets_that_do_not_fit_are_named(y, message):
    model = named()
    with pytest.raises(ValueError, match=message):
        fit(model, AutoMeanField(model), (X, y), epochs=1, progress=False)
    if "infinity" not in message:
        with pytest.raises(ValueError, match=message):
            named()(X, y)


def test_what_needs_one_output_says_so():
    model, guide = guided()
    with pytest.raises(ValueError, match="method must be 'draws' for a model of named outputs"):
        predict(model, guide, X, method="linearized")
    with pytest.raises(ValueError, match=r"function_site must be 'f' for a model of named outputs, got 'height\.f'"):
        predict(model, guide, X, function_site="height.f")
    with pytest.raises(ValueError, match=r"must return one tensor, got dict: .*a likelihood for each output"):
        SupervisedModel(BayesianModule(split()), likelihoods.Gaussian())(X)
