# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Cuts along a path by the loss."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pyro_radial.compression.graph import count_flops, count_weights
from pyro_radial.compression.prune import cut_path, evaluate_path
from pyro_radial.compression.scores import Scores
from pyro_radial.compression.surgery import cut_network

INF = math.inf


def kept(cut):
    """What is kept, as a set."""
    sides = {"outputs": cut.outputs, "inputs": cut.inputs}
    return {
        (s, layer, i) for s, side in sides.items() for layer, m in side.items() for i in m.nonzero().flatten().tolist()
    }


def test_path_over_all_layers_takes_away_the_lowest_scores_of_all():
    scores = Scores(outputs={"0": torch.tensor([5.0, 1.0, 3.0])}, inputs={"0": torch.tensor([2.0, 4.0])})
    path = cut_path(scores)
    assert [cut.outputs["0"].int().tolist() for cut in path] == [[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 0, 0]]
    # The input with score 4 is the best of its layer, and is kept.
    assert [cut.inputs["0"].int().tolist() for cut in path] == [[1, 1], [1, 1], [0, 1], [0, 1]]


def test_path_per_layer_takes_away_the_same_share_of_each():
    scores = Scores(outputs={"0": torch.arange(8.0), "1": -100 * torch.arange(4.0)})
    for cut in cut_path(scores, per_layer=True):
        shares = [float(mask.float().mean()) for mask in cut.outputs.values()]
        assert abs(shares[0] - shares[1]) <= 1 / 4
    assert [len(kept(cut)) for cut in cut_path(scores, per_layer=True)] == [12, 10, 9, 7, 6, 4, 3, 2]


@given(
    st.lists(
        st.lists(st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=6), min_size=1, max_size=4
    ),
    st.integers(2, 12),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_path_is_nested_from_everything_to_one_unit_of_each_layer(layers, num_cuts, per_layer):
    values = [torch.tensor(layer) for layer in layers]
    outputs, inputs = ({str(i): layer for i, layer in enumerate(values) if i % 2 == side} for side in (0, 1))
    path = cut_path(Scores(outputs, inputs), num_cuts=num_cuts, per_layer=per_layer)
    assert 1 <= len(path) <= num_cuts
    sets = [kept(cut) for cut in path]
    assert len(sets[0]) == sum(map(len, layers))
    assert all(later < earlier for earlier, later in pairwise(sets))
    last = [*path[-1].outputs.values(), *path[-1].inputs.values()]
    assert all(mask.sum() == 1 for mask in last)
    for layer, mask in [*path[-1].outputs.items(), *path[-1].inputs.items()]:
        assert values[int(layer)][mask] == max(layers[int(layer)])


def test_cuts_are_spread_evenly():
    path = cut_path(Scores(outputs={"0": torch.randn(101)}), num_cuts=11)
    assert [len(kept(cut)) for cut in path] == [101, 91, 81, 71, 61, 51, 41, 31, 21, 11, 1]
    assert len(cut_path(Scores(outputs={"0": torch.zeros(4)}))) == 2


def test_path_of_one_cut_is_refused():
    with pytest.raises(ValueError, match="num_cuts must be at least 2, got 1"):
        cut_path(Scores(outputs={"0": torch.zeros(2)}), num_cuts=1)


def test_each_cut_of_a_path_is_evaluated_once_with_the_sizes_of_the_cut_network(capsys):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    path = cut_path(Scores(outputs={"0": torch.randn(6)}, inputs={"0": torch.randn(4)}))
    seen = []

    def loss(small):
        seen.append(small)
        return torch.tensor(float(len(seen)))

    records = evaluate_path(net, path, loss, (4,))
    assert "cuts: 100%" in capsys.readouterr().err
    for record, cut in zip(records, path, strict=True):
        assert record.cut.outputs["0"].tolist() == record.cut.inputs["2"].tolist() == cut.outputs["0"].tolist()
    assert [record.loss for record in records] == list(range(1, len(path) + 1))
    for record, small in zip(records, seen, strict=True):
        assert repr(small) == repr(cut_network(net, record.cut))
        assert (record.weights, record.flops) == (count_weights(small).total, count_flops(small, (4,)).total)
    assert all(type(record.loss) is float for record in records)
    evaluate_path(net, path, loss, (4,), progress=False)
    assert capsys.readouterr().err == ""


def test_end_of_a_path_keeps_the_best_pair_by_the_scores():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[0].weight.data[2] = 100  # Its norm would speak for unit 2.
    scores = Scores(outputs={"0": torch.tensor([9.0, 1.0, 3.0])}, inputs={"1": torch.tensor([0.0, 2.0, 1.0])})
    with pytest.warns(UserWarning, match="layer '0' would be cut to nothing; its unit 1 is kept"):
        last = evaluate_path(net, cut_path(scores), lambda small: 0.0, (2,), scores, progress=False)[-1]
    assert last.cut.outputs["0"].tolist() == [False, True, False]
    assert torch.equal(cut_network(net, last.cut)[0].weight, net[0].weight[[1]])


def test_a_path_finds_the_units_that_matter():
    # Only two of the eight hidden units do anything; the scores know, with noise.
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        net[2].weight[:, 2:] *= 1e-4
    scores = Scores(outputs={"0": net[2].weight[0].abs().log() + 0.1 * torch.randn(8)})
    x = torch.randn(200, 3)
    y = net(x).detach()
    records = evaluate_path(
        net, cut_path(scores), lambda small: (small(x) - y).square().mean().item(), (3,), progress=False
    )
    best = min((record for record in records if record.loss <= 1e-5), key=lambda record: record.weights)
    assert best.cut.outputs["0"].tolist() == [True] * 2 + [False] * 6
