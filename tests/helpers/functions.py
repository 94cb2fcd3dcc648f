# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws with known moments."""

import torch


def white(count, dim):
    """Draws whose mean is zero and covariance one, exactly."""
    values = torch.randn(count, dim, dtype=torch.double)
    values -= values.mean(0)
    return values @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(values.mT).reshape(dim, dim))).mT
