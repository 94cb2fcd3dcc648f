# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The curvature of a likelihood in the output of a network."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pyro_radial.nn.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson

__all__ = ["output_hessian"]


def output_hessian(likelihood: Likelihood, f: Tensor, noise: Mapping[str, Tensor], who: str) -> Tensor:
    r"""The Hessian :math:`-\partial^2 \log p(y | f) / \partial f^2`, which for these likelihoods no target changes.

    :param Likelihood likelihood: categorical, Bernoulli, Gaussian or Poisson, with one output dim.
    :param torch.Tensor f: outputs ``[N, K]``.
    :param noise: what its distribution needs besides.
    :param str who: what errors call the caller.
    :returns: matrices ``[N, K, K]``.
    :raises ValueError: naming another likelihood, or outputs of another shape.
    """
    hessian = HESSIANS.get(type(likelihood))
    if hessian is None:
        known = ", ".join(kind.__name__ for kind in HESSIANS)
        raise ValueError(f"{who}: likelihood must be one of {known}, got {type(likelihood).__name__}")
    if f.dim() != 2 or likelihood.event_dim != 1:
        raise ValueError(
            f"{who}: likelihood must be of outputs [N, K], with event_dim=1, got outputs {list(f.shape)} and "
            f"event_dim={likelihood.event_dim}"
        )
    return hessian(f, noise)


def _categorical(f: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    p = f.softmax(-1)
    return p.diag_embed() - p.unsqueeze(-1) * p.unsqueeze(-2)


def _bernoulli(f: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    return (f.sigmoid() * (-f).sigmoid()).diag_embed()


def _gaussian(f: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    return torch.ones_like(f).div(noise["scale"].to(f).square()).diag_embed()


def _poisson(f: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    return f.exp().diag_embed()


# By exact class: a subclass may have another distribution.
HESSIANS: dict[type[Likelihood], Callable[[Tensor, Mapping[str, Tensor]], Tensor]] = {
    Categorical: _categorical,
    Bernoulli: _bernoulli,
    Gaussian: _gaussian,
    Poisson: _poisson,
}
