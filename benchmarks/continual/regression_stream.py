# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""UCI regression whose rows arrive in five batches: chains of posteriors beside training on all rows at once.

python -m benchmarks.continual.regression_stream --data-dir DIR
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.common import (
    REGRESSION,
    Claim,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    main,
    markdown_table,
    paired,
    reaches,
    with_error,
)
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    BayesianModule,
    PriorChain,
    RadialELBO,
    SupervisedModel,
    fit,
    predict,
)
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn

__all__ = ["claims", "draw", "report", "run"]

GUIDES = {"mean field": AutoMeanField, "radial": AutoRadial}
STREAM, AT_ONCE, LAST = GIVEN = ("stream", "at once", "last batch")
#: Posterior, form of its chain, and the rows it is given; without a chain the forms are one.
METHODS = (
    ("mean field", "normal", STREAM),
    ("radial", "normal", STREAM),
    ("radial", "exact", STREAM),
    *itertools.product(GUIDES, [""], (AT_ONCE, LAST)),
)
NOISES = ("local", "weights")


class Setting(NamedTuple):
    """What is chosen on validation rows, for each method: where standard deviations start, and the rate."""

    init_stddev: float
    learning_rate: float


class Size(NamedTuple):
    """Data sets, batches of the stream, steps on each, rows of a step, and draws of a prediction."""

    sets: tuple[str, ...] = ("energy", "concrete")
    batches: int = 5
    steps: int = 200
    batch_size: int = 200
    hidden: int = 50
    num_samples: int = 100
    grid: tuple[Setting, ...] = (Setting(0.003, 0.01), Setting(0.01, 0.03))


SIZES = {"default": Size(), "small": Size(("yacht",), 2, 3, 200, 5, 10, (Setting(0.01, 0.01),))}


def run(
    output: Path, *, data_dir: Path, form: Form = "default", seeds: int = 5, workers: int = 1, threads: int = 1
) -> None:
    """Rows of a standard split in random order, in five batches of which only the first is known when it is scaled.

    Inputs and targets are standardized by the first batch, and results are of the targets' own units: the RMSE of the
    predictive mean, and the log of the predictive density, averaged over draws first and then over test rows. Each
    batch is learned in as many steps of Adam, whose rate falls to zero along a cosine, and then never seen again; its
    posterior is the next prior. The scale of the noise is a parameter that each batch trains on from where it was. The
    same guide has all rows at once for as many steps in total, or the last batch alone for the steps of one.

    Each method's setting is the one of a small grid with the best log-likelihood, the mean over sets, on a tenth of the
    training rows of split 0 held out at random; the last batch alone takes that of all rows at once. Results are of the
    splits after that. The default form takes at most 25 minutes of one core.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, **size._asdict()})

    def job(name: str, method: tuple[str, str, str], noise: str, setting: Setting, split: int) -> Job:
        keys = {"data": name, **as_keys(method, noise), **setting._asdict(), "split": split}
        return Job(keys, score, (data_dir, form, name, method, noise, setting, split))

    choosing = [
        job(name, method, noise, setting, 0)
        for name, method, noise, setting in itertools.product(size.sets, METHODS, NOISES, size.grid)
        if method[2] != LAST
    ]
    compute_all(results, choosing, workers, threads)
    testing = [
        job(name, method, noise, chosen(results, size, method, noise), split)
        for split, name, method, noise in itertools.product(
            range(1, 1 + (seeds if form == "default" else 1)), size.sets, METHODS, NOISES
        )
    ]
    compute_all(results, testing, workers, threads)


def as_keys(method: tuple[str, str, str], noise: str) -> Row:
    return dict(zip(("posterior", "form", "given"), method, strict=True)) | {"noise": noise}


def chosen(results: Results, size: Size, method: tuple[str, str, str], noise: str) -> Setting:
    """The best on the validation rows of split 0."""
    posterior, form, given = method
    keys = as_keys((posterior, form, AT_ONCE if given == LAST else given), noise) | {"split": 0}

    def validated(setting: Setting) -> float:
        found = results.values("log_likelihood", **keys, **setting._asdict())
        return mean(values[-1] for values in found)

    return max(size.grid, key=validated)


class Split(NamedTuple):
    """Batches of training rows and rows to measure on, standardized by the first batch, and the target's unit."""

    batches: list[Pair]
    measured: Pair
    unit: float


