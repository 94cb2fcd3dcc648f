# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of functions and the predictions they make."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributions import Categorical

from pyro_radial.distributions.wrappers import leaf

__all__ = ["Prediction"]


@dataclass(frozen=True)
class Prediction:
    """Function draws ``[S, N, ...]`` and the predictions they make.

    Draw s is one function at all N inputs: the same weights throughout.

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
        return self._linked().mean(0)

    @property
    def variance(self) -> Tensor:
        """The predictive variance: the mean variance of an observation plus the variance of its mean.

        :returns: a tensor ``[N, *target]``, in the units of the targets squared.
        :raises ValueError: for a categorical likelihood, whose labels are no numbers.
        """
        observation = self._require("variance").observation(self.samples, **self.noise)
        if isinstance(leaf(observation), Categorical):
            raise ValueError(
                "Prediction.variance: likelihood must have numbers as targets, got labels of classes, which have no "
                "variance; use entropy"
            )
        return observation.variance.mean(0) + observation.mean.var(0, unbiased=False)

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
        of_draws = self._require("mutual_information").predictive_entropy(self._linked())
        return (self.entropy - of_draws.mean(0)).clamp_min(0.0)

    def log_prob(self, y: Tensor) -> Tensor:
        """The log predictive density of targets: the log of the mean over draws of the density.

        Probabilities are averaged before the log is taken; its mean over test points is the test log-likelihood.

        :param torch.Tensor y: targets ``[N, *target]``.
        :returns: a tensor ``[N]``, in nats.
        """
        likelihood = self._require("log_prob")
        y = likelihood.check_target(self.samples, y.to(self.samples.device))
        per_draw = likelihood.observation(self.samples, **self.noise).log_prob(y)
        return per_draw.logsumexp(0) - math.log(len(self.samples))

    def _linked(self) -> Tensor:
        return self.samples if self.likelihood is None else self.likelihood.inverse_link(self.samples)

    def _require(self, what: str) -> Any:
        if self.likelihood is None:
            raise ValueError(
                f"Prediction.{what}: model must have an attribute `likelihood`, as SupervisedModel has, got none"
            )
        return self.likelihood
