# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The measured figures of inference with priors on functions, as blocks of the page README.md."""

from statistics import mean
from typing import Any

from report_tools import REGRESSION, of_splits, paired, results, table, with_error

ESTIMATORS = ("published", "SpectralStein()", "Stein()", "GaussianMoments()")
NORMAL, OTHER = ("white", "smooth"), ("two modes", "student")
OTHERS = ("exact process", "mean field")
# As published (Farquhar, Osborne and Gal, 2020, table 2): RMSE and log-likelihood of functional networks.
FBNN = {
    "boston": ("2.38 ± 0.10", "-2.30 ± 0.04"),
    "concrete": ("4.94 ± 0.18", "-3.10"),
    "energy": ("0.41", "-0.68"),
    "wine": ("0.67 ± 0.01", "-1.04"),
    "yacht": ("0.61 ± 0.07", "-1.03"),
    "naval": ("", "7.13 ± 0.02"),
    "protein": ("4.33 ± 0.03", "-2.89"),
}
IMPLICIT_FIGURES = ("error", "deviation", "coverage")


def score_estimators() -> str:
    found = results("score_estimators")
    rows, seeds = found["rows"], found["setting"]["seeds"]

    def values(figure: str, **keys: Any) -> list[float]:
        return [row[f"{figure} at draws"] for row in rows if keys.items() <= row.items()]

    def mean_of(figure: str, laws: tuple[str, ...], **keys: Any) -> float:
        return mean(value for law in laws for value in values(figure, law=law, **keys))

    cases = [(dim, draws) for dim in (10, 25, 60) for draws in (100, 500)]
    lines = []
    for name in ESTIMATORS:
        cells = [
            " / ".join(f"{mean_of('error', (law,), estimator=name, dim=dim, draws=draws):.2f}" for law in NORMAL)
            for dim, draws in cases
        ]
        lines.append([name, *cells, f"{mean_of('slope', NORMAL, estimator=name):.2f}"])
    published = [value for law in NORMAL for value in values("error", law=law, draws=100, estimator="published")]
    others = ", ".join(f"{name} {mean_of('error', OTHER, estimator=name):.2f}" for name in ESTIMATORS)
    return (
        "Scores of normal laws estimated at their own draws: the norm of the error over that of the true score, for "
        f"unit covariance / for values of a smooth Gaussian process, means of {seeds} seeds. The slope is the part of "
        "the true score that the estimate holds, in the mean of these cases; below 1 a fit comes out too narrow. "
        "An error above 1 is more than that of a score of zero. "
        "`published` is the estimator of the code for functional networks, rebuilt here. Its errors at 100 draws are "
        f"{min(published):.2f} to {max(published):.2f}; another re-implementation had 0.57 to 0.90 "
        "(`benchmarks/score_estimators.py`):\n\n"
        + table(["", *(f"{dim} dims, {draws} draws" for dim, draws in cases), "slope"], lines)
        + "\n\nFor laws that are not normal (two modes, and Student's t with 5 degrees of freedom, in 10 and 25 dims) "
        f"the mean errors are: {others}."
    )


def extrapolation() -> str:
    found = results("functional_extrapolation")
    setting, lines = found["setting"], []
    tasks = list(dict.fromkeys(row["task"] for row in found["rows"]))
    keys = dict.fromkeys((row["task"], row["method"], row["net"]) for row in found["rows"])
    for task, method, net in sorted(keys, key=lambda key: tasks.index(key[0])):
        own = [row for row in found["rows"] if (row["task"], row["method"], row["net"]) == (task, method, net)]
        cells = [with_error([row[key] for row in own], 3) for key in ("error", "ratio")]
        if method == "exact process":
            cells = ["", ""]
        later = [f"{own[0]['rmse']:.2f} / {own[0]['coverage']:.0%}" if "rmse" in own[0] else ""]
        lines.append([task, f"{method} {net}".strip(), *cells, *later, str(len(own))])
    return (
        "Networks with a Gaussian process as their prior, beside weight-space mean field (standard normal priors, KL "
        f"whole or times 0.001), {setting['steps']:,} steps of Adam at {setting['lr']:g}, in the last 30 % at a tenth, "
        "ReLU; for the series of carbon dioxide twice as many, from five times that rate. Error: root mean square "
        "difference of the posterior means on the whole domain from the exact process, in deviations of the prior; "
        "ratio: mean ratio of the standard deviations. For the series of carbon dioxide also the root mean square "
        "error in ppm and the coverage of 95 % intervals in the five years after the data "
        "(`benchmarks/functional_extrapolation.py`):\n\n"
        + table(["", "", "error", "ratio", "later", "seeds"], lines)
        + "\n\n![Posteriors beside the exact processes](results/functional_extrapolation.png)"
        + "\n\nThe cube by networks of several sizes:\n\n"
        + "![Posteriors of the cube by size](results/functional_extrapolation_sizes.png)"
    )


