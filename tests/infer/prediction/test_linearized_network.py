# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A last-layer posterior as one module returns what predict computes, also after an export."""

import copy
import io

import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import LinearizedNetwork, last_layer_laplace
from pyro_radial.nn import likelihoods

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
CLASSES = (X[:, 0] > 0).long()
ROWS = {"args": ({0: torch.export.Dim("rows", min=2)},)}


class Logits(nn.Module):
    """A network that returns an object with logits, and takes part of its input by name."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 2, bias=False)

    def forward(self, x, shift=0.0):
        return self.head(self.body(x + shift))


NETWORKS = {
    "perceptron": lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)),
    "linear": lambda: nn.Linear(3, 2),
    "batch norm, dropout and no bias": Logits,
    "convolutional": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)
    ),
}


def fitted(network="perceptron", likelihood=None, structure=None):
    torch.manual_seed(1)
    net = NETWORKS[network]()
    likelihood = likelihood or likelihoods.Categorical()
    model = SupervisedModel(BayesianModule(net), likelihood)
    of_classes = isinstance(likelihood, likelihoods.Categorical)
    y = CLASSES if of_classes else torch.stack([CLASSES, 1 - CLASSES], -1).float()
    return model, last_layer_laplace(model, net, (X, y), prior_precision=1.0, structure=structure)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_mean_and_covariance_are_those_of_the_guide(network, structure):
    model, guide = fitted(network, structure=structure)
    mean, covariance = LinearizedNetwork(model, guide)(X)
    expected, expected_covariance = guide.joint_marginals(model)(X)
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(covariance, expected_covariance)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("likelihood", [likelihoods.Categorical, likelihoods.Bernoulli])
def test_probabilities_are_those_of_predict(network, likelihood):
    model, guide = fitted(network, likelihood())
    found = LinearizedNetwork(model, guide, "probit")(X)
    torch.testing.assert_close(found, predict(model, guide, X, method="probit").mean)


@pytest.mark.parametrize(
    ("network", "method"), [("batch norm, dropout and no bias", "linearized"), ("convolutional", "probit")]
)
def test_an_exported_program_gives_the_same_for_any_number_of_rows(network, method):
    served = LinearizedNetwork(*fitted(network), method)
    if isinstance(served.features, Logits):
        compiled = torch.compile(served, backend="eager")
        torch.testing.assert_close(compiled(x=X, shift=0.5), served(X + 0.5))
    program = torch.export.export(served, (X[:3].clone(),), dynamic_shapes=ROWS)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in (X[:2], X):
        torch.testing.assert_close(loaded(rows), served(rows))


def test_it_is_in_evaluation_mode_and_keeps_copies():
    model, guide = fitted("batch norm, dropout and no bias")
    served = LinearizedNetwork(model, guide, "probit")
    before = served(X)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), *guide.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(1.0)
    assert torch.equal(served(X), before)
    assert not any(module.training for module in served.modules())
    assert not any(parameter.requires_grad for parameter in served.parameters())
    assert torch.equal(copy.deepcopy(served)(X), before)


def test_what_does_not_fit_is_named():
    model, guide = fitted()
    other = AutoMeanField(model)
    other.setup(X, CLASSES)
    cases = [
        ((model, other), "guide must be one that last_layer_laplace returned, got AutoMeanField: .* SampledNetwork"),
        ((model, guide, "draws"), "method must be one of .*'probit'.*, got 'draws'"),
        ((fitted(likelihood=likelihoods.Gaussian())[0], guide, "probit"), "model must have a likelihood of classes"),
        ((nn.Linear(3, 2), guide), "model must"),
        ((fitted("linear")[0], guide), "weight"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            LinearizedNetwork(*arguments)


@pytest.mark.parametrize("flatten", [nn.Flatten(), nn.Flatten(-3)])
def test_an_image_without_the_dim_of_the_rows_is_named(flatten):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), flatten, nn.Linear(144, 3))
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    x = torch.randn(20, 1, 8, 8)
    guide = last_layer_laplace(model, network, (x, torch.arange(20) % 3), prior_precision=1.0)
    served = LinearizedNetwork(model, guide, "probit")
    assert served(x[:1]).shape == (1, 3)
    with pytest.raises(ValueError, match=r"x must be .* a dim for the rows, .* from x of shape \[1, 8, 8\]"):
        served(x[0])
    with pytest.raises(ValueError, match=r"x must be .* a dim for the rows, got x of shape \[8, 8\]"):
        served(x[0, 0])
