# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Score methods on a split of a UCI set, and make the table and the plot of the scores."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import pyro

from benchmarks.common import REGRESSION, Results, Row, markdown_table, paired, uci_split, with_error
from benchmarks.functional._regression import exact_prediction, kept_prior, of_network, trained

FUNCTIONAL, MEAN_FIELD, EXACT = METHODS = ("functional", "mean field", "exact process")
FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
MEASURES = REGRESSION | {"coverage": "coverage", "seconds": "seconds"}
# As published (Farquhar, Osborne and Gal, 2020, table 2): RMSE and log-likelihood of functional networks.
FBNN = {
    "boston": ("2.38 ± 0.10", "-2.30 ± 0.04"),
    "concrete": ("4.94 ± 0.18", "-3.10"),
    "energy": ("0.41", "-0.68"),
    "wine": ("0.67 ± 0.01", "-1.04"),
    "yacht": ("0.61 ± 0.07", "-1.03"),
}


def score(data_dir: Path, name: str, split: int, method: str, setting: Row, checkpoint: Path, num_samples: int) -> Row:
    """Score a method on one split, with the seconds it takes."""
    data = uci_split(data_dir, FOLDERS[name], split)
    (_, y), unit = data["test"], data["unit"]
    start, seconds, prior = time.process_time(), 0.0, None
    pyro.set_rng_seed(split)
    if method in (FUNCTIONAL, EXACT):
        prior, seconds = kept_prior(data["train"], setting, checkpoint.with_name(f"{name}_{split}_prior"))
        start = time.process_time()
        pyro.set_rng_seed(split)
    if method == EXACT:
        scored = exact_prediction(prior, data["train"], data["test"])
    else:
        scored = of_network(*trained(data["train"], setting, prior, checkpoint), data["test"], num_samples)
    seconds += time.process_time() - start
    # A density of standardized targets is per standardized unit.
    return {
        "rmse": unit * float((scored.mean - y).square().mean().sqrt()),
        "log_likelihood": float(scored.log_prob.mean()) - math.log(unit),
        "coverage": float(scored.covered.double().mean()),
        "seconds": round(seconds, 1),
    }


def table(results: Results, others: Sequence[str]) -> str:
    """Make a table of every measure on every set; differences are paired with the last of the other methods."""
    lines = []
    for data in results.distinct("data"):
        for (name, title), theirs in zip(MEASURES.items(), (*FBNN[data], "", ""), strict=True):
            ours, *rest = (results.values(name, data=data, method=method) for method in (FUNCTIONAL, *others))
            digits = 1 if name == "seconds" else 3
            cells = [with_error(values, digits) for values in (ours, *rest)]
            less = "" if name in ("coverage", "seconds") else with_error(paired(ours, rest[-1]), digits)
            lines.append([f"{data}, {title}", *cells, less, theirs, str(len(ours))])
    return markdown_table(["", FUNCTIONAL, *others, f"functional less {others[-1]}", "FBNN", "splits"], lines)
