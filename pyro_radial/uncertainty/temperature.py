# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Temperature scaling: one number, fitted on validation data, makes class probabilities sharper or flatter."""

import math
from dataclasses import dataclass

import torch
from scipy.optimize import brentq

from pyro_radial._pyro.checks import positive_float
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.nn.likelihoods import Categorical
from pyro_radial.uncertainty._inputs import class_labels


@dataclass(frozen=True)
class TemperatureScaling:
    r"""Class probabilities at a temperature.

    .. math:: p_k = \mathrm{softmax}(z / T)_k \propto q_k^{1 / T}

    with z the logits, or the logarithms of probabilities q. A temperature above one makes a model less certain, below
    one more certain; the most probable class and the accuracy stay the same. It is the usual baseline for the
    calibration of a posterior: one parameter, fitted in milliseconds on validation data.

    Source: Guo et al. (2017), *On Calibration of Modern Neural Networks*, section 4.2, equation 9.

    :param temperature: T, positive.
    :raises ValueError: if the temperature is not positive and finite.

    Example::

        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0], [0.0, 4.0]])
        >>> scaling = TemperatureScaling.fit(logits, torch.tensor([0, 0, 1, 0]))  # Three of four are right.
        >>> scaling(logits)[0]
        tensor([0.7500, 0.2500])
        >>> round(scaling.temperature, 3)  # 4 / log 3
        3.641
    """

    temperature: float

    def __post_init__(self) -> None:
        positive_float("temperature", self.temperature)

    def __call__(self, logits: torch.Tensor | Prediction) -> torch.Tensor:
        """Return the probabilities ``[N, K]`` at the temperature, for logits as in :meth:`fit` and in their dtype."""
        return (_check_logits(logits) / self.temperature).softmax(-1)

    @classmethod
    def fit(cls, logits: torch.Tensor | Prediction, labels: torch.Tensor) -> "TemperatureScaling":
        r"""Find the temperature with the lowest negative log-likelihood of the labels.

        The likelihood is convex in 1/T. Its derivative :math:`\sum_n (E_{p_n}[z_{nk}] - z_{n y_n})` is zero at one
        temperature, which is found to rounding in double precision.

        :param logits: logits or log-probabilities of validation points, ``[N, K]``; pass probabilities as
            ``probs.log()``. For a ``Prediction`` of classes, the logarithm of its mean probabilities: draws are
            averaged first, then scaled.
        :param labels: true classes from 0 to K - 1, integers of shape ``[N]``.
        :returns: the scaling, to be called with logits of any points.
        :raises ValueError: if shapes, values or types do not fit, a label has probability zero, or there is no such
            temperature: either all labels are the most probable classes, so colder is always better, or the logits of
            the labels are no higher than the mean over classes, so hotter is always better.
        """
        scores = _check_logits(logits).detach()
        labels = class_labels("logits", labels, scores.shape)
        z = scores.cpu().double()
        of_labels = z.gather(-1, labels.cpu()[:, None]).squeeze(-1)
        if of_labels.isinf().any():
            raise ValueError(
                "labels must have positive probability at every point, got a label with probability zero"
            )
        possible = z.isfinite()
        values = torch.where(possible, z, 0.0)

        def slope(inverse: float) -> float:
            probs = torch.where(possible, inverse * values, -math.inf).softmax(-1)
            return float(((probs * values).sum(-1) - of_labels).mean())

        if not slope(0.0) < 0:
            raise ValueError(
                "labels must have logits above the mean over classes, on average, for a temperature to exist, got "
                "predictions no better than chance"
            )
        if not float((z.amax(-1) - of_labels).mean()) > 0:
            raise ValueError(
                "labels must hold a point whose most probable class is not its label for a temperature to exist, got "
                f"{len(labels)} right of {len(labels)}: use more validation points"
            )
        low = high = 1.0
        while slope(low) >= 0:
            low /= 2
        while slope(high) <= 0:
            high *= 2
        return cls(1 / brentq(slope, low, high, xtol=1e-300, rtol=1e-15))


def _check_logits(logits: torch.Tensor | Prediction) -> torch.Tensor:
    """Return logits in float32 or wider, or raise a ValueError that names them."""
    if isinstance(logits, Prediction):
        likelihood = logits.likelihood
        if not isinstance(likelihood, Categorical) or likelihood.event_dim != 1:
            raise ValueError(
                "logits must be a prediction of one class for each point, made with the likelihood Categorical, got "
                f"{type(likelihood).__name__}"
            )
        logits = logits.samples.log_softmax(-1).logsumexp(0) - math.log(len(logits.samples))
    if logits.ndim != 2 or 0 in logits.shape or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating-point of shape [N, K], got {logits.dtype} {list(logits.shape)}"
        )
    if logits.isnan().any() or not logits.amax(-1).isfinite().all():
        raise ValueError(
            "logits must be numbers below infinity, with one in each row above minus infinity, got NaN or infinity"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
