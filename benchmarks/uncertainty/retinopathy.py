# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Choose fundus images of RetinaMNIST to refer, as in table 1 and figure 3 of the Radial paper, by many methods.

python -m benchmarks.uncertainty.retinopathy
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import softplus

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    main,
    markdown_table,
    with_error,
)
from benchmarks.uncertainty._augmentation import RandomAffine
from benchmarks.uncertainty._methods import (
    DEEP_ENSEMBLE,
    DROPOUT,
    IVON,
    LAPLACE,
    MEAN_FIELD,
    METHODS,
    NATURAL_ENSEMBLE,
    NATURAL_RADIAL,
    PLAIN,
    RADIAL,
    RADIAL_ENSEMBLE,
    SGD,
    SGD_ENSEMBLE,
    TEMPERATURE,
    TWEAKS,
    Augment,
    MakeNet,
    Setting,
    Task,
    measures,
    train,
)
from benchmarks.uncertainty._referred import SHARES, compared, curve_of, judged, percent, pooled, spread
from pyro_radial.uncertainty.plots import plot_reliability
from tutorials import image_sets
from tutorials.plots import plot_referral

#: What each method is made of, whose setting it has; the others have one of their own, which is searched.
MADE_OF = {
    **dict.fromkeys((TEMPERATURE, LAPLACE, DEEP_ENSEMBLE), PLAIN),
    RADIAL_ENSEMBLE: RADIAL,
    SGD_ENSEMBLE: SGD,
    NATURAL_ENSEMBLE: NATURAL_RADIAL,
}
ALL = (*METHODS, SGD, SGD_ENSEMBLE, NATURAL_RADIAL, NATURAL_ENSEMBLE)
SEARCHED = [name for name in ALL if name not in MADE_OF]
# Those of one phase share no training.
OF_MEMBERS = [RADIAL_ENSEMBLE, SGD_ENSEMBLE, NATURAL_ENSEMBLE]
PHASES = (SEARCHED, [TEMPERATURE, *OF_MEMBERS], [LAPLACE], [DEEP_ENSEMBLE])
WITH_RADIAL = (RADIAL, RADIAL_ENSEMBLE, NATURAL_RADIAL, NATURAL_ENSEMBLE)
#: Table 1 of the paper, at the same shares, in percent.
PUBLISHED = {
    DROPOUT: (93.0, 94.1, 94.5, 95.1),
    MEAN_FIELD: (63.6, 63.5, 63.5, 62.6),
    TWEAKS: (93.9, 94.4, 95.4, 96.4),
    RADIAL: (94.3, 95.3, 96.1, 96.8),
    DEEP_ENSEMBLE: (93.9, 96.0, 96.6, 97.2),
    RADIAL_ENSEMBLE: (94.5, 97.9, 98.0, 98.1),
}
#: Convolutions of each block, and their channels in units of the width; a block for each size down to 7 x 7.
VGG4 = ((1, 1), (1, 2), (2, 4))


class Size(NamedTuple):
    """How much is searched, trained and tested."""

    width: int = 16
    epochs: int = 30
    batch_size: int = 60
    configurations: int = 10
    num_members: int = 3
    num_samples: int = 32
    num_resamples: int = 100
    compile: bool = True


SIZES = {"default": Size(), "small": Size(2, 1, 30, 2, 2, 2, 5, compile=False)}


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    seeds: int = 5,
    workers: int = 1,
    threads: int = 1,
) -> None:
    """Try as many random settings for each method with seed 0, then test its best with seeds from 10 on."""
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    searching = [
        Job({"part": "search", "method": name, "number": number}, search, (data_dir, size, name, number))
        for name in SEARCHED
        for number in range(size.configurations)
    ]
    compute_all(results, searching, workers, threads)
    for phase in PHASES:
        testing = []
        for seed in range(FIRST_SEED, FIRST_SEED + (seeds if form == "default" else 1)):
            for name in phase:
                keys = {"part": "test", "method": name, "seed": seed}
                number = best(results, MADE_OF.get(name, name))["number"]
                folder = results.checkpoint("networks", seed)
                testing.append(Job(keys, evaluate, (data_dir, size, name, number, seed, folder)))
        compute_all(results, testing, workers, threads)


