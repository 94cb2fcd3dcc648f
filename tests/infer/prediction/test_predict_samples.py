# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Samples of a posterior in the place of a guide: of Pyro's NUTS, of a closed form, and of another model."""

import pyro
import pytest
import torch
from pyro.infer import MCMC, NUTS
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel, predict
from pyro_radial.nn import likelihoods

NOISE = 0.5
X = torch.linspace(-1.0, 1.0, 12).unsqueeze(-1)
Y = 0.7 * X - 0.2
NEW = torch.tensor([[-2.0], [0.0], [0.5], [3.0]])


def regression():
    return SupervisedModel(BayesianModule(nn.Linear(1, 1)), likelihoods.Gaussian(scale=NOISE))


def exact(x):
    """Mean and variance of the function in closed form, with normal priors on weight and bias."""
    phi, new = (torch.cat([inputs, torch.ones_like(inputs)], -1) for inputs in (X, x))
    covariance = torch.linalg.inv(phi.mT @ phi / NOISE**2 + torch.eye(2))
    mean = covariance @ phi.mT @ Y / NOISE**2
    return new @ mean, (new @ covariance * new).sum(-1, keepdim=True)


def sampled(number=50):
    torch.manual_seed(2)
    return {"weight": torch.randn(number, 1, 1), "bias": torch.randn(number, 1)}


def test_nuts_gives_the_predictive_of_the_conjugate_model():
    model = regression()
    pyro.set_rng_seed(0)
    mcmc = MCMC(NUTS(model, jit_compile=False), num_samples=100, warmup_steps=60, disable_progbar=True)
    mcmc.run(X, Y)
    prediction = predict(model, mcmc.get_samples(), NEW)
    mean, variance = exact(NEW)
    assert prediction.samples.shape == (100, 4, 1)
    # Of so few samples of NUTS a third counts, at least.
    error = (variance / 33).sqrt()
    assert bool(((prediction.mean - mean).abs() < 4 * error).all())
    assert bool(((prediction.variance - NOISE**2) / variance - 1).abs().max() < 4 * (2 / 33) ** 0.5)


@pytest.mark.parametrize("chunk_size", [3, 1024])
def test_a_draw_is_the_function_of_its_sample_in_order(chunk_size):
    samples = sampled()
    prediction = predict(regression(), samples, NEW, chunk_size=chunk_size)
    expected = samples["weight"] * NEW + samples["bias"].unsqueeze(1)
    torch.testing.assert_close(prediction.samples, expected)
    assert prediction.noise["scale"].shape == (50, 1)


def test_a_site_without_samples_comes_from_its_prior():
    samples = {"weight": torch.zeros(400, 1, 1)}
    prediction = predict(regression(), samples, NEW)
    # The bias alone is left, standard normal and the same at all inputs of a draw.
    assert float(prediction.samples.std(0).max()) == pytest.approx(1.0, abs=4 * (2 * 400) ** -0.5)
    torch.testing.assert_close(prediction.samples, prediction.samples[:, :1].expand_as(prediction.samples))


BAD = {
    "chains apart": (
        {"weight": torch.zeros(2, 50, 1, 1), "bias": torch.zeros(2, 50, 1)},
        r"site 'weight' must have shape \('S', 1, 1\), got \(2, 50, 1, 1\); .*group_by_chain",
    ),
    "another model": (
        {**sampled(), "slope": torch.zeros(50)},
        r"latent sites of the model, \['bias', 'weight'\], got some of 'slope'",
    ),
    "the function": ({**sampled(), "f": torch.zeros(50, 4, 1)}, "got some of 'f'"),
    "targets": ({**sampled(), "y": torch.zeros(50, 4, 1)}, "got some of 'y'"),
    "other numbers": (
        {"weight": torch.zeros(3, 1, 1), "bias": torch.zeros(2, 1)},
        r"one number of draws for all sites, got \{'weight': 3, 'bias': 2\}",
    ),
    "none": ({}, "one number of draws for all sites, got {}"),
    "no draws": ({"weight": torch.zeros(0, 1, 1)}, r"site 'weight' must be a tensor .* got shape \(0, 1, 1\)"),
}


@pytest.mark.parametrize(("samples", "message"), BAD.values(), ids=BAD)
def test_samples_that_do_not_fit_are_refused_by_name(samples, message):
    with pytest.raises(ValueError, match=f"^samples .*{message}"):
        predict(regression(), samples, NEW)


def test_a_number_of_draws_that_is_not_that_of_the_samples_is_refused():
    assert len(predict(regression(), sampled(), NEW, 50).samples) == 50
    with pytest.raises(
        ValueError, match="num_samples must be left out with samples, which are 50 for each site, got 64"
    ):
        predict(regression(), sampled(), NEW, 64)
