# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Rewards of which only that of the arm that was pulled is known."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_radial.nn.likelihood import check_values
from pyro_radial.nn.likelihoods import Gaussian

__all__ = ["PulledArm"]


class PulledArm(Gaussian):
    r"""Normal rewards of K arms, of which each row knows some: in a bandit, the one that was pulled.

    .. math:: \log p(y \mid f) = \sum_{k:\ y_k\ \text{known}} \log N(y_k;\ f_k, \sigma^2).

    ``y`` is ``[B, K]`` with NaN where nothing is known. All else is as in
    :class:`~pyro_radial.nn.likelihoods.Gaussian`.

    :param args: of :class:`~pyro_radial.nn.likelihoods.Gaussian`.
    :param kwargs: of the same.

    Example::

        >>> y = torch.tensor([[float("nan"), 1.0]])
        >>> PulledArm().observation(torch.zeros(1, 2), scale=torch.tensor(1.0)).log_prob(y)
        tensor([-1.4189])
    """

    def observation(self, f: Tensor, **noise: Tensor) -> Any:
        """The normal distribution around ``f``, in whose density what is not known does not count."""
        scale = noise["scale"]
        known = _WhereKnown(f, scale.reshape(scale.shape + (1,) * self.event_dim), validate_args=False)
        return known.to_event(self.event_dim)

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raises a ValueError naming ``y`` for an infinite reward."""
        check_values(~y.isinf(), y, "finite rewards, or NaN where nothing is known")


class _WhereKnown(dist.Normal):
    """A normal distribution to which NaN is no news."""

    def log_prob(self, value: Tensor) -> Tensor:
        known = ~value.isnan()
        # Nothing is computed of NaN, whose gradient would be NaN even where it is left out afterwards.
        density: Tensor = super().log_prob(torch.where(known, value, self.loc.detach()))
        return torch.where(known, density, 0.0)
