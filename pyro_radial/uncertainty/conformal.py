# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Conformal prediction: sets of classes and intervals that contain the truth with a requested probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from pyro_radial._pyro.checks import check_flag, check_number, check_types, proper_fraction
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.uncertainty._inputs import check_probabilities, class_labels, real_targets


@dataclass(frozen=True)
class ConformalSets:
    r"""Sets of classes that contain the true class with a given probability, for any model.

    The set of a point contains the classes whose score is at most the threshold q, the k-th smallest score of n
    calibration points, :math:`k = \lceil (n + 1)\,\mathrm{level} \rceil`. If calibration points and new ones are
    exchangeable, and no scores are equal, the set contains the true class with probability k / (n + 1). That is at
    least ``level`` on average over points and calibration sets, but not for each kind of point: sets may miss a rare
    class almost always. With ``by_class`` it holds for the points of each class. Points are exchangeable only if the
    same draws predict them, as in :class:`~pyro_radial.infer.SampledNetwork`.

    The score of class c is, with p the predicted probabilities,

    - ``"aps"``: the sum of all :math:`p_k \ge p_c`. Sets are larger where the model is less certain.
    - ``"lac"``: :math:`1 - p_c`. Sets are the smallest on average.

    Both may be empty: "lac" where the largest p is below 1 - q, and "aps" where it is above q.

    Source: Sadinle, Lei and Wasserman (2019), *Least ambiguous set-valued classifiers with bounded error levels*, for
    ``"lac"``; Romano, Sesia and Candès (2020), *Classification with valid and adaptive coverage*, equation 5 without
    its random number, for ``"aps"``; Vovk (2012), *Conditional validity of inductive conformal predictors*, for
    ``by_class``.

    :param level: the least probability that a set contains the true class.
    :param threshold: q, or one for each class.
    :param score: "aps" or "lac".

    Example::

        >>> probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.6, 0.3, 0.1]])
        >>> sets = ConformalSets.fit(probs, torch.tensor([0, 1, 1, 0]), level=0.75, score="lac")
        >>> sets(torch.tensor([[0.5, 0.35, 0.15]]))  # 1 - p is at most 0.7
        tensor([[ True,  True, False]])
    """

    level: float
    threshold: float | tuple[float, ...]
    score: str = "lac"

    def __post_init__(self) -> None:
        proper_fraction("level", self.level)
        thresholds = self.threshold if isinstance(self.threshold, tuple) else [self.threshold]
        for threshold in thresholds:
            check_number("threshold", threshold, math.isfinite, "a finite number")
        _check_score(self.score, CLASS_SCORES)

    @classmethod
    def fit(
        cls,
        probs: torch.Tensor | Prediction,
        labels: torch.Tensor,
        level: float = 0.9,
        score: str = "lac",
        by_class: bool = False,
    ) -> ConformalSets:
        """Find the threshold from calibration points that were used neither for training nor for any choice.

        :param probs: class probabilities of calibration points, ``[n, K]``, or their ``Prediction``.
        :param labels: their classes from 0 to K - 1, integers ``[n]``.
        :param level: the probability asked for, between zero and one.
        :param score: "aps" or "lac".
        :param by_class: whether each class has a threshold of its own, so that sets contain the points of each class
            with the probability asked for. Sets are then larger.
        :returns: the sets, to be called with probabilities of any points.
        :raises ValueError: naming the argument that does not fit, or for fewer than level / (1 - level) points, of each
            class with ``by_class``.
        """
        _check_score(score, CLASS_SCORES)
        scores = CLASS_SCORES[score](_probabilities(probs))
        labels = class_labels("probs", labels, scores.shape).to(scores.device)
        own = scores.gather(-1, labels[:, None]).squeeze(-1)
        if not check_flag("by_class", by_class):
            return cls(level, float(_threshold("labels", own, level)), score)
        thresholds = [
            float(_threshold(f"labels of class {k}", own[labels == k], level))
            for k in range(scores.shape[-1])
        ]
        return cls(level, tuple(thresholds), score)

    def __call__(self, probs: torch.Tensor | Prediction) -> torch.Tensor:
        """Return whether each class belongs to the set of each point, ``[N, K]``."""
        scores = CLASS_SCORES[self.score](_probabilities(probs))
        return torch.less_equal(scores, scores.new_tensor(self.threshold))