def implicit() -> str:
    found = results("functional_implicit")
    rows, setting = found["rows"], found["setting"]
    lines = []
    for prior in dict.fromkeys(row["prior"] for row in rows):
        for law in ("posterior", "prior"):
            keys = [f"{law} {figure}, {place}" for place in ("beside data", "gap") for figure in IMPLICIT_FIGURES]
            own = [row for row in rows if row["prior"] == prior]
            lines.append([f"{prior}, {law}", *(with_error([row[key] for row in own], 3) for key in keys)])
    headings = [f"{figure}, {place}" for place in ("beside data", "in the gap") for figure in IMPLICIT_FIGURES]
    runs = 1 + max(row["seed"] for row in rows)
    return (
        "Priors known by draws alone, random steps and random straight pieces on [0, 1]: 20 data on [0, 0.2] and "
        f"on [0.8, 1] of a function of the prior, {setting['steps']:,} steps, 2 x 100 tanh units, `SteinKL`. Error "
        "of the mean against the true function, standard deviation, share of the true function within two of them; "
        f"mean and standard error of {runs} runs (`benchmarks/functional_implicit.py`):\n\n"
        + table(["", *headings], lines)
        + "\n\n![Posteriors under implicit priors](results/functional_implicit.png)"
    )


def functional_uci() -> str:
    found = results("functional_uci")
    setting, lines = found["setting"], []
    for name, published in FBNN.items():
        for (figure, title), theirs in zip(REGRESSION.items(), published, strict=True):
            ours, *rest = (
                of_splits(found["rows"], figure, data=name, method=method) for method in ("functional", *OTHERS)
            )
            digits = 5 if (name, figure) == ("naval", "rmse") else 3
            cells = [with_error(values, digits) for values in (ours, *rest)]
            cells += [paired(ours, other, digits) for other in rest]
            lines.append([f"{name}, {title}", *cells, theirs, str(len(ours))])
    hidden, large = setting["hidden"], setting["large"]["naval"]
    return (
        f"UCI regression with a Gaussian process as the prior of a network of {len(hidden)} x {hidden[0]} "
        f"{setting['activation']} units, fitted to the training rows by marginal likelihood; that process itself; and "
        "the same network with weight-space mean field. Standard splits, at least "
        f"{setting['least_steps']:,} steps of Adam from {setting['lr']:g} down, batches of {setting['batch_size']} "
        f"rows (all, of up to {setting['whole_up_to']}) and {setting['num_points']} points; naval and protein "
        f"{large['least_steps']:,} steps of 1 x {large['hidden'][0]} units, and an exact process of 3,000 rows. In the "
        "targets' own units, mean and standard error; the differences are paired, functional less the other. FBNN is "
        "published, with splits and budgets of its own (`benchmarks/functional_uci.py`, whose first lines say how the "
        "settings were chosen):\n\n"
        + table(["", "functional", *OTHERS, *(f"less {other}" for other in OTHERS), "FBNN", "splits"], lines)
    )


def functional_cost() -> str:
    found = results("functional_cost")
    rows, setting = found["rows"], found["setting"]
    functional = [row for row in rows if "share" in row]

    def cell(**keys: Any) -> str:
        return next((f"{r['ratio']:.2f} ({r['share']:.0%})" for r in functional if keys.items() <= r.items()), "")

    def growth(fixed: dict[str, int], grows: str, noun: str) -> str:
        chosen = [row for row in functional if fixed.items() <= row.items()]
        sizes = sorted({row[grows] for row in chosen})
        subjects = sorted({row["subject"] for row in chosen})
        lines = [[f"`{name}`", *(cell(subject=name, **{grows: size}, **fixed) for size in sizes)] for name in subjects]
        return table(["", *(f"{size} {noun}" for size in sizes)], lines)

    base = next(row for row in functional if (row["subject"], row["points"], row["draws"]) == ("SteinKL()", 60, 100))
    likelihood = next(row for row in rows if (row["subject"], row["draws"]) == ("likelihood", 100))
    return (
        "One training step with `FunctionalELBO` (loss, gradient, Adam) as a multiple of one with `RadialELBO`, strict "
        "KL, `vectorize_particles=True` and as many draws; in brackets the part of the step that is the divergence. "
        "Network 1-100-100-100-100-100-1, `AutoMeanField`, 20 data; points are the data and those of a `UniformBox`. "
        f"One thread, medians of {setting['rounds']} interleaved rounds, torch {setting['torch']}. At 100 draws the "
        f"likelihood alone, without any KL, costs {likelihood['ratio']:.2f} of the `RadialELBO` step. The base case, "
        f"`SteinKL()` at 60 points, costs {base['over_likelihood']:.2f} times the likelihood alone. An empty cell has "
        "too few draws for the divergence. The implicit prior is `PiecewiseLinear`, known by 500 draws a step "
        "(`benchmarks/functional_cost.py`). By draws, at 60 points:\n\n"
        + growth({"points": 60}, "draws", "draws")
        + "\n\nBy points, at 300 draws:\n\n"
        + growth({"draws": 300}, "points", "points")
    )
