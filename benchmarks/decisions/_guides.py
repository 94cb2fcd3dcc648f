# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks, guides and tables of the experiments on decisions."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from benchmarks.common import Results, with_error
from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional
from pyro_radial.infer.autoguide.families import Delta

__all__ = ["GUIDES", "mean_of", "mean_ranks", "network", "of_common_seeds", "runs_of"]


# What names a cell of which each seed has a row.
CELL = ("task", "problem", "method", "acquisition", "width")


def point(model: Any) -> Any:
    return AutoRadial(model, families={".": Delta()})


GUIDES: Mapping[str, Any] = {
    "radial": AutoRadial,
    "mean field": AutoMeanField,
    "radial-directional": AutoRadialDirectional,
    "point": point,
}


def network(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def mean_ranks(
    results: Results, name: str, problem: str, methods: Sequence[str], **keys: Any
) -> dict[str, list[float]]:
    """For each seed that all methods have, the mean over problems of a method's rank by a score, the lowest first."""
    found: dict[str, list[float]] = {method: [] for method in methods}
    problems = results.distinct(problem)
    scores = {
        (row[problem], row["method"], row["seed"]): row[name]
        for row in results.where(**keys)
        if row["method"] in methods
    }
    for seed in sorted({seed for _, _, seed in scores}):
        if any((own, method, seed) not in scores for own in problems for method in methods):
            continue
        by_problem = [sorted(methods, key=lambda method, own=own: scores[own, method, seed]) for own in problems]
        for method in methods:
            found[method].append(statistics.mean(order.index(method) + 1 for order in by_problem))
    return found


def mean_of(values: Sequence[float], digits: int) -> str:
    """The mean with its standard error; nothing of a cell that is not measured yet."""
    return with_error(values, digits) if values else ""


def of_common_seeds(results: Results, name: str, key: str, values: Sequence[Any], **keys: Any) -> list[list[float]]:
    """A result for each value of a key, of the seeds that all of them have."""
    found = [{row["seed"]: row[name] for row in results.where(**{key: value}, **keys)} for value in values]
    seeds = sorted(set.intersection(*(set(own) for own in found)))
    return [[own[seed] for seed in seeds] for own in found]


def runs_of(results: Results) -> str:
    """How many seeds there are: "5", or "4 to 5" where a cell lacks some."""
    counts = Counter(tuple(map(row.get, CELL)) for row in results.rows)
    least, most = min(counts.values()), max(counts.values())
    return str(most) if least == most else f"{least} to {most}"
