# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The validation is the predictive density of held-out rows, and leaves the training alone."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_radial import AutoMeanField, FunctionalELBO, TermsELBO, predict
from pyro_radial.functional import GaussianKL, GaussianProcess
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.training import training_run
from pyro_radial.nn import likelihoods
from tests.helpers.runs import ROWS, assert_same, data, problem, state_of, trained


def test_validation_is_the_log_of_the_mean_probability_and_leaves_training_alone():
    epochs = []

    def keep(pair):
        return lambda record: epochs.append(state_of(*pair))

    for validation in (None, data(9, seed=4)):
        pair = problem("dropout")
        trained(*pair, validation=validation, callback=keep(pair))
    plain, validated = epochs[:3], epochs[3:]
    for one, other in zip(plain, validated, strict=True):
        assert_same(one, other)


def test_the_record_of_an_epoch_holds_the_validation_of_its_parameters():
    model, guide = problem()
    x, y = data(9, seed=4)
    _, result = trained(model, guide, validation=(x, y), epochs=1)
    torch.manual_seed(0)
    expected = -predict(model, guide, x, num_samples=16).log_prob(y).mean().item()
    assert result.history[0]["validation_nll"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kinds", "number"), [({".": families.Delta()}, 1), ({"weight": families.Delta()}, 16)])
def test_point_estimates_are_validated_with_one_draw(monkeypatch, kinds, number):
    model, _ = problem()
    counts = []

    def counted(*args, num_samples, **kwargs):
        counts.append(num_samples)
        return predict(*args, num_samples=num_samples, **kwargs)

    monkeypatch.setattr(training_run, "predict", counted)
    trained(model, AutoMeanField(model, families=kinds), validation=data(9, seed=4), epochs=1)
    assert counts == [number]


def test_a_validation_that_turns_nan_stops_training(monkeypatch):
    class Nan(likelihoods.Gaussian):
        def observation(self, f, **noise):
            distribution = super().observation(f, **noise)
            # Prediction gives draws a dim of their own.
            return distribution if f.dim() == 2 else dist.Normal(f * float("nan"), 1.0, validate_args=False).to_event(1)

    model, guide = problem(likelihood=Nan(num_data=ROWS))
    pair = data()[0], torch.zeros(ROWS, 2)
    with pytest.raises(FloatingPointError, match="validation"):
        trained(model, guide, data=pair, validation=pair)


class Renamed(likelihoods.Gaussian):
    """A likelihood that records the function's values at a site of its own."""

    def forward(self, f, y=None):
        with pyro.poutine.block(hide=["f"]):
            values = super().forward(f, y)
        size = f.shape[-1 - self.event_dim]
        with pyro.plate("values", size):
            pyro.deterministic("g", f, event_dim=self.event_dim)
        return values


def test_a_loss_that_reads_functions_at_its_own_site_is_validated_there():
    def made(likelihood, **kwargs):
        model, guide = problem(likelihood=likelihood(num_data=ROWS))
        prior = GaussianProcess(lambda a, b: (-0.5 * torch.cdist(a, b) ** 2).exp())
        return model, guide, FunctionalELBO(prior, divergence=GaussianKL(), num_functions=30, **kwargs)

    x, y = data()[0], torch.zeros(ROWS, 2)
    results = []
    for likelihood, site in ((likelihoods.Gaussian, {}), (Renamed, {"function_site": "g"})):
        model, guide, loss = made(likelihood, **site)
        _, result = trained(model, guide, data=(x, y), validation=(x[:9], y[:9]), loss=loss, epochs=2)
        results.append([record["validation_nll"] for record in result.history])
    # Gradients are added in another order, which rounds in another way on some processors.
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    model, guide, loss = made(Renamed, function_site="g")
    with pytest.raises(ValueError, match="function_site must be a site of the model, got 'f'"):
        trained(model, guide, data=(x, y), validation=(x[:9], y[:9]), loss=TermsELBO())
