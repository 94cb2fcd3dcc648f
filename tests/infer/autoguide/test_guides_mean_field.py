# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro
import pyro.distributions as dist
import torch

from pyro_radial import AutoMeanField
from tests.helpers.models import train_to_convergence


def test_it_reaches_the_exact_posterior_of_a_conjugate_model():
    # With one normal observation of variance 1 per weight and prior N(0, 1) the posterior is N(y / 2, 1 / 2).
    y = torch.tensor([1.0, -2.0, 0.5])

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        pyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=y)

    guide = AutoMeanField(model, init_stddev=0.3)
    train_to_convergence(model, guide, num_steps=300, num_particles=100, max_plate_nesting=0)
    distribution = guide.posterior()["w"]
    torch.testing.assert_close(distribution.mean, y / 2, atol=0.02, rtol=0)
    torch.testing.assert_close(distribution.stddev, torch.full((3,), 0.5**0.5), atol=0, rtol=0.02)
