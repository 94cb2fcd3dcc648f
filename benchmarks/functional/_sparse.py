# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a sparse variational Gaussian process (GPyTorch's) on sets too large for the exact process."""

import gpytorch
import torch
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor

from benchmarks.common import Pair

__all__ = ["SparseProcess"]

INDUCING, BATCH_SIZE, LEARNING_RATE = 300, 200, 0.01


class _Process(ApproximateGP):  # type: ignore[misc]
    def __init__(self, inducing: Tensor) -> None:
        distribution = CholeskyVariationalDistribution(len(inducing))
        super().__init__(VariationalStrategy(self, inducing, distribution, learn_inducing_locations=True))
        width = inducing.shape[1]
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=width))
        self.kernel.base_kernel.lengthscale = width**0.5

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


class SparseProcess:
    """Trained on rows with so many steps of Adam; 0.3 of the rate after 60 % of them, 0.09 after 85 %.

    Source: Hensman, Fusi and Lawrence (2013), "Gaussian Processes for Big Data".
    """

    def __init__(self, rows: Pair, steps: int) -> None:
        x, y = rows[0], rows[1].squeeze(-1)
        self.process = _Process(x[torch.randperm(len(x))[:INDUCING]].clone())
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, num_data=len(x))
        parameters = [*self.process.parameters(), *self.likelihood.parameters()]
        adam = torch.optim.Adam(parameters, lr=LEARNING_RATE)
        ends = [round(0.6 * steps), round(0.85 * steps)]
        falling = torch.optim.lr_scheduler.MultiStepLR(adam, ends, gamma=0.3)
        for _ in range(steps):
            batch = torch.randint(len(x), (min(BATCH_SIZE, len(x)),))
            adam.zero_grad()
            loss = -bound(self.process(x[batch]), y[batch])
            loss.backward()
            adam.step()
            falling.step()

    @torch.no_grad()
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of targets, ``[N, 1]`` each, in float64."""
        self.process.eval()
        self.likelihood.eval()
        parts = [self.likelihood(self.process(part)) for part in x.split(1_000)]
        mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
        return mean.double().unsqueeze(-1), variance.double().unsqueeze(-1)
