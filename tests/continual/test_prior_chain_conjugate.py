# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Chains of regressions that are linear in their weights, whose best posteriors are known in closed form."""

from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import biject_to, constraints
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_radial import AutoRadial, BayesianModule, PriorChain, SupervisedModel, TermsELBO, fit
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.nn import likelihoods

INPUTS, OUTPUTS, ROWS, NOISE, STEPS = 4, 2, 25, 0.5, 120
SHAPE = (OUTPUTS, INPUTS)


def stream(num_batches=3):
    """Batches ``([rows, inputs], [rows, outputs])``, with features that are correlated, so that weights are too."""
    mixed = torch.eye(INPUTS, dtype=torch.double) + 0.25
    x = torch.randn(num_batches, ROWS, INPUTS, dtype=torch.double) @ mixed
    y = x @ (0.5 * torch.randn(INPUTS, OUTPUTS, dtype=torch.double))
    return list(zip(x, y + NOISE * torch.randn_like(y), strict=True))


def standard():
    """The first prior."""
    return torch.zeros(SHAPE, dtype=torch.double), torch.ones(SHAPE, dtype=torch.double)


def exact(x, y, mean, variance):
    """Mean ``[outputs, inputs]`` and precision ``[outputs, inputs, inputs]`` given rows and a prior by element."""
    precision = torch.diag_embed(1 / variance) + x.T @ x / NOISE**2
    pull = mean / variance + y.T @ x / NOISE**2
    return torch.linalg.solve(precision, pull.unsqueeze(-1)).squeeze(-1), precision


def mean_field(x, y, mean, variance):
    """The nearest normal by element: the exact mean, and variances from the diagonal of the precision."""
    mean, precision = exact(x, y, mean, variance)
    return mean, 1 / precision.diagonal(dim1=-2, dim2=-1)


@pytest.mark.parametrize("weight", [1.0, 2.5])
def test_a_weight_counts_the_data_of_each_task_but_the_first_as_often(weight):
    batches = stream()
    chain = PriorChain(lambda: None, weight=weight)
    mean, variance = standard()
    for x, y in batches:
        mean, variance = mean_field(x, y, mean, variance)
        chain.advance({"weight": dist.Normal(mean, variance.sqrt()).to_event(2)})
        torch.testing.assert_close(chain.prior["weight"].mean, mean)
        mean, variance = chain.prior["weight"].mean, chain.prior["weight"].variance
    times = [1.0] + [weight] * (len(batches) - 1)
    counted = 1.0 + sum(n * x.square().sum(0) / NOISE**2 for n, (x, _) in zip(times, batches, strict=True))
    torch.testing.assert_close(1.0 / variance, counted.expand(SHAPE))


def test_a_weight_leaves_a_precision_that_fell_and_the_site_s_own_support():
    chain = PriorChain(lambda: None, weight=3.0)
    for scale in (0.5, 2.0, 1.0):
        chain.advance({"z": dist.LogNormal(torch.tensor([0.3]), torch.tensor([scale])).to_event(1)})
        found = chain.prior["z"].base_dist
        # From 1 / 4 to 1, three times.
        expected = scale if scale != 1.0 else (0.25 + 3.0 * 0.75) ** -0.5
        assert float(found.scale) == pytest.approx(expected)
        assert float(found.loc) == pytest.approx(0.3)


@pytest.mark.parametrize("support", [constraints.positive, constraints.unit_interval, constraints.simplex])
def test_a_weight_counts_on_the_site_s_own_support(support):
    """Also if one posterior of a positive site is a log-normal and the next a normal under exp."""
    chain = PriorChain(lambda: None, weight=3.0)
    for precision in (1.0, 2.0):
        normal = dist.Normal(torch.tensor([0.3, 0.1]), precision**-0.5).to_event(1)
        chain.advance({"z": dist.TransformedDistribution(normal, [biject_to(support)])})
    torch.testing.assert_close(leaf(chain.prior["z"].base_dist).scale, torch.full((2,), 4.0**-0.5))
    if support is constraints.positive:
        chain.advance({"z": dist.LogNormal(torch.zeros(2), 5.0**-0.5).to_event(1)})
        torch.testing.assert_close(chain.prior["z"].base_dist.scale, torch.full((2,), 7.0**-0.5))


def test_a_weight_needs_normals_under_the_same_transforms():
    chain = PriorChain(lambda: None, weight=3.0)
    normal = dist.TransformedDistribution(dist.Normal(0.0, 1.0), [biject_to(constraints.interval(0.0, 2.0))])
    chain.advance({"z": normal})
    other = dist.TransformedDistribution(dist.Normal(0.0, 0.5), [biject_to(constraints.interval(0.0, 3.0))])
    with pytest.raises(ValueError, match=r"site 'z': weight must be 1\.0"):
        chain.advance({"z": other})


def test_a_chain_with_local_reparameterization_ends_at_the_mean_field_recursion():
    model = SupervisedModel(
        BayesianModule(nn.Linear(INPUTS, OUTPUTS, bias=False).double()),
        likelihoods.Gaussian(scale=NOISE),
        local_reparameterization=True,
    )
    chain = PriorChain(model, "normal")
    # Draws for each row are cheap, and leave a noise of a few hundredths of a standard deviation.
    loss = TermsELBO(64, vectorize_particles=True, max_plate_nesting=1, strict_kl=True)
    rates = {"optim": partial(torch.optim.Adam, lr=0.1), "scheduler": partial(CosineAnnealingLR, T_max=STEPS)}
    mean, variance = standard()
    for number, (x, y) in enumerate(stream(2)):
        guide = chain.guide(AutoRadial)
        fit(chain, guide, (x, y), epochs=STEPS, batch_size=len(x), loss=loss, seed=number, progress=False, **rates)
        chain.advance(guide)
        mean, variance = mean_field(x, y, mean, variance)
    chained = chain.prior["weight"]
    # In standard deviations of the recursion's end.
    assert ((chained.mean - mean) / variance.sqrt()).abs().max() < 0.1
    assert (chained.stddev / variance.sqrt() - 1).abs().max() < 0.1
