# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loop of an optimization: it finds known maxima, goes on where it was, and refuses what does not fit."""

import math
from functools import cache, partial

import pytest
import torch
from torch import nn

pytest.importorskip("botorch")

from pyro_radial import AutoRadial, BayesianModule, FunctionalELBO, SupervisedModel
from pyro_radial.decisions import optimization
from pyro_radial.decisions.optimization import (
    AcquisitionSearch,
    FunctionDraws,
    GaussianProcessSurrogate,
    NetworkSurrogate,
    OptimizationResult,
    Proposer,
    RandomFeatures,
    RandomSearch,
    gibbon,
    log_expected_improvement,
    max_value_entropy,
    run_optimization,
    thompson,
    thompson_candidates,
    upper_confidence_bound,
)
from pyro_radial.functional import GaussianProcess, MarginalKL, UniformBox
from pyro_radial.nn import likelihoods

BOUNDS = [[-1.0, 0.0], [1.0, 4.0]]


def objective(x):
    return -(x[0] - 0.4).square() - 0.1 * (x[1] - 1.0).square()


def network(steps=30, functional=False, seed=0, lr=3e-3):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    model = SupervisedModel(
        BayesianModule(net), likelihoods.Gaussian(scale=0.1), local_reparameterization=not functional
    )
    options = {"optim": partial(torch.optim.Adam, lr=lr)}
    if functional:
        prior = GaussianProcess(lambda a, b: torch.exp(-2.0 * torch.cdist(a, b).square()))
        box = UniformBox(0.0, 1.0, 8)
        options["loss"] = FunctionalELBO(
            prior, box, divergence=MarginalKL(), compare_at="measurement_points", num_functions=1
        )
    return NetworkSurrogate(model, AutoRadial(model), steps=steps, batch_size=16, compile=False, **options)


SURROGATES = {
    "Gaussian process": GaussianProcessSurrogate,
    "random features": lambda: RandomFeatures(100),
    "radial": network,
    "functional": lambda: network(functional=True),
}
ACQUISITIONS = {
    "thompson": thompson,
    "log_expected_improvement": log_expected_improvement,
    "upper_confidence_bound": upper_confidence_bound,
    "gibbon": gibbon,
    "max_value_entropy": max_value_entropy,
}


@cache
def trained(make):
    torch.manual_seed(0)
    surrogate = make()
    surrogate.begin(2)
    x = torch.rand(6, 2).double()
    y = -(x - 0.5).square().sum(1, keepdim=True)
    surrogate.refit(x, (y - y.mean()) / y.std())
    return surrogate, x, y


def same(one, other):
    return torch.equal(one.x, other.x) and torch.equal(one.y, other.y)


@pytest.mark.parametrize("acquisition", ACQUISITIONS.values(), ids=ACQUISITIONS)
@pytest.mark.parametrize("make", SURROGATES.values(), ids=SURROGATES)
def test_every_acquisition_runs_on_every_surrogate(make, acquisition):
    surrogate, x, y = trained(make)
    found = acquisition(surrogate, x, y)
    at = torch.rand(3, 1, 2).double().requires_grad_()
    value = found(at)
    assert value.shape == (3,)
    assert value.isfinite().all()
    (gradient,) = torch.autograd.grad(value.sum(), at)
    assert gradient.isfinite().all()
    assert (gradient != 0).any()


def test_a_gaussian_process_finds_the_maximum():
    result = run_optimization(
        objective,
        BOUNDS,
        AcquisitionSearch(GaussianProcessSurrogate(), log_expected_improvement),
        num_evaluations=14,
        progress=False,
    )
    point, value = result.best
    assert torch.allclose(point, torch.tensor([0.4, 1.0]).double(), atol=0.3)
    assert value > -0.01
    assert result.simple_regret(0.0)[-1] == -value


