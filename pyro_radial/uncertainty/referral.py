# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The score of the points that a model keeps when it refers the most uncertain ones to an expert."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import torch

from pyro_radial._pyro.checks import check_integer, held_numbers, random_seed
from pyro_radial.uncertainty._inputs import finite_numbers

Score = Callable[[torch.Tensor, torch.Tensor], SupportsFloat]


@dataclass(frozen=True, eq=False)
class ReferralCurve:
    """The score of the kept points at each referred share, from :func:`referral_curve`.

    :param referred: shares of the points that are referred, float64, shape ``[L]``.
    :param score: score of the kept points, float64, shape ``[L]``.
    :param resamples: the same for R bootstrap resamples of the points, float64, shape ``[R, L]``.
    :param redrawn: number of resamples that were drawn again because the score of their kept points was not defined.
    """

    referred: torch.Tensor
    score: torch.Tensor
    resamples: torch.Tensor
    redrawn: int

    @property
    def stderr(self) -> torch.Tensor:
        """Standard error of the score at each share, the standard deviation over resamples, ``[L]``."""
        return self.resamples.std(0)


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
    r"""Score the points that are left when the most uncertain share is referred to an expert.

    At share s of N points, the s N most uncertain ones (rounded) are referred and ``score`` is computed from the
    others. If the uncertainty is high where the model errs, the curve improves with the share; if the two are
    unrelated, the curve is flat. Points of equal uncertainty are referred in an order drawn from the seed.

    Standard errors come from the bootstrap: N points are drawn with replacement, ranked and scored, R times. A
    resample without a score, for example because a class is missing, is drawn again and counted. If none was, two
    methods tested on the same points with the same seed share their resamples, and
    ``(a.resamples - b.resamples).std(0)`` is the standard error of their difference.

    Source: Farquhar, Osborne and Gal (2020), *Radial Bayesian Neural Networks*, section 4.1 and table 1, where
    ``score`` is the area under the ROC curve and ``uncertainty`` the mutual information.

    :param score: a function of predictions and targets that returns a number, such as
        ``lambda probs, y: (probs.argmax(-1) == y).float().mean()`` or one of scikit-learn's.
    :param predictions: first argument of ``score``, such as class probabilities, ``[N, ...]``.
    :param targets: second argument of ``score``, ``[N, ...]``.
    :param uncertainty: uncertainty of each point, such as ``Prediction.mutual_information``, shape ``[N]``.
    :param shares: referred shares in ``[0, 1)``, increasing.
    :param num_resamples: R, at least 2.
    :param seed: seed of the resamples and of the order of ties.
    :returns: a result with ``referred``, ``score`` and ``stderr``.
    :raises ValueError: if an argument is out of range, its number of points does not fit, or the score at a share is
        not defined (a class is missing) or not finite; the message names the share.

    Example::

        >>> accuracy = lambda probs, labels: (probs.argmax(-1) == labels).float().mean()
        >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.45, 0.55], [0.6, 0.4]])
        >>> curve = referral_curve(accuracy, probs, torch.tensor([0, 1, 0, 0]), 1 - probs.amax(-1), shares=[0, 0.25])
        >>> curve.score.tolist()
        [0.75, 1.0]
    """
    ranks = finite_numbers("uncertainty", uncertainty)
    number = len(ranks)
    for name, values in (("predictions", predictions), ("targets", targets)):
        if values.ndim == 0 or len(values) != number:
            raise ValueError(
                f"{name} must have {number} rows to fit uncertainty, got shape {list(values.shape)}"
            )
    referred = held_numbers("shares", shares)
    is_valid = (
        referred.ndim == 1 and len(referred) > 0 and bool(((referred >= 0) & (referred < 1)).all())
    )
    if not is_valid or not (referred.diff() > 0).all():
        raise ValueError(
            f"shares must be increasing numbers in [0, 1), where 0.1 refers 10 %, got {referred.tolist()}"
        )
    num_kept = [number - round(number * value) for value in referred.tolist()]
    if num_kept[-1] == 0:
        raise ValueError(f"shares must leave at least one of {number} points, got {referred[-1]:g}")
    check_integer("num_resamples", num_resamples, 2, "an integer of at least 2")
    generator = torch.Generator().manual_seed(random_seed("seed", seed, bits=64))

    def curve(points: torch.Tensor) -> torch.Tensor:
        ranked = points[ranks[points].argsort(stable=True)].to(predictions.device)
        ordered = predictions[ranked]
        true = targets[ranked.to(targets.device)]
        scores = [
            _score_kept(score, ordered[:num_scored], true[:num_scored], share_referred, number)
            for share_referred, num_scored in zip(referred.tolist(), num_kept, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float64)

    of_all = curve(torch.randperm(number, generator=generator, device="cpu"))
    resamples: list[torch.Tensor] = []
    redrawn = 0
    while len(resamples) < num_resamples:
        points = torch.randint(number, (number,), generator=generator, device="cpu")
        try:
            resamples.append(curve(points))
        except ValueError as error:
            redrawn += 1
            if redrawn > num_resamples:
                raise ValueError(
                    f"score must be defined for most resamples, got {redrawn} of {redrawn + len(resamples)} without; "
                    f"refer smaller shares or take more points: {error}"
                ) from error
    return ReferralCurve(referred, of_all, torch.stack(resamples), redrawn)


def _score_kept(
    score: Score, predictions: torch.Tensor, targets: torch.Tensor, referred: float, number: int
) -> float:
    """Return the score of the kept points, or raise a ValueError that names the share without one."""
    where = f"for the {len(targets)} of {number} points left at a referred share of {referred:g}"
    try:
        value = float(score(predictions, targets))
    except (TypeError, ValueError) as error:
        raise ValueError(f"score must be defined {where}: {error}") from error
    if not abs(value) < float("inf"):
        raise ValueError(f"score must be finite {where}, got {value}")
    return value
