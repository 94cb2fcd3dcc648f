# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws as a BoTorch model, against the draws and functions with a known maximum."""

import pytest
import torch
from torch import nn

pytest.importorskip("botorch")

from botorch.acquisition import (
    LogExpectedImprovement,
    PosteriorMean,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qSimpleRegret,
    qUpperConfidenceBound,
)
from botorch.acquisition.max_value_entropy_search import qLowerBoundMaxValueEntropy
from botorch.generation import MaxPosteriorSampling
from botorch.optim import optimize_acqf

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.botorch import FunctionDraws
from pyro_radial.infer import SampledNetwork
from pyro_radial.nn import likelihoods

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()


def network_draws(num_samples, outputs=1):
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(scale=0.1))
    guide = AutoRadial(model)
    guide.setup(torch.zeros(2, 2).double(), torch.zeros(2, outputs).double())
    return SampledNetwork(model, guide, num_samples=num_samples)


def test_batches_are_those_of_the_points_alone():
    draws = FunctionDraws(network_draws(5))
    x = torch.rand(3, 4, 2).double()
    values = draws(x)
    assert values.shape == (3, 5, 4, 1)
    for number in range(3):
        assert torch.allclose(values[number], draws(x[number]), atol=1e-12)


class Parabolas(nn.Module):
    """Two functions that are largest at the same known point, as their mean is."""

    num_samples = 2
    top = torch.tensor([0.3, 0.8]).double()

    def forward(self, x):
        return torch.stack([-c * (x - self.top).square().sum(-1, keepdim=True) for c in (1.0, 3.0)])


CANDIDATES = torch.rand(64, 2, generator=torch.Generator().manual_seed(0)).double()
ACQUISITIONS = {
    "qLogEI": lambda model: qLogExpectedImprovement(model, best_f=-1.0),
    "qLogNEI": lambda model: qLogNoisyExpectedImprovement(model, CANDIDATES[:3], prune_baseline=False),
    "qUCB": lambda model: qUpperConfidenceBound(model, beta=0.01),
    "qSimpleRegret": qSimpleRegret,
    "LogEI": lambda model: LogExpectedImprovement(model, best_f=-1.0),
    "one draw": lambda model: PosteriorMean(model.draw(1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ACQUISITIONS.values(), ids=ACQUISITIONS)
def test_the_maximum_of_known_functions_is_found(make):
    acquisition = make(FunctionDraws(Parabolas()))
    x, _ = optimize_acqf(acquisition, UNIT, q=1, num_restarts=4, raw_samples=32)
    assert torch.allclose(x[0], Parabolas.top, atol=0.02)


@pytest.mark.filterwarnings("ignore")
def test_entropy_search_and_discrete_thompson_sampling_run_on_a_network():
    draws = FunctionDraws(network_draws(16))
    acquisition = qLowerBoundMaxValueEntropy(draws, CANDIDATES)
    x, value = optimize_acqf(acquisition, UNIT, q=1, num_restarts=2, raw_samples=8)
    assert value.isfinite()
    assert ((x >= 0) & (x <= 1)).all()
    # A maximum: no candidate has a larger value by more than the search's error.
    assert acquisition(CANDIDATES.unsqueeze(1)).max() <= value + 0.05 * value.abs()
    assert MaxPosteriorSampling(draws)(CANDIDATES, num_samples=3).shape == (3, 2)


def test_what_does_not_fit_is_named():
    draws = FunctionDraws(network_draws(4))
    with pytest.raises(ValueError, match=r"X must be points that the functions take, got \[5, 3\]"):
        draws.posterior(torch.rand(5, 3).double())
    with pytest.raises(ValueError, match=r"index must be below the 4 draws, got 4"):
        draws.draw(4)
    with pytest.raises(ValueError, match=r"num_outputs must be the 2 outputs of the functions, got 1"):
        FunctionDraws(network_draws(4, outputs=2)).posterior(torch.rand(5, 2).double())
    untrained = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian())
    with pytest.raises(ValueError, match=r"guide must have its parameters"):
        SampledNetwork(untrained, AutoRadial(untrained))
