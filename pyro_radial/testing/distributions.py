# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Test cases for every reparameterized distribution on real tensors."""

import copy
import pickle
from typing import Any

import pyro
import pytest
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

NUM_SAMPLES = 10_000
# A Monte Carlo estimate may be off by this many standard errors; about 50 comparisons fail by chance once in 300 runs.
STANDARD_ERRORS = 4.0
ROUNDING = 1e-12
# A central difference loses half of the bits of float64.
STEP = 1e-6
TOLERANCE = 1e-5


class DistributionTests:
    """Check shapes, samples, moments, entropy, gradients, ``expand`` and copies of a distribution.

    Inherit from it, define :meth:`make`, and let pytest collect the class.
    """

    def make(self, dtype: torch.dtype = torch.float64) -> Any:
        """Return a small example of the distribution with parameters of this dtype, with any batch and event shape."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _seed(self) -> None:
        pyro.set_rng_seed(0)

    @pytest.fixture(name="distribution")
    def _distribution(self) -> TorchDistribution:
        """Return the example in double precision."""
        return self.make(torch.float64)

    def test_samples_and_densities_have_the_shapes_pyro_expects(
        self, distribution: TorchDistribution
    ) -> None:
        batch = distribution.batch_shape
        shape = batch + distribution.event_shape
        for sample in (torch.Size(), torch.Size((2,)), torch.Size((2, 3))):
            value = distribution.rsample(sample)
            assert value.shape == sample + shape
            assert distribution.log_prob(value).shape == sample + batch
        assert distribution.entropy().shape == batch
        assert distribution.mean.shape == distribution.variance.shape == shape
        assert distribution.support.event_dim == distribution.event_dim  # type: ignore[union-attr]

    def test_samples_lie_in_the_support_and_carry_no_gradient(
        self, distribution: TorchDistribution
    ) -> None:
        value = distribution.sample(torch.Size((100,)))
        assert not value.requires_grad
        assert bool(distribution.support.check(value).all())  # type: ignore[union-attr]

    def test_a_seed_gives_the_same_sample_twice(self, distribution: TorchDistribution) -> None:
        pyro.set_rng_seed(1)
        draw = distribution.sample()
        pyro.set_rng_seed(1)
        assert torch.equal(draw, distribution.sample())

    def test_everything_has_the_dtype_of_the_parameters(self) -> None:
        for dtype in (torch.float32, torch.float64):
            distribution = self.make(dtype)
            value = distribution.rsample()
            assert value.dtype == distribution.log_prob(value).dtype == dtype
            assert distribution.entropy().dtype == dtype
            assert distribution.mean.dtype == distribution.variance.dtype == dtype

    def test_moments_match_samples(self, distribution: TorchDistribution) -> None:
        centered = distribution.sample(torch.Size((NUM_SAMPLES,))) - distribution.mean
        _assert_mean_is(centered, torch.zeros_like(distribution.mean))
        _assert_mean_is(centered.square(), distribution.variance)

    def test_entropy_is_the_mean_of_minus_the_log_density(
        self, distribution: TorchDistribution
    ) -> None:
        _assert_mean_is(
            -distribution.log_prob(distribution.sample(torch.Size((NUM_SAMPLES,)))),
            distribution.entropy(),
        )

    def test_gradient_of_the_log_density_matches_differences(
        self, distribution: TorchDistribution
    ) -> None:
        value = distribution.sample()
        direction = torch.randn_like(value)
        at = value.clone().requires_grad_()
        total = distribution.log_prob(at).sum()
        # A constant density has no gradient.
        gradient = (
            torch.autograd.grad(total, at)[0] if total.requires_grad else torch.zeros_like(at)
        )
        # The difference leaves a support without interior, such as a sphere.
        with pyro.validation_enabled(False):
            ahead = distribution.log_prob(value + STEP * direction).sum()
            behind = distribution.log_prob(value - STEP * direction).sum()
        change = (ahead - behind) / (2 * STEP)
        torch.testing.assert_close(
            (gradient * direction).sum(), change, rtol=TOLERANCE, atol=TOLERANCE
        )

    def test_expanding_repeats_the_distribution_and_leaves_the_original(
        self, distribution: TorchDistribution
    ) -> None:
        batch_shape = distribution.batch_shape
        larger = distribution.expand(torch.Size((5, *batch_shape)))
        expanded_twice = larger.expand(torch.Size((2, 5, *batch_shape)))
        assert distribution.batch_shape == batch_shape
        assert larger.batch_shape == (5, *batch_shape)
        assert expanded_twice.batch_shape == (2, 5, *batch_shape)
        assert type(larger) is type(distribution)
        value = expanded_twice.sample()
        assert value.shape == expanded_twice.batch_shape + distribution.event_shape
        torch.testing.assert_close(expanded_twice.log_prob(value), distribution.log_prob(value))
        # Each repeat has its own noise.
        assert not torch.equal(value[0], value[1])

    def test_copies_and_pickles_are_the_same_distribution(
        self, distribution: TorchDistribution
    ) -> None:
        value = distribution.sample()
        for twin in (copy.deepcopy(distribution), pickle.loads(pickle.dumps(distribution))):
            assert torch.equal(twin.log_prob(value), distribution.log_prob(value))


def _assert_mean_is(samples: Tensor, expected: Tensor) -> None:
    """Check that each element of the mean over the first dimension is within the standard errors."""
    error = samples.std(0) / len(samples) ** 0.5
    # A constant differs by rounding alone.
    assert bool(((samples.mean(0) - expected).abs() <= STANDARD_ERRORS * error + ROUNDING).all())
