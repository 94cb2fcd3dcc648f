# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""All usual scores of a posterior on test data, in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pyro_radial._pyro.checks import held_numbers, proper_fraction
from pyro_radial.infer.data import Rows, as_inputs, move
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.nn.likelihoods import Categorical
from pyro_radial.nn.modules import device_of, dtype_of
from pyro_radial.nn.named_likelihoods import NamedLikelihoods
from pyro_radial.uncertainty.calibration import expected_calibration_error, reliability
from pyro_radial.uncertainty.intervals import (
    crps_from_draws,
    interval_coverage,
    quantile_calibration,
)
from pyro_radial.uncertainty.metrics import accuracy, auroc, brier_score, fpr_at_tpr
from pyro_radial.uncertainty.plots import plot_quantile_calibration, plot_reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPS = 8  # of draws, each left out once
LEVELS = tuple(level / 20 for level in range(1, 20))


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores on test data, from :func:`evaluate`; printing it gives a table.

    :param scores: values by name.
    :param errors: their standard errors from the finite number of draws; NaN with one draw, and then not printed. They
        do not include the error from the finite test set.
    :param prediction: the prediction of the test data.
    :param targets: the targets of the test data.
    :param float level: the level of intervals.
    """

    scores: Mapping[str, float]
    errors: Mapping[str, float]
    prediction: Prediction
    targets: Tensor
    level: float

    def __str__(self) -> str:
        width = max(map(len, self.scores))
        lines = []
        for name, value in self.scores.items():
            error = self.errors[name]
            lines.append(
                f"{name:<{width}}  {value:9.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")
            )
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw accuracy against confidence, or for real targets the calibration of quantiles with the level marked.

        :param ax: axes to draw into; default a new figure.
        :returns: the axes.
        :raises ImportError: without matplotlib.
        """
        if _of_classes(self.prediction):
            labels, prediction = _by_label(self.prediction, self.targets)
            return plot_reliability({"test": reliability(prediction.mean, labels)}, ax)
        quantiles = self.prediction.quantiles(LEVELS)
        curve = quantile_calibration(quantiles, LEVELS, self.targets)
        return plot_quantile_calibration({"test": curve}, ax, level=self.level)


class Evaluations(dict[str, Evaluation]):
    """The scores of named outputs, by name; printing them gives a table for each."""

    def __str__(self) -> str:
        return "\n\n".join(f"{name}\n{evaluation}" for name, evaluation in self.items())


