# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How far means and widths have come, from the steps that natural gradients have taken."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_radial.infer.optim.natural_gradient import (
    LR,
    MOST_SHARE,
    SQUARE_SHARE,
    TINY,
    NaturalGradientOptimizer,
)

# Means further from rest than this, in standard deviations of the posterior, have not arrived, nor have widths whose
# logarithm is further off than this.
MOST_MEAN_ERROR, MOST_WIDTH_ERROR = 0.18, 0.09
# The variance of log(variance) that steps leave is this times their rate and their mean square, where the rate is
# constant (1/2) or falls like 5 / t (5/9).
SCATTER = 0.55
# A weight is on its way if it has moved by more than this many standard deviations of its noise.
BEYOND_NOISE = 2.0
# A mean that cannot have closed its distance to less than exp(-3) of it is on its way, whatever the noise.
LEAST_CLOSED = 3.0
# At most this many sites are named.
MOST_NAMED = 3
# The least ratio of a variance to the best one that is estimated.
LEAST_RATIO = 1e-3


class Arrival(NamedTuple):
    """How far a site has come at one step, for each of its :func:`~.natural_gradient.some_of` weights.

    :param Tensor sum_of_rates: the sum of the rates of widths so far, 0-d.
    :param Tensor mean_drift: the estimated distances from rest of the means that are on their way, zero for the others,
        in standard deviations of the posterior.
    :param Tensor mean_scatter: the standard deviations that the noise of steps leaves in means, in the same unit.
    :param Tensor width_pull: the estimated logarithms of width / best width, of the widths that are on their way;
        negative if they are too narrow.
    :param Tensor width_scatter: the standard deviations that the noise of steps leaves in the logarithms of widths.
    """

    sum_of_rates: Tensor
    mean_drift: Tensor
    mean_scatter: Tensor
    width_pull: Tensor
    width_scatter: Tensor

    @property
    def mean_error(self) -> float:
        """The root mean square over weights of the distance of means from rest."""
        return float(torch.hypot(self.mean_drift, self.mean_scatter).square().mean().sqrt())

    @property
    def width_error(self) -> float:
        """The root mean square over weights of the distance of log(width) from rest."""
        return float(torch.hypot(self.width_pull, self.width_scatter).square().mean().sqrt())

    @property
    def share_too_narrow(self) -> float:
        """The share of weights with a width on its way up."""
        return float((self.width_pull < -MOST_WIDTH_ERROR).double().mean())

    def words(self) -> str:
        """Say by how much means and widths are off, or nothing if they have arrived."""
        errors: list[str] = []
        if self.mean_error > MOST_MEAN_ERROR:
            errors.append(f"means by about {self.mean_error:.2g} standard deviations")
        if self.width_error > MOST_WIDTH_ERROR:
            narrow = f", {self.share_too_narrow:.0%} too narrow" if self.share_too_narrow else ""
            errors.append(f"widths by a factor of about {math.exp(self.width_error):.3g}{narrow}")
        return ", ".join(errors)


@torch.no_grad()
def find_arrivals(
    progress: Mapping[str, Mapping[str, Any]], batch_rows: Sequence[int], kl_weight: float = 1.0
) -> dict[str, Arrival]:
    """Return how far the means and widths of each site have come.

    :param progress: from :meth:`NaturalGradientOptimizer.progress`.
    :param batch_rows: the numbers of rows in the batches of an epoch.
    :param kl_weight: the weight of the KL. It scales the curvatures at rest, so means and widths are as slow.
    """
    arrivals: dict[str, Arrival] = {}
    for name, site in progress.items():
        current, marked, limit = site["now"].double(), site["marked"], site["limit"]
        points = torch.tensor(site["trail"], dtype=torch.float64, device=current.device)
        steps, mean_rates, width_rates = points.unbind(-1)
        travel, growth = current - site["before"].double()
        stddev = current[1].exp() / site["per_stddev"]
        # The averages of squares start at zero.
        of_square = kl_weight**2 * (1.0 - (1.0 - SQUARE_SHARE) ** max(1, site["trail"][-1][0]))
        noise, width_noise = (site["squares"].double() / of_square).sqrt() + TINY
        noise = noise * stddev
        largest_unit = MOST_SHARE * (current[0].square() + stddev.square()).mean().sqrt()
        closing = (largest_unit / stddev).clamp(max=1.0) / noise
        scatter = _scatter(steps, mean_rates, noise, closing, batch_rows)
        earlier_scatter = _scatter(
            steps[: marked + 1], mean_rates[: marked + 1], noise, closing, batch_rows
        )
        is_on_its_way = (travel / stddev).square() > BEYOND_NOISE**2 * (scatter + earlier_scatter)
        is_on_its_way |= closing * mean_rates[-1] < LEAST_CLOSED
        closed = closing * (mean_rates[-1] - mean_rates[marked])
        drift = torch.where(is_on_its_way, (travel / stddev).abs() / closed.expm1(), 0.0)
        since_mark = points[-1] - points[marked]
        arrivals[name] = Arrival(
            width_rates[-1],
            drift,
            scatter.sqrt(),
            _pull(growth, width_noise, since_mark[0], kl_weight * since_mark[2], limit),
            0.5
            * width_noise
            * (SCATTER * (limit / width_noise).clamp(max=kl_weight * site["width_rate"])).sqrt(),
        )
    return arrivals


