# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scores of weights under a posterior, and the importance that Torch-Pruning reads from them."""

import importlib
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch_pruning
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, BayesianModule
from pyro_radial.compression import PosteriorImportance
from pyro_radial.compression.scores import Scores, tensor_scores
from pyro_radial.nn.priors import RadialDirectionalPrior
from pyro_radial.nn.priors.radial_directional import TensorSites
from tests.helpers.networks import Net

IMAGES = torch.zeros(1, 2, 3, 3)


def guided(prior, family, net=None, **kwargs):
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)) if net is None else net
    guide = family(BayesianModule(net, prior), **kwargs)
    guide.setup(IMAGES)
    return guide


def randomized(guide):
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return guide


@pytest.mark.parametrize(
    ("grouping", "rows", "columns"),
    [("row", {"0": 3, "2": 2}, {}), ("column", {}, {"0": 2, "2": 12}), ("double", {"0": 3, "2": 2}, {"0": 2, "2": 12})],
)
def test_radii_of_rows_and_columns_are_scored_where_the_prior_has_them(grouping, rows, columns):
    scores = tensor_scores(guided(RadialDirectionalPrior(grouping), AutoRadialDirectional))
    assert {layer: len(values) for layer, values in scores.rows.items()} == rows
    assert {layer: len(values) for layer, values in scores.columns.items()} == columns


@pytest.mark.parametrize("shared", [True, False])
def test_the_score_is_the_log_mode_of_the_radius_plus_the_log_length_of_the_mean_direction(shared):
    guide = randomized(guided(RadialDirectionalPrior("row"), AutoRadialDirectional, shared_concentration=shared))
    posterior = guide.posterior()
    # The mode by search, so that no formula of the library's is on both sides.
    sites = TensorSites("0.weight").local_radius("row")
    a, b = (posterior[site].base_dist for site in (sites.gamma, sites.inverse_gamma))
    root = dist.LogNormal(0.5 * (a.mean + b.mean), 0.5 * (a.variance + b.variance).sqrt())
    grid = torch.linspace(-6.0, 4.0, 200_001, dtype=torch.float64)
    mode = grid[root.log_prob(grid.exp()[:, None]).argmax(0)]
    length = posterior["0.weight.direction"].mean.norm(dim=-1).log()
    torch.testing.assert_close(tensor_scores(guide).rows["0"].double(), mode + length, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", [AutoRadial, AutoMeanField])
def test_other_posteriors_are_scored_by_their_signal_to_noise_ratio(family):
    guide = randomized(guided(dist.Normal(0.0, 1.0), family))
    draws = guide.posterior()["0.weight"].sample((1_000,))
    mean = guide.median()["0.weight"]
    noise = (draws - mean).square().mean(0)
    scores = tensor_scores(guide)
    for values, dims in ((scores.rows["0"], (1, 2, 3)), (scores.columns["0"], (0, 2, 3))):
        expected = 0.5 * (mean.square().sum(dims) / noise.sum(dims)).log()
        # The noise of a radial distribution is a mean of squares of one normal radius, so its relative error is
        # sqrt(2 / 1000).
        torch.testing.assert_close(values, expected, atol=4 * 0.5 * (2 / 1_000) ** 0.5, rtol=0)


def skip():
    """Two layers write four channels, and three read them."""

    def call(net, x):
        stream = net.linear1(x)
        stream = (stream + net.linear2(stream)).unsqueeze(-1)
        return net.conv(stream) + net.transposed(stream)

    layers = {"conv": nn.Conv1d(4, 2, 1), "transposed": nn.ConvTranspose1d(4, 2, 1)}
    return Net(call, linear1=nn.Linear(3, 4), linear2=nn.Linear(4, 4), **layers)


def with_scores(net, scores):
    importance = PosteriorImportance(net, guided(dist.Normal(0.0, 1.0), AutoMeanField))
    importance.scores = scores
    importance._names = {module: name for name, module in net.named_modules()}
    return importance


def first_group(net, x):
    """The channels that the first layer writes; the last layer's come first."""
    return [*torch_pruning.DependencyGraph().build_dependency(net, (x,)).get_all_groups()][-1]


def test_a_channel_has_the_mean_of_the_largest_score_that_writes_it_and_the_largest_that_reads_it():
    rows = {"linear1": torch.tensor([1.0, 2.0, 3.0, 4.0]), "linear2": torch.tensor([5.0, 0.0, 0.0, 0.0])}
    columns = {"linear2": torch.tensor([0.0, 0.0, 0.0, 9.0]), "conv": torch.tensor([1.0, 7.0, 1.0, 1.0])}
    # The inputs of a transposed convolution are the rows of its weight.
    rows["transposed"] = torch.tensor([0.0, 0.0, 3.0, 0.0])
    net = skip()
    group = first_group(net, torch.zeros(2, 3))
    scores = with_scores(net, Scores(rows, columns))(group)
    assert scores.tolist() == [(5 + 1) / 2, (2 + 7) / 2, (3 + 3) / 2, (4 + 9) / 2]
    assert with_scores(net, Scores({"linear2": rows["linear2"]}, {}))(group).tolist() == [5, 0, 0, 0]
    assert with_scores(net, Scores({}, {}))(group) is None


def test_a_channel_of_several_inputs_has_the_largest_of_their_scores():
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))
    scores = Scores({}, {"2": torch.arange(12.0)})
    assert with_scores(net, scores)(first_group(net, IMAGES)).tolist() == [3, 7, 11]


def test_the_pruners_of_torch_pruning_take_it():
    net = nn.Sequential(nn.Conv2d(2, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    guide = randomized(guided(RadialDirectionalPrior("row"), AutoRadialDirectional, net))
    importance = PosteriorImportance(net, guide)
    best = importance.scores.rows["0"].argsort()[4:].sort().values
    weight = net[0].weight[best]
    pruner = torch_pruning.BasePruner(net, IMAGES, importance, pruning_ratio=0.5, ignored_layers=[net[3]])
    pruner.step()
    assert torch.equal(net[0].weight, weight)
    with pytest.raises(ValueError, match=r"got 4 for 8 in dim 0 of the weight of '0': prune in one step"):
        importance(first_group(net, IMAGES))


@pytest.mark.parametrize(
    ("make_guide", "message"),
    [
        (
            lambda: AutoMeanField(lambda: pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))),
            "guide must have a weight tensor among its sites",
        ),
        (lambda: AutoNormal(lambda: None), r"guide must be a guide of this library, .* got AutoNormal"),
    ],
)
def test_guides_without_scores_are_refused(make_guide, message):
    guide = make_guide()
    if isinstance(guide, AutoMeanField):
        guide.setup()
    with pytest.raises(ValueError, match=message):
        PosteriorImportance(nn.Linear(2, 2), guide)


def test_without_torch_pruning_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    monkeypatch.delitem(sys.modules, "pyro_radial.compression")
    with pytest.raises(ImportError, match=r"Torch-Pruning: pip install 'pyro-radial\[pruning\]'"):
        importlib.import_module("pyro_radial.compression")
