# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training that continues: against one training of the true loss, and from a state."""

import copy
import math
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.optim import SGD

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FunctionalELBO, RadialELBO, SupervisedModel, diagnose
from pyro_radial.decisions.refits import Refits
from pyro_radial.functional import BetweenRows, GaussianProcess, MarginalKL
from pyro_radial.infer.autoguide.families import Delta
from pyro_radial.nn import likelihoods
from pyro_radial.nn.likelihoods import MaskedGaussian

X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def regression(guide=AutoRadial, likelihood=None, seed=0, **options):
    torch.manual_seed(seed)
    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihood or likelihoods.Gaussian(scale=0.5))
    return Refits(model, guide(model), **{"steps": 20, "batch_size": 8, "compile": False, **options})


def test_one_step_is_on_the_loss_of_all_rows():
    # A point estimate and batches of all rows: the gradient is known.
    def point(model):
        return AutoRadial(model, families={".": Delta()})

    refits = regression(point, steps=1, batch_size=60, optim=lambda parameters: SGD(parameters, lr=1e-3))
    refits.begin(X, Y)
    before = {name: value.mean for name, value in refits.guide.posterior().items()}
    leaves = {name: value.detach().clone().requires_grad_() for name, value in before.items()}
    f = X @ leaves["weight"].T + leaves["bias"]
    prior = sum(dist.Normal(0.0, 1.0).log_prob(leaf).sum() for leaf in leaves.values())
    loss = -dist.Normal(f, 0.5).log_prob(Y).sum() - prior
    loss.backward()
    refits.refit(X, Y)
    for name, value in refits.guide.posterior().items():
        assert torch.allclose(value.mean, before[name] - 1e-3 * leaves[name].grad, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 30])
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


def test_a_graph_serves_any_number_of_rows():
    refits = regression()
    for rows in (1, 5, 30):
        refits.refit(X[:rows], Y[:rows])
    assert len(refits._trainer.gradients.captured.recordings) == 1
    assert refits._trainer.gradients.captured.eager_because == []
    assert refits.steps_done == 60


@pytest.mark.parametrize("rows", [3, 30])
def test_afterwards_the_model_is_one_of_all_rows(rows):
    refits = regression(loss=RadialELBO())
    refits.refit(X[:20], Y[:20])
    refits.refit(X[:rows], Y[:rows])
    restored = regression()
    restored.begin(X, Y)
    restored.load_state_dict(refits.state_dict())
    for own in (refits, restored):
        assert own.model.likelihood.num_data == rows
        torch.manual_seed(0)
        terms = diagnose(own.model, own.guide, (X[:rows], Y[:rows]), num_particles=100).terms
        assert terms.num_data == rows
        posterior = own.guide.posterior()
        mean = X[:rows] @ posterior["weight"].mean.T + posterior["bias"].mean
        variance = X[:rows].square() @ posterior["weight"].variance.T + posterior["bias"].variance
        expected = (((Y[:rows] - mean).square() + variance) / (2 * 0.5**2)).sum() + rows * math.log(0.5 * math.tau**0.5)
        assert float(terms.negative_log_likelihood) == pytest.approx(float(expected), rel=0.1)


def test_no_row_is_in_a_batch_twice_before_all_are():
    refits = regression()
    assert len(refits._rows(30).unique()) == 8
    assert sorted(refits._rows(3).bincount().tolist()) == [2, 3, 3]


def of_functions():
    kernel = lambda a, b: torch.exp(-0.5 * torch.cdist(a, b).square())  # noqa: E731
    return FunctionalELBO(
        GaussianProcess(kernel),
        BetweenRows(X, 5),
        divergence=MarginalKL(),
        compare_at="measurement_points",
        num_functions=1,
    )


LOSSES = {"weights": RadialELBO, "functions": of_functions}


@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("compile", [False, True])
def test_from_a_state_it_goes_on_bit_for_bit(loss, compile):
    def refitted(refits, calls):
        for number in calls:
            torch.manual_seed(number)
            refits.refit(X[: 5 * number], Y[: 5 * number])

    undisturbed = regression(loss=loss(), compile=compile)
    refitted(undisturbed, (1, 2, 3, 4))
    first = regression(loss=loss(), compile=compile)
    refitted(first, (1, 2))
    state = copy.deepcopy(first.state_dict())
    second = regression(loss=loss(), seed=7, compile=compile)
    second.begin(X[:2], Y[:2])
    second.load_state_dict(state)
    refitted(second, (3, 4))
    assert second.steps_done == undisturbed.steps_done == 80
    for name, value in undisturbed.guide.state_dict().items():
        assert torch.equal(value, second.guide.state_dict()[name]), name


def test_bad_arguments_are_named():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(num_data=100))
    with pytest.raises(ValueError, match="num_data of the likelihood must be the number of training points"):
        Refits(model, AutoRadial(model)).begin(X, Y)
    with pytest.raises(ValueError, match=r"guide must be a Module, got function"):
        Refits(model, lambda x, y: None)
    with pytest.raises(ValueError, match="loss must keep its terms, as RadialELBO does, got str"):
        Refits(model, AutoRadial(model), loss="elbo")
    with pytest.raises(ValueError, match="steps must be a positive integer, got 0"):
        Refits(model, AutoRadial(model), steps=0)
    refits = regression()
    with pytest.raises(ValueError, match="x and y must have the same number of rows, at least one, got 0 and 0"):
        refits.refit(X[:0], Y[:0])
    with pytest.raises(RuntimeError, match="training must begin before it has a state"):
        regression().state_dict()


def test_another_model_is_refused():
    refits = regression()
    refits.begin(X, Y)
    other = SupervisedModel(BayesianModule(nn.Linear(2, 1, bias=False)), likelihoods.Gaussian(scale=0.5))
    other = Refits(other, AutoRadial(other))
    other.begin(X, Y)
    with pytest.raises(ValueError, match=r"from another guide: .* entries differ"):
        refits.load_state_dict(other.state_dict())


def test_what_is_not_finite_is_named_and_no_step_is_taken():
    refits = regression(optim=lambda parameters: SGD(parameters, lr=1e30))
    with pytest.raises(FloatingPointError, match=r"not finite in step 1: .*try a smaller learning rate"):
        refits.refit(X, Y)
    assert refits.steps_done == 1


def test_unobserved_targets_are_ignored():
    refits = regression(likelihood=MaskedGaussian(scale=0.5))
    y = Y.clone()
    y[::2] = math.nan
    refits.refit(X, y)
    assert all(value.isfinite().all() for value in refits.guide.state_dict().values())
