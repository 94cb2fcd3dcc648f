# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks side by side are the same networks each alone, and the density that NUTS samples is the model's."""

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import nn

from benchmarks.guides import against_nuts, uci_nine
from benchmarks.guides._stacked import (
    StackedDirections,
    StackedNormals,
    side_by_side,
    stacked_directional,
    stacked_mean_field,
    stacked_model,
    stacked_radial,
)
from pyro_radial import AutoRadial, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn, RadialDirectionalPrior

NUMBER, INPUTS, HIDDEN, ROWS = 3, 4, 5, 7


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    parts = [[torch.randn(ROWS, width, generator=generator) for width in (INPUTS, 1)] for _ in range(NUMBER)]
    return side_by_side([x for x, _ in parts]), side_by_side([y[:, 0] for _, y in parts])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return stacked_model(ROWS, NUMBER, INPUTS, HIDDEN, noise=0.5, prior=StackedNormals(3.0))


def alone(guide, place):
    """The model and guide of one network, with the parameters of the stack."""
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    likelihood = likelihoods.Gaussian(num_data=ROWS, scale=0.5)
    own = SupervisedModel(BayesianModule(net, FanIn(3.0, 3.0)), likelihood)
    radial = AutoRadial(own)
    radial.setup(torch.zeros(1, INPUTS), torch.zeros(1, 1))
    for site, stacked in zip(("0.weight", "0.bias", "2.weight", "2.bias"), guide.posterior(), strict=True):
        for kind in ("locs", "scales"):
            value = guide.get_parameter(f"{kind}.{stacked}_unconstrained").detach()[place]
            name = f"{kind}.{site}_unconstrained"
            radial.get_parameter(name).data.copy_(value)
    return own, radial


def test_the_outputs_are_those_of_each_network_alone(model, rows):
    x, _ = rows
    trace = poutine.trace(model.bnn).get_trace(x)
    weights = {name: trace.nodes[name]["value"] for name in ("weight1", "bias1", "weight2", "bias2")}
    for place in range(NUMBER):
        hidden = (x[:, place] @ weights["weight1"][place].T + weights["bias1"][place]).relu()
        expected = hidden @ weights["weight2"][place].T + weights["bias2"][place]
        torch.testing.assert_close(trace.nodes["_RETURN"]["value"][:, place], expected[:, 0])


def test_each_network_has_radii_of_its_own(model, rows):
    guide = stacked_radial(model)
    guide.setup(*rows)
    posterior = guide.posterior()
    assert posterior["weight1"].base_dist.batch_shape == (NUMBER,)
    assert posterior["weight1"].base_dist.event_shape == (HIDDEN, INPUTS)
    assert posterior["bias1"].base_dist.event_shape == (HIDDEN,)


def test_the_divergence_is_the_sum_of_those_of_each_network_alone(model, rows):
    guide = stacked_radial(model)
    guide.setup(*rows)
    loss = RadialELBO(strict_kl=True)
    loss(model, guide)(*rows)
    total = loss.terms.kl
    parts = []
    for place in range(NUMBER):
        own, radial = alone(guide, place)
        one = RadialELBO(strict_kl=True)
        one(own, radial)(rows[0][:, place], rows[1][:, [place]])
        parts.append(one.terms.kl)
    torch.testing.assert_close(total, sum(parts))


def test_no_network_learns_from_the_rows_of_another(model, rows):
    x, y = rows
    guide = stacked_mean_field(model)
    guide.setup(x, y)
    other = y.clone()
    other[:, 1] += 10.0
    gradients = []
    for targets in (y, other):
        torch.manual_seed(0)
        loss = RadialELBO()(model, guide)(x, targets)
        parameters = [guide.get_parameter("locs.weight1_unconstrained"), *model.likelihood.parameters()]
        gradients.append(torch.autograd.grad(loss, parameters))
    for before, after in zip(*gradients, strict=True):
        torch.testing.assert_close(before[[0, 2]], after[[0, 2]])
        assert not torch.allclose(before[1], after[1])


