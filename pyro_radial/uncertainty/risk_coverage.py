# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss of the most certain points, against how many these are."""

from dataclasses import dataclass

import torch

from pyro_radial.uncertainty._inputs import finite_numbers, means_of_ties

__all__ = ["RiskCoverage", "risk_coverage"]


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Mean loss of the most certain points; made by :func:`risk_coverage`.

    :param coverage: share of the points that are kept, 1/N, 2/N, ..., 1, float64, shape ``[N]``.
    :param risk: mean loss of those, float64, shape ``[N]``; the last is the mean loss of all.
    """

    coverage: torch.Tensor
    risk: torch.Tensor

    @property
    def area(self) -> torch.Tensor:
        r"""Area under the risk-coverage curve, also AURC; lower is better.

        .. math:: \frac{1}{N} \sum_{n=1}^N \mathrm{risk}_n

        Source: Geifman, Uziel and El-Yaniv (2019), *Bias-reduced uncertainty estimation for deep neural classifiers*.

        :returns: 0-d tensor, in the units of the loss.
        """
        return self.risk.mean()


def risk_coverage(losses: torch.Tensor, uncertainty: torch.Tensor) -> RiskCoverage:
    r"""Mean loss of the n most certain points, for each n.

    .. math:: \mathrm{risk}_n = \frac{1}{n} \sum_{i=1}^n \ell_{(i)}

    with :math:`\ell_{(i)}` the loss of the i-th point in the order of growing uncertainty. Points of the same
    uncertainty have their mean loss, which is the expectation over their order. Unlike
    :func:`~pyro_radial.uncertainty.referral_curve` it is for scores that are means over points, at every share.

    :param losses: loss of each point, such as 1 where the most probable class is not the label and 0 elsewhere, shape
        ``[N]``.
    :param uncertainty: what ranks the points, such as ``Prediction.entropy``; shape ``[N]``.
    :returns: coverage, risk, and the area under the curve.
    :raises ValueError: if an argument is not one-dimensional, is empty, is not finite, or does not fit the other.

    Example::

        >>> curve = risk_coverage(torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0.1, 0.9, 0.2, 0.3]))
        >>> [round(risk, 3) for risk in curve.risk.tolist()], round(curve.area.item(), 3)
        ([0.0, 0.0, 0.333, 0.5], 0.208)
    """
    ranks = finite_numbers("risk_coverage: uncertainty", uncertainty)
    values = finite_numbers("risk_coverage: losses", losses, len(ranks))
    kept = torch.arange(1, len(ranks) + 1, dtype=torch.float64)
    risk = means_of_ties(values, ranks)[ranks.argsort()].cumsum(0) / kept
    return RiskCoverage(kept / len(ranks), risk)
