# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Data that are not standardized are said, by training and by a diagnosis, and all others are not."""

import re
import warnings

import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel, diagnose, fit
from pyro_radial.infer.diagnose.diagnose import not_standardized
from pyro_radial.nn import likelihoods

ROWS = 40
UNIT = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0))
X, Y = UNIT, UNIT.sum(1, keepdim=True)
ADVICE = "Standardize inputs and real targets"


def problem(likelihood=None, width=2, net=None):
    model = SupervisedModel(BayesianModule(net or nn.Linear(width, 1)), likelihood or likelihoods.Gaussian())
    return model, AutoMeanField(model)


def said(x, y, **of_problem):
    """What a training says, and what a diagnosis says after it, which must be the same."""
    model, guide = problem(**of_problem)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, guide, (x, y), epochs=2, batch_size=10, progress=False, seed=0)
    texts = [str(warning.message) for warning in caught]
    assert [text for text in diagnose(model, guide, (x, y)).findings if ADVICE in text] == texts
    return texts


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (100 * X, Y, r"The data have inputs with a root mean square of up to \d+, but"),
        (X + torch.tensor([0.0, 2000.0]), Y, r"inputs with a root mean square of up to 2e\+03, but"),
        (X, 35 + 17 * Y, r"The data have targets with mean -?[\d.]+ and standard deviation 28, but"),
        (X, 1 + 0.01 * Y, r"The data have targets with mean 1 and standard deviation 0.01\d+, but"),
        (280 + 100 * X, 35 + 17 * Y, "inputs with .* and targets with"),
    ],
)
def test_unstandardized_data_are_said_once_with_the_numbers(x, y, message):
    (text,) = said(x, y)
    assert ADVICE in text
    assert re.search(message, text)


@pytest.mark.parametrize("size", [1.0, 255.0])
def test_pixels_of_classes_are_not_said(size):
    images, labels = size * X.sigmoid(), (Y[:, 0] > 0).long()
    net = nn.Linear(2, 2)
    assert said(images, labels, likelihood=likelihoods.Categorical(), net=net) == []


@pytest.mark.parametrize(
    ("x", "y", "of_problem"),
    [
        (X, Y, {}),
        (3 * X + 1, 2 * Y + 3, {}),
        (X, torch.zeros(ROWS, 1), {}),
        (X, 0.01 * Y, {"likelihood": likelihoods.Gaussian(scale=0.001)}),
        (X, Y, {"likelihood": likelihoods.Gaussian(scale=1000.0)}),
        (X, (50 * Y.sigmoid()).round(), {"likelihood": likelihoods.Poisson()}),
        (100 * X, Y, {"net": nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))}),
        ((100 * X).long(), Y, {"net": nn.Sequential(nn.Embedding(1000, 3), nn.Flatten(), nn.Linear(6, 1))}),
    ],
    ids=["unit", "almost", "constant", "a small noise", "a large noise", "counts", "normalized", "indices"],
)
def test_data_of_about_unit_size_are_not_said(x, y, of_problem):
    if not x.is_floating_point():
        x = x.abs()
    assert said(x, y, **of_problem) == []


def test_unobserved_targets_and_single_rows_are_not_judged():
    model = problem(likelihoods.Gaussian())[0]
    assert not_standardized(model, X, Y.masked_fill(Y > 0, torch.nan)) is None
    assert not_standardized(model, 1000 * X[:1], Y[:1]) is None
    assert not_standardized(lambda x, y: None, 1000 * X, Y) is None
