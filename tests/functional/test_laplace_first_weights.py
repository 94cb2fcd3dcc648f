# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""First weights at the length scales of a prior."""

import pytest
import torch
from pyro.contrib.gp.kernels import RBF, Matern52
from torch import nn

from pyro_radial.functional import GaussianProcess, ImplicitProcess, init_to_prior

LENGTHS = torch.tensor([0.2, 3.0, 500.0])
UNITS = 4_000


def points():
    torch.manual_seed(0)
    return torch.randn(80, 3) * torch.tensor([1.0, 0.5, 40.0]) + torch.tensor([0.0, 3.0, -10.0])


def started(prior, x):
    torch.manual_seed(1)
    return init_to_prior(nn.Sequential(nn.Linear(x.shape[1], UNITS), nn.Tanh(), nn.Linear(UNITS, 1)), prior, x)[
        0
    ].requires_grad_(False)


def test_every_unit_is_zero_at_one_of_the_points():
    x = points()
    first = started(GaussianProcess(RBF(3, lengthscale=LENGTHS)), x)
    nearest = first(x).abs().min(0).values
    assert float(nearest.max()) < 1e-4 * float(first.weight.abs().max() * x.abs().max())


def test_the_span_of_a_units_features_is_the_kernel_whatever_the_units_of_inputs():
    # Cosines with a uniform phase have the kernel as covariance (Rahimi and Recht, 2007); weights decide on it.
    x = points()
    kernel = RBF(3, lengthscale=LENGTHS)
    weight = started(GaussianProcess(kernel), x).weight
    phase = x @ weight.T + 6.2831853 * torch.rand(UNITS)
    features = (2.0 / UNITS) ** 0.5 * phase.cos()
    assert float((features @ features.T - kernel(x).detach()).abs().max()) < 6 / UNITS**0.5


def test_rougher_kernels_of_a_length_start_steeper_and_inputs_without_effect_or_spread_flat():
    x = points()
    x[:, 1] = 7.0
    smooth, rough = (
        started(GaussianProcess(kernel(1, lengthscale=torch.tensor(1.0), active_dims=[0])), x)
        for kernel in (RBF, Matern52)
    )
    assert float(smooth.weight[:, 0].std()) < float(rough.weight[:, 0].std()) < 1.5
    assert not smooth.weight[:, 1:].any()


@pytest.mark.parametrize(
    ("network", "prior", "message"),
    [
        (nn.Linear(2, 1), GaussianProcess(RBF(3)), r"start with a linear layer of inputs \[3\], got Linear"),
        (nn.Tanh(), GaussianProcess(RBF(3)), "got None"),
        (nn.Linear(3, 1), ImplicitProcess(lambda x, n: torch.zeros(n, len(x), 1)), "prior must have moments"),
    ],
)
def test_bad_input_is_named(network, prior, message):
    with pytest.raises(ValueError, match=message):
        init_to_prior(network, prior, points())
