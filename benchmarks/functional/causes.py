# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Find what makes a functional posterior too narrow, by one change at a time, on validation rows of Boston.

python -m benchmarks.functional.causes --data-dir DIR
"""

import time
from functools import partial
from pathlib import Path

import pyro
import torch
from matplotlib.figure import Figure
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from torch import Tensor, nn

from benchmarks.common import Claim, Form, Job, Pair, Results, Row, compute_all, main, markdown_table, uci_split
from benchmarks.functional import _regression
from benchmarks.functional._training import NUM_SAMPLES
from benchmarks.functional._uci import FOLDERS
from pyro_radial import AutoMeanField, AutoRadial, SupervisedModel
from pyro_radial.functional import GaussianProcess
from pyro_radial.functional.process_comparison import compare_with_process
from pyro_radial.infer.autoguide import init_to_network

__all__ = ["claims", "draw", "report", "run"]

#: Cost of a run; the page shows it as long as there are no results.
NEEDS = "an hour of one core"
RECOMMENDED = "recommended"
DATA = "boston"
#: The change that each line makes to the recommended setting.
CHANGES: dict[str, Row] = {
    RECOMMENDED: {},
    "a third of the steps": {"steps": 1_300},
    "the noise at the rate of the rest": {"noise_lr": None},
    "noise starts at the process's": {"times_noise": 1.05},
    "prior noise of 0.03": {"prior_noise": 0.03},
    "divergence not weighed": {"weigh_up": 0.0},
    "divergence times N/B": {"weigh_up": 1.0},
    "points in a box": {"measurement_points": "box"},
    "moments of draws": {"divergence": "GaussianKL"},
    "batches of 200": {"batch_size": 200},
    "ReLU": {"activation": "ReLU"},
    "radial posterior": {"guide": "radial"},
    "radial posterior, a radius for each unit": {"guide": "radius per unit"},
    "normal posterior of low rank": {"guide": "low rank"},
}
EVERY = {
    "default": CHANGES,
    "small": {name: CHANGES[name] for name in (RECOMMENDED, "normal posterior of low rank")},
}


def low_rank(model: SupervisedModel, init_stddev: float) -> AutoLowRankMultivariateNormal:
    """Make Pyro's guide, with the square root of the number of weights as its rank."""
    return AutoLowRankMultivariateNormal(model, init_loc_fn=init_to_network, init_scale=init_stddev)


GUIDES = {
    "mean field": AutoMeanField,
    "radial": AutoRadial,
    "radius per unit": partial(AutoRadial, event_dim=1),
    "low rank": low_rank,
}


def run(output: Path, *, data_dir: Path, form: Form = "default", workers: int = 2) -> None:
    """Train the recommended setting of ``functional.uci``, and others that differ from it in one thing.

    A tenth of the training rows of the first split is left out and serves as new inputs. No test row is used. One seed.
    """
    results = Results(output, {"torch": torch.__version__, "data": DATA, **_regression.FORMS[form]})
    jobs = []
    for name, change in EVERY[form].items():
        setting = _regression.FORMS[form] | ({} if form == "small" else change)
        guide = change.get("guide", "mean field")
        jobs.append(Job({"change": name}, compared, (data_dir, setting, guide, results.checkpoint(name), form)))
    compute_all(results, jobs, workers)


def compared(data_dir: Path, setting: Row, guide_name: str, checkpoint: Path, form: str) -> Row:
    """The network beside the exact process, in the process's own units."""
    x, y = _regression.shuffled(uci_split(data_dir, FOLDERS[DATA], 0)["train"])
    size = len(x) // 10
    new, rows = (x[:size], y[:size]), (x[size:], y[size:])
    pyro.set_rng_seed(0)
    fitted, _ = _regression.kept_prior(rows, setting, checkpoint.with_name("prior"))
    pyro.set_rng_seed(0)
    start = time.process_time()
    model, guide = _regression.trained(rows, setting, fitted, checkpoint, GUIDES[guide_name])
    seconds = time.process_time() - start
    scored = _regression.of_network(model, guide, new, NUM_SAMPLES[form])
    exact = _regression.exact_prediction(fitted, rows, new)
    return {
        "log_likelihood": float(scored.log_prob.mean()),
        "exact_log_likelihood": float(exact.log_prob.mean()),
        "rmse": float((scored.mean - new[1]).square().mean().sqrt()),
        "exact_rmse": float((exact.mean - new[1]).square().mean().sqrt()),
        "ms": 1e3 * seconds / setting["steps"],
    } | beside(model, guide, fitted, rows, new[0], setting, NUM_SAMPLES[form])


