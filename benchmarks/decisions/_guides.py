# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks, guides and pieces of tables shared by the experiments on decisions."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import Results, with_error
from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional
from pyro_radial.infer.autoguide.families import Delta


def point(model: Any) -> Any:
    return AutoRadial(model, families={".": Delta()})


GUIDES: Mapping[str, Any] = {
    "radial": AutoRadial,
    "mean field": AutoMeanField,
    "radial-directional": AutoRadialDirectional,
    "point": point,
}


def mean_ranks(
    results: Results, name: str, problem: str, methods: Sequence[str], **keys: Any
) -> dict[str, list[float]]:
    """Return each method's rank by a score (1 is the lowest), averaged over problems, for each seed of all methods.

    Methods whose scores agree to three decimals share the mean of their ranks.
    """
    found: dict[str, list[float]] = {method: [] for method in methods}
    problems = results.distinct(problem)
    scores = {
        (row[problem], row["method"], row["seed"]): round(row[name], 3)
        for row in results.where(**keys)
        if row["method"] in methods
    }
    for seed in sorted({seed for _, _, seed in scores}):
        for method in methods:
            ranks = []
            for own in problems:
                differences = [scores[own, other, seed] - scores[own, method, seed] for other in methods]
                ranks.append(sum(d < 0.0 for d in differences) + 0.5 * (differences.count(0.0) + 1))
            found[method].append(statistics.mean(ranks))
    return found


def mean_of(values: Sequence[float], digits: int) -> str:
    """Return the mean with its standard error as text; empty for a cell without results."""
    return with_error(values, digits) if values else ""