def arriving(data_dir: Path, name: str, split: int, num_batches: int) -> Split:
    """A standard split in a random order; of split 0, a tenth of the training rows in the place of the test rows."""
    file = np.load(data_dir / "uci" / f"{name}.npz")
    data, measured = file["data"], file[f"test_indices_{split}"]
    order = np.random.default_rng(split).permutation(file[f"train_indices_{split}"])
    if split == 0:
        measured, order = np.split(order, [len(order) // 10])
    batches = np.array_split(order, num_batches)
    scale, target = data[batches[0]].std(0), int(file["target_column"])
    data = torch.tensor((data - data[batches[0]].mean(0)) / np.where(scale > 0, scale, 1.0), dtype=torch.float32)
    x, y = data[:, file["feature_columns"]], data[:, [target]]
    return Split([(x[rows], y[rows]) for rows in batches], (x[measured], y[measured]), float(scale[target]))


def score(
    data_dir: Path, form: Form, name: str, method: tuple[str, str, str], noise: str, setting: Setting, split: int
) -> Row:
    """Results after each batch."""
    size = SIZES[form]
    batches, (x, y), unit = arriving(data_dir, name, split, size.batches)
    pyro.clear_param_store()
    pyro.set_rng_seed(split)
    found: dict[str, list[float]] = {name: [] for name in REGRESSION}
    began = process_time()
    for model, guide in learned(batches, method, noise, setting, size, split):
        draws = predict(model, guide, x, num_samples=size.num_samples)
        found["rmse"].append(round(float((draws.mean - y).square().mean().sqrt()) * unit, 5))
        # A density of standardized targets is per standardized unit.
        found["log_likelihood"].append(round(float(draws.log_prob(y).mean()) - math.log(unit), 5))
    return found | {"seconds": round(process_time() - began, 1)}


def learned(
    batches: list[Pair], method: tuple[str, str, str], noise: Any, setting: Setting, size: Size, seed: int
) -> Iterator[tuple[PriorChain, nn.Module]]:
    """The chain and its guide after each batch that this method is given."""
    posterior, form, given = method
    steps = size.steps
    if given == AT_ONCE:
        batches, steps = [all_rows(batches)], size.steps * len(batches)
    if given == LAST:
        batches = batches[-1:]
    net = nn.Sequential(nn.Linear(batches[0][0].shape[1], size.hidden), nn.ReLU(), nn.Linear(size.hidden, 1))
    likelihood = likelihoods.Gaussian(scale=0.5, learn_scale=True)
    chain = PriorChain(
        SupervisedModel(BayesianModule(net, FanIn()), likelihood, local_reparameterization=noise == "local"),
        form or "exact",
    )
    for number, (x, y) in enumerate(batches):
        guide = chain.guide(GUIDES[posterior], init_stddev=setting.init_stddev)
        epochs = round(steps / -(-len(x) // size.batch_size))
        fit(
            chain,
            guide,
            (x, y),
            epochs=epochs,
            batch_size=size.batch_size,
            optim=partial(torch.optim.Adam, lr=setting.learning_rate, fused=True),
            scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=epochs),
            loss=RadialELBO(strict_kl=True),
            seed=len(batches) * seed + number,
            progress=False,
        )
        yield chain, guide
        chain.advance(guide)


def all_rows(batches: list[Pair]) -> Pair:
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    return x, y


def tested(results: Results, name: str, data: str, method: tuple[str, str, str], noise: str) -> list[list[float]]:
    """A result after each batch, by split, of splits that no choice was made on."""
    rows = results.where(data=data, **as_keys(method, noise))
    return [row[name] for row in rows if row["split"] > 0]


def last(results: Results, name: str, data: str, method: tuple[str, str, str], noise: str = "local") -> list[float]:
    """The same after the last batch."""
    return [values[-1] for values in tested(results, name, data, method, noise)]


def splits(results: Results) -> int:
    return len([split for split in results.distinct("split") if split > 0])


def claims(results: Results) -> list[Claim]:
    """Compare chains with local reparameterization by their log-likelihoods on the same splits."""
    names = results.distinct("data")
    normal, radial, exact = METHODS[:3]

    def compared(text: str, ours: tuple[str, str, str], theirs: tuple[str, str, str], holds: Any) -> Claim:
        pairs = [paired(*(last(results, "log_likelihood", name, m) for m in (ours, theirs))) for name in names]
        numbers = "; ".join(f"{name} {with_error(pair, 3)}" for name, pair in zip(names, pairs, strict=True))
        return Claim(f"UCI stream: {text}", "", numbers, str(splits(results)), all(map(holds, pairs)))

    own = [("mean field", normal), ("radial, normal form", radial), ("radial, exact form", exact)]
    found = [
        compared(
            f"a chain ({title}) has a higher log-likelihood than its last batch alone",
            method,
            (method[0], "", LAST),
            above_error,
        )
        for title, method in own
    ]
    found += [
        compared(
            f"a chain ({title}) is at most a standard error below training on all rows at once",
            method,
            (method[0], "", AT_ONCE),
            lambda pair: reaches(pair, 0.0),
        )
        for title, method in own
    ]
    text = "a radial chain has a higher log-likelihood in the normal form than in the exact form"
    return [*found, compared(text, radial, exact, above_error)]


def above_error(differences: list[float]) -> bool:
    """Whether the mean is above zero by more than its standard error."""
    return not reaches([-value for value in differences], 0.0)


def title_of(method: tuple[str, str, str]) -> str:
    posterior, form, given = method
    return f"{posterior}, {given if given != STREAM else f'chain, {form} form'}"


def settings_of(results: Results, method: tuple[str, str, str], noise: str) -> str:
    rows = [row for row in results.where(**as_keys(method, noise)) if row["split"] > 0]
    return f"from {rows[0]['init_stddev']:g}, rate {rows[0]['learning_rate']:g}"


def report(results: Results) -> str:
    """Report both results after the last batch, by method and data set."""
    setting, names = results.setting, results.distinct("data")
    lines = [
        [
            title_of(method),
            noise,
            settings_of(results, method, noise),
            *(with_error(last(results, name, data, method, noise), 3) for data in names for name in REGRESSION),
        ]
        for method, noise in itertools.product(METHODS, NOISES)
    ]
    minutes = sum(results.values("seconds")) / 60
    headings = [f"{data}, {title}" for data in names for title in REGRESSION.values()]
    return f"""### A stream of regression batches

The rows of UCI regression data arrive in {setting["batches"]} batches in random order, standardized with statistics \
of the first (`python -m benchmarks.continual.regression_stream --data-dir DIR`, {minutes:.0f} minutes of one core). \
The network has one hidden layer of {setting["hidden"]} units. A chain takes {setting["steps"]} steps of Adam on each \
batch and never sees it again. The same guide on all rows at once takes as many steps in total; on the last batch \
alone it takes the steps of one batch. Test results after the last batch are in the targets' units, mean and standard \
error over {splits(results)} splits. Settings (initial standard deviation and learning rate) were chosen for each \
method on a tenth of the training rows of another split. "noise" says where training draws noise: in the outputs of \
layers, for each row ("local", local reparameterization), or in the weights.

{markdown_table(["method", "noise", "setting", *headings], lines)}

{results.plot("Log-likelihood by batches learned")}"""


COLORS = ("#0072B2", "#D55E00", "#CC79A7")


def draw(results: Results) -> None:
    """Log-likelihoods after each batch, between those of the last batch alone and of all rows at once."""
    names = results.distinct("data")
    figure = Figure(figsize=(4.5 * len(names) + 2.5, 3.8), layout="constrained", dpi=130)
    for data, ax in zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True):
        for (method, color), (noise, style) in itertools.product(
            zip(METHODS[:3], COLORS, strict=True), zip(NOISES, ("o-", "s:"), strict=True)
        ):
            values = Tensor(tested(results, "log_likelihood", data, method, noise)).mean(0).tolist()
            ax.plot(range(1, len(values) + 1), values, style, ms=4, color=color, label=f"{title_of(method)}, {noise}")
        for (posterior, color), (given, style) in itertools.product(
            zip(GUIDES, COLORS, strict=False), ((AT_ONCE, "--"), (LAST, "-."))
        ):
            level = mean(last(results, "log_likelihood", data, (posterior, "", given)))
            ax.axhline(level, ls=style, lw=1, color=color, label=f"{posterior}, {given}, local")
        ax.set(title=data, xlabel="batches learned", xticks=range(1, results.setting["batches"] + 1))
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("test log-likelihood")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