def beside(
    model: SupervisedModel, guide: nn.Module, fitted: GaussianProcess, rows: Pair, new: Tensor, setting: Row, draws: int
) -> Row:
    """Noise, widths and means."""
    noisy = GaussianProcess(fitted.kernel, noise=setting["prior_noise"])
    noisy.observation_noise = fitted.observation_noise
    comparison = compare_with_process(
        model,
        guide,
        noisy,
        rows,
        {"new inputs": new},
        measured={"training inputs"},
        num_samples=draws,
        function_site="f",
    )
    training, other = comparison.places
    return {
        "noise": comparison.noise / comparison.process_noise,
        "width": other.width,
        "distance": other.distance,
        "training_width": training.width,
        "training_distance": training.distance,
    }


def claims(results: Results) -> list[Claim]:
    """Check that the recommended setting is as good as the exact process on these rows."""
    (row,) = results.where(change=RECOMMENDED)
    ours, exact = row["log_likelihood"], row["exact_log_likelihood"]
    text = "Boston, rows left out of training: the recommended functional network is no worse than its exact process"
    return [Claim(text, f"{exact:.3f}", f"{ours:.3f}", "1", ours >= exact)]


def report(results: Results) -> str:
    """Report the effect of each change."""
    columns = {
        "log_likelihood": "log-likelihood",
        "rmse": "RMSE",
        "noise": "noise",
        "width": "width, new inputs",
        "distance": "mean, new inputs",
        "training_width": "width, training",
        "training_distance": "mean, training",
    }
    lines = []
    for row in results.rows:
        cells = [
            f"{row[name]:.2f}" if name not in ("log_likelihood", "rmse") else f"{row[name]:.3f}" for name in columns
        ]
        lines.append([row["change"], *cells, f"{row['ms']:.0f}"])
    first, setting = results.rows[0], results.setting
    exact = ["exact process", f"{first['exact_log_likelihood']:.3f}", f"{first['exact_rmse']:.3f}", *["1.00"] * 2]
    lines.append([*exact, "0.00", "1.00", "0.00", ""])
    return f"""### Why functional posteriors come out too narrow

Boston, first split, a tenth of the training rows left out, standardized units, one seed (`python -m \
benchmarks.functional.causes --data-dir DIR`). The recommended setting takes {setting["steps"]:,} steps on batches of \
{setting["batch_size"]} rows and {setting["num_points"]} points between rows, with `LinearizedKL` and a mean-field \
posterior. Every other line changes one thing in it. Noise and widths are multiples of those of the exact process. The \
columns "mean" give the distance from the mean of the exact process, in standard deviations of that process. ms are \
milliseconds per step on one thread.

{markdown_table(["", *columns.values(), "ms"], lines)}

{results.plot("Log-likelihood and width of functional posteriors, by change")}"""


def draw(results: Results) -> None:
    """Log-likelihoods and widths beside those of the exact process."""
    rows = results.rows
    figure = Figure(figsize=(8.4, 0.8 + 0.27 * len(rows)), layout="constrained", dpi=110)
    axes = figure.subplots(1, 2, sharey=True)
    exact = rows[0]["exact_log_likelihood"]
    for ax, name, at, title in (
        (axes[0], "log_likelihood", exact, "log-likelihood, new inputs"),
        (axes[1], "width", 1.0, "width, new inputs"),
    ):
        colors = ["#D55E00" if row["change"] == RECOMMENDED else "#0072B2" for row in rows]
        ax.scatter([row[name] for row in rows], range(len(rows)), c=colors, s=22)
        line = ax.axvline(at, color="0.6", lw=1)
        ax.set_xlabel(title, fontsize=9)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.93")
    axes[0].set_yticks(range(len(rows)), [row["change"] for row in rows], fontsize=8)
    axes[0].invert_yaxis()
    figure.legend([line], ["exact process"], frameon=False, fontsize=8, loc="outside upper right")
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
