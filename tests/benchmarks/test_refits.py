# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training that continues: against one training of the true loss."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.decisions._refits import Refits
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.nn import likelihoods

X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def regression(guide=AutoRadial, **options):
    torch.manual_seed(0)
    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(scale=0.5))
    return Refits(model, guide(model), **{"steps": 20, "batch_size": 8, "compile": False, **options})


@pytest.mark.parametrize("rows", [30])
def test_the_posterior_is_the_conjugate_one(rows):
    # Mean field: the mean is exact, the variance is one over the diagonal of the precision.
    x, y = X[:rows], Y[:rows] + 0.5
    adam = partial(torch.optim.Adam, lr=0.01)
    refits = regression(AutoMeanField, steps=700, batch_size=30, optim=adam)
    refits.refit(x, y)
    design = torch.cat([x, torch.ones(rows, 1)], 1).double()
    precision = torch.eye(3).double() + design.T @ design / 0.25
    mean = torch.linalg.solve(precision, design.T @ y.double() / 0.25)[:, 0]
    posterior = refits.guide.posterior()
    found = torch.cat([posterior[name].mean.flatten() for name in ("weight", "bias")]).double()
    spread = torch.cat([posterior[name].variance.flatten() for name in ("weight", "bias")]).double()
    # Adam wanders by some times its rate around the optimum.
    assert torch.allclose(found, mean, atol=0.1)
    assert torch.allclose(spread.log(), -precision.diagonal().log(), atol=0.35)


def test_no_row_is_in_a_batch_twice_before_all_are():
    refits = regression()
    assert len(refits._rows(30).unique()) == 8
    assert sorted(refits._rows(3).bincount().tolist()) == [2, 3, 3]