def test_directions_and_radii_of_the_stack_have_the_density_of_those_of_each_network_alone(rows):
    x, y = rows
    model = stacked_model(ROWS, NUMBER, INPUTS, HIDDEN, noise=0.5, prior=StackedDirections(3.0))
    guide = stacked_directional(model, 0.99)
    guide.setup(x, y)
    torch.manual_seed(0)
    drawn = guide(x, y)
    # The nodes, since the density of the stack is not yet summed over the elements of a site.
    trace = poutine.trace(poutine.condition(model, data=drawn)).get_trace(x, y)
    trace.compute_log_prob()
    names = [name for name in drawn if name.startswith("weight1")]
    total = sum(trace.nodes[name]["log_prob_sum"] for name in names)
    parts, outputs = [], []
    for place in range(NUMBER):
        net = nn.Sequential(nn.Linear(INPUTS, HIDDEN, bias=False))
        own = BayesianModule(net, RadialDirectionalPrior("row"))
        data = {name.replace("weight1", "0.weight"): drawn[name][place] for name in names}
        alone = poutine.trace(poutine.condition(own, data=data)).get_trace(x[:, place])
        parts.append(alone.log_prob_sum())
        outputs.append(alone.nodes["_RETURN"]["value"])
    torch.testing.assert_close(total, sum(parts))
    site = "weight1.local_radius_gamma"
    assert guide.posterior()[site].event_shape == (NUMBER, HIDDEN)
    weights = drawn["weight1.direction"] * _radii(drawn, "local")[..., None] * _radii(drawn, "global")[:, None, None]
    torch.testing.assert_close(torch.stack(outputs, 1), torch.einsum("nki,khi->nkh", x, weights))


def _radii(drawn, kind):
    gamma, inverse_gamma = (drawn[f"weight1.{kind}_radius_{name}"] for name in ("gamma", "inverse_gamma"))
    return (gamma * inverse_gamma).sqrt()


def test_the_rate_of_the_last_steps_falls_and_the_loss_is_looked_at_there():
    losses = [10.0] * 20 + [1.0] * 10 + [0.5] * 10
    assert uci_nine.last_change([10.0] * 180 + [1.0] * 10 + [0.5] * 10) == -0.5
    assert uci_nine.curve(losses, 4) == [10.0, 10.0, 1.0, 0.5]
    assert len(uci_nine.curve([1.0, 2.0], 50)) == 50


def test_a_published_log_likelihood_may_contradict_its_rmse():
    samples = 0.7 * torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    reached = float(dist.Normal(0.0, 0.7).log_prob(samples).mean())
    assert uci_nine.normal_log_likelihood(0.7) == pytest.approx(reached, abs=0.01)
    assert uci_nine.contradicts(4.04, -7.54)
    assert not uci_nine.contradicts(0.66, -0.91)


@pytest.mark.parametrize("name", list(against_nuts.NETS))
def test_the_density_that_nuts_samples_is_the_model_s(name):
    data = against_nuts.data_of(against_nuts.NETS[name])
    density, function, number = against_nuts.energy(name, data)
    model = against_nuts.make_model(name, 0)
    prior = FanIn(against_nuts.GAIN)
    joints, energies = [], []
    for seed in range(2):
        weights = torch.randn(number, generator=torch.Generator().manual_seed(seed))
        values, start = {}, 0
        for site, parameter in against_nuts.make_network(name).named_parameters():
            own = weights[start : start + parameter.numel()].reshape(parameter.shape)
            values[site], start = own * prior(site, parameter).scale, start + parameter.numel()
        trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*data)
        torch.testing.assert_close(function(weights, data[0]), trace.nodes["f"]["value"])
        joints.append(trace.log_prob_sum())
        energies.append(density(weights))
    torch.testing.assert_close(joints[0] - joints[1], energies[1] - energies[0], rtol=1e-4, atol=1e-3)


def test_r_hat_is_one_of_equal_chains_and_more_of_others(tmp_path):
    from benchmarks.common import Results

    results = Results(tmp_path / "rows.json", {"draws": 200})
    for chain, shift in enumerate((0.0, 0.0)):
        row = {"half_means": [[shift], [shift]], "half_variances": [[1.0], [1.0]]}
        results.rows.append({"net": "equal", "method": "NUTS", "seed": chain} | row)
    for chain, shift in enumerate((0.0, 2.0)):
        row = {"half_means": [[shift], [shift]], "half_variances": [[1.0], [1.0]]}
        results.rows.append({"net": "far", "method": "NUTS", "seed": chain} | row)
    assert float(against_nuts.r_hat(results, "equal")) == pytest.approx(0.99**0.5)
    assert float(against_nuts.r_hat(results, "far")) == pytest.approx((0.99 + 4 / 3) ** 0.5)
