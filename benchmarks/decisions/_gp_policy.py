# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Thompson sampling with a Gaussian process for each arm."""

import copy

import torch
from torch import Tensor

from benchmarks.decisions._policies import Policy
from pyro_radial.functional import GaussianProcess
from pyro_radial.functional.gaussian import cholesky, with_diagonal


class GaussianProcessThompson(Policy):
    """Draw each arm's reward from the exact posterior at the context, and pull the arm with the largest draw.

    All arms start with the same prior. Each learns the parameters of its own kernel, mean and noise at each refit,
    from where they were. Rewards of all arms are standardized together.

    :param GaussianProcess prior: prior of each arm.
    """

    #: The largest number of rewards of an arm in its posterior, the latest, since N rewards cost N^3.
    max_points = 1000
    #: The largest number of iterations of each arm in a refit, none with 0, and of rewards in one.
    steps, fit_points = 10, 100
    #: The standard deviation of the noise in standardized units, before it is learned.
    noise = 0.3

    def __init__(self, prior: GaussianProcess) -> None:
        self.prior = prior
        self.gradient_steps = 0
        self._arms: list[GaussianProcess] = []
        self._data: list[tuple[Tensor, Tensor]] = []
        self._solved: list[tuple[Tensor, Tensor]] = []

    def begin(self, num_features: int, num_arms: int) -> None:
        """Give each arm its own prior."""
        super().begin(num_features, num_arms)
        self._arms = [copy.deepcopy(self.prior) for _ in range(num_arms)]
        for arm in self._arms:
            arm.observation_noise.fill_(self.noise)
        self._data = [(torch.zeros(0, num_features), torch.zeros(0)) for _ in range(num_arms)]
        self._solve()

    @torch.no_grad()
    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        at = context.unsqueeze(0)
        arms = zip(self._arms, self._data, self._solved, strict=True)
        mean, variance = torch.stack([_moments(arm, x, *solved, at) for arm, (x, _), solved in arms]).unbind(1)
        return int((mean + variance.clamp_min(0.0).sqrt() * torch.randn_like(mean)).argmax())

    def refit(self, contexts: Tensor, arms: Tensor, rewards: Tensor) -> None:
        """Condition on the latest rewards, and learn the priors' parameters."""
        values = rewards.double()
        spread = values.std(correction=0)
        standard = ((values - values.mean()) / (spread if spread > 0 else 1.0)).to(rewards.dtype)
        for number, arm in enumerate(self._arms):
            x, y = contexts[arms == number], standard[arms == number]
            self._data[number] = (x[-self.max_points :], y[-self.max_points :])
            # One reward teaches nothing about the parameters, and equal rewards would drive the noise to zero.
            if self.steps and len(y) > 1 and y.std(correction=0) > 0:
                before = float(arm.observation_noise)
                arm.fit(*self._data[number], num_points=self.fit_points, steps=self.steps)
                arm.observation_noise.clamp_(min=min(before, 0.01))
                self.gradient_steps += self.steps
        self._solve()

    @torch.no_grad()
    def _solve(self) -> None:
        """Prepare the decisions until the next refit."""
        self._solved = [_solved(arm, *data) for arm, data in zip(self._arms, self._data, strict=True)]


def _solved(arm: GaussianProcess, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of the rewards' covariance, and the residuals from the prior's mean solved with it."""
    if not len(x):
        return torch.zeros(0, 0, dtype=torch.double), torch.zeros(0, 1, dtype=torch.double)
    mean, covariance = arm.moments(x)
    factor = cholesky(with_diagonal(covariance[0], arm.observation_noise.square()), arm.jitter)
    return factor, torch.linalg.solve_triangular(factor, y.double().unsqueeze(1) - mean, upper=False)


def _moments(arm: GaussianProcess, x: Tensor, factor: Tensor, residual: Tensor, at: Tensor) -> Tensor:
    """Mean and variance at one context, equal to those of :meth:`GaussianProcess.posterior`."""
    mean, variance = (part.flatten() for part in arm.moments(at))
    if len(x):
        cross = arm.kernel(x.double(), at.double())
        cross = cross.to_dense() if hasattr(cross, "to_dense") else cross
        half = torch.linalg.solve_triangular(factor, cross, upper=False)
        mean, variance = mean + (half * residual).sum(), variance - half.square().sum()
    return torch.cat([mean, variance])
