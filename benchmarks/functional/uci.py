# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare networks under a Gaussian process prior with that process on five UCI sets (Sun et al., 2019).

python -m benchmarks.functional.uci --data-dir DIR
"""

from pathlib import Path

import torch

from benchmarks.common import Claim, Form, Job, Results, compute_all, main, paired, reaches
from benchmarks.functional._regression import FORMS, SMALL_SETS
from benchmarks.functional._training import NUM_SAMPLES
from benchmarks.functional._uci import (
    EXACT,
    FBNN,
    FUNCTIONAL,
    MEAN_FIELD,
    METHODS,
    score,
    table,
)


def run(output: Path, *, data_dir: Path, form: Form = "default", seeds: int = 10, workers: int = 2) -> None:
    """Train on the standard splits, standardized by the training rows; results are in the units of the targets.

    A Gaussian process with an RBF kernel and a length scale for each input is fitted to the training rows by marginal
    likelihood (Sun et al., 2019, section 5.2). It predicts by itself (``exact process``), and is the prior of a network
    of 2 x 50 SiLU units, as smooth as the process (theirs is 1 x 50 with ReLU). Batches have 100 rows, with 50 points
    on lines between training rows. The divergence is in closed form, for the linearized network. Its weight is the
    square root of N/B; the published weight is N/B.

    The noise is learned, at a constant rate of 0.05, and cannot fall below that of the process. It starts at three
    times as much, because it would otherwise be learned last. ``mean field`` has the same network, batches and steps;
    the prior variance of its weights is one over the number of inputs of a unit, and its noise starts at 0.5. Training
    takes 4,000 steps of Adam at 0.015, 0.0045 and 0.00075.

    Settings were chosen on a tenth of the training rows of the first split.
    """
    setting, num_samples = FORMS[form], NUM_SAMPLES[form]
    results = Results(output, {"torch": torch.__version__, **setting, "num_samples": num_samples})
    jobs = []
    names = ["yacht"] if form == "small" else SMALL_SETS
    for split in range(1 if form == "small" else seeds):
        for name in names:
            for method in METHODS:
                checkpoint = results.checkpoint(name, split, method)
                arguments = (data_dir, name, split, method, setting, checkpoint, num_samples)
                jobs.append(Job({"data": name, "split": split, "method": method}, score, arguments))
    compute_all(results, jobs, workers)


def claims(results: Results) -> list[Claim]:
    """Compare with the exact process and with published log-likelihoods, and check coverage, on all sets at once."""
    exact, published, covered = [], [], []
    for data in results.distinct("data"):
        ours, theirs = (results.values("log_likelihood", data=data, method=method) for method in (FUNCTIONAL, EXACT))
        coverage = results.values("coverage", data=data, method=FUNCTIONAL)
        if reaches(paired(ours, theirs), 0.0):
            exact.append(data)
        if reaches(ours, float(FBNN[data][1].split()[0])):
            published.append(data)
        if 0.90 <= sum(coverage) / len(coverage) <= 0.98:
            covered.append(data)
    number, splits = len(results.distinct("data")), str(len(results.distinct("split")))
    text = "UCI: a network with a functional prior"
    return [
        Claim(f"{text} {what}", goal, f"{len(held)} of {number}: {', '.join(held)}", splits, len(held) == number)
        for what, goal, held in (
            ("reaches the log-likelihood of FBNN", "five sets", published),
            ("reaches the log-likelihood of its exact process", "within one standard error", exact),
            ("has 95 % intervals with the right coverage", "0.90 to 0.98", covered),
        )
    ]


def report(results: Results) -> str:
    """Report all results on every set, by method."""
    setting = results.setting
    hidden = setting["hidden"]
    return f"""### UCI regression under functional priors

The prior of the functional network is a Gaussian process, fitted to the training rows by marginal likelihood. We \
compare a network of {len(hidden)} x {hidden[0]} {setting["activation"]} units with that process and with the same \
network under weight-space mean field. All use the standard splits. Networks train for {setting["steps"]:,} steps of \
Adam, with a rate that falls from {setting["lr"]:g}, on batches of {setting["batch_size"]} rows and \
{setting["num_points"]} points between rows, with `LinearizedKL`. Results are means and standard errors in the units \
of the targets; differences are paired. Coverage is that of 95 % intervals. Seconds are on one thread and include \
fitting the process and predicting. FBNN results are as published, with other splits and budgets (`python -m \
benchmarks.functional.uci --data-dir DIR`; `--help` describes how we chose the settings).

{table(results, (MEAN_FIELD, EXACT))}"""


if __name__ == "__main__":
    main(run, report)
