# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Bayesian linear regression with unknown noise, in closed form."""

from typing import NamedTuple

import torch
from torch import Tensor


class LinearModel(NamedTuple):
    r"""The normal-inverse-gamma distribution of the weights of a linear model and its noise.

    .. math:: \sigma^2 \sim \mathrm{IG}(a, b), \qquad w \mid \sigma^2 \sim N(\mu, \sigma^2 \Lambda^{-1}),
        \qquad y \mid x, w, \sigma^2 \sim N(w^T x, \sigma^2).

    Rows X with rewards y update it to

    .. math:: \Lambda' = \Lambda + X^T X, \quad \Lambda' \mu' = \Lambda \mu + X^T y, \quad a' = a + \tfrac n2, \quad
        b' = b + \tfrac12 (y^T y + \mu^T \Lambda \mu - \mu'^T \Lambda' \mu').

    Source: Riquelme, Tucker and Snoek (2018), "Deep Bayesian Bandits Showdown", eq. 1 and 2.

    :param Tensor mean: :math:`\mu`, ``[E]``, in float64.
    :param Tensor precision: :math:`\Lambda`, ``[E, E]``.
    :param Tensor shape: :math:`a`.
    :param Tensor rate: :math:`b`.
    """

    mean: Tensor
    precision: Tensor
    shape: Tensor
    rate: Tensor

    @classmethod
    def prior(cls, size: int, prior_precision: float, shape: float, rate: float) -> "LinearModel":
        r"""A prior with mean zero and :math:`\Lambda = \lambda I`."""
        eye = torch.eye(size, dtype=torch.double)
        return cls(
            torch.zeros(size, dtype=torch.double),
            prior_precision * eye,
            torch.tensor(shape, dtype=torch.double),
            torch.tensor(rate, dtype=torch.double),
        )

    def updated(self, x: Tensor, y: Tensor) -> "LinearModel":
        """The posterior given rows ``[n, E]`` and rewards ``[n]``, both in float64."""
        precision = self.precision + x.mT @ x
        weighted = self.precision @ self.mean
        mean = torch.cholesky_solve((weighted + x.mT @ y).unsqueeze(1), torch.linalg.cholesky(precision)).squeeze(1)
        change = y @ y + self.mean @ weighted - mean @ precision @ mean
        return LinearModel(mean, precision, self.shape + 0.5 * len(y), self.rate + 0.5 * change.clamp_min(0.0))

    def draw(self) -> Tensor:
        """Draw weights ``[E]``, with a noise level drawn first."""
        variance = self.rate / torch._standard_gamma(self.shape)
        factor = torch.linalg.cholesky(self.precision)
        noise = torch.randn_like(self.mean).unsqueeze(1)
        return self.mean + variance.sqrt() * torch.linalg.solve_triangular(factor.mT, noise, upper=True).squeeze(1)
