# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scores of units under a posterior."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, BayesianModule
from pyro_radial.compression.scores import Cut, Scores, unit_scores
from pyro_radial.nn.priors import RadialDirectionalPrior
from pyro_radial.nn.priors.radial_directional import TensorSites


def guided(prior, family, net=None, **kwargs):
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)) if net is None else net
    guide = family(BayesianModule(net, prior), **kwargs)
    guide.setup(torch.zeros(1, 2, 3, 3))
    return guide


def randomized(guide):
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return guide


class TestRadiiAndDirections:
    @pytest.mark.parametrize(
        ("grouping", "outputs", "inputs"),
        [("row", {"0": 3}, {}), ("column", {}, {"0": 2, "2": 12}), ("double", {"0": 3}, {"0": 2, "2": 12})],
    )
    def test_rows_score_outputs_and_columns_inputs_but_never_the_networks_outputs(self, grouping, outputs, inputs):
        scores = unit_scores(guided(RadialDirectionalPrior(grouping), AutoRadialDirectional))
        assert {layer: len(values) for layer, values in scores.outputs.items()} == outputs
        assert {layer: len(values) for layer, values in scores.inputs.items()} == inputs

    @pytest.mark.parametrize("shared", [True, False])
    def test_the_score_is_the_log_mode_of_the_radius_plus_the_log_length_of_the_mean_direction(self, shared):
        guide = randomized(guided(RadialDirectionalPrior("row"), AutoRadialDirectional, shared_concentration=shared))
        posterior = guide.posterior()
        # The mode by search, so that no formula of the library's is on both sides.
        sites = TensorSites("0.weight").local_radius("row")
        a, b = (posterior[site].base_dist for site in (sites.gamma, sites.inverse_gamma))
        root = dist.LogNormal(0.5 * (a.mean + b.mean), 0.5 * (a.variance + b.variance).sqrt())
        grid = torch.linspace(-6.0, 4.0, 200_001, dtype=torch.float64)
        mode = grid[root.log_prob(grid.exp()[:, None]).argmax(0)]
        length = posterior["0.weight.direction"].mean.norm(dim=-1).log()
        torch.testing.assert_close(unit_scores(guide).outputs["0"].double(), mode + length, atol=2e-4, rtol=0)


class TestSignalToNoise:
    @pytest.mark.parametrize("family", [AutoRadial, AutoMeanField])
    def test_it_is_that_of_a_row_and_of_a_column(self, family):
        guide = randomized(guided(dist.Normal(0.0, 1.0), family))
        draws = torch.stack([guide()["0.weight"] for _ in range(4_000)])
        mean = guide.median()["0.weight"]
        noise = (draws - mean).square().mean(0)
        scores = unit_scores(guide)
        for found, dims in ((scores.outputs["0"], (1, 2, 3)), (scores.inputs["0"], (0, 2, 3))):
            expected = 0.5 * (mean.square().sum(dims) / noise.sum(dims)).log()
            # The noise of a radial distribution is a mean of squares of one normal radius, so its relative error is
            # sqrt(2 / 4000).
            torch.testing.assert_close(found, expected, atol=4 * 0.5 * (2 / 4_000) ** 0.5, rtol=0)


def test_a_guide_without_weight_tensors_is_refused():
    guide = AutoMeanField(lambda: pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1)))
    guide.setup()
    with pytest.raises(ValueError, match="weight tensor"):
        unit_scores(guide)


def test_a_guide_without_a_posterior_is_refused():
    with pytest.raises(ValueError, match=r"guide must be a guide of this library, .* got AutoNormal"):
        unit_scores(AutoNormal(lambda: None))


@pytest.mark.parametrize("side", ["outputs", "inputs"])
@pytest.mark.parametrize("mask", [torch.tensor([1, 0]), torch.tensor([[True]]), torch.tensor([1.0])])
def test_masks_are_boolean_vectors(side, mask):
    with pytest.raises(ValueError, match=rf"{side}\['fc'\] must be a boolean vector"):
        Cut(**{side: {"fc": mask}})


@pytest.mark.parametrize("side", ["outputs", "inputs"])
@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.tensor([1, 2]), "one floating point number per unit"),
        (torch.zeros(2, 2), "one floating point number per unit"),
        (torch.zeros(0), "one floating point number per unit"),
        (torch.tensor([0.0, torch.nan]), "less than infinity, and not NaN"),
        (torch.tensor([0.0, torch.inf]), "less than infinity, and not NaN"),
    ],
)
def test_scores_are_vectors_of_numbers(side, scores, message):
    with pytest.raises(ValueError, match=rf"{side}\['fc'\] must be .*{message}"):
        Scores(**{side: {"fc": scores}})


def test_no_scores_are_refused():
    with pytest.raises(ValueError, match="must hold scores"):
        Scores()


def test_a_cut_says_how_many_units_it_keeps():
    cut = Cut(outputs={"0": torch.tensor([False, True, True])}, inputs={"0": torch.tensor([False, True])})
    assert repr(cut) == "Cut(outputs={'0': 2 of 3}, inputs={'0': 1 of 2})"
