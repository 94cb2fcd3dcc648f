# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a likelihood refuses, and the argument it names."""

import math

import pyro.distributions as dist
import pytest
import torch

from pyro_radial.nn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    NegativeBinomial,
    Poisson,
)

N, B = 100, 8

LIKELIHOODS = [Categorical, Bernoulli, Gaussian, HeteroscedasticGaussian, Poisson, NegativeBinomial]


class TestBadInput:
    @pytest.mark.parametrize("label", [-1, 3, 7])
    def test_a_label_that_is_no_class_is_named(self, label):
        y = torch.tensor([0, 1, 2, 0, label, 1, 2, -5])
        message = rf"y must hold labels from 0 to 2, of 3 classes, for site 'y', got {label} at \[4\]"
        with pytest.raises(ValueError, match=message):
            Categorical(num_data=N)(torch.zeros(B, 3), y)

    @pytest.mark.parametrize("make", [Poisson, NegativeBinomial])
    @pytest.mark.parametrize("count", [-1.0, 1.5])
    def test_what_is_no_count_is_named(self, count, make):
        y = torch.zeros(B, 2)
        y[4, 1] = count
        with pytest.raises(ValueError, match=rf"y must hold counts, .* for site 'y', got {count} at \[4, 1\]"):
            make(num_data=N)(torch.zeros(B, 2), y)

    @pytest.mark.parametrize("make", LIKELIHOODS)
    def test_more_targets_than_num_data_is_named(self, make):
        f, y = torch.zeros(B, 2), torch.zeros(B, dtype=torch.long)
        y = y if make is Categorical else y[:, None].expand(B, 1 if make is HeteroscedasticGaussian else 2)
        with pytest.raises(ValueError, match=f"num_data must be at least {B}, the number of targets in y, got {B - 1}"):
            make(num_data=B - 1)(f, y)
        make(num_data=B - 1)(f)

    @pytest.mark.parametrize("concentration", [0.0, -1.0, math.inf, math.nan, "2"])
    def test_a_concentration_that_is_not_positive_and_finite_is_named(self, concentration):
        with pytest.raises(ValueError, match="concentration must be"):
            NegativeBinomial(concentration=concentration)

    def test_an_odd_heteroscedastic_output_is_named(self):
        with pytest.raises(ValueError, match=r"even size.* site 'f'"):
            HeteroscedasticGaussian(num_data=N)(torch.zeros(B, 3))

    @pytest.mark.parametrize(
        ("likelihood", "f_shape", "y_shape"),
        [
            (Gaussian(num_data=N), (B, 2), (B,)),
            (Gaussian(num_data=N), (B, 1), (1, B)),
            (Gaussian(num_data=N), (B, 1), (B, 2)),
            (Gaussian(num_data=N, event_dim=0), (B,), (B, 1)),
            (Gaussian(num_data=N), (B, 1), (B + 1, 1)),
            (Bernoulli(num_data=N), (B, 2), (B, 3)),
            (Poisson(num_data=N), (3, B, 1), (3, B, 1)),
            (HeteroscedasticGaussian(num_data=N), (B, 2), (B, 2)),
        ],
    )
    def test_targets_of_a_wrong_shape_are_named(self, likelihood, f_shape, y_shape):
        with pytest.raises(ValueError, match=r"y must have shape .* site 'y'"):
            likelihood(torch.zeros(f_shape), torch.zeros(y_shape))

    @pytest.mark.parametrize(
        ("likelihood", "y"),
        [
            (Gaussian(num_data=N), torch.zeros(B, 5, 3)),
            (Poisson(num_data=N), torch.zeros(B, 5)),
            (Categorical(num_data=N), torch.zeros(B, 5).long()),
        ],
    )
    def test_targets_of_sequences_say_which_event_dim_takes_them(self, likelihood, y):
        with pytest.raises(ValueError, match=r"y must have shape .*; if .* set event_dim=2 in the likelihood"):
            likelihood(torch.zeros(B, 5, 3), y)

    @pytest.mark.parametrize("beside", [{"scale": 1.0}, {"learn_scale": True}])
    def test_two_kinds_of_noise_are_refused(self, beside):
        with pytest.raises(ValueError, match="precision_prior"):
            Gaussian(num_data=N, precision_prior=dist.Gamma(6.0, 6.0), **beside)

    @pytest.mark.parametrize("distribution", [dist.Normal(0.0, 1.0), dist.Gamma(torch.ones(2), 1.0)])
    def test_a_precision_prior_that_is_no_distribution_of_one_positive_number_is_named(self, distribution):
        with pytest.raises(ValueError, match="precision_prior must"):
            Gaussian(num_data=N, precision_prior=distribution)
