# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.effect import AutoNormalMessenger
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO, predict
from pyro_radial.nn import likelihoods
from pyro_radial.poutine import mean_only


def model():
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(w.sum(), rate), obs=torch.ones(3))


@pytest.mark.parametrize("make", [AutoRadial, AutoMeanField, AutoNormal])
def test_every_site_is_at_its_median_without_noise(make):
    guide = make(model)
    guide()
    first, second = mean_only(guide)(), mean_only(guide)()
    for name, median in guide.median().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name].detach(), median)
    assert not torch.equal(guide()["w"], guide()["w"])


@pytest.mark.parametrize("make", [AutoRadial, AutoMeanField])
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO, TermsELBO])
def test_the_loss_is_that_of_a_point_estimate_under_every_elbo(make, loss):
    guide = make(model)
    guide()
    at_median = poutine.condition(model, data=guide.median())
    expected = -poutine.trace(at_median).get_trace().log_prob_sum()
    value = loss().loss(model, mean_only(guide))
    assert float(value) == pytest.approx(float(expected), rel=1e-5)


def test_as_a_context_it_takes_the_noise_from_the_guide_and_leaves_the_model():
    guide = AutoRadial(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), TraceMeanField_ELBO())
    with mean_only():
        first, second = svi.evaluate_loss(), svi.evaluate_loss()
    assert first == second
    assert svi.evaluate_loss() != first


def test_observed_sites_and_mini_batches_are_left_alone():
    def local():
        with pyro.plate("rows", 6, subsample_size=2) as index:
            pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            pyro.sample("obs", dist.Normal(0.0, 1.0), obs=torch.zeros(6)[index])

    guide = AutoRadial(local)
    trace = poutine.trace(mean_only(guide)).get_trace()
    assert trace.nodes["z"]["value"].shape == (2, 2)
    assert "obs" not in trace.nodes


def test_a_model_in_the_place_of_its_guide_is_named():
    x, y = torch.randn(5, 2), torch.zeros(5, 1)
    supervised = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian())
    guide = AutoRadial(supervised)
    guide.setup(x, y)
    for use in (
        lambda: mean_only(model)(),
        lambda: predict(mean_only(supervised), guide, x),
        lambda: TermsELBO().loss(mean_only(supervised), guide, x, y),
    ):
        with pytest.raises(ValueError, match="mean_only: guide must be a guide, got a model, with targets at site 'y'"):
            use()


def test_guides_with_factors_computed_sites_or_the_model_inside_are_fine_and_discrete_sites_are_named():
    def guide():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        pyro.deterministic("twice", 2 * w)
        pyro.factor("jacobian", w.sum(), has_rsample=True)

    assert float(poutine.trace(mean_only(guide)).get_trace().nodes["twice"]["value"].abs().max()) == 0
    assert torch.equal(mean_only(AutoNormalMessenger(model))()["y"], torch.ones(3))
    with pytest.raises(ValueError, match="'coin'"):
        mean_only(lambda: pyro.sample("coin", dist.Categorical(torch.ones(3))))()
