# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""BoTorch models of draws and of a linearized process, against the draws and exact moments."""

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
from botorch.acquisition.max_value_entropy_search import qLowerBoundMaxValueEntropy, qMaxValueEntropy
from botorch.generation import MaxPosteriorSampling
from botorch.optim import optimize_acqf

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.botorch import FunctionDraws, ProcessModel
from pyro_radial.functional import PosteriorProcess
from pyro_radial.infer import SampledNetwork
from pyro_radial.nn import likelihoods

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()


def posterior(guide=AutoRadial, hidden=8, outputs=1):
    net = (
        nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, outputs)) if hidden else nn.Linear(2, outputs)
    )
    model = SupervisedModel(BayesianModule(net.double()), likelihoods.Gaussian(scale=0.1))
    guide = guide(model)
    guide.setup(torch.zeros(2, 2).double(), torch.zeros(2, outputs).double())
    return model, guide


def test_batches_are_those_of_the_points_alone():
    draws = FunctionDraws(SampledNetwork(*posterior(), num_samples=5))
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
    "one draw": lambda model: PosteriorMean(model.one(1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ACQUISITIONS.values(), ids=ACQUISITIONS)
def test_the_maximum_of_known_functions_is_found(make):
    acquisition = make(FunctionDraws(Parabolas()))
    x, _ = optimize_acqf(acquisition, UNIT, q=1, num_restarts=4, raw_samples=32)
    assert torch.allclose(x[0], Parabolas.top, atol=0.02)


@pytest.mark.filterwarnings("ignore")
def test_entropy_search_and_discrete_thompson_sampling_run_on_a_network():
    model, guide = posterior()
    draws = FunctionDraws(SampledNetwork(model, guide, num_samples=16))
    gibbon = qLowerBoundMaxValueEntropy(draws, CANDIDATES)
    entropy = qMaxValueEntropy(ProcessModel(PosteriorProcess(model, guide.posterior()), noise=0.1), CANDIDATES)
    for acquisition in (gibbon, entropy):
        x, value = optimize_acqf(acquisition, UNIT, q=1, num_restarts=2, raw_samples=8)
        assert value.isfinite()
        assert ((x >= 0) & (x <= 1)).all()
        # A maximum: no candidate has a larger value by more than what the search leaves.
        assert acquisition(CANDIDATES.unsqueeze(1)).max() <= value + 0.05 * value.abs()
    chosen = MaxPosteriorSampling(draws)(CANDIDATES, num_samples=3)
    assert chosen.shape == (3, 2)


@pytest.mark.parametrize("guide", [AutoRadial, AutoMeanField])
def test_a_linear_network_has_its_exact_covariance(guide):
    model, guide = posterior(guide, hidden=0)
    found = guide.posterior()
    variance = torch.cat([found["weight"].variance.flatten(), found["bias"].variance])
    mean = torch.cat([found["weight"].mean.flatten(), found["bias"].mean])
    process = ProcessModel(PosteriorProcess(model, found), noise=0.3)
    x = torch.rand(4, 3, 2).double()
    design = torch.cat([x, torch.ones(4, 3, 1).double()], -1)
    joint = process.posterior(x)
    expected = (design * variance) @ design.mT
    assert torch.allclose(joint.mean.squeeze(-1), design @ mean, atol=1e-12)
    assert torch.allclose(joint.distribution.covariance_matrix, expected, atol=1e-7)
    noisy = process.posterior(x, observation_noise=True).distribution.covariance_matrix
    assert torch.allclose(noisy - expected, 0.09 * torch.eye(3).double().expand(4, 3, 3), atol=1e-7)
    given = process.posterior(x, observation_noise=torch.full((4, 3, 1), 0.5).double())
    assert torch.allclose(given.variance.squeeze(-1), expected.diagonal(dim1=-2, dim2=-1) + 0.5, atol=1e-7)
    # One point at a time goes by marginals.
    alone = process.posterior(x.reshape(12, 1, 2))
    assert torch.allclose(alone.variance.flatten(), expected.diagonal(dim1=-2, dim2=-1).flatten(), atol=1e-7)


def test_a_process_has_the_moments_of_its_draws_to_first_order():
    model, guide = posterior(AutoMeanField)
    x = torch.rand(5, 2).double()
    samples = predict(model, guide, x, num_samples=4000).samples.squeeze(-1)
    joint = ProcessModel(PosteriorProcess(model, guide.posterior())).posterior(x)
    covariance = joint.distribution.covariance_matrix
    assert torch.allclose(covariance, samples.T.cov(), rtol=0.2, atol=0.05 * float(covariance.diagonal().max()))


def test_many_batches_are_computed_in_parts():
    model, guide = posterior()
    process = ProcessModel(PosteriorProcess(model, guide.posterior()))
    x = torch.rand(150, 2, 2).double()
    joint = process.posterior(x)
    for number in (0, 127, 128, 149):
        alone = process.posterior(x[number])
        assert torch.allclose(joint.distribution.covariance_matrix[number], alone.distribution.covariance_matrix)


def test_what_does_not_fit_is_named():
    model, guide = posterior()
    draws = FunctionDraws(SampledNetwork(model, guide, num_samples=4))
    process = ProcessModel(PosteriorProcess(model, guide.posterior()))
    for asked in (draws, process):
        with pytest.raises(ValueError, match=r"X must be points that the functions take, got \[(1, )?5, 3\]"):
            asked.posterior(torch.rand(5, 3).double())
    with pytest.raises(ValueError, match=r"index must be below the 4 draws, got 4"):
        draws.one(4)
    model, guide = posterior(outputs=2)
    with pytest.raises(ValueError, match=r"process must have one output, got 2"):
        ProcessModel(PosteriorProcess(model, guide.posterior())).posterior(torch.rand(5, 2).double())
    with pytest.raises(ValueError, match=r"num_outputs must be the 2 outputs of the functions, got 1"):
        FunctionDraws(SampledNetwork(model, guide, num_samples=4)).posterior(torch.rand(5, 2).double())
    untrained = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian())
    with pytest.raises(ValueError, match=r"guide must have its parameters"):
        SampledNetwork(untrained, AutoRadial(untrained))