class Fundus(NamedTuple):
    """Standardized images with labels 0 and 1, and what augments those images."""

    train: Pair
    validation: Pair
    test: Pair
    augment: Augment


def fundus(data_dir: Path | None) -> Fundus:
    """RetinaMNIST, each channel standardized by the training images; grades from 2 on are referred."""
    data = image_sets.load("retinamnist", data_dir)
    assert data.val_images is not None
    assert data.val_labels is not None
    mean = data.train_images.mean((0, 2, 3), keepdim=True)
    stddev = data.train_images.std((0, 2, 3), keepdim=True)

    def pair(images: Tensor, grades: Tensor) -> Pair:
        return (images - mean) / stddev, (grades >= 2).long()

    return Fundus(
        pair(data.train_images, data.train_labels),
        pair(data.val_images, data.val_labels),
        pair(data.test_images, data.test_labels),
        RandomAffine(fill=tuple((-mean / stddev).flatten().tolist())),
    )


class MeanAndMaxPool(nn.Module):
    """The mean and the maximum of each channel over all places, ``[N, C, H, W]`` to ``[N, 2 C]``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return both, one after the other."""
        return torch.cat([x.mean((-2, -1)), x.amax((-2, -1))], -1)


def vgg(dropout: float = 0.0, *, width: int) -> nn.Sequential:
    """A network like VGG with both global pools in the place of its fully connected layers: paper 000, appendix D.1.

    :param dropout: rate of the dropout at the end of each block, without which there is none.
    :param width: channels of the first convolutions.
    """
    layers: list[nn.Module] = []
    channels = 3
    for number, (convolutions, multiple) in enumerate(VGG4):
        if number:
            layers.append(nn.MaxPool2d(2))
        for _ in range(convolutions):
            layers += [_started(nn.Conv2d(channels, multiple * width, 3, padding=1)), nn.ReLU()]
            channels = multiple * width
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, MeanAndMaxPool(), nn.Linear(2 * channels, 2))


