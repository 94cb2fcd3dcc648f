# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A full or a low-rank covariance within an event: KLs, an exact posterior, chains, quantiles, and what it refuses."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from torch.distributions import kl_divergence

from pyro_radial import AutoMeanField, CompiledSVI, TermsELBO
from pyro_radial.continual import PriorChain
from pyro_radial.infer.autoguide import families

NUM_SAMPLES = 40_000
NOISE = 0.5


def fill(guide, seed=0):
    """Give the guide another mean and covariance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.double))


def guide_of(prior, rank=None, **plates):
    """A guide with a random covariance of the site ``w``, in double precision."""

    def model():
        with pyro.plate_stack("rows", plates.get("sizes", ())):
            pyro.sample("w", prior)

    guide = AutoMeanField(model, families={"w": families.MultivariateNormal(init_stddev=0.5, rank=rank)})
    guide.setup()
    fill(guide.double())
    return guide


def normal(*shape):
    loc = torch.randn(shape, dtype=torch.double)
    scale = 0.5 + torch.rand(shape, dtype=torch.double)
    return dist.Normal(loc, scale)


def full_normal(*batch):
    factor = torch.randn(*batch, 3, 3, dtype=torch.double).tril(-1) + 1.5 * torch.eye(3, dtype=torch.double)
    return dist.MultivariateNormal(torch.randn(*batch, 3, dtype=torch.double), scale_tril=factor)


PRIORS = {
    "vector": normal(3).to_event(1),
    "rows in a plate": normal(2, 3).to_event(1),
    "matrix": normal(2, 3).to_event(2),
    "matrices in a plate": normal(4, 2, 3).to_event(2),
    "single numbers": normal(3),
    "full covariance": full_normal(),
    "full covariances in a plate": full_normal(2),
    "log-normal": dist.LogNormal(torch.zeros(3, dtype=torch.double), 0.7).to_event(1),
    "log-normal matrix": dist.LogNormal(torch.zeros(2, 3, dtype=torch.double), 0.7).to_event(2),
}


@pytest.mark.parametrize("rank", [None, 1, 3])
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_the_kl_is_closed_and_the_mean_difference_of_log_densities(prior, rank):
    q = guide_of(prior, rank, sizes=prior.batch_shape).posterior()["w"]
    kl = kl_divergence(q, prior)
    draws = q.sample((NUM_SAMPLES,))
    difference = q.log_prob(draws) - prior.log_prob(draws)
    error = difference.std(0) / NUM_SAMPLES**0.5
    assert kl.shape == prior.batch_shape
    assert (kl >= 0).all()
    assert ((difference.mean(0) - kl).abs() <= 4.0 * error).all()


def test_a_linear_regression_has_its_exact_posterior():
    """Two nearly equal inputs make coefficients with a correlation of about -0.95."""
    torch.manual_seed(1)
    shared = torch.randn(30, 1)
    x = torch.cat([shared + 0.25 * torch.randn(30, 2), torch.randn(30, 1)], -1)
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + NOISE * torch.randn(30)

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("rows", 30):
            pyro.sample("y", dist.Normal((x * w).sum(-1), NOISE), obs=y)

    precision = torch.eye(3) + x.mT @ x / NOISE**2
    covariance = precision.inverse()
    mean = covariance @ (x.mT @ y) / NOISE**2
    assert covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt() < -0.9
    guide = AutoMeanField(model, families={"w": families.MultivariateNormal()})
    steps = 350
    optim = pyro.optim.ClippedAdam({"lr": 0.3, "lrd": 0.0003 ** (1 / steps)})
    loss = TraceMeanField_ELBO(num_particles=16, vectorize_particles=True)
    svi = CompiledSVI(model, guide, optim, loss, compile=False)
    for _ in range(steps):
        svi.step()
    posterior = guide.posterior()["w"]
    # In units of the posterior: the noise of the last steps is a few percent of a standard deviation.
    units = covariance.diagonal().sqrt()
    torch.testing.assert_close((posterior.mean - mean) / units, torch.zeros(3), rtol=0, atol=0.1)
    scale = units[:, None] * units
    torch.testing.assert_close(posterior.covariance_matrix / scale, covariance / scale, rtol=0, atol=0.1)
    # The marginals' quantiles; independent elements would be three times narrower.
    quantiles = guide.quantiles([0.05, 0.95])["w"]
    expected = dist.Normal(posterior.mean, posterior.stddev).icdf(torch.tensor([[0.05], [0.95]]))
    torch.testing.assert_close(quantiles, expected)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
@pytest.mark.parametrize("form", ["normal", "exact"])
def test_a_chain_takes_it_and_starts_from_it(form, shape, rank):
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))

    chain = PriorChain(model, form)
    full = {"w": families.MultivariateNormal(rank=rank)}
    guide = chain.guide(AutoMeanField, families=full)
    guide.setup()
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    chain.advance(guide)
    following = chain.guide(AutoMeanField, families=full)
    following.setup()
    found = following.posterior()["w"]
    before = guide.posterior()["w"]
    draws = before.sample((5,))
    if form == "exact":
        torch.testing.assert_close(found.log_prob(draws), before.log_prob(draws), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(chain.prior["w"].log_prob(draws), before.log_prob(draws), rtol=1e-4, atol=1e-4)
    else:
        expected = following.quantiles([0.1, 0.5])["w"]
        torch.testing.assert_close(guide.quantiles([0.1, 0.5])["w"], expected, rtol=1e-4, atol=1e-4)
    loss = TermsELBO(strict_kl=form == "normal" or len(shape) == 1).loss(chain, following)
    assert math.isfinite(loss)


def test_a_start_at_another_covariance_keeps_means_and_widths():
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))

    rows = dist.MultivariateNormal(torch.ones(2, 3), scale_tril=torch.eye(3).expand(2, 3, 3) * 0.3).to_event(1)
    for scales, expected in ((True, 0.3), (False, 0.1)):
        guide = AutoMeanField(model, families={"w": families.MultivariateNormal()})
        guide.start_at({"w": rows}, scales=scales)
        guide.setup()
        median, upper = guide.quantiles([0.5, 0.841345])["w"]
        torch.testing.assert_close(median, torch.ones(2, 3))
        torch.testing.assert_close(upper - median, torch.full((2, 3), expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_mini_batch_takes_the_covariances_of_its_rows(rank):
    def row_plate(rows):
        return pyro.plate("rows", 6, subsample=rows)

    def model(rows):
        with row_plate(rows):
            pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    own = {"w": families.MultivariateNormal(rank=rank)}
    guide = AutoMeanField(model, families=own, create_plates=row_plate)
    guide.setup(torch.arange(6))
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    rows = torch.tensor([4, 1])
    drawn = pyro.poutine.trace(guide).get_trace(rows).nodes["w"]["fn"]
    torch.testing.assert_close(drawn.covariance_matrix, guide.posterior()["w"].covariance_matrix[rows])


def test_an_event_that_is_too_large_is_refused_by_name():
    def model(size):
        with pyro.plate("rows", 2):
            pyro.sample("w", dist.Normal(torch.zeros(size), 1.0).to_event(1))

    guide = AutoMeanField(model, families={"w": families.MultivariateNormal()})
    with pytest.raises(
        ValueError, match=r"site 'w' must have at most 1,000 elements in .*, got 1,001: give it a rank, as M"
    ):
        guide.setup(1_001)
    with pytest.raises(ValueError, match="got 500,000"):
        guide.setup(500_000)
    guide.setup(3)


def test_steps_of_svi_and_its_own_losses_agree():
    def model(y):
        w = pyro.sample("w", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(w, 0.5).to_event(1), obs=y)

    y = torch.tensor([1.0, 2.0])
    guide = AutoMeanField(model, families={"w": families.MultivariateNormal()})
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceMeanField_ELBO())
    for _ in range(10):
        svi.step(y)
    losses = []
    for loss in (TraceMeanField_ELBO(), TermsELBO(strict_kl=True)):
        pyro.set_rng_seed(3)
        losses.append(float(loss.loss(model, guide, y)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_low_rank_covariance_is_that_of_its_parameters():
    prior = normal(2, 3).to_event(2)
    guide = guide_of(prior, rank=2)
    scale = guide.scales.w.detach().flatten()
    factor = scale[:, None] * guide.factors.w.detach()
    covariance = scale.square().diag() + factor @ factor.mT
    q = guide.posterior()["w"]
    draws = q.sample((NUM_SAMPLES,)).flatten(1)
    expected = dist.MultivariateNormal(guide.median()["w"].flatten(), covariance).log_prob(draws)
    torch.testing.assert_close(q.log_prob(draws.unflatten(1, (2, 3))), expected)
    median, upper = guide.quantiles([0.5, 0.841344746])["w"]
    torch.testing.assert_close((upper - median).flatten(), covariance.diagonal().sqrt(), rtol=1e-6, atol=0)


def test_a_low_rank_starts_at_the_standard_deviation_asked_for():
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(2_000), 1.0).to_event(1))

    guide = AutoMeanField(model, families={"w": families.MultivariateNormal(init_stddev=0.3, rank=5)})
    guide.setup()
    torch.testing.assert_close(guide.posterior()["w"].stddev, torch.full((2_000,), 0.3))


def test_the_kl_of_a_large_event_needs_no_covariance_and_is_that_of_a_full_one():
    loc = torch.randn(300, dtype=torch.double)
    q = dist.LowRankMultivariateNormal(loc, torch.randn(300, 4, dtype=torch.double), 0.1 + torch.rand(300).double())
    p = dist.Normal(torch.zeros(300, dtype=torch.double), 2.0).to_event(1)
    full = dist.MultivariateNormal(loc, q.covariance_matrix)
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(full, p))
    large = dist.LowRankMultivariateNormal(torch.zeros(100_000), torch.ones(100_000, 2), torch.ones(100_000))
    assert kl_divergence(large, dist.Normal(torch.zeros(100_000), 1.0).to_event(1)).isfinite()


def test_a_low_rank_finds_the_wide_direction_of_a_posterior():
    """Only differences are observed, so the mean of the elements stays as wide as in the prior."""
    size = 4

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(size), 1.0).to_event(1))
        differences = w - w.mean(-1, keepdim=True)
        pyro.sample("y", dist.Normal(differences, 0.2).to_event(1), obs=torch.zeros(size))

    shared = torch.full((size, size), 1 / size)
    # A precision of 26 in all directions but one, where it is 1.
    covariance = (torch.eye(size) - shared) / 26 + shared
    pyro.set_rng_seed(0)
    guide = AutoMeanField(model, families={"w": families.MultivariateNormal(rank=1)})
    optim = pyro.optim.ClippedAdam({"lr": 0.3, "lrd": 0.0003 ** (1 / 400)})
    loss = TraceMeanField_ELBO(num_particles=64, vectorize_particles=True)
    svi = CompiledSVI(model, guide, optim, loss, compile=False)
    for _ in range(400):
        svi.step()
    torch.testing.assert_close(guide.posterior()["w"].covariance_matrix, covariance, rtol=0, atol=0.05)


@pytest.mark.parametrize("rank", [0, -1, 2.5, "2"])
def test_a_rank_that_is_no_positive_count_is_named(rank):
    with pytest.raises(ValueError, match="rank must be"):
        families.MultivariateNormal(rank=rank)


def test_a_rank_above_the_elements_is_refused_by_site():
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))

    guide = AutoMeanField(model, families={"w": families.MultivariateNormal(rank=5)})
    with pytest.raises(ValueError, match="rank must be at most 4, the elements of an event of site 'w', got 5"):
        guide.setup()
