# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of functions and their predictions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from pyro_radial._pyro.checks import held_numbers, positive_count, warn
from pyro_radial._pyro.compat import tree_leaves
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.nn.likelihoods import masked

# Samples are split into this many chunks, since densities make copies; fewer than SMALL numbers are not split.
CHUNKS, SMALL = 64, 2**14


@dataclass(frozen=True)
class Prediction:
    """Function draws ``[S, N, ...]`` and their predictions.

    Draw s is one function at all N inputs, with the same weights. All quantities are computed for a few inputs at a
    time, which needs little memory besides the samples.

    :param torch.Tensor samples: values of the network at the function site, before the link, ``[S, N, *outputs]``.
    :param likelihood: the likelihood of the model, or None if it has none.
    :param noise: the noise of each draw, by argument of ``likelihood.observation``, ``[S, 1]``, or
        ``[S, 1, *outputs]`` with a number for each output.
    """

    samples: Tensor
    likelihood: Any = None
    noise: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def joined(predictions: Sequence[Any]) -> Any:
        r"""Join predictions of several posteriors at the same inputs, such as the members of an ensemble.

        With equal numbers of draws the result is the equal mixture of M posteriors,

        .. math:: p(y \mid x) = \frac1M \sum_{m=1}^M E_{q_m(w)}[p(y \mid x, w)].

        Source: Lakshminarayanan, Pritzel and Blundell (2017), "Simple and Scalable Predictive Uncertainty Estimation
        using Deep Ensembles", section 2.4.

        :param predictions: predictions of models with equal likelihoods, or the dicts of named outputs.
        :returns: a prediction with the draws of all, one after another; it has the first one's likelihood.
        :raises ValueError: for no predictions, or outputs of different shapes.

        Example::

            >>> import torch
            >>> Prediction.joined([Prediction(torch.zeros(8, 5, 3)), Prediction(torch.ones(8, 5, 3))]).samples.shape
            torch.Size([16, 5, 3])
        """
        layouts = list(map(_layout_of, predictions))
        if not layouts or any(layout != layouts[0] for layout in layouts):
            raise ValueError(
                f"predictions must hold draws of the same outputs at the same inputs, got {layouts}"
            )
        if isinstance(predictions[0], Predictions):
            joined = Predictions()
            for name in predictions[0]:
                joined[name] = Prediction.joined([member[name] for member in predictions])
            return joined
        noise: dict[str, Tensor] = {}
        for argument in predictions[0].noise:
            noise[argument] = torch.cat([member.noise[argument] for member in predictions])
        samples = torch.cat([member.samples for member in predictions])
        return Prediction(samples, predictions[0].likelihood, noise)

    @property
    def mean(self) -> Tensor:
        """The predictive mean: the mean over draws after the link, ``[N, *outputs]``, in the units of the targets."""
        likelihood = self.likelihood
        if likelihood is None:
            return self.samples.mean(0)
        return self._by_rows(lambda samples, _: likelihood.inverse_link(samples).mean(0))

    @property
    def variance(self) -> Tensor:
        """The predictive variance, the sum of :attr:`aleatoric_variance` and :attr:`epistemic_variance`.

        :returns: a tensor ``[N, *target]``, in the units of the targets squared.
        :raises ValueError: for a categorical likelihood; labels are not numbers.
        """
        return self._moment(
            "variance", lambda y: y.variance.mean(0) + y.mean.var(0, unbiased=False)
        )

    @property
    def aleatoric_variance(self) -> Tensor:
        r"""The variance that more data would not remove: the mean over draws of the noise's variance.

        .. math:: E_w[\mathrm{Var}(y \mid w)]

        Source: Depeweg et al. (2018), "Decomposition of Uncertainty in Bayesian Deep Learning".

        :returns: a tensor ``[N, *target]``, in the units of the targets squared.
        """
        return self._moment("aleatoric_variance", lambda y: y.variance.mean(0))

    @property
    def epistemic_variance(self) -> Tensor:
        r"""The variance from uncertain weights: the variance over draws of the mean.

        .. math:: \mathrm{Var}_w(E[y \mid w])

        It is zero where all draws agree, and the variance of the S draws themselves, without Bessel's correction.

        Source: Depeweg et al. (2018), "Decomposition of Uncertainty in Bayesian Deep Learning".

        :returns: a tensor ``[N, *target]``, in the units of the targets squared.
        """
        return self._moment("epistemic_variance", lambda y: y.mean.var(0, unbiased=False))

    @property
    def entropy(self) -> Tensor:
        """The entropy of the predictive mean, for discrete observations: the total uncertainty.

        :returns: a tensor ``[N]``, in nats.
        :raises NotImplementedError: for observations that are not discrete and finite.
        """
        return self._require("entropy").predictive_entropy(self.mean)

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of an observation and the weights: entropy minus the mean entropy of draws.

        It is zero where all draws agree.

        Source: Houlsby et al. (2011), "Bayesian Active Learning for Classification and Preference Learning", eq. 2.

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
        """Compute the log predictive density of targets: the log of the mean over draws of the density.

        :param torch.Tensor y: targets ``[N, *target]``, or a NumPy array; missing ones add nothing.
        :returns: a tensor ``[N]``, in nats.
        """
        return self._log_prob(
            "y", y, lambda of_draws: of_draws.logsumexp(0) - math.log(len(of_draws))
        )

    def _log_prob(self, argument: str, y: Any, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the log densities of the observed targets, combined by a function from ``[S, n]`` to ``[n, ...]``."""
        likelihood = self._require("log_prob")
        y = held_numbers(argument, y, device=self.samples.device)
        y, observed = likelihood.read_target(self.samples, y, ~likelihood.is_missing(y))

        def log_prob(samples: Tensor, rows: slice) -> Tensor:
            distribution = masked(likelihood.observation(samples, **self.noise), observed[rows])
            return combine(distribution.log_prob(y[rows]))

        return self._by_rows(log_prob)

    def sample_targets(self, num_targets: int = 1) -> Tensor:
        """Draw targets: the noise of the likelihood around each draw of the function.

        Targets of one function share its weights, so draws for one input are independent only with ``num_targets=1``.

        :param int num_targets: M, the number of targets for each function and input.
        :returns: a tensor ``[S * M, N, *target]``; rows s, S + s, 2S + s, ... are of function s.
        :raises ValueError: if ``num_targets`` is less than one.

        Example::

            >>> import torch
            >>> from pyro_radial.nn import likelihoods
            >>> Prediction(torch.zeros(64, 5, 3), likelihoods.Categorical()).sample_targets().shape
            torch.Size([64, 5])
        """
        positive_count("num_targets", num_targets)
        observation = self._require("sample_targets").observation(self.samples, **self.noise)
        return observation.sample((num_targets,)).flatten(0, 1)

    def quantiles(self, levels: Any, num_targets: int = 16) -> Tensor:
        """Compute quantiles of the predictive distribution from new draws of targets.

        The quantile at level p is the least drawn value with a share p of the S M draws at or below it, so a quantile
        of counts is a count. Ask for all levels at once, since each call draws anew.

        :param levels: a number or several, strictly between zero and one, ``[*L]``.
        :param int num_targets: M, the number of targets for each function.
        :returns: a tensor ``[*L, N, *target]``, in the units of the targets.
        :raises ValueError: for a level out of range, ``num_targets`` below one, or a categorical likelihood.

        Example::

            >>> import torch
            >>> from pyro_radial.nn import likelihoods
            >>> prediction = Prediction(torch.zeros(2000, 5, 1), likelihoods.Gaussian(), {"scale": torch.ones(2000, 1)})
            >>> lower, upper = prediction.quantiles([0.05, 0.95])
            >>> lower.shape, upper.mean() - lower.mean() > 3.2
            (torch.Size([5, 1]), tensor(True))
        """
        levels = held_numbers("levels", levels)
        if levels.numel() == 0 or not ((levels > 0) & (levels < 1)).all():
            raise ValueError(f"levels must be strictly between zero and one, got {levels.tolist()}")
        positive_count("num_targets", num_targets)
        likelihood = self._require("quantiles")
        number = num_targets * len(self.samples)
        # A level of 0.1 in single precision is a little above 0.1, and must not ask for one more draw.
        ranks = (number * (levels.flatten() - 1e-7)).ceil().long().clamp_min(1) - 1

        def quantiles(samples: Tensor, _: slice) -> Tensor:
            observation = likelihood.observation(samples, **self.noise)
            _require_numbers("quantiles", "order", observation)
            ordered = observation.sample((num_targets,)).flatten(0, 1).sort(0).values
            return ordered[ranks.to(ordered.device)].movedim(0, 1)

        # Sorting makes a copy of the draws and an integer for each.
        values = self._by_rows(quantiles, copies=2 * num_targets).movedim(1, 0)
        return values.reshape(levels.shape + values.shape[1:])

    def _moment(self, quantity: str, moment: Callable[[Any], Tensor]) -> Tensor:
        """Return a moment of the observations of all draws at each input; targets must be numbers."""
        likelihood = self._require(quantity)

        def moment_of_rows(samples: Tensor, _: slice) -> Tensor:
            observation = likelihood.observation(samples, **self.noise)
            return moment(_require_numbers(quantity, "variance; use entropy", observation))

        return self._by_rows(moment_of_rows)

    def _by_rows(self, function: Callable[[Tensor, slice], Tensor], copies: int = 1) -> Tensor:
        """Apply a function of the samples of some rows to all rows, by chunks; it makes ``copies`` of its input."""
        number = self.samples.shape[1]
        numbers = copies * max(1, self.samples.numel())
        size = max(1, number // (CHUNKS * copies), number * SMALL // numbers)
        result: Any = None
        for start in range(0, max(1, number), size):
            rows = slice(start, start + size)
            values = function(self.samples[:, rows], rows)
            if result is None:
                result = values.new_empty((number, *values.shape[1:]))
            result[rows] = values
        return result

    def _require(self, quantity: str) -> Any:
        """Return the likelihood, or raise a ValueError that names the quantity which needs it."""
        if self.likelihood is None:
            raise ValueError(
                f"Prediction.{quantity}: model must have an attribute `likelihood`, as SupervisedModel has, got none"
            )
        return self.likelihood


class Predictions(dict[str, Prediction]):
    """The predictions of named outputs from the same draws of the weights, by name."""

    def log_prob(self, y: Mapping[str, Any]) -> Tensor:
        """Compute the log predictive density ``[N]`` of all targets of a row together, without those that are missing.

        :raises ValueError: for other names than those of the outputs.
        """
        if not isinstance(y, Mapping) or y.keys() != self.keys():
            got = list(y) if isinstance(y, Mapping) else type(y).__name__
            raise ValueError(f"y must be a dict with targets for {list(self)}, got {got}")
        total: Any = 0.0
        for name, prediction in self.items():
            total = total + prediction._log_prob(
                f"y[{name!r}]", y[name], lambda of_draws: of_draws.T
            )
        return total.logsumexp(-1) - math.log(total.shape[-1])


def make_prediction(samples: Any, likelihood: Any, noise: Mapping[str, Tensor]) -> Any:
    """Return the prediction for samples of a model's function, or one for each output in a dict of samples."""
    if isinstance(samples, Tensor):
        return Prediction(samples, likelihood, dict(noise))
    predictions = Predictions()
    for name, values in samples.items():
        noise_of_output = {
            key.removeprefix(f"{name}."): value
            for key, value in noise.items()
            if key.startswith(f"{name}.")
        }
        predictions[name] = Prediction(values, likelihood.by_name[name], noise_of_output)
    return predictions


def _layout_of(prediction: Any) -> Any:
    """Return the shape of a draw and the names of the noise, by name for named outputs."""
    if isinstance(prediction, Predictions):
        return {name: _layout_of(output) for name, output in prediction.items()}
    return [*prediction.samples.shape[1:], *prediction.noise]


def _require_numbers(quantity: str, lacking: str, observation: object) -> Any:
    """Return the observation, or raise a ValueError if its targets are classes."""
    if isinstance(leaf(observation), Categorical):
        raise ValueError(
            f"Prediction.{quantity}: likelihood must have numbers as targets, got labels of classes, which have no "
            f"{lacking}"
        )
    return observation


def are_identical(draws: Tensor) -> bool:
    """Return whether all slices of a tensor ``[S, ...]`` are the same."""
    # Comparing two of them mostly tells; comparing all takes memory.
    return draws[0].equal(draws[-1]) and draws.equal(draws[:1].expand_as(draws))


def warn_if_identical(samples: Any, is_point: Callable[[], bool]) -> None:
    """Warn of functions, a tensor ``[S, ...]`` or a dict, that are all the same, unless the posterior is a point."""
    outputs = tree_leaves(samples)
    number = len(outputs[0])
    if number > 1 and all(map(are_identical, outputs)) and not is_point():
        warn(
            f"all {number} draws are identical, so predictions have no uncertainty: the network may not use the "
            "parameters that the guide draws (nn.MultiheadAttention, for one, reads out_proj.weight and never calls an "
            "adapter in its place), its units may be dead, or the posterior's scales too small to change a value"
        )