def _started(layer: nn.Conv2d) -> nn.Conv2d:
    """With the start of He et al. (2015), which keeps the size of signals through any number of layers."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


def network(width: int) -> MakeNet:
    """A network for these images, from its dropout rate."""
    return partial(vgg, width=width)


def candidate(size: Size, number: int, name: str) -> Setting:
    """A random setting; those of one number have the same prior in all methods, and the same rate of Adam or SGD."""
    share = iter(torch.rand(8, generator=torch.Generator().manual_seed(number)).double().tolist())

    def between(low: float, high: float) -> float:
        return low + (high - low) * next(share)

    def in_logarithm(low: float, high: float) -> float:
        return math.exp(between(math.log(low), math.log(high)))

    rate = in_logarithm(1e-3, 1e-2)
    setting = Setting(
        epochs=size.epochs,
        batch_size=size.batch_size,
        rate=rate,
        prior_stddev=in_logarithm(0.1, 3.0),
        # The paper's sigma, from its range of rho.
        init_scale=float(softplus(torch.tensor(between(-10.0, 0.0)))),
        scale_rate=rate * in_logarithm(1.0, 10.0),
        dropout=between(0.05, 0.5),
        ivon_rate=(lr := in_logarithm(0.03, 1.0)),
        lr=lr,
        init_stddev=in_logarithm(0.003, 0.1),
        hess_init=in_logarithm(0.1, 10.0),
        num_members=size.num_members,
        num_samples=size.num_samples,
        compile=size.compile,
    )
    return replace(setting, rate=lr) if MADE_OF.get(name, name) == SGD else setting


def search(data_dir: Path | None, size: Size, name: str, number: int) -> Row:
    """A setting, trained on two thirds of the training images and judged by the others and those for validation."""
    data = fundus(data_dir)
    x, y = data.train
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    others, fitted = order[: len(y) // 3], order[len(y) // 3 :]
    setting = candidate(size, number, name)
    try:
        rows = x[fitted], y[fitted]
        learned = train(name, Task(network(size.width), rows, data.validation, setting, 0, augment=data.augment))
    except FloatingPointError:
        # A rate that is too high.
        return {**asdict(setting), "nll": math.inf, "seconds": 0.0}
    unseen, labels = torch.cat([x[others], data.validation[0]]), torch.cat([y[others], data.validation[1]])
    return {**asdict(setting), **measures(learned.predict(unseen), labels), "seconds": learned.seconds}


def best(results: Results, name: str) -> Row:
    """The setting of the lowest negative log-likelihood."""
    rows = results.where(part="search", method=name)
    return min(rows, key=lambda row: row["nll"] if math.isfinite(row["nll"]) else math.inf)


def evaluate(data_dir: Path | None, size: Size, name: str, number: int, seed: int, folder: Path) -> Row:
    """A method with a setting, trained on all training images and tested."""
    data = fundus(data_dir)
    setting = candidate(size, number, name)
    task = Task(network(size.width), data.train, data.validation, setting, seed, folder, data.augment)
    learned = train(name, task)
    return judged(learned.predict(data.test[0]), data.test[1], size.num_resamples) | {
        "number": number,
        "seconds": learned.seconds,
        "details": learned.details,
    }


def best_of(results: Results, names: Sequence[str]) -> str:
    """The method with the highest mean area of all images."""
    return max(names, key=lambda name: float(curve_of(results.where(part="test", method=name)).score[0]))


def claims(results: Results) -> list[Claim]:
    """Check the ranking of table 1 where errors allow it, and referral."""
    seeds = str(len(results.distinct("seed")))
    with_radial = best_of(results, WITH_RADIAL)
    without = best_of(results, [name for name in ALL if name not in WITH_RADIAL])
    mean, error = (float(100 * value[0]) for value in compared(results, with_radial, without))
    found = [
        Claim(
            "RetinaMNIST: the best method with radial posteriors is less than two errors behind the best without",
            f"{PUBLISHED[RADIAL_ENSEMBLE][0]} against {PUBLISHED[DEEP_ENSEMBLE][0]}",
            f"{with_radial} against {without}: difference {mean:.1f} ± {error:.1f} points",
            seeds,
            mean > -2 * error,
        )
    ]
    gain, error = gain_of(results, RADIAL, "entropy")
    text = "RetinaMNIST: referring the 30 % of images with the highest entropy raises the AUC of radial"
    return [*found, Claim(text, "", f"by {gain:.1f} ± {error:.1f} points", seeds, gain > 2 * error)]


def gain_of(results: Results, method: str, ranked_by: str) -> tuple[float, float]:
    """What referring the largest share adds to the area, in percent, and its bootstrap standard error."""
    curve = curve_of(results.where(part="test", method=method), ranked_by)
    resampled = curve.resamples[:, -1] - curve.resamples[:, 0]
    return float(100 * (curve.score[-1] - curve.score[0])), float(100 * resampled.std())


def total_seconds(results: Results, name: str) -> float:
    """CPU seconds of all trainings that a method needs: its search, and its seeds with all members."""
    searching = results.values("seconds", part="search", method=MADE_OF.get(name, name))
    return sum(searching) + sum(results.values("seconds", part="test", method=name))


def report(results: Results) -> str:
    """Report table 1, calibration, other rankings and times."""
    table, rankings, chosen = [], [], []
    for name in ALL:
        rows = results.where(part="test", method=name)
        curve = curve_of(rows)
        cells = [percent(curve, place) for place in range(len(SHARES))]
        scores = (
            with_error([row[key] for row in rows], 3) for key in ("accuracy", "nll", "calibration_error", "brier")
        )
        epochs = sum(row["details"].get("epochs", 0) for row in rows)
        epoch = f"{sum(row['seconds'] for row in rows) / epochs:.2f}" if epochs else ""
        seconds = f"{total_seconds(results, name):.0f}"
        table.append([name, *cells, spread(rows), *scores, epoch, seconds])
        if len(rows[0]["referred"]) > 1:
            rankings.append([name, *(percent(curve_of(rows, "entropy"), place) for place in range(1, len(SHARES)))])
        if name in SEARCHED:
            chosen.append(_chosen(results, name))
    size = results.setting
    headings = [f"{share:.0%}" for share in SHARES]
    measured = ["accuracy", "NLL", "ECE", "Brier", "s / epoch", "s in all"]
    published = [[name, *(f"{auc:.1f}" for auc in PUBLISHED[name])] for name in METHODS if name in PUBLISHED]
    return f"""### Retinopathy