def evaluate(
    model: Callable[..., object],
    guide: Any,
    test: Any,
    *,
    ood: Any = None,
    num_samples: int | None = None,
    method: Literal["draws", "linearized", "probit", "propagate"] = "draws",
    level: float = 0.9,
    progress: bool = True,
) -> Any:
    r"""Predict test data and compute the usual scores, each with its standard error over draws.

    For classes: accuracy, negative log-likelihood (NLL, nats per point), expected calibration error and Brier score.
    With many labels per point, as for tokens, each label that counts is a point; ``ood`` is then not supported.
    For real targets, in their units: RMSE, NLL, CRPS, and coverage and mean width of central intervals. With ``ood``,
    each measure of unfamiliarity gets an AUROC, and a false positive rate at the threshold that finds 95 % of the
    unfamiliar inputs. The measures are entropy, mutual information, and, with logits f, energy
    :math:`-\log \sum_k e^{f_k}` and :math:`-\max_k f_k`, both means over draws; for real targets, the epistemic
    variance. One draw, as of the probit, has no mutual information.

    Standard errors come from the jackknife over eight groups of draws.

    Source: Liu, Wang, Owens and Li (2020), *Energy-based out-of-distribution detection*, equation 4; Hendrycks et al.
    (2022), *Scaling out-of-distribution detection for real-world settings*, section 3, for the largest logit.

    :param model: a Pyro model with a likelihood, as for :func:`~pyro_radial.predict`.
    :param guide: its guide, or samples.
    :param test: inputs and targets, as the data of :func:`~pyro_radial.fit`.
    :param ood: other inputs ``[M, ...]``, which the model should find unfamiliar.
    :param num_samples: S, the number of draws, as of :func:`~pyro_radial.predict`.
    :param method: of the prediction, as of :func:`~pyro_radial.predict`.
    :param level: the level of intervals for real targets, between zero and one.
    :param progress: whether to show a progress bar.
    :returns: an :class:`Evaluation`; for a model of named outputs, a dict with one for each name, which leaves out rows
        with missing targets of that output.
    :raises ValueError: naming the argument that does not fit.
    :raises ImportError: for ``ood`` without scikit-learn.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> x = torch.randn(20, 2)
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 3)), likelihoods.Categorical())
        >>> guide = AutoRadial(model)
        >>> guide.setup(x, torch.arange(20) % 3)
        >>> found = evaluate(model, guide, (x, torch.arange(20) % 3), ood=10 * x, progress=False)
        >>> list(found.scores)[:5]
        ['accuracy', 'NLL', 'ECE', 'Brier', 'AUROC, entropy']
    """
    proper_fraction("level", level)
    likelihood: Any = getattr(model, "likelihood", None)
    if likelihood is None:
        raise ValueError(
            "model must have an attribute `likelihood`, as SupervisedModel has, got none"
        )
    dtype = dtype_of(guide, model)
    x, y = Rows(test, "test", dtype).all()
    if ood is not None:
        ood = as_inputs(ood, "ood", dtype)
    predicted = partial(
        predict, model, guide, num_samples=num_samples, method=method, progress=progress
    )
    familiar = predicted(x)
    unfamiliar = None if ood is None else predicted(ood)
    if not isinstance(likelihood, NamedLikelihoods):
        return _evaluation(familiar, unfamiliar, y, level)
    samples = {name: prediction.samples for name, prediction in familiar.items()}
    likelihood.read_target(samples, move(y, device_of(guide, model)))
    evaluations = Evaluations()
    for name in likelihood.by_name:
        unfamiliar_output = None if unfamiliar is None else unfamiliar[name]
        evaluations[name] = _evaluation(familiar[name], unfamiliar_output, y[name], level, name)
    return evaluations


def _evaluation(
    familiar: Prediction,
    unfamiliar: Prediction | None,
    y: object,
    level: float,
    output: str | None = None,
) -> Evaluation:
    """Compute the scores of one output from the predictions of test inputs, and of others if they are given."""
    targets = held_numbers("test", y, device=familiar.samples.device)
    likelihood = familiar.likelihood
    of_classes = _of_classes(familiar)
    missing = likelihood.is_missing(targets).reshape(len(targets), -1)
    # Rows of several labels are scored by the labels that they have.
    is_scored = ~(missing.all(-1) if of_classes else missing.any(-1))
    if not bool(is_scored.any()):
        of_output = "" if output is None else f" of output {output!r}"
        raise ValueError(f"test must have targets{of_output}, got only missing ones")
    if not bool(is_scored.all()):
        targets = targets[is_scored]
        familiar = replace(familiar, samples=familiar.samples[:, is_scored])
    if of_classes:
        likelihood.read_target(familiar.samples, targets)
    else:
        targets = likelihood.check_target(familiar.samples, targets)
    if unfamiliar is not None and of_classes and likelihood.event_dim > 1:
        raise ValueError(
            f"ood must be None for many labels per point (event_dim={likelihood.event_dim})"
        )

    def scores(draw_index: Tensor | slice) -> dict[str, float]:
        draws = _choose_draws(familiar, draw_index)
        values = (
            _score_labels(draws, targets) if of_classes else _score_numbers(draws, targets, level)
        )
        if unfamiliar is not None:
            values |= _score_detection(draws, _choose_draws(unfamiliar, draw_index))
        return values

    values = scores(slice(None))
    errors = _jackknife(scores, len(familiar.samples), values)
    return Evaluation(values, errors, familiar, targets, level)


