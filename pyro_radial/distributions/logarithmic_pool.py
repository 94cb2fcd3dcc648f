# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A weighted geometric mean of densities, which a KL meets as the weighted sum of the KLs to each."""

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from pyro_radial.distributions.wrappers import expanded

__all__ = ["LogarithmicPool", "kl_to_pool"]


class LogarithmicPool(TorchDistribution):
    r"""A logarithmic opinion pool :math:`\prod_i p_i^{w_i}`, as it stands: without its constant.

    The constant Z is at most one (by Hölder's inequality), and closed in few cases. So the log-density is at most that
    of the normalized pool, :math:`\sum_i w_i KL(q \| p_i) = KL(q \| pool) - \log Z` at least the KL to it, and a bound
    on the log evidence under the one a bound under the other. The gradient in q is the same.

    There is no sampler of the pool: draws, support, mean and variance are those of the first distribution.

    :param distributions: distributions of the same shapes and support.
    :param weights: a number for each, none negative; they sum to one.
    :raises ValueError: for no distributions, other shapes, or weights that are no such numbers.

    Example::

        >>> import pyro.distributions as dist
        >>> pool = LogarithmicPool([dist.Normal(0.0, 1.0), dist.Normal(2.0, 1.0)], [0.5, 0.5])
        >>> pool.log_prob(torch.tensor(1.0)) < dist.Normal(1.0, 1.0).log_prob(torch.tensor(1.0))
        tensor(True)
    """

    arg_constraints: dict[str, Any] = {}

    def __init__(
        self, distributions: Sequence[Any], weights: Sequence[float], validate_args: bool | None = None
    ) -> None:
        shapes = {(p.batch_shape, p.event_shape) for p in distributions}
        if len(shapes) != 1:
            raise ValueError(f"LogarithmicPool: distributions must have one shape, got {sorted(shapes)}")
        count = len(distributions)
        if len(weights) != count or min(weights) < 0.0 or not abs(sum(weights) - 1.0) < 1e-6:
            raise ValueError(
                f"LogarithmicPool: weights must be {count} non-negative numbers that sum to one, got {list(weights)}"
            )
        self.distributions = tuple(distributions)
        self.weights = tuple(weights)
        self.has_rsample = self.distributions[0].has_rsample
        super().__init__(*shapes.pop(), validate_args=validate_args)

    @property
    def support(self) -> Any:  # noqa: D102
        return self.distributions[0].support

    @property
    def mean(self) -> Tensor:  # noqa: D102
        mean: Tensor = self.distributions[0].mean
        return mean

    @property
    def variance(self) -> Tensor:  # noqa: D102
        variance: Tensor = self.distributions[0].variance
        return variance

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> "LogarithmicPool":
        """The pool of the same distributions with a larger batch shape."""
        larger = [expanded(p, batch_shape) for p in self.distributions]
        return LogarithmicPool(larger, self.weights, validate_args=False)

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Draws of the first distribution, ``[*sample_shape, *batch, *event]``."""
        draws: Tensor = self.distributions[0].sample(sample_shape)
        return draws

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """The same with gradients."""
        draws: Tensor = self.distributions[0].rsample(sample_shape)
        return draws

    def log_prob(self, value: Tensor) -> Tensor:
        """The weighted mean of the log-densities, ``[*batch]``."""
        return _weighted(self.weights, [p.log_prob(value) for p in self.distributions])


def kl_to_pool(q: Distribution, p: LogarithmicPool) -> Tensor:
    r"""The weighted sum :math:`\sum_i w_i KL(q \| p_i)`, by the rule for each; never less than the KL to the normalized
    pool.

    :raises NotImplementedError: where one of them has no rule.
    """
    return _weighted(p.weights, [kl_divergence(q, own) for own in p.distributions])


def _weighted(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    total = weights[0] * values[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total = total + weight * value
    return total