def _scatter(
    steps: Tensor, sums: Tensor, noise: Tensor, closing: Tensor, batch_rows: Sequence[int]
) -> Tensor:
    """Return the variance that the noise of steps leaves in means, in units of the posterior's.

    The rows of an epoch come once each, so the noise of batches of one size cancels over an epoch unless a mean forgets
    it before. If the last batch is smaller, its rows have a larger weight, and a part remains. The noise of draws does
    not cancel; its size is about one.

    :param steps: the numbers of steps at marks.
    :param sums: the sums of rates of means there.
    :param noise: the root mean squares of gradients.
    :param closing: the part of its distance that a mean closes in a step, at a rate of one.
    """
    weights = torch.exp(-2.0 * closing * (sums[-1] - sums)[:, None])
    rates = sums.diff() / steps.diff()
    variance = 0.5 * closing * (rates[:, None] * weights.diff(dim=0)).sum(0)
    number, inverse = len(batch_rows), sum(1.0 / rows for rows in batch_rows)
    if number == 1:
        return variance * noise.square()
    per_row = number / sum(batch_rows)
    remaining = (inverse - number * per_row) / (inverse - per_row)
    of_draws = noise.square().clamp(max=1.0)
    uncanceled = (remaining + (variance * number).square() / 3.0).clamp(max=1.0)
    return variance * (of_draws + (noise.square() - of_draws) * uncanceled)


def _pull(growth: Tensor, noise: Tensor, steps: Tensor, sum_of_rates: Tensor, limit: Any) -> Tensor:
    r"""Return the estimated logarithm of width / best width of the widths that are on their way, zero for the others.

    Without noise :math:`d \log v / d s = 1 - v / v^*` at the sum of rates s, so :math:`1 - v^* / v` falls like
    :math:`e^{-s}`.

    :param growth: how far log(width) has moved since a mark.
    :param noise: the root mean squares of the derivatives by log(width).
    :param steps: the number of steps since the mark, and the sum of their rates.
    """
    closed = torch.minimum(sum_of_rates, steps * limit / noise)
    ratio = (1.0 - torch.exp(2.0 * growth - closed)) / -torch.expm1(-closed)
    is_on_its_way = growth.abs() > 0.5 * BEYOND_NOISE * noise * closed / steps.sqrt()
    return torch.where(is_on_its_way, 0.5 * ratio.clamp(min=LEAST_RATIO).log(), 0.0)


def advise(
    optimizer: NaturalGradientOptimizer, arrivals: Mapping[str, Arrival], epoch: int, epochs: int
) -> str | None:
    """Return advice if sites had not arrived after the epoch that ``fit`` returns, else None.

    :param epochs: the number of epochs that the rates were planned for.
    """
    sites = [
        f"'{name}' ({words})" for name, arrival in arrivals.items() if (words := arrival.words())
    ]
    if not sites:
        return None
    change = "give more epochs or a larger batch_size"
    if epoch + 1 < epochs:
        change = "return the last epoch, without validation, patience or a callback that stops"
    if optimizer.param_groups[0]["initial_lr"] < LR:
        change += ", or leave lr out"
    return (
        f"after epoch {epoch} of {epochs}, NaturalGradient has not arrived at {len(sites)} of {len(arrivals)} sites: "
        f"{', '.join(sites[:MOST_NAMED])}; {change}"
    )
