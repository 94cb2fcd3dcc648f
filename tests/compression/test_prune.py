# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The plain network at the center of a posterior, and the smaller one that pruning makes of it."""

import math
import warnings

import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.utils.data import TensorDataset

from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    SupervisedModel,
)
from pyro_radial.compression import count_flops, count_weights, mask_network, mean_network, prune
from pyro_radial.compression.graph import IndexSelect
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior

X = torch.zeros(1, 3)


def test_its_weights_are_the_mean_of_the_posterior_where_radii_are_sure():
    bnn = BayesianModule(nn.Linear(3, 4), RadialDirectionalPrior())
    guide = AutoRadialDirectional(bnn, init_stddev=1e-4, init_mean_cosine=0.6)
    guide.setup(X)
    draws = torch.stack([bnn.to_module(guide(X)).weight.detach() for _ in range(300)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - mean_network(bnn, guide).weight).abs() <= 4 * error).all()


def test_a_group_whose_direction_dissolved_is_zero():
    bnn = BayesianModule(nn.Linear(3, 4), RadialDirectionalPrior())
    guide = AutoRadialDirectional(bnn, shared_concentration=False)
    guide.setup(X)
    with torch.no_grad():
        guide.concentrations.weight.direction_unconstrained[2] = -40.0
    weight = mean_network(bnn, guide).weight
    assert weight[2].abs().max() < 1e-12
    assert weight[[0, 1, 3]].norm(dim=1).min() > 0.01


def test_without_directions_it_is_the_network_at_the_median():
    bnn = BayesianModule(nn.Linear(3, 4))
    guide = AutoMeanField(bnn)
    guide.setup(X)
    assert torch.equal(mean_network(bnn, guide).weight, guide.median()["weight"])


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def points(number, seed):
    """Four inputs; the label tells whether the first two have the same sign."""
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def untrained(net=None, likelihood=None, family=AutoMeanField):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)) if net is None else net
    model = SupervisedModel(BayesianModule(net), likelihood or likelihoods.Categorical())
    guide = family(model)
    guide.setup(points(4, 0)[0])
    return model, guide


