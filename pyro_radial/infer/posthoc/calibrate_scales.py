# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scales for a trained network, chosen on validation rows without training."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_radial._pyro import checks
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.infer.autoguide.base import AutoPerSite
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.training.data import Rows, device_of, dtype_of, num_rows, take
from pyro_radial.poutine import mean_only

__all__ = ["ScaleSearch", "calibrate_scales"]

#: Values of c on the grid, and after it.
NUM_GRID, NUM_REFINEMENTS = 16, 6
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class ScaleSearch:
    """The result of :func:`calibrate_scales`.

    :param float number: the chosen multiple of the relative scales.
    :param float nll: the validation NLL with it, in nats per row.
    :param float plain_nll: the validation NLL without noise.
    :param tried: the NLL of all validation rows by number, in ascending order; infinite where a density overflows.
    """

    number: float
    nll: float
    plain_nll: float
    tried: dict[float, float]


@torch.no_grad()
def calibrate_scales(
    model: Callable[..., Any],
    guide: Any,
    validation: Any,
    scales: Callable[[str, Tensor], Any] | None = None,
    *,
    low: float = 1e-4,
    high: float = 10.0,
    num_samples: int = 16,
    chunk_size: int = 1024,
    seed: int = 0,
    progress: bool = True,
) -> ScaleSearch:
    r"""Set a guide's scales to the multiple with the lowest validation NLL.

    The means stay; nothing is trained. Site s gets the standard deviations :math:`c\, r_s`, with relative scales r of 1
    or from ``scales``, and the c that minimizes

    .. math:: -\frac{1}{N} \sum_n \log \frac{1}{S} \sum_{i=1}^S p(y_n | f_{\mu + c r \epsilon_i}(x_n))

    over 16 values on a grid of log c and six of a golden-section search. All c share the noise :math:`\epsilon`. Sites
    without a scale, or on a constrained support, do not change. With more than 256 rows, the search takes one in 32,
    at least 128, half from the quarter with the highest NLL; all rows then compare its best c with its neighbors.

    Source: Kiefer (1953), "Sequential Minimax Search for a Maximum".

    :param model: a Pyro model with a likelihood, such as :class:`~pyro_radial.SupervisedModel`.
    :param guide: a guide of this library with its parameters and trained means, e.g. by ``guide.load_means``.
    :param validation: rows that the means were not trained on, in any form that :func:`~pyro_radial.fit` takes.
    :param scales: a function of a site's name and mean that returns its relative scales (broadcast to the mean).
    :param float low: the smallest c.
    :param float high: the largest c.
    :param int num_samples: S, draws for each NLL.
    :param int chunk_size: rows in one pass.
    :param int seed: seed of the noise; the global random state is restored.
    :param bool progress: whether to show a progress bar.
    :returns: the chosen ``number`` with its ``nll``, and what was tried.
    :raises ValueError: for an argument out of range, a guide without scales, relative scales that do not fit, and an
        infinite NLL at every c; the guide keeps its scales. A RuntimeError if the guide has no parameters yet.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> network, x, y = nn.Linear(4, 3), torch.randn(50, 4), torch.randint(3, (50,))
        >>> model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
        >>> guide = AutoRadial(model)
        >>> guide.setup(x, y)
        >>> _ = guide.load_means(network.state_dict())
        >>> search = calibrate_scales(model, guide, (x, y), lambda name, mean: mean.norm() / 9, progress=False)
        >>> len(search.tried), search.nll == min(search.tried.values())
        (22, True)
    """
    checks.positive_count("num_samples", num_samples)
    checks.random_seed("seed", seed)
    checks.check_flag("progress", progress)
    if not checks.positive_float("high", high) > checks.positive_float("low", low):
        raise ValueError(f"high must be larger than low, got {high} and {low}")
    if scales is not None and not callable(scales):
        raise ValueError(f"scales must be a function of a site's name and its mean, or None, got {scales!r}")
    relative = _relative_scales(guide, scales)
    x, y = Rows(validation, "validation", dtype_of(guide, model)).all()

    total = num_rows(x)
    few = total if total <= 256 else max(128, total // 32)

    def losses(draws_of: Any, number_of_draws: int, rows: Any = slice(None)) -> Tensor:
        with seeded(seed, device_of(guide, model)):
            per_row = -predict(model, draws_of, take(x, rows), number_of_draws, chunk_size).log_prob(take(y, rows))
        bar.update(len(per_row) * number_of_draws)
        return per_row.cpu()

    def nll_at(number: float, rows: Any = slice(None), weights: Any = 1.0) -> float:
        guide.set_stddevs({name: number * scale for name, scale in relative.items()})
        return _mean(weights * losses(guide, num_samples, rows))

    before = {name: value.clone() for name, value in guide.state_dict().items()}
    work = total + num_samples * ((NUM_GRID + NUM_REFINEMENTS) * few + 3 * total * (few < total))
    with tqdm(total=work, desc="scales", unit="row", disable=not progress) as bar:
        plain = losses(mean_only(guide), 1)
        # A midpoint rule in t for the mean over the ranks q of rows, from 0 to 1, with q = 1 - (1 - t)^2.
        t = (torch.arange(few, dtype=torch.float64) + 0.5) / few
        part = (plain.argsort()[(total * (1.0 - (1.0 - t) ** 2)).long()], 2.0 * (1.0 - t)) if few < total else ()
        try:
            known = _golden_section(lambda number: nll_at(number, *part), low, high)
            numbers, near, tried = list(known), [min(known, key=known.__getitem__)], {} if part else known
            while left := [number for number in near if number not in tried]:
                new = min(left, key=known.__getitem__)
                tried[new] = nll_at(new)
                place = numbers.index(min(tried, key=lambda number: (tried[number], number)))
                near = numbers[max(place - 1, 0) : place + 2]
            best = min(tried, key=lambda number: (tried[number], number))
            if math.isinf(tried[best]):
                raise ValueError("validation must have a finite NLL at some scale, got none")
            guide.set_stddevs({name: best * scale for name, scale in relative.items()})
        except BaseException:
            guide.load_state_dict(before)
            raise
    return ScaleSearch(best, tried[best], _mean(plain), dict(sorted(tried.items())))


def _mean(per_row: Tensor) -> float:
    return float(per_row.mean()) if bool(per_row.isfinite().all()) else math.inf


def _relative_scales(guide: Any, scales: Callable[[str, Tensor], Any] | None) -> dict[str, Tensor]:
    if not isinstance(guide, AutoPerSite):
        raise ValueError(f"guide must be one of this library, such as AutoRadial, got {type(guide).__name__}")
    means = guide.loc_scale_means()
    if not means:
        found = {name: type(family).__name__ for name, family in guide.chosen_families().items()}
        raise ValueError(f"guide must have a site with a location and a scale, got {found}")
    return {
        n: checks.held_numbers("scales", 1.0 if scales is None else scales(n, m), dtype=m.dtype, device=m.device)
        for n, m in means.items()
    }


def _golden_section(
    evaluate: Callable[[float], float],
    low: float,
    high: float,
    num_grid: int = NUM_GRID,
    num_refinements: int = NUM_REFINEMENTS,
) -> dict[float, float]:
    """The values by ascending number: of a logarithmic grid, and of golden sections around its smallest."""
    logs = torch.linspace(math.log(low), math.log(high), num_grid, dtype=torch.float64).tolist()
    found = {log: evaluate(math.exp(log)) for log in logs}
    best = min(range(num_grid), key=lambda index: found[logs[index]])
    left, right = logs[max(best - 1, 0)], logs[min(best + 1, num_grid - 1)]
    inner = [right - GOLDEN * (right - left), left + GOLDEN * (right - left)]
    for step in range(num_refinements):
        new = inner[min(step, 1)]
        if step >= 2 and found[inner[0]] < found[inner[1]]:
            right, new = inner[1], inner[1] - GOLDEN * (inner[1] - left)
            inner = [new, inner[0]]
        elif step >= 2:
            left, new = inner[0], inner[0] + GOLDEN * (right - inner[0])
            inner = [inner[1], new]
        found[new] = evaluate(math.exp(new))
    return {math.exp(log): found[log] for log in sorted(found)}
