# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The plain network at the center of a posterior, and the smaller one that pruning makes of it."""

import math
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pyro_radial import (
    AutoMeanField,
    AutoRadialDirectional,
    BayesianModule,
    SupervisedModel,
)
from pyro_radial.compression import cut_network, mean_network, prune
from pyro_radial.compression.graph import IndexSelect, count_flops, count_weights
from pyro_radial.compression.prune import evaluate_cut, nested_cuts
from pyro_radial.compression.scores import Scores
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior
from tests.helpers.chains import masked

X = torch.zeros(1, 3)


def test_its_weights_are_the_mean_of_the_posterior_where_radii_are_sure():
    bnn = BayesianModule(nn.Linear(3, 4), RadialDirectionalPrior())
    guide = AutoRadialDirectional(bnn, init_stddev=1e-4, init_mean_cosine=0.6)
    guide.setup(X)
    draws = torch.stack([bnn.to_module(guide(X)).weight.detach() for _ in range(300)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - mean_network(bnn, guide).weight).abs() <= 4 * error).all()


def test_without_directions_it_is_the_network_at_the_median():
    bnn = BayesianModule(nn.Linear(3, 4))
    guide = AutoMeanField(bnn)
    guide.setup(X)
    assert torch.equal(mean_network(bnn, guide).weight, guide.median()["weight"])


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
    assert result.record.weights == count_weights(result.network) < count_weights(whole)
    assert result.record.flops == count_flops(result.network, (4,))
    # Nothing that was tried and is good enough is smaller.
    for record in result.path:
        assert record.weights >= result.record.weights or record.loss > result.path[0].loss + tolerance


def test_the_pruned_network_gives_the_outputs_of_the_masked_one(trained):
    model, guide = trained
    x, y = points(400, 1)
    result = prune(model, guide, (x, y), 3.0)
    zeroed = masked(mean_network(model.bnn, guide), result.record.cut)
    torch.testing.assert_close(result.network.eval()(x), zeroed.eval()(x))
    assert {type(module) for module in result.network} <= {nn.Linear, nn.ReLU, nn.Dropout, IndexSelect}
    assert "of 760 weights" in repr(result)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            lambda: (*untrained(nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))), points(20, 1)),
            "model must hold a chain of layers: net must be .* got LayerNorm at '1'",
        ),
        (lambda: (*untrained(), ({"x": points(20, 1)[0]}, points(20, 1)[1])), "data: x must be one tensor, got dict"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        prune(*arguments(), 1.0)


def test_a_path_of_one_cut_is_refused():
    with pytest.raises(ValueError, match="num_cuts must be at least 2, got 1"):
        prune(*untrained(), points(20, 1), 1.0, num_cuts=1)


def kept(cut):
    """What is kept, as a set."""
    sides = {"outputs": cut.outputs, "inputs": cut.inputs}
    return {
        (s, layer, i) for s, side in sides.items() for layer, m in side.items() for i in m.nonzero().flatten().tolist()
    }


def test_cuts_over_all_layers_take_away_the_lowest_scores_of_all():
    scores = Scores(outputs={"0": torch.tensor([5.0, 1.0, 3.0])}, inputs={"0": torch.tensor([2.0, 4.0])})
    cuts = nested_cuts(scores, 50, per_layer=False)
    assert [cut.outputs["0"].int().tolist() for cut in cuts] == [[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 0, 0]]
    # The input with score 4 is the best of its layer, and is kept.
    assert [cut.inputs["0"].int().tolist() for cut in cuts] == [[1, 1], [1, 1], [0, 1], [0, 1]]


def test_cuts_per_layer_take_away_the_same_share_of_each():
    cuts = nested_cuts(Scores(outputs={"0": torch.arange(8.0), "1": -100 * torch.arange(4.0)}), 50, per_layer=True)
    for cut in cuts:
        shares = [float(mask.float().mean()) for mask in cut.outputs.values()]
        assert abs(shares[0] - shares[1]) <= 1 / 4
    assert [len(kept(cut)) for cut in cuts] == [12, 10, 9, 7, 6, 4, 3, 2]


@given(
    st.lists(
        st.lists(st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.integers(2, 12),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_cuts_are_nested_from_everything_to_one_unit_of_each_layer(layers, num_cuts, per_layer):
    values = [torch.tensor(layer) for layer in layers]
    outputs, inputs = ({str(i): layer for i, layer in enumerate(values) if i % 2 == side} for side in (0, 1))
    cuts = nested_cuts(Scores(outputs, inputs), num_cuts, per_layer=per_layer)
    assert 1 <= len(cuts) <= num_cuts
    sets = [kept(cut) for cut in cuts]
    assert len(sets[0]) == sum(map(len, layers))
    assert all(later < earlier for earlier, later in pairwise(sets))
    for layer, mask in [*cuts[-1].outputs.items(), *cuts[-1].inputs.items()]:
        assert mask.sum() == 1
        assert values[int(layer)][mask] == max(layers[int(layer)])


def test_the_last_cut_keeps_the_best_pair_by_the_scores():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[0].weight.data[2] = 100  # Its norm would speak for unit 2.
    scores = Scores(outputs={"0": torch.tensor([9.0, 1.0, 3.0])}, inputs={"1": torch.tensor([0.0, 2.0, 1.0])})
    last = nested_cuts(scores, 50, per_layer=False)[-1]
    with pytest.warns(UserWarning, match="layer '0' would be cut to nothing; its unit 1 is kept"):
        record = evaluate_cut(net, last, lambda small: 0.0, (2,), scores)
    assert record.cut.outputs["0"].tolist() == [False, True, False]
    assert torch.equal(cut_network(net, record.cut)[0].weight, net[0].weight[[1]])