def test_a_network_finds_more_than_chance():
    options = {"num_evaluations": 11, "progress": False}
    by_network = run_optimization(objective, BOUNDS, AcquisitionSearch(network(200, lr=0.02)), **options)
    by_chance = run_optimization(objective, BOUNDS, RandomSearch(), **options)
    assert by_network.best[1] > by_chance.best[1]
    # The first points are the same for all.
    assert torch.equal(by_network.x[:5], by_chance.x[:5])
    assert by_network.gradient_steps == 6 * 200


def test_random_features_have_the_posterior_of_a_gaussian_process():
    # With many features the process is that of the kernel they are of.
    torch.manual_seed(0)
    surrogate = RandomFeatures(1500)
    x = torch.rand(8, 1).double()
    surrogate.refit(x, (6 * x).sin())
    process = surrogate._process
    lengthscale = 1 / process.frequencies.square().mean().sqrt()
    kernel = lambda a, b: process.scale.square() * 750 * torch.exp(-0.5 * ((a - b.T) / lengthscale).square())  # noqa: E731
    at = torch.rand(4, 1).double()
    gram = kernel(x, x) + process.noise * torch.eye(8).double()
    solved = torch.linalg.solve(gram, kernel(x, at))
    mean = process.offset + solved.T @ ((6 * x).sin() - process.offset)
    covariance = kernel(at, at) - kernel(at, x) @ solved
    found = surrogate.normal().posterior(at)
    unit = float(kernel(at, at)[0, 0])
    assert torch.allclose(found.mean, mean, atol=0.1 * math.sqrt(unit))
    assert torch.allclose(found.distribution.covariance_matrix, covariance, atol=0.05 * unit)
    draws = surrogate.draws(4000).posterior(at).values.squeeze(-1)
    spread = found.variance.squeeze(-1).sqrt()
    assert ((draws.mean(0) - found.mean.squeeze(-1)).abs() < 5 * spread / math.sqrt(4000)).all()
    assert torch.allclose(draws.std(0), spread, rtol=0.1)


class Stopping(Exception):
    pass


PROPOSERS = {
    "network": lambda: AcquisitionSearch(network(10)),
    "chance": RandomSearch,
    "features": lambda: AcquisitionSearch(RandomFeatures(50)),
}


@pytest.mark.parametrize("make", PROPOSERS.values(), ids=PROPOSERS)
def test_a_run_that_ends_early_ends_where_an_undisturbed_one_does(make, tmp_path):
    options = {"num_evaluations": 7, "num_initial": 3, "seed": 2, "progress": False}
    undisturbed = run_optimization(objective, BOUNDS, make(), **options)
    for ends_at in (2, 4):
        seen = []

        def failing(x, seen=seen, ends_at=ends_at):
            seen.append(x)
            if len(seen) == ends_at:
                raise Stopping
            return objective(x)

        with pytest.raises(Stopping):
            run_optimization(failing, BOUNDS, make(), checkpoint=tmp_path / "run.pt", **options)
    resumed = run_optimization(objective, BOUNDS, make(), checkpoint=tmp_path / "run.pt", **options)
    assert same(resumed, undisturbed)
    assert resumed.gradient_steps == undisturbed.gradient_steps


def test_more_evaluations_may_be_asked_for(tmp_path):
    options = {"checkpoint": tmp_path / "run.pt", "progress": False}
    few, more = (run_optimization(objective, BOUNDS, RandomSearch(), num_evaluations=n, **options) for n in (6, 9))
    assert torch.equal(more.x[:6], few.x)
    assert len(more.y) == 9


def test_discrete_and_categorical_inputs_have_their_values():
    seen = []

    def counted(x):
        seen.append(x.tolist())
        return -(x[0] - 0.2).square() - (x[1] - 3).square() + (x[2] == 1.0)

    result = run_optimization(
        counted,
        [[-1.0, 0.0, 0.0], [1.0, 6.0, 2.0]],
        AcquisitionSearch(GaussianProcessSurrogate(), log_expected_improvement, num_restarts=2, raw_samples=16),
        num_evaluations=7,
        discrete={1: range(7)},
        categorical={2: [0, 1, 2]},
        progress=False,
    )
    assert {x[1] for x in seen} <= set(map(float, range(7)))
    assert {x[2] for x in seen} <= {0.0, 1.0, 2.0}
    assert len({x[0] for x in seen}) == 7
    assert result.x.tolist() == seen


