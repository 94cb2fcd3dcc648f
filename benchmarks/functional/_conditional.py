# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draw piecewise functions given data, by filtering and then sampling, and draw from the nearest normal."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import Pair
from pyro_radial.functional import FunctionPrior, PiecewiseConstant, PiecewiseLinear
from pyro_radial.functional.gaussian import gaussian_condition

__all__ = ["conditional_draws", "normal_draws"]

NUM_PLACES = {PiecewiseConstant: 400, PiecewiseLinear: 100}
NUM_VALUES = 201
#: Draws that the moments of a prior are taken from.
MANY = 20_000
#: The log-likelihood of the pieces from each of some places to one, ``[P, V, W]``, in V values where they begin and W
#: values where they end; of a piece with one value, ``[P, V, 1]``.
Table = Callable[[Tensor, Tensor, Tensor], Tensor]


def conditional_draws(
    prior: PiecewiseConstant | PiecewiseLinear, rows: Pair, noise: float, grid: Tensor, num_samples: int
) -> Tensor:
    r"""Draws ``[S, G]`` of the prior given observations with normal noise, at the points ``[G, 1]`` of a grid.

    With change points at places :math:`p_0 \dots p_M` alone, each there with the odds rate / M, the pieces are a Markov
    chain: the probability of the data up to a place where a piece ends is a sum over where that piece began, and the
    pieces are drawn from the last to the first.
    """
    x, y = (part.double().squeeze(-1) for part in rows)
    last = NUM_PLACES[type(prior)]
    places = torch.linspace(prior.low, prior.high, last + 1, dtype=torch.double)
    values = torch.linspace(0.0, 1.0, NUM_VALUES, dtype=torch.double)
    linear = isinstance(prior, PiecewiseLinear)
    table = (_of_lines if linear else _of_steps)(x, y, noise, values)
    # Log-probabilities of the data up to each place, and of the value there; a step's next value is a new one.
    forward = torch.full((last + 1, NUM_VALUES), -torch.inf, dtype=torch.double)
    forward[0] = 0.0
    odds = torch.tensor(prior.rate / last, dtype=torch.double).log()
    for end in range(1, last + 1):
        both = forward[:end, :, None] + table(places[:end, None], places[end], values)
        found = both.logsumexp((0, 1)) - torch.tensor(NUM_VALUES).log()
        forward[end] = found + (odds if end < last else 0.0)
    draws = [_drawn_back(forward, table, places, values, linear, grid.double().squeeze(-1)) for _ in range(num_samples)]
    return torch.stack(draws)


def normal_draws(prior: FunctionPrior, rows: Pair, noise: float, grid: Tensor, num_samples: int) -> Tensor:
    """As ``conditional_draws``, of the normal distribution with the prior's moments, which are those of many draws."""
    x, y = rows
    drawn = prior.sample(torch.cat([x, grid]), MANY).squeeze(-1).double()
    noise_variance = torch.tensor(noise**2, dtype=torch.double)
    mean, (given,) = gaussian_condition(drawn.mean(0)[:, None], drawn.T.cov()[None], y.double(), noise_variance)
    eigenvalues, vectors = torch.linalg.eigh(given)
    root = vectors * eigenvalues.clamp(min=0.0).sqrt()
    return mean.squeeze(-1) + torch.randn(num_samples, len(grid), dtype=torch.double) @ root.mT


def _drawn_back(forward: Tensor, table: Table, places: Tensor, values: Tensor, linear: bool, grid: Tensor) -> Tensor:
    """One function, from its last piece to its first."""
    end = len(places) - 1
    function, known = torch.zeros_like(grid), torch.zeros_like(grid, dtype=torch.bool)
    right = int(torch.distributions.Categorical(logits=forward[end]).sample())
    while end > 0:
        weights = forward[:end] + table(places[:end, None], places[end], values[[right]]).squeeze(-1)
        choice = int(torch.distributions.Categorical(logits=weights.flatten()).sample())
        start, left = divmod(choice, NUM_VALUES)
        share = (grid - places[start]) / (places[end] - places[start])
        piece = torch.lerp(values[left], values[right if linear else left], share)
        function = torch.where((grid >= places[start]) & (grid <= places[end]) & ~known, piece, function)
        known |= grid >= places[start]
        end, right = start, left
    return function


def _of_steps(x: Tensor, y: Tensor, noise: float, values: Tensor) -> Table:
    misfit = (y - values[:, None]).square() / (2.0 * noise**2)

    def table(start: Tensor, end: Tensor, last: Tensor) -> Tensor:
        inside = (x >= start) & (x < end)
        return -(inside.double() @ misfit.mT)[..., None]

    return table


def _of_lines(x: Tensor, y: Tensor, noise: float, values: Tensor) -> Table:
    """The misfit of a line is quadratic in its values at the ends."""

    def table(start: Tensor, end: Tensor, last: Tensor) -> Tensor:
        v, w = values[:, None], last[None, :]
        inside = ((x >= start) & (x < end)).double()
        share = (x - start) / (end - start)
        terms = (
            ((1 - share).square(), v.square()),
            (share.square(), w.square()),
            (2 * share * (1 - share), v * w),
            (-2 * y * (1 - share), v),
            (-2 * y * share, w),
            (y.square().expand_as(share), torch.ones_like(v)),
        )
        misfit = sum((inside * weight).sum(-1)[..., None, None] * of for weight, of in terms)
        return -misfit / (2.0 * noise**2)

    return table
