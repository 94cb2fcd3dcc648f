# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How good is what a model keeps for itself when it refers the points it is least certain of to an expert."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyro_radial._pyro.checks import non_negative_integer, positive_count
from pyro_radial.uncertainty._inputs import finite_numbers

__all__ = ["ReferralCurve", "referral_curve"]

Score = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True, eq=False)
class ReferralCurve:
    """The score of what is left at each referred share; made by :func:`referral_curve`.

    :param share: shares of the points that are referred, float64, shape ``[L]``.
    :param score: score of the others, float64, shape ``[L]``.
    :param resamples: the same for R bootstrap resamples of the points, float64, shape ``[R, L]``.
    :param redrawn: how many resamples were thrown away because the score was not defined for what was left.
    """

    share: torch.Tensor
    score: torch.Tensor
    resamples: torch.Tensor
    redrawn: int

    @property
    def stderr(self) -> torch.Tensor:
        """Standard error of the score at each share, the standard deviation over resamples.

        :returns: a tensor ``[L]``.
        """
        return self.resamples.std(0)

    @property
    def area(self) -> torch.Tensor:
        r"""Area under the curve over the width of its shares: the mean score, in the units of the score.

        .. math:: \frac{1}{s_L - s_1} \int_{s_1}^{s_L} \mathrm{score}(s) \, ds

        by the trapezoidal rule; of a single share, its score.

        :returns: 0-d tensor.
        """
        return self._area(self.score)

    @property
    def area_stderr(self) -> torch.Tensor:
        """Standard error of the area, the standard deviation over resamples.

        :returns: 0-d tensor.
        """
        return self._area(self.resamples).std(0)

    def _area(self, scores: torch.Tensor) -> torch.Tensor:
        if len(self.share) == 1:
            return scores[..., 0]
        return torch.trapezoid(scores, self.share) / (self.share[-1] - self.share[0])


@torch.no_grad()
def referral_curve(
    score: Score,
    predictions: torch.Tensor,
    targets: torch.Tensor,
    uncertainty: torch.Tensor,
    shares: Sequence[float] = (0.0, 0.1, 0.2, 0.3),
    *,
    num_resamples: int = 100,
    seed: int = 0,
) -> ReferralCurve:
    r"""Score of what is left when the most uncertain share of the points is referred to an expert.

    At share s of N points the s N most uncertain are referred, rounded to the nearest number, and ``score`` is taken of
    the others. An uncertainty that knows what the model does not know makes the curve better with the share; one that
    knows nothing leaves it level. Points of the same uncertainty are referred in an order drawn from the seed.

    The errors are those of the bootstrap: R times N points are drawn with replacement, ranked and scored anew. A
    resample that lacks a class may have no score; it is drawn again, and counted. Two methods tested on the same points
    with the same seed have the same resamples, if neither had one drawn again: ``(a.resamples - b.resamples).std(0)``
    is then the standard error of their difference, which is mostly far less than that of either.

    Source: Farquhar, Osborne and Gal (2020), *Radial Bayesian Neural Networks*, section 4.1 and table 1, where
    ``score`` is the area under the ROC curve and ``uncertainty`` the mutual information.

    :param score: a function of predictions and targets of some points that returns a number, such as
        :func:`~pyro_radial.uncertainty.accuracy`, :func:`~pyro_radial.uncertainty.class_auroc` or
        :func:`~pyro_radial.uncertainty.negative_log_likelihood`.
    :param predictions: first argument of ``score``, such as class probabilities, ``[N, ...]``.
    :param targets: second argument of ``score``, ``[N, ...]``.
    :param uncertainty: what ranks the points, such as ``Prediction.mutual_information``; shape ``[N]``.
    :param shares: referred shares in ``[0, 1)``, increasing.
    :param num_resamples: R, at least 2.
    :param seed: of the resamples and of the order of ties.
    :returns: score and standard error at each share, and the area.
    :raises ValueError: if an argument is out of range, its number of points does not fit, or the score of what is left
        at a share is not defined (a class is missing) or not finite; the message names the share.

    Example::

        >>> from pyro_radial.uncertainty import accuracy
        >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.45, 0.55], [0.6, 0.4]])
        >>> curve = referral_curve(accuracy, probs, torch.tensor([0, 1, 0, 0]), 1 - probs.amax(-1), shares=[0, 0.25])
        >>> curve.score.tolist()
        [0.75, 1.0]
    """
    ranks = finite_numbers("referral_curve: uncertainty", uncertainty)
    number = len(ranks)
    for name, values in (("predictions", predictions), ("targets", targets)):
        if values.ndim == 0 or len(values) != number:
            raise ValueError(
                f"referral_curve: {name} must have {number} rows to fit uncertainty, got shape {list(values.shape)}"
            )
    share = _checked_shares(shares)
    left = [number - round(number * value) for value in share.tolist()]
    if left[-1] == 0:
        raise ValueError(f"referral_curve: shares must leave at least one of {number} points, got {share[-1]:g}")
    if positive_count("referral_curve: num_resamples", num_resamples) < 2:
        raise ValueError(f"referral_curve: num_resamples must be at least 2, got {num_resamples}")
    generator = torch.Generator().manual_seed(non_negative_integer("referral_curve: seed", seed))

    def curve(points: torch.Tensor) -> torch.Tensor:
        ranked = points[ranks[points].argsort(stable=True)].to(predictions.device)
        ordered, true = predictions[ranked], targets[ranked.to(targets.device)]
        scores = [_scored(score, ordered[:k], true[:k], s, number) for s, k in zip(share.tolist(), left, strict=True)]
        return torch.tensor(scores, dtype=torch.float64)

    of_all = curve(torch.randperm(number, generator=generator))
    resamples: list[torch.Tensor] = []
    redrawn = 0
    while len(resamples) < num_resamples:
        points = torch.randint(number, (number,), generator=generator)
        try:
            resamples.append(curve(points))
        except ValueError as error:
            redrawn += 1
            if redrawn > num_resamples:
                raise ValueError(
                    f"referral_curve: score must be defined for most resamples, got {redrawn} of "
                    f"{redrawn + len(resamples)} without; refer smaller shares or take more points: {error}"
                ) from error
    return ReferralCurve(share, of_all, torch.stack(resamples), redrawn)


def _checked_shares(shares: Sequence[float]) -> torch.Tensor:
    share = torch.as_tensor(shares, dtype=torch.float64)
    fits = share.ndim == 1 and len(share) > 0 and bool(((share >= 0) & (share < 1)).all())
    if not fits or not (share.diff() > 0).all():
        raise ValueError(
            f"referral_curve: shares must be increasing numbers in [0, 1), of which 0.1 refers 10 %, got "
            f"{share.tolist()}"
        )
    return share


def _scored(score: Score, predictions: torch.Tensor, targets: torch.Tensor, share: float, number: int) -> float:
    """The score of what is left, or a ValueError that says where there is none."""
    where = f"for the {len(targets)} of {number} points left at a referred share of {share:g}"
    try:
        value = float(score(predictions, targets))
    except ValueError as error:
        raise ValueError(f"referral_curve: score must be defined {where}: {error}") from error
    if not abs(value) < float("inf"):
        raise ValueError(f"referral_curve: score must be finite {where}, got {value}")
    return value