def test_candidates_are_the_maximizers_of_draws():
    class Tops(nn.Module):
        num_samples = 3
        tops = torch.tensor([[0.2, 1.0], [0.5, 3.0], [-0.5, 2.0]]).double()

        def forward(self, x):
            return torch.stack([-(x - top).square().sum(-1, keepdim=True) for top in self.tops])

    found = thompson_candidates(FunctionDraws(Tops()), BOUNDS, 3)
    assert torch.allclose(found, Tops.tops, atol=1e-3)
    with pytest.raises(ValueError, match=r"num_candidates must be at most the 3 draws, got 4"):
        thompson_candidates(FunctionDraws(Tops()), BOUNDS, 4)


def test_standardized_values_are_what_the_proposer_gets():
    told = []

    class Noting(Proposer):
        def propose(self, x, y, space):
            told.append((x, y))
            return space.random(1)[0]

    for standardize in (True, False):
        result = run_optimization(
            objective, BOUNDS, Noting(), num_evaluations=6, standardize=standardize, progress=False
        )
        x, y = told[-1]
        assert ((x >= 0) & (x <= 1)).all()
        values = result.y[:5]
        if standardize:
            values = (values - values.mean()) / values.std(correction=0)
        assert torch.allclose(y[:, 0], values)


def test_progress_has_the_best_value(capsys):
    result = run_optimization(objective, BOUNDS, RandomSearch(), num_evaluations=6)
    assert f"best {result.best[1]:.6g}" in capsys.readouterr().err


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"bounds must have the least values first"):
        run_optimization(objective, BOUNDS[::-1], RandomSearch())
    with pytest.raises(ValueError, match=r"num_initial must be at most the 4 evaluations, got 5"):
        run_optimization(objective, BOUNDS, RandomSearch(), num_evaluations=4)
    with pytest.raises(ValueError, match=r"run_optimization: proposer must be a Proposer, got NetworkSurrogate"):
        run_optimization(objective, BOUNDS, network())
    with pytest.raises(ValueError, match=r"AcquisitionSearch: surrogate must be a Surrogate, got RandomSearch"):
        AcquisitionSearch(RandomSearch())
    with pytest.raises(ValueError, match=r"AcquisitionSearch: acquisition must be a function"):
        AcquisitionSearch(network(), "thompson")
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"objective must be finite, got (nan|inf) at \["):
            run_optimization(lambda x, bad=bad: bad, BOUNDS, RandomSearch(), progress=False)
    path = tmp_path / "run.pt"
    run_optimization(objective, BOUNDS, RandomSearch(), num_evaluations=5, checkpoint=path, progress=False)
    for options, name in (({"seed": 1}, "seed"), ({"discrete": {1: [1, 2]}}, r"space\.discrete 1")):
        with pytest.raises(ValueError, match=f"was made with {name}"):
            run_optimization(objective, BOUNDS, RandomSearch(), checkpoint=path, progress=False, **options)
    with pytest.raises(ValueError, match=r"was made with proposer"):
        run_optimization(objective, BOUNDS, AcquisitionSearch(RandomFeatures()), checkpoint=path, progress=False)


@pytest.mark.parametrize("make", SURROGATES.values(), ids=SURROGATES)
def test_a_surrogate_not_yet_trained_says_so(make):
    surrogate = make()
    surrogate.begin(2)
    for ask in (lambda: surrogate.draws(2), surrogate.normal):
        with pytest.raises(ValueError, match=r"must be (trained|fitted) before"):
            ask()


def test_all_is_exported():
    assert all(hasattr(optimization, name) for name in optimization.__all__)
    assert OptimizationResult(torch.rand(3, 2), torch.tensor([1.0, 3.0, 2.0])).best[1] == 3.0