@pytest.fixture(scope="module")
def trained():
    """A network of two hidden layers that fits the labels, ten of its units with tiny weights, and a guide at it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 20), nn.Dropout(0.1), nn.ReLU(), nn.Linear(20, 2))
    with torch.no_grad():
        net[0].weight[20:] *= 1e-3
    x, y = points(800, 0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical())
    guide = AutoMeanField(model)
    guide.setup(x, y)
    return model, guide


def error(net, rows):
    return 100 * float((net.eval()(rows[0]).argmax(-1) != rows[1]).double().mean())


@pytest.mark.parametrize("tolerance", [0, 0.5, 3.0])
def test_the_error_rises_by_at_most_the_tolerance_and_the_network_is_smaller(trained, tolerance):
    validation = points(400, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = prune(*trained, validation, tolerance)
    model, guide = trained
    whole = mean_network(model.bnn, guide)
    assert result.path[0].loss == pytest.approx(error(whole, validation))
    assert result.record.loss == pytest.approx(error(result.network, validation))
    assert result.record.loss <= result.path[0].loss + tolerance + 1e-9
    assert result.record.weights == count_weights(result.network).total < count_weights(whole).total
    assert result.record.flops == count_flops(result.network, (4,)).total
    # Nothing that was tried and is good enough is smaller.
    for record in result.path:
        assert record.weights >= result.record.weights or record.loss > result.path[0].loss + tolerance


def test_the_pruned_network_gives_the_outputs_of_the_masked_one(trained):
    model, guide = trained
    x, y = points(400, 1)
    result = prune(model, guide, (x, y), 3.0)
    masked = mask_network(mean_network(model.bnn, guide), result.record.cut)
    torch.testing.assert_close(result.network.eval()(x), masked.eval()(x))
    assert {type(module) for module in result.network} <= {nn.Linear, nn.ReLU, nn.Dropout, IndexSelect}
    assert "of 760 weights" in repr(result)


def test_a_larger_tolerance_leaves_no_larger_network(trained):
    rows = points(400, 1)
    sizes = [prune(*trained, rows, tolerance).record.weights for tolerance in (0, 2, 100)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_a_dataset_and_another_guide_of_the_library_will_do():
    x, y = points(1_500, 2)
    model, guide = untrained(family=AutoRadial)
    of_tensors, of_dataset = (prune(model, guide, rows, 10.0) for rows in ((x, y), TensorDataset(x, y)))
    assert of_tensors.record[1:] == of_dataset.record[1:]
    # More rows than are evaluated at a time.
    assert of_tensors.path[0].loss == pytest.approx(error(mean_network(model.bnn, guide), (x, y)))


def test_nothing_of_the_model_changes_and_its_mode_stays(trained):
    model, guide = trained
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = prune(model, guide, points(100, 1), 3.0)
    assert model.training
    assert result.network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_batch_norms_get_the_statistics_of_the_network_that_is_left():
    torch.manual_seed(0)
    x, y = points(800, 0)
    net = nn.Sequential(nn.Linear(4, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        net[1].running_mean += 10.0
    model, guide = untrained(net)
    validation = points(300, 1)
    assert error(mean_network(model.bnn, guide), validation) > 40  # by the statistics of the network as it was
    result = prune(model, guide, validation, 0.0, num_cuts=4)
    assert result.path[0].loss < 15
    signal = result.network[0](validation[0])
    torch.testing.assert_close(result.network[1].running_mean, signal.mean(0), rtol=1e-4, atol=1e-4)


def test_dropouts_do_not_make_results_random():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.arange(60) % 2
    net = nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 2))
    model, guide = untrained(net)
    before = torch.get_rng_state()
    results = []
    for seed in range(4):
        torch.manual_seed(seed)
        results.append(prune(model, guide, (x, y), 5.0, num_cuts=6))
        assert error(results[-1].network, (x, y)) == pytest.approx(results[-1].record.loss)
    assert all([r.loss for r in result.path] == [r.loss for r in results[0].path] for result in results)
    torch.set_rng_state(before)
    prune(model, guide, (x, y), 5.0, num_cuts=6)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf, "1", None, True])
def test_a_tolerance_out_of_range_is_named(tolerance):
    with pytest.raises(ValueError, match="tolerance must be a finite number, at least zero, got"):
        prune(*untrained(), points(20, 1), tolerance)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            lambda: (*untrained(nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))), points(20, 1)),
            "model must hold a chain of layers: net must hold .* got LayerNorm at '1'",
        ),
        (
            lambda: (*untrained(nn.Sequential(Residual(nn.Linear(4, 4)), nn.Linear(4, 2))), points(20, 1)),
            "model must hold a chain of layers: .* got Residual at '0'. .* skip connections, .* library Torch-Pruning",
        ),
        (
            lambda: (*untrained(likelihood=likelihoods.Bernoulli(event_dim=1)), points(20, 1)),
            "model must be a SupervisedModel .* Categorical .* got SupervisedModel with Bernoulli",
        ),
        (lambda: (nn.Linear(4, 2), untrained()[1], points(20, 1)), "model must be a SupervisedModel .* got Linear"),
        (lambda: (untrained()[0], AutoNormal(untrained()[0]), points(20, 1)), "guide must be a guide of this library"),
        (lambda: (*untrained(), points(20, 1)[0]), r"data must be a pair \(x, y\)"),
        (lambda: (*untrained(), (points(20, 1)[0], points(19, 1)[1])), "data: y must have as many rows as x"),
        (lambda: (*untrained(), (points(20, 1)[0], points(20, 1)[1] + 2)), "data: y must hold labels from 0 to 1"),
        (lambda: (*untrained(), (points(20, 1)[0] * math.nan, points(20, 1)[1])), "data: x must not hold NaN"),
        (lambda: (*untrained(), ({"x": points(20, 1)[0]}, points(20, 1)[1])), "data: x must be one tensor, got dict"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        prune(*arguments(), 1.0)


def test_a_path_of_one_cut_is_refused():
    with pytest.raises(ValueError, match="num_cuts must be at least 2, got 1"):
        prune(*untrained(), points(20, 1), 1.0, num_cuts=1)
