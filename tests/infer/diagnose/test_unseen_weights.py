# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Weights that no row reaches end at their prior, and others where they are."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, NaturalGradient, SupervisedModel, fit
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods


@pytest.mark.filterwarnings("ignore:.*has not arrived:UserWarning")
@pytest.mark.parametrize("batch_size", [60, 20])
def test_rows_of_an_embedding_that_are_never_seen_end_at_the_prior(batch_size):
    torch.manual_seed(0)
    users = torch.arange(60) % 6
    y = torch.randn(60, 1)
    prior = dist.Normal(0.5, 10.0)
    model = SupervisedModel(BayesianModule(nn.Embedding(9, 1), prior=prior), likelihoods.Gaussian(scale=0.5))
    guide = AutoMeanField(model)
    settings = {"epochs": 120 * batch_size // 60, "batch_size": batch_size, "progress": False}
    result = fit(model, guide, (users, y), optim=NaturalGradient(), **settings)
    posterior = guide.posterior()["weight"]
    torch.testing.assert_close(posterior.mean[6:], torch.full((3, 1), 0.5))
    torch.testing.assert_close(posterior.stddev[6:], torch.full((3, 1), 10.0))
    assert bool((posterior.stddev[:6] < 1.0).all())
    assert not result.arrivals["weight"].width_pull[6:].any()


@pytest.mark.filterwarnings("ignore:.*has not arrived:UserWarning")
def test_a_prior_that_depends_on_another_site_is_left_to_the_optimizer():
    def model(x, y=None):
        size = pyro.sample("size", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(2), size).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ torch.stack([w[0], torch.tensor(0.0)]), 1.0), obs=y)

    guide = AutoMeanField(model, init_stddev=1e-3)
    x = torch.randn(20, 2)
    result = fit(model, guide, (x, x.sum(-1)), optim=NaturalGradient(), epochs=30, progress=False)
    assert result.arrivals["w"].share_too_narrow > 0.0
    assert float(guide.posterior()["w"].stddev[1]) < 0.1


@pytest.mark.filterwarnings("ignore:.*has not arrived:UserWarning")
def test_one_scale_for_rows_with_and_without_data_is_left_to_the_optimizer():
    model = SupervisedModel(BayesianModule(nn.Embedding(9, 1)), likelihoods.Gaussian(scale=0.5))
    guide = AutoMeanField(model, families={"weight": families.Normal(1e-3, shared_scale=True)})
    data = torch.arange(60) % 6, torch.randn(60, 1)
    result = fit(model, guide, data, optim=NaturalGradient(), epochs=30, progress=False)
    assert result.arrivals["weight"].share_too_narrow == 1.0
    assert bool((guide.posterior()["weight"].stddev < 0.1).all())
