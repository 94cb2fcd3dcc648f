# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Quadrature over the circle and the sphere."""

import math

import numpy as np
import torch


def sphere_points(dim):
    """Points and weights of a quadrature over the circle or the sphere, exact for smooth functions."""
    angle = np.arange(128) * (2 * math.pi / 128)
    if dim == 2:
        points, weights = np.stack([np.cos(angle), np.sin(angle)], -1), np.full(128, 2 * math.pi / 128)
    else:
        height, share = np.polynomial.legendre.leggauss(128)
        ring = np.sqrt(1.0 - height**2)[:, None]
        points = np.stack(
            [ring * np.cos(angle), ring * np.sin(angle), np.broadcast_to(height[:, None], (128, 128))], -1
        ).reshape(-1, 3)
        weights = (share[:, None] * np.full(128, 2 * math.pi / 128)).reshape(-1)
    return torch.tensor(points), torch.tensor(weights)
