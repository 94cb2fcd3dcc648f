# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Even draws have the distribution one by one, and are more even together."""

import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from pyro_radial.distributions import RadialNormal
from pyro_radial.infer.prediction.even_draws import even_draws

LOC = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
SCALE = torch.tensor([[0.5, 1.0, 2.0], [0.1, 0.2, 0.3]])
DISTRIBUTIONS = {
    "normal": dist.Normal(LOC, SCALE).to_event(2),
    "radial": RadialNormal(LOC, SCALE, event_dim=2),
    "radial by row": RadialNormal(LOC, SCALE, event_dim=1).to_event(1),
    "multivariate normal": dist.MultivariateNormal(
        LOC.flatten(), torch.diag(SCALE.flatten() ** 2) + 0.003 * torch.ones(6, 6)
    ),
    "radial of one element": RadialNormal(LOC, SCALE, event_dim=0).to_event(2),
}


def many(distribution, number, blocks=4000):
    """Draw blocks of so many values, ``[blocks, number, ...]``."""
    torch.manual_seed(0)
    return torch.stack([even_draws(distribution, number) for _ in range(blocks)])


@pytest.mark.parametrize("number", [1, 2, 5, 8])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_each_draw_has_the_distribution(name, number):
    distribution = DISTRIBUTIONS[name]
    draws = many(distribution, number)
    assert draws.shape == (4000, number, *distribution.shape())
    torch.manual_seed(1)
    expected = distribution.sample((20_000,))
    for place in (0, number - 1):
        # An element, and the radius, which neighboring draws share.
        elements = draws[:, place].flatten(1)[:, 2], expected.flatten(1)[:, 2]
        samples = (draws[:, place].reshape(-1, 2, 3), expected.reshape(-1, 2, 3))
        radii = (((sample - LOC) / SCALE).flatten(1).norm(dim=1) for sample in samples)
        for ours, theirs in (elements, tuple(radii)):
            assert stats.ks_2samp(ours.numpy(), theirs.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_are_pairs_around_the_mean(name):
    torch.manual_seed(2)
    for number in (6, 7):
        draws = even_draws(DISTRIBUTIONS[name], number).reshape(number, 2, 3) - LOC
        pairs = number // 2
        assert torch.allclose(draws[:pairs], -draws[number - pairs :], atol=1e-6)
    # The single draw of an odd number has a partner nowhere.
    assert (draws[pairs] + draws).abs().amax((1, 2)).min() > 1e-3


def test_radii_fall_into_each_interval_once():
    torch.manual_seed(3)
    distribution = RadialNormal(torch.zeros(4, 50), torch.ones(4, 50), event_dim=1)
    radii = even_draws(distribution, 32)[:16].norm(dim=-1)
    interval = (2.0 * dist.Normal(0.0, 1.0).cdf(radii) - 1.0) * 16
    assert torch.equal(interval.floor().long().sort(0).values, torch.arange(16)[:, None].expand(16, 4))
    # Each row has an order of its own.
    assert not torch.equal(radii.argsort(0)[:, 0], radii.argsort(0)[:, 1])


def test_a_transform_takes_even_draws():
    torch.manual_seed(4)
    distribution = dist.LogNormal(torch.tensor([0.3, -0.5]), 0.2).to_event(1)
    draws = even_draws(distribution, 10)
    torch.testing.assert_close(draws[:5].log() + draws[5:].log(), torch.tensor([0.6, -1.0]).expand(5, 2))


def test_other_distributions_are_drawn_as_they_are():
    for distribution in (
        dist.Gamma(2.0, 1.0),
        dist.Delta(torch.ones(3)).to_event(1),
        dist.Normal(0.0, 1.0).expand([3]),
    ):
        torch.manual_seed(5)
        draws = even_draws(distribution, 4)
        torch.manual_seed(5)
        assert draws.shape == (4, *distribution.shape())
        if isinstance(distribution, dist.Gamma):
            assert torch.equal(draws, distribution.sample((4,)))


class UniformNoise(dist.Normal):
    """Has the mean and the standard deviation of a normal, and draws another noise."""

    def rsample(self, sample_shape=()):
        return self.loc + self.scale * 12**0.5 * (torch.rand(self._extended_shape(sample_shape)) - 0.5)

    def sample(self, sample_shape=()):
        return self.rsample(sample_shape).detach()


def test_a_subclass_of_the_normal_keeps_its_own_noise():
    draws = even_draws(UniformNoise(torch.zeros(100), torch.ones(100)).to_event(1), 50)
    assert draws.abs().max() <= 3**0.5


@pytest.mark.parametrize("name", ["normal", "radial"])
def test_means_of_functions_have_less_error(name):
    distribution = DISTRIBUTIONS[name]

    def error(draws):
        """The root mean square error of the mean of a function that is not linear."""
        values = (0.3 * draws[..., 0, 0]).exp() + draws[..., 1, 1].sin()
        return float((values.mean(1) - values.mean()).square().mean().sqrt())

    torch.manual_seed(6)
    independent = distribution.sample((4000, 8))
    assert error(many(distribution, 8)) < 0.5 * error(independent)
