# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The first weights of networks under priors on functions."""

import torch
from torch import Tensor, nn

from pyro_radial.functional.priors.function_prior import (
    FunctionPrior,
    check_points,
    check_prior,
    require_moments,
)

#: Rows at which a prior is asked, how far from them in standard deviations of an input, and the least correlation.
MOST_ROWS, SHIFT, LEAST_CORRELATION = 50, 0.3, 1e-3


@torch.no_grad()
def init_to_prior(network: nn.Module, prior: FunctionPrior, points: Tensor) -> nn.Module:
    r"""Start the first layer of a network with the length scales of a prior, where the points are.

    Input i has the length scale

    .. math:: \ell_i^{-2} = -\frac{2}{\delta_i^2} \log \mathrm{corr}\big(f(x), f(x + \delta_i e_i)\big),

    in the mean over points, with :math:`\delta_i` of 0.3 standard deviations of the input; under an RBF kernel it is
    the kernel's own. Weights are drawn from :math:`\mathcal N(0, \ell_i^{-2})`, the spectral density of such a kernel.
    A bias puts the unit's zero at one of the points. Torch's own start knows neither.

    Source: Rahimi and Recht (2007), "Random Features for Large-Scale Kernel Machines", algorithm 1, with another bias.

    :param network: a module whose first linear layer takes the inputs; other layers keep their weights.
    :param FunctionPrior prior: a prior with moments.
    :param Tensor points: the training inputs and points where predictions are made, ``[M, D]``.
    :returns: the network.
    :raises ValueError: for a network whose first layer is not linear in D inputs, and a prior without moments.

    Example::

        >>> from pyro_radial.functional import GaussianProcess
        >>> prior = GaussianProcess(lambda a, b: torch.exp(-0.5 * ((a - b.T) / 0.2) ** 2))
        >>> first = init_to_prior(nn.Linear(1, 1_000), prior, torch.linspace(-1, 1, 20)[:, None])
        >>> round(float(first.weight.detach().std()))  # 1 / 0.2
        5
    """
    check_prior(prior)
    check_points(points, "points")
    layer = next((module for module in network.modules() if isinstance(module, nn.Linear)), None)
    if layer is None or points.shape[1:] != (layer.in_features,):
        raise ValueError(
            f"network must start with a linear layer of inputs {list(points.shape[1:])}, got {layer}"
        )
    rows = points[:: -(-len(points) // MOST_ROWS)].double()
    size = len(rows)
    shifts = SHIFT * points.double().std(0, correction=0)
    pace = torch.ones_like(shifts)
    for i, shift in enumerate(shifts.where(shifts > 0.0, SHIFT)):
        shifted_rows = (
            rows + shift * torch.eye(len(shifts), dtype=rows.dtype, device=rows.device)[i]
        )
        covariance = require_moments(prior, torch.cat([rows, shifted_rows]), 1)[1][0]
        variance = covariance.diagonal()
        correlation = covariance.diagonal(size) / (variance[:size] * variance[size:]).sqrt()
        pace[i] = (-2.0 * correlation.clamp(LEAST_CORRELATION, 1.0).log().mean()).sqrt() / shift
    layer.weight.normal_().mul_(pace)
    if layer.bias is not None:
        at = points[torch.randint(len(points), (layer.out_features,), device=points.device)]
        layer.bias.copy_(-(layer.weight * at.to(layer.weight)).sum(-1))
    return network
