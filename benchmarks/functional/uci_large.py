# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare networks under a Gaussian process prior with sparse and small exact processes on large UCI sets.

python -m benchmarks.functional.uci_large --data-dir DIR
"""

from pathlib import Path

import torch

from benchmarks.common import Claim, Form, Job, Results, compute_all, main
from benchmarks.functional._regression import FORMS, LARGE_SETTINGS, MOST_ROWS
from benchmarks.functional._training import NUM_SAMPLES
from benchmarks.functional._uci import (
    EXACT,
    MEAN_FIELD,
    METHODS,
    SPARSE,
    draw_differences,
    published_claims,
    score,
    table,
)

__all__ = ["claims", "draw", "report", "run"]

#: Cost of a run; the page shows it as long as there are no results.
NEEDS = "an hour of two cores"


def run(output: Path, *, data_dir: Path, form: Form = "default", seeds: int = 3, workers: int = 2) -> None:
    """Train as in ``functional.uci``, with other settings.

    There are 20 points between rows and 10,000 steps. Before these, 20 epochs (protein) or 100 epochs (naval) train
    only the means, under priors on functions and on weights. Weights start at a standard deviation of 0.01 (protein) or
    0.001 (naval, where a simulator computes the targets without noise). ``exact process`` uses 3,000 rows. ``sparse
    process`` is GPyTorch's; it uses all rows, with 300 inducing points and as many steps.

    Settings were chosen on a tenth of the training rows of the first split.
    """
    large = dict.fromkeys(LARGE_SETTINGS, FORMS["small"]) if form == "small" else LARGE_SETTINGS
    num_samples = NUM_SAMPLES[form]
    results = Results(output, {"torch": torch.__version__, **large, "num_samples": num_samples})
    jobs = []
    for split in range(1 if form == "small" else seeds):
        for name, setting in large.items():
            for method in (*METHODS, SPARSE):
                checkpoint = results.checkpoint(name, split, method)
                arguments = (data_dir, name, split, method, setting, checkpoint, num_samples)
                jobs.append(Job({"data": name, "split": split, "method": method}, score, arguments))
    compute_all(results, jobs, workers)


def claims(results: Results) -> list[Claim]:
    """Compare with published log-likelihoods."""
    return published_claims(results)


def report(results: Results) -> str:
    """Report all results on every set, by method."""
    setting = results.setting["naval"]
    return f"""### Large UCI sets under functional priors

This is the same comparison on sets that are too large for an exact process on all rows. The exact process gets \
{MOST_ROWS:,} of the rows; GPyTorch's sparse process gets all. Networks train for {setting["steps"]:,} steps and have \
2 x {setting["hidden"][0]} units; epochs that train only the means come first (`python -m \
benchmarks.functional.uci_large --data-dir DIR`; `--help` describes how we chose the settings).

{table(results, (MEAN_FIELD, EXACT, SPARSE))}

{results.plot("Log-likelihoods minus that of the sparse process")}"""


def draw(results: Results) -> None:
    """Log-likelihoods less that of the sparse process, on the same splits."""
    draw_differences(results, SPARSE)


if __name__ == "__main__":
    main(run, report, draw)