The task is to tell grades from 2 up from lower grades on RetinaMNIST at 28 x 28 (`python -m \
benchmarks.uncertainty.retinopathy`). The network resembles VGG, with {len(network(1)().state_dict()) // 2 - 1} \
convolutions from {size["width"]} channels up, and with mean and maximum pooling. It trains for {size["epochs"]} \
epochs on the 1,080 training images with the paper's augmentation, in batches of {size["batch_size"]}, at a rate that \
falls to zero. Where the name of a method says nothing else, the optimizer is Adam; IVON is mean field by natural \
gradients.

Each method tries {size["configurations"]} random settings. Rates (1e-3 to 1e-2) and priors (0.1 to 3; weight decay \
for point estimates) are the same for all methods by Adam; SGD and natural gradients have rates from 0.03 to 1 and the \
same priors. Other settings are the start (rho from -10 to 0) and the rate of scales, the first curvature (0.1 to 10) \
of natural gradients, and dropout. The table uses the setting with the lowest NLL on a third of the training images \
and the 120 for validation, after training on the others with seed 0. Methods made from the plain network use its \
setting. Ensembles have {size["num_members"]} members. Posteriors have {size["num_samples"]} draws, which the members \
of an ensemble share. The table has {len(results.distinct("seed"))} seeds that we did not use for any choice.

The table gives the AUC in percent on the rest of the 400 test images when a share is referred. Images are ranked by \
mutual information, or by entropy for methods with a single draw. Each AUC is a mean over seeds ± its standard error \
over {size["num_resamples"]} bootstrap resamples of the test images, which are the same for all methods. "over seeds" \
is the standard error over seeds at 0 %. Seconds are on one core; "s in all" includes the search and every member.

{markdown_table(["", *headings, "over seeds", *measured], table)}

Ranked by entropy instead:

{markdown_table(["", *headings[1:]], rankings)}

Published results, with 512 x 512 images and 15 million parameters:

{markdown_table(["", *headings], published)}

Settings that the search chose (sigma is the initial scale, in the units of each method):

{markdown_table(["", "rate", "prior", "sigma", "rate of scales", "dropout", "NLL", "worst NLL"], chosen)}

The budget is the same for all methods. To fit it, we use images of 28 x 28 instead of 512 x 512, 1,080 images instead \
of 44,594, one split for the search instead of cross-validation, {size["epochs"]} epochs, and one batch size. With 400 \
test images, differences below two to three points of AUC cannot be detected.

{results.plot("AUC of the remaining images by share referred, and accuracy by confidence")}"""


def _chosen(results: Results, name: str) -> list[str]:
    row = best(results, name)
    worst = max(results.values("nll", part="search", method=name))
    rate = row["ivon_rate"] if name in (IVON, NATURAL_RADIAL) else row["rate"]
    start = {TWEAKS: 1e-3, IVON: row["init_stddev"]}.get(name, row["init_scale"])
    noisy = name in (MEAN_FIELD, RADIAL, TWEAKS)
    return [
        name,
        f"{rate:.4f}",
        f"{row['prior_stddev']:.2f}",
        f"{start:.2g}" if noisy or name == IVON else "",
        f"{row['scale_rate']:.4f}" if noisy else "",
        f"{row['dropout']:.2f}" if name == DROPOUT else "",
        f"{row['nll']:.3f}",
        f"{worst:.3f}",
    ]


def draw(results: Results) -> None:
    """Referral curves with bootstrap errors, by both rankings, and calibration of all seeds together."""
    shown = [DROPOUT, DEEP_ENSEMBLE, MEAN_FIELD, TWEAKS, RADIAL, RADIAL_ENSEMBLE]
    rows = {name: results.where(part="test", method=name) for name in shown}
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=110)
    left, middle, right = figure.subplots(1, 3)
    for ax, ranked_by in ((left, "mutual information"), (middle, "entropy")):
        curves = {name: curve_of(own, ranked_by) for name, own in rows.items()}
        plot_referral(curves, "AUC", ax).set_title(f"referred by {ranked_by}", fontsize=10)
    middle.sharey(left)
    left.autoscale()
    plot_reliability({name: pooled(own) for name, own in rows.items()}, right)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    for ax in figure.axes:
        ax.get_legend().remove()
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
