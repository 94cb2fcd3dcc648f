# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions as ArviZ holds them: the numbers, under names, and what its own functions make of them."""

import sys

import numpy as np
import pytest
import torch

from pyro_radial.infer import Prediction, to_arviz
from pyro_radial.nn import likelihoods

DRAWS, ROWS, CLASSES = 200, 30, 3


def regression(outputs=(2,)):
    return Prediction(
        0.3 * torch.randn(DRAWS, ROWS, *outputs),
        likelihoods.Gaussian(event_dim=len(outputs)),
        {"scale": 1.0 + 0.1 * torch.rand(DRAWS, 1)},
    )


@pytest.fixture
def arviz():
    return pytest.importorskip("arviz", reason="ArviZ is not installed")


def test_draws_and_noise_are_variables_of_the_posterior(arviz):
    prediction = regression()
    posterior = to_arviz(prediction)["posterior"]
    assert dict(posterior["f"].sizes) == {"chain": 1, "draw": DRAWS, "input": ROWS, "output": 2}
    assert np.array_equal(posterior["f"].values[0], prediction.samples.numpy())
    assert np.array_equal(posterior["scale"].values[0], prediction.noise["scale"][:, 0].numpy())
    assert posterior["f"].mean(("chain", "draw")).dims == ("input", "output")


def test_outputs_of_several_dims_are_numbered_and_those_of_none_have_none(arviz):
    assert to_arviz(regression((2, 4)))["posterior"]["f"].dims[2:] == ("input", "output_0", "output_1")
    assert to_arviz(Prediction(torch.randn(5, 3)))["posterior"]["f"].dims == ("chain", "draw", "input")


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_targets_bring_their_log_likelihood_whose_mean_is_the_predictive_density(arviz, kind):
    if kind == "regression":
        prediction, y = regression(), torch.randn(ROWS, 2)
    else:
        prediction = Prediction(torch.randn(DRAWS, ROWS, CLASSES), likelihoods.Categorical())
        y = torch.arange(ROWS) % CLASSES
    tree = to_arviz(prediction, y.numpy())
    log_likelihood = tree["log_likelihood"]["y"]
    assert log_likelihood.dims == ("chain", "draw", "input")
    assert np.array_equal(tree["observed_data"]["y"].values, y.numpy())
    density = torch.as_tensor(log_likelihood.values[0]).logsumexp(0) - np.log(DRAWS)
    torch.testing.assert_close(density, prediction.log_prob(y))


def test_arviz_summarizes_and_compares_it(arviz):
    tree = to_arviz(regression(), torch.randn(ROWS, 2))
    assert len(arviz.summary(tree, var_names=["f"])) == ROWS * 2
    assert np.isfinite(arviz.loo(tree).elpd_loo if hasattr(arviz.loo(tree), "elpd_loo") else arviz.loo(tree).elpd)


def test_without_arviz_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"to_arviz needs ArviZ, .* pip install pyro-radial\[arviz\]"):
        to_arviz(regression())


def test_targets_without_a_likelihood_are_refused(arviz):
    with pytest.raises(ValueError, match="to_arviz: y must be left out without a likelihood"):
        to_arviz(Prediction(torch.randn(5, 3)), torch.randn(3))


@pytest.mark.parametrize("outputs", [(), (2,), (2, 4)])
def test_draws_of_targets_spread_by_function_and_noise(arviz, outputs):
    """A hundred draws and more at many places: their variance is that of the prediction to a few percent."""
    torch.manual_seed(0)
    prediction = regression(outputs)
    targets = to_arviz(prediction)["posterior_predictive"]["y"]
    assert targets.shape == (1, DRAWS, ROWS, *outputs)
    variance = float(targets.var(("chain", "draw")).mean())
    expected = float(prediction.variance.mean())
    assert variance == pytest.approx(expected, rel=4 * (2 / (DRAWS * ROWS)) ** 0.5 + 1 / DRAWS)


def test_without_a_likelihood_there_are_no_targets(arviz):
    assert "posterior_predictive" not in to_arviz(Prediction(torch.randn(5, 3)))
