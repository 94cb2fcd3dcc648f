# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of functions and the predictions they make."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from pyro_radial.distributions.wrappers import leaf

__all__ = ["Prediction"]

# Into how many parts samples are split, for a density makes a few copies of what it is given, and how many numbers
# need no splitting.
PARTS, SMALL = 64, 2**14


@dataclass(frozen=True)
class Prediction:
    """Function draws ``[S, N, ...]`` and the predictions they make.

    Draw s is one function at all N inputs: the same weights throughout. What is computed of them is computed for a few
    inputs at a time, so that it needs little memory besides the samples.

    :param torch.Tensor samples: values of the network at the function site, before the link, ``[S, N, *outputs]``.
    :param likelihood: what describes the observations, or None for a model without a ``likelihood``.
    :param noise: the noise of each draw, by argument of ``likelihood.observation``, ``[S, 1]``.
    """

    samples: Tensor
    likelihood: Any = None
    noise: dict[str, Tensor] = field(default_factory=dict)

    @property
    def mean(self) -> Tensor:
        """The predictive mean: link first, then the mean over draws.

        :returns: a tensor ``[N, *outputs]``, in the units of the targets.
        """
        likelihood = self.likelihood
        if likelihood is None:
            return self.samples.mean(0)
        return self._by_rows(lambda samples, _: likelihood.inverse_link(samples).mean(0))

    @property
    def variance(self) -> Tensor:
        """The predictive variance: the mean variance of an observation plus the variance of its mean.

        :returns: a tensor ``[N, *target]``, in the units of the targets squared.
        :raises ValueError: for a categorical likelihood, whose labels are no numbers.
        """
        likelihood = self._require("variance")

        def variance(samples: Tensor, _: slice) -> Tensor:
            observation = likelihood.observation(samples, **self.noise)
            if isinstance(leaf(observation), Categorical):
                raise ValueError(
                    "Prediction.variance: likelihood must have numbers as targets, got labels of classes, which have "
                    "no variance; use entropy"
                )
            return observation.variance.mean(0) + observation.mean.var(0, unbiased=False)

        return self._by_rows(variance)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the predictive mean, for discrete observations: the total uncertainty.

        :returns: a tensor ``[N]``, in nats.
        :raises NotImplementedError: for observations that are not discrete and finite.
        """
        return self._require("entropy").predictive_entropy(self.mean)

    @property
    def mutual_information(self) -> Tensor:
        """What an observation would tell about the weights: entropy less the mean entropy of draws.

        Zero where all draws agree.

        Source: Houlsby et al. (2011), *Bayesian Active Learning for Classification and Preference Learning*, eq. 2.

        :returns: a tensor ``[N]``, in nats.
        :raises NotImplementedError: for observations that are not discrete and finite.
        """
        likelihood = self._require("mutual_information")

        def information(samples: Tensor, _: slice) -> Tensor:
            means = likelihood.inverse_link(samples)
            of_draws = likelihood.predictive_entropy(means).mean(0)
            return (likelihood.predictive_entropy(means.mean(0)) - of_draws).clamp_min(0.0)

        return self._by_rows(information)

    def log_prob(self, y: Any) -> Tensor:
        """The log predictive density of targets: the log of the mean over draws of the density.

        Probabilities are averaged before the log is taken; its mean over test points is the test log-likelihood.

        :param torch.Tensor y: targets ``[N, *target]``, or an array of NumPy.
        :returns: a tensor ``[N]``, in nats.
        """
        likelihood = self._require("log_prob")
        y = likelihood.check_target(self.samples, torch.as_tensor(y, device=self.samples.device))

        def log_prob(samples: Tensor, rows: slice) -> Tensor:
            per_draw = likelihood.observation(samples, **self.noise).log_prob(y[rows])
            return per_draw.logsumexp(0) - math.log(len(samples))

        return self._by_rows(log_prob)

    def _by_rows(self, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """A function of the samples of some inputs, and which these are, for all inputs."""
        number = self.samples.shape[1]
        size = max(1, number // PARTS, number * SMALL // max(1, self.samples.numel()))
        result: Tensor | None = None
        for start in range(0, max(1, number), size):
            rows = slice(start, start + size)
            values = function(self.samples[:, rows], rows)
            if result is None:
                result = values.new_empty((number, *values.shape[1:]))
            result[rows] = values
        assert result is not None
        return result

    def _require(self, what: str) -> Any:
        if self.likelihood is None:
            raise ValueError(
                f"Prediction.{what}: model must have an attribute `likelihood`, as SupervisedModel has, got none"
            )
        return self.likelihood
