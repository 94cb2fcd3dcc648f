# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Monte Carlo dropout: masks of the right moments, one for each row, and nothing else in train mode."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel, predict
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
DRAWS = 400


def plain(net, x=X, outputs=1):
    """The network as it is, as a point estimate."""
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(scale=0.1))
    guide = AutoMeanField(model, families={".": families.Delta()})
    guide.setup(x, torch.zeros(len(x), outputs))
    return model, guide


@pytest.mark.parametrize("chunk_size", [4, 1024])
def test_draws_have_the_moments_of_masks_that_are_independent_for_each_row(chunk_size):
    rate, net = 0.3, nn.Linear(4, 1)
    model, guide = plain(nn.Sequential(nn.Dropout(rate), net))
    # The last row twice: masks that were shared would make the two alike.
    x = torch.cat([X, X[-1:]])
    samples = predict(model, guide, x, DRAWS, chunk_size, dropout=True).samples[..., 0]
    terms = (x * net.weight).detach()
    variance = rate / (1 - rate) * terms.square().sum(-1)
    centered = samples - (terms.sum(-1) + net.bias.detach())
    assert bool((centered.mean(0).abs() < 4.5 * (variance / DRAWS).sqrt()).all())
    # The kurtosis of so few terms is below that of a normal, so that this is generous.
    assert bool(((centered.square().mean(0) / variance - 1).abs() < 4.5 * (2 / DRAWS) ** 0.5).all())
    covariance = (centered[:, -1] * centered[:, -2]).mean() / variance[-1]
    assert abs(float(covariance)) < 4.5 / DRAWS**0.5


def test_norm_layers_stay_in_evaluation_mode_and_all_modes_are_restored():
    norm = nn.BatchNorm1d(4)
    norm.running_mean.fill_(3.0)
    model, guide = plain(nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout(0.5), nn.Linear(4, 1)))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in (*model.modules(), *model.bnn.skeleton.modules())]
    predict(model, guide, X, 3, dropout=True)
    assert [module.training for module in (*model.modules(), *model.bnn.skeleton.modules())] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # Without dropout's share the two would be the same; a batch's statistics would be far off the running mean.
    pyro.set_rng_seed(0)
    dropped, off = predict(model, guide, X, DRAWS, dropout=True), predict(model, guide, X, 1)
    assert bool(((dropped.mean - off.mean).abs() < 4.5 * dropped.samples.std(0) / DRAWS**0.5).all())


def test_a_model_written_by_hand_and_a_guide_with_noise_work_too():
    bnn = BayesianModule(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bnn = bnn

        def forward(self, x, y=None):
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(pyro.deterministic("values", self.bnn(x).squeeze(-1)), 1.0), obs=y)

    model = Model()
    guide = AutoMeanField(model, init_stddev=0.5)
    guide.setup(X, torch.zeros(6))
    both = predict(model, guide, X, 150, function_site="values", dropout=True).samples.var(0)
    weights = predict(model, guide, X, 150, function_site="values").samples.var(0)
    assert bool((both > 1.1 * weights).all())


@pytest.mark.parametrize("net", [nn.Linear(4, 1), nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 1))])
def test_a_model_that_drops_nothing_is_refused(net):
    with pytest.raises(ValueError, match=r"model must have dropout layers, .* got SupervisedModel without any"):
        predict(*plain(net), X, dropout=True)
