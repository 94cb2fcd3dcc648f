# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A model that the tests of guides share."""

import pyro
import pyro.distributions as dist


def matrix_model(x=None):
    pyro.sample("weight", dist.Normal(0.0, 1.0).expand([5, 4]).to_event(2))
    pyro.sample("bias", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