@dataclass(frozen=True, eq=False)
class ConformalIntervals:
    r"""Intervals that contain a real target with a given probability, for any model.

    Like :class:`ConformalSets`, with a threshold q for each element of a target, and this score of a target y:

    - ``"quantile"``: :math:`\max(l - y, y - u)` with l and u the predictive quantiles at (1 - level) / 2 and (1 +
      level) / 2. The interval is [l - q, u + q], or its center if the ends would cross.
    - ``"normalized"``: :math:`|y - \mu| / \sigma` with the predictive mean and standard deviation. The interval is
      :math:`\mu \pm q \sigma`.

    Source: Romano, Patterson and Candès (2019), *Conformalized quantile regression*, equation 6, for ``"quantile"``;
    Lei, G'Sell, Rinaldo, Tibshirani and Wasserman (2018), *Distribution-free predictive inference for regression*,
    section 5.2, for ``"normalized"``.

    :param level: the least probability that an interval contains the target.
    :param threshold: q, ``[*target]``.
    :param score: "quantile" or "normalized".

    Example::

        >>> from pyro_radial.nn import likelihoods
        >>> draws = Prediction(torch.zeros(64, 19, 1), likelihoods.Gaussian(), {"scale": torch.ones(64, 1)})
        >>> intervals = ConformalIntervals.fit(draws, torch.linspace(-1, 1, 19)[:, None], score="normalized")
        >>> intervals.threshold, intervals(draws)[1][0]  # the 18th of 19 distances
        (tensor([1.]), tensor([1.]))
    """

    level: float
    threshold: torch.Tensor
    score: str = "quantile"

    def __post_init__(self) -> None:
        proper_fraction("level", self.level)
        check_types(torch.Tensor, threshold=self.threshold)
        if not self.threshold.is_floating_point() or not self.threshold.isfinite().all():
            raise ValueError(f"threshold must hold finite real numbers, got {self.threshold}")
        _check_score(self.score, TARGET_SCORES)

    @classmethod
    def fit(
        cls,
        prediction: Prediction,
        targets: torch.Tensor,
        level: float = 0.9,
        score: str = "quantile",
    ) -> ConformalIntervals:
        """Find the thresholds from calibration points that were used neither for training nor for any choice.

        :param prediction: the prediction of calibration points, of real targets.
        :param targets: ``[n, *target]``; ``[n]`` stands for ``[n, 1]``.
        :param level: the probability asked for, between zero and one.
        :param score: "quantile" or "normalized".
        :returns: the intervals, to be called with predictions of any points.
        :raises ValueError: as :meth:`ConformalSets.fit`.
        """
        _check_score(score, TARGET_SCORES)
        check_types(Prediction, prediction=prediction)
        lower, upper, unit = _ends(prediction, proper_fraction("level", level), score)
        targets = real_targets("prediction", lower, targets)
        distances = torch.maximum(lower - targets, targets - upper) / unit
        return cls(level, _threshold("targets", distances, level), score)

    def __call__(self, prediction: Prediction) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lower and the upper ends, ``[N, *target]`` each, in the units of the targets."""
        check_types(Prediction, prediction=prediction)
        lower, upper, unit = _ends(prediction, self.level, self.score)
        if lower.shape[1:] != self.threshold.shape:
            raise ValueError(
                f"prediction must have targets of shape {list(self.threshold.shape)}, got {list(lower.shape[1:])}"
            )
        lower = lower - self.threshold * unit
        upper = upper + self.threshold * unit
        center = 0.5 * (lower + upper)
        return torch.minimum(lower, center), torch.maximum(upper, center)


def _ends(
    prediction: Prediction, level: float, score: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Return the interval before its correction, and the unit of the correction."""
    if score == "quantile":
        lower, upper = prediction.quantiles([(1 - level) / 2, (1 + level) / 2])
        return lower, upper, 1.0
    mean = prediction.mean
    return mean, mean, prediction.variance.sqrt()


def _sums_of_larger(probs: torch.Tensor) -> torch.Tensor:
    """Return for each class the sum of its probability and those that are larger."""
    ordered, places = probs.sort(dim=-1, descending=True, stable=True)
    return torch.empty_like(probs).scatter_(-1, places, ordered.cumsum(-1))


TARGET_SCORES = ("quantile", "normalized")
CLASS_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aps": _sums_of_larger,
    "lac": lambda probs: 1.0 - probs,
}


def _probabilities(probs: torch.Tensor | Prediction) -> torch.Tensor:
    """Return class probabilities in float64."""
    values = probs.mean if isinstance(probs, Prediction) else probs
    return check_probabilities(values).detach().double()


def _threshold(argument: str, scores: torch.Tensor, level: float) -> torch.Tensor:
    """Return the least score that is no smaller than a share of these scores and a new one."""
    # Rounding must not ask for one more.
    rank = max(1, math.ceil((len(scores) + 1) * proper_fraction("level", level) - 1e-9))
    if rank > len(scores):
        raise ValueError(
            f"{argument} must be of at least {math.ceil(level / (1 - level) - 1e-9)} calibration points for "
            f"level={level:g}, got {len(scores)}"
        )
    return scores.kthvalue(rank, 0).values


def _check_score(score: object, known: Collection[str]) -> None:
    if not isinstance(score, str) or score not in known:
        raise ValueError(f"score must be one of {', '.join(map(repr, known))}, got {score!r}")
