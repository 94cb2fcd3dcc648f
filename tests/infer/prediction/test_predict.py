# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of functions: each is one function, however the inputs are cut; and asking for them changes nothing."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import HMC, MCMC
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import SampledNetwork
from pyro_radial.nn import likelihoods
from tests.helpers.networks import Net
from tests.helpers.predictions import CLASSES, GAMMA, POINTS, X, draws, problem

# --------------------------------------------------------------------------------------------- the draws themselves


ZEROS = torch.zeros(POINTS, CLASSES)
KINDS = {
    "categorical": {},
    "gaussian": {"likelihood": likelihoods.Gaussian(num_data=POINTS), "y": ZEROS},
    "random noise": {"likelihood": likelihoods.Gaussian(num_data=POINTS, precision_prior=GAMMA), "y": ZEROS},
    # The guide leaves a weight to the prior: the model draws it.
    "hidden site": {"guide": lambda model: AutoRadial(poutine.block(model, hide=["2.weight"]))},
}


@pytest.mark.parametrize("chunk_size", [1, 22, 23])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_the_same_for_every_chunk_size(kind, chunk_size):
    model, guide = problem(**KINDS[kind])
    whole = draws(model, guide)
    chunked = draws(model, guide, chunk_size=chunk_size)
    # A matrix product rounds differently for other numbers of rows.
    assert torch.allclose(chunked.samples, whole.samples, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(chunked.noise[name], value) for name, value in whole.noise.items())
    assert float((whole.samples[0] - whole.samples[1]).abs().max()) > 0.01


def test_draws_leave_the_random_numbers_of_the_targets_out():
    """The guide's draws are those that it makes alone, whatever the model samples in between."""
    model, guide = problem(**KINDS["gaussian"])
    states = []
    for rows in (1, POINTS):
        draws(model, guide, X[:rows])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def function_model(function_site="f"):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            f = pyro.deterministic(function_site, x @ w)
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    return model


@pytest.mark.parametrize(("guide", "local"), [(AutoNormal, False), (AutoDelta, True), (AutoRadial, True)])
def test_a_model_function_without_likelihood_gives_draws_and_their_mean(guide, local):
    with pyro.settings.context(module_local_params=local):
        model = function_model()
        made = guide(model)
        made(X, torch.zeros(POINTS))
        prediction = draws(model, made, chunk_size=5)
    assert prediction.samples.shape == (6, POINTS)
    assert torch.equal(prediction.mean, prediction.samples.mean(0))
    for name in ("variance", "entropy", "mutual_information"):
        with pytest.raises(ValueError, match=rf"Prediction.{name}: model must have an attribute `likelihood`"):
            getattr(prediction, name)
    with pytest.raises(ValueError, match="log_prob: model must have"):
        prediction.log_prob(torch.zeros(POINTS))


# ------------------------------------------------------------------------------------------------------ side effects


def normed_net():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))


@pytest.mark.parametrize("fail", [False, True])
def test_modules_predict_in_evaluation_mode_and_come_back_as_they_were(fail):
    model, guide = problem(net=normed_net())
    model.likelihood.eval()
    modes = [module.training for module in [*model.modules(), *guide.modules()]]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = X[:1].expand(5, 2)
    if fail:
        with pytest.raises(ValueError, match=r"given x of shape"):
            predict(model, guide, torch.zeros(5, 7))
    else:
        samples = draws(model, guide, x).samples
        # With dropout on, or batch statistics of equal rows, this would not hold.
        assert torch.allclose(samples, samples[:, :1].expand_as(samples), atol=1e-5)
        assert not torch.allclose(samples, torch.zeros(()), atol=1e-3)
    assert [module.training for module in [*model.modules(), *guide.modules()]] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_tracks_gradients_and_the_callers_setting_stays(grad):
    model, guide = problem()
    with torch.set_grad_enabled(grad):
        prediction = draws(model, guide)
        assert torch.is_grad_enabled() == grad
    assert not prediction.samples.requires_grad
    assert all(p.grad is None for p in guide.parameters())


# --------------------------------------------------------------------------------------------------------- bad input


def test_draws_of_sites_in_a_plate_serve_one_chunk_only():
    def model(x, y=None):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            f = pyro.deterministic("f", z + x[:, 0])
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    guide = AutoNormal(model)
    guide(X, torch.zeros(POINTS))
    assert draws(model, guide).samples.shape == (6, POINTS)
    with pytest.raises(ValueError, match=r"chunk_size must be all rows, since site 'z.*' .* is inside a plate, got 3"):
        draws(model, guide, chunk_size=10)


def test_a_sampler_is_told_to_give_its_samples():
    model, _ = problem()
    mcmc = MCMC(HMC(model), num_samples=1)
    for use in (lambda: predict(model, mcmc, X), lambda: SampledNetwork(model, mcmc)):
        with pytest.raises(ValueError, match=r"guide must be a function, got MCMC; .*mcmc\.get_samples\(\)"):
            use()


def unused():
    """A network with a parameter that it does not use."""
    return Net(lambda net, x: net.used(x), used=nn.Linear(2, CLASSES), unused=nn.Linear(2, 2))


IDENTICAL = pytest.warns(UserWarning, match="all 6 draws are identical, so predictions have no uncertainty")


@pytest.mark.parametrize("chunk_size", [5, 500])
def test_identical_draws_of_a_guide_that_is_not_a_point_warn(chunk_size):
    bnn = BayesianModule(unused(), select=lambda name, parameter: name.startswith("unused"))
    model = SupervisedModel(bnn, likelihoods.Categorical())
    guide = AutoRadial(model)
    guide.setup(X, torch.zeros(POINTS).long())
    with IDENTICAL:
        draws(model, guide, chunk_size=chunk_size)
    with IDENTICAL:
        predict(model, {"unused.weight": torch.randn(6, 2, 2), "unused.bias": torch.zeros(6, 2)}, X)
    with IDENTICAL:
        SampledNetwork(model, guide, 6).predict(X)


def no_function_site(x, y=None):
    pyro.sample("w", dist.Normal(0.0, 1.0))


def scalar_function(x, y=None):
    pyro.deterministic("f", pyro.sample("w", dist.Normal(0.0, 1.0)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (no_function_site, "function_site must be a site of the model, got 'f'"),
        (scalar_function, r"site 'f' must have a row for each of 23 inputs, got shape \(\)"),
    ],
)
def test_a_model_without_a_function_of_its_rows_is_named(model, message):
    guide = AutoNormal(model)
    guide(X)
    with pytest.raises(ValueError, match=message):
        predict(model, guide, X)


def test_a_model_of_several_arguments_is_told_to_take_one():
    def model(x, group, y=None):
        pyro.deterministic("f", pyro.sample("w", dist.Normal(0.0, 1.0)) * x + group)

    guide = AutoMeanField(model)
    guide(X, X)
    for inputs in (X, (X, X)):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'group'") as caught:
            predict(model, guide, inputs)
        assert "`x, group = inputs`" in caught.value.__notes__[0]
