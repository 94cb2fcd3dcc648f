# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Record how a tested method refers images, and compute means, errors and differences of these results."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Results, Row
from benchmarks.uncertainty._methods import area, measures
from pyro_radial.infer import Prediction
from pyro_radial.uncertainty import referral_curve, reliability
from pyro_radial.uncertainty.calibration import Reliability
from pyro_radial.uncertainty.referral import ReferralCurve

SHARES = (0.0, 0.1, 0.2, 0.3)
BINS = 10


def judged(prediction: Prediction, labels: Tensor, num_resamples: int) -> Row:
    """Measures, areas of what is left with their resamples, and the bins of calibration."""
    probabilities = prediction.mean
    rankings = {"entropy": prediction.entropy}
    # One draw alone tells nothing about weights.
    if len(prediction.samples) > 1:
        rankings = {"mutual information": prediction.mutual_information, **rankings}
    referred = {}
    for name, uncertainty in rankings.items():
        curve = referral_curve(area, probabilities, labels, uncertainty, SHARES, num_resamples=num_resamples)
        referred[name] = {
            "score": _listed(curve.score),
            "resamples": _listed(curve.resamples),
            "redrawn": curve.redrawn,
        }
    bins = reliability(probabilities, labels, BINS)
    shown = {name: _listed(getattr(bins, name).nan_to_num()) for name in ("confidence", "accuracy", "count")}
    return {**measures(prediction, labels), "referred": referred, "bins": shown}


def _listed(values: Tensor) -> list[Any]:
    return (1e4 * values.double()).round().div(1e4).tolist()


def curve_of(rows: Sequence[Row], ranking: str | None = None) -> ReferralCurve:
    """The mean over seeds, with its resamples of the test images, which are the same for all; None is the first."""
    chosen = [next(iter(row["referred"].values())) if ranking is None else row["referred"][ranking] for row in rows]
    score = torch.tensor([one["score"] for one in chosen], dtype=torch.float64)
    resamples = torch.tensor([one["resamples"] for one in chosen], dtype=torch.float64)
    return ReferralCurve(torch.tensor(SHARES), score.mean(0), resamples.mean(0), sum(one["redrawn"] for one in chosen))


def errors(scores: Tensor, resamples: Tensor) -> Tensor:
    """Standard errors of a mean over seeds ``[S, L]``, for other seeds and other test images at once."""
    of_seeds = scores.var(0) / len(scores) if len(scores) > 1 else torch.zeros_like(scores[0])
    return (of_seeds + resamples.mean(0).var(0)).sqrt()


def compared(results: Results, ours: str, theirs: str) -> tuple[Tensor, Tensor]:
    """Mean differences of the areas at each share, and their standard errors, image by image and seed by seed."""
    parts = []
    for name in ("score", "resamples"):
        ab = [
            torch.tensor(
                [next(iter(row["referred"].values()))[name] for row in results.where(part="test", method=method)]
            )
            for method in (ours, theirs)
        ]
        parts.append(ab[0] - ab[1])
    return parts[0].mean(0), errors(*parts)


def pooled(rows: Sequence[Row]) -> Reliability:
    """The bins of all seeds together."""
    bins = [{name: torch.tensor(values, dtype=torch.float64) for name, values in row["bins"].items()} for row in rows]
    count = torch.stack([one["count"] for one in bins])
    total = count.sum(0)

    def mean(name: str) -> Tensor:
        return (torch.stack([one[name] for one in bins]) * count).sum(0) / total

    return Reliability(mean("confidence"), mean("accuracy"), total.long())


def percent(curve: ReferralCurve, place: int) -> str:
    return f"{100 * curve.score[place]:.1f} ± {100 * curve.stderr[place]:.1f}"


def spread(rows: Sequence[Row]) -> str:
    scores = torch.tensor([row["auc"] for row in rows], dtype=torch.float64)
    return f"± {100 * scores.std() / len(scores) ** 0.5:.1f}" if len(rows) > 1 else ""