def _score_labels(prediction: Prediction, labels: Tensor) -> dict[str, float]:
    """Return the scores of predicted classes."""
    labels, prediction = _by_label(prediction, labels)
    probs = prediction.mean
    return {
        "accuracy": float(accuracy(probs, labels)),
        "NLL": -float(prediction.log_prob(labels).mean()),
        "ECE": float(expected_calibration_error(probs, labels)),
        "Brier": float(brier_score(probs, labels)),
    }


def _score_numbers(prediction: Prediction, targets: Tensor, level: float) -> dict[str, float]:
    """Return the scores of predicted numbers."""
    lower, upper = prediction.quantiles([(1 - level) / 2, (1 + level) / 2])
    values = {
        "RMSE": float((prediction.mean - targets).square().mean().sqrt()),
        "NLL": -float(prediction.log_prob(targets).mean()),
        f"coverage of {100 * level:g} %": float(interval_coverage(lower, upper, targets)),
        "mean width": float((upper - lower).mean()),
    }
    if len(prediction.samples) > 1:
        values["CRPS"] = float(crps_from_draws(prediction.sample_targets(), targets))
    return values


def _score_detection(familiar: Prediction, unfamiliar: Prediction) -> dict[str, float]:
    """Return how well unfamiliar inputs are told from those of the test data."""
    values: dict[str, float] = {}
    unfamiliar_scores = _unfamiliarity(unfamiliar)
    for name, familiar_scores in _unfamiliarity(familiar).items():
        values[f"AUROC, {name}"] = auroc(familiar_scores, unfamiliar_scores[name])
        values[f"FPR95, {name}"] = fpr_at_tpr(familiar_scores, unfamiliar_scores[name])
    return values


def _unfamiliarity(prediction: Prediction) -> dict[str, Tensor]:
    """Return scores that are higher at unfamiliar inputs, ``[N]`` each."""
    if not _of_classes(prediction):
        return {"epistemic variance": prediction.epistemic_variance.flatten(1).sum(-1)}
    measures = {"entropy": prediction.entropy}
    if len(prediction.samples) > 1:
        measures["mutual information"] = prediction.mutual_information
    measures["energy"] = -prediction.samples.logsumexp(-1).mean(0)
    measures["largest logit"] = -prediction.samples.amax(-1).mean(0)
    return measures


def _of_classes(prediction: Prediction) -> bool:
    return isinstance(prediction.likelihood, Categorical)


def _by_label(prediction: Prediction, labels: Tensor) -> tuple[Tensor, Prediction]:
    """Return the labels that count, each as a point of its own, and their prediction."""
    labels = labels.flatten()
    samples = prediction.samples.flatten(1, -2)
    observed = ~prediction.likelihood.is_missing(labels)
    if not observed.all():
        labels = labels[observed]
        samples = samples[:, observed]
    return labels, replace(prediction, samples=samples, likelihood=Categorical())


def _choose_draws(prediction: Prediction, draw_index: Tensor | slice) -> Prediction:
    """Return the prediction of some of its draws."""
    noise = {name: value[draw_index] for name, value in prediction.noise.items()}
    return replace(prediction, samples=prediction.samples[draw_index], noise=noise)


def _jackknife(
    scores: Callable[[Tensor], dict[str, float]], number: int, values_of_all: Mapping[str, float]
) -> dict[str, float]:
    """Compute standard errors from leaving out each group of draws once."""
    count = min(GROUPS, number)
    if count < 2 + (number <= GROUPS):
        return dict.fromkeys(values_of_all, float("nan"))
    order = torch.arange(number, device="cpu")
    scores_by_group = [scores(order[order % count != group]) for group in range(count)]
    errors = {}
    for name in values_of_all:
        leave_out_values = torch.tensor(
            [left_out_scores[name] for left_out_scores in scores_by_group]
        ).double()
        errors[name] = float(((count - 1) * leave_out_values.var(unbiased=False)).sqrt())
    return errors
