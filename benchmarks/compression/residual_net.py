# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Prune a residual network on Fashion-MNIST by its posterior, by the norms of its filters, and by its batch norms.

python -m benchmarks.compression.residual_net --data-dir DIR
"""

import math
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    flat_images,
    is_below,
    main,
    markdown_table,
    paired,
    with_error,
)
from benchmarks.uncertainty._networks import Block, residual_net
from pyro_radial import AutoRadialDirectional, BayesianModule, RadialELBO, SupervisedModel, fit
from pyro_radial.compression import count_flops, count_weights, cut_path, mean_network, unit_scores
from pyro_radial.compression.joined import JoinedChannels
from pyro_radial.compression.scores import Scores
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior

__all__ = ["claims", "draw", "report", "run"]

INPUT_SHAPE = (1, 28, 28)
METHODS = {
    "posterior": ("radii of the posterior", "#0072B2"),
    "magnitude": ("L1 norms of filters", "#D55E00"),
    "scales": ("batch norm scales", "#009E73"),
}
Split = dict[str, Pair]


@dataclass(frozen=True)
class Setting:
    """One size of the experiment, and what each method trains with."""

    num_train: int = 12_000
    width: int = 16
    blocks: tuple[int, ...] = (1, 1, 1)
    epochs: int = 10
    tuning_epochs: int = 4
    batch_size: int = 100
    #: The same for all methods.
    tuning_learning_rate: float = 2e-3
    #: Shares of the whole network's operations that a pruned network may have.
    shares: tuple[float, ...] = (0.5, 0.25, 0.1)
    #: Of the posterior. Grouping and weight of the KL were the best of seven pairs on validation images, with seed 100:
    #: rows with 0.3, 0.1 and 0.03, and columns also with 0.01.
    learning_rate: float = 2e-3
    grouping: str = "column"
    kl_weight: float = 0.03
    global_scale: float = 1e-2
    init_mean_cosine: float = 0.97
    radius_learning_rate: float = 2e-2
    #: Of plain training, chosen by this experiment among all pairs of these.
    learning_rates: tuple[float, ...] = (2e-3, 5e-3, 1e-2)
    decays: tuple[float, ...] = (0.0, 0.1, 0.5)
    #: Chosen after these, by the method that cuts by batch norms.
    penalties: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    #: What the plain methods replace by their choice.
    decay: float = 0.0
    penalty: float = 0.0


FORMS = {
    "default": Setting(),
    "small": Setting(
        num_train=200,
        width=4,
        blocks=(1, 1),
        epochs=1,
        tuning_epochs=1,
        shares=(0.5,),
        learning_rates=(2e-3, 5e-3),
        decays=(0.0,),
        penalties=(1e-3,),
    ),
}


def run(output: Path, *, data_dir: Path, form: Form = "default", seeds: int = 5, workers: int = 2) -> None:
    """Three ways to choose the channels of a residual network, at equal epochs and equal fine-tuning.

    Plain training has the learning rate and weight decay, and batch norms the penalty, with the least validation error
    after cuts and fine-tuning, as the mean over sizes and with another seed than those that are reported.
    """
    setting = FORMS[form]
    results = Results(output, {"torch": torch.__version__, **asdict(setting)})

    def best(method: str, candidates: list[Row]) -> Row:
        # Half the fine-tuning, as when the posterior's settings were chosen.
        quick = replace(setting, tuning_epochs=(setting.tuning_epochs + 1) // 2)
        jobs = [
            Job(
                {"part": "validation", "method": method, "seed": 0, **candidate},
                all_sizes,
                (data_dir, replace(quick, **candidate), method, 0, "validation"),
            )
            for candidate in candidates
        ]
        rows = compute_all(results, jobs, workers)
        return candidates[min(range(len(rows)), key=lambda number: cut_error(rows[number]))]

    pairs = product(setting.learning_rates, setting.decays)
    plain = best("magnitude", [{"learning_rate": rate, "decay": decay} for rate, decay in pairs])
    choices = {
        "posterior": {},
        "magnitude": plain,
        "scales": best("scales", [{**plain, "penalty": penalty} for penalty in setting.penalties]),
    }
    jobs = [
        Job(
            {"part": "test", "method": method, "seed": seed, **choices[method]},
            all_sizes,
            (data_dir, replace(setting, **choices[method]), method, seed, "test"),
        )
        for seed in range(FIRST_SEED, FIRST_SEED + (1 if form == "small" else seeds))
        for method in METHODS
    ]
    compute_all(results, jobs, workers)


def cut_error(row: Row) -> float:
    """The mean over sizes of the error after cuts and fine-tuning."""
    return mean(point["tuned_error"] for point in row["points"][1:])


def load(data_dir: Path, setting: Setting) -> Split:
    """Standardized images: some to train on, others to choose settings by, and the test set."""
    (x, y), test = flat_images("fashion_mnist", data_dir)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, validation = order[: setting.num_train], order[-5_000:]
    parts = {"train": (x[train], y[train]), "validation": (x[validation], y[validation]), "test": test}
    return {part: (images.reshape(-1, *INPUT_SHAPE), labels) for part, (images, labels) in parts.items()}


@torch.no_grad()
def error(net: nn.Module, rows: Pair) -> float:
    """The share of errors in percent."""
    net.eval()
    guesses = torch.cat([net(part).argmax(-1) for part in rows[0].split(1_000)])
    return round(100 * float((guesses != rows[1]).double().mean()), 4)


def train(net: nn.Module, rows: Pair, epochs: int, setting: Setting) -> None:
    """Plain training with a rate that falls to zero, weight decay, and an L1 penalty on the scales of batch norms."""
    x, y = rows
    net.train()
    scales = [module.weight for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": setting.decay},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=setting.learning_rate)
    steps = epochs * math.ceil(len(x) / setting.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(setting.batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x[index]), y[index])
            if setting.penalty:
                loss = loss + setting.penalty * torch.cat(scales).abs().sum()
            loss.backward()
            optimizer.step()
            schedule.step()


def train_posterior(net: nn.Module, rows: Pair, setting: Setting, seed: int) -> tuple[nn.Module, Scores]:
    """The plain network at the center of a posterior, and the scores of its channels."""
    x, y = rows
    prior = RadialDirectionalPrior(setting.grouping, setting.global_scale)
    model = SupervisedModel(BayesianModule(net, prior), likelihoods.Categorical(num_data=len(x)))
    guide = AutoRadialDirectional(model, init_mean_cosine=setting.init_mean_cosine, shared_concentration=False)
    guide.setup(x[:2], y[:2])
    steps = setting.epochs * math.ceil(len(x) / setting.batch_size)
    loss = RadialELBO(strict_kl=True, kl_weight=lambda step: setting.kl_weight * min(1.0, 2 * (step + 1) / steps))
    fit(
        model,
        guide,
        (x, y),
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        optim=partial(two_rates, setting),
        loss=loss,
        seed=seed,
        progress=False,
    )
    return mean_network(model.bnn, guide), unit_scores(guide)


def two_rates(setting: Setting, parameters: list[Tensor]) -> torch.optim.Adam:
    """Adam with a larger rate for radii and concentrations, which travel far on their logarithms."""
    return torch.optim.Adam(
        [
            {"params": [p for p in parameters if p.dim() > 1], "lr": setting.learning_rate},
            {"params": [p for p in parameters if p.dim() < 2], "lr": setting.radius_learning_rate},
        ]
    )


def scores_of_norms(net: nn.Module) -> Scores:
    """The logarithm of the mean absolute weight of each filter."""
    convolutions = {name: m for name, m in net.named_modules() if isinstance(m, nn.Conv2d)}
    return Scores({name: m.weight.detach().abs().flatten(1).mean(1).log() for name, m in convolutions.items()})


def scores_of_scales(net: nn.Sequential) -> Scores:
    """The logarithm of the scale after each convolution; the convolution beside a block has no batch norm."""
    scales = {"0": net[1].weight}
    for name, block in net.named_children():
        if isinstance(block, Block):
            scales |= {f"{name}.first": block.norms[0].weight, f"{name}.second": block.norms[1].weight}
    return Scores({name: scale.detach().abs().log() for name, scale in scales.items()})


def trained(method: str, data: Split, setting: Setting, seed: int) -> tuple[nn.Module, Scores]:
    torch.manual_seed(seed)
    net = residual_net(setting.width, setting.blocks, "cpu", 0.0)
    if method == "posterior":
        return train_posterior(net, data["train"], setting, seed)
    train(net, data["train"], setting.epochs, setting)
    return net, scores_of_norms(net) if method == "magnitude" else scores_of_scales(net)


def all_sizes(data_dir: Path, setting: Setting, method: str, seed: int, part: str) -> Row:
    """Train, then cut to each size and fine-tune the cut network; errors are on a part of the data."""
    data = load(data_dir, setting)
    begun = time.process_time()
    net, scores = trained(method, data, setting, seed)
    seconds = time.process_time() - begun
    update_bn(data["train"][0].split(500), net)
    whole = {"share": 1.0, **sizes(net), **errors_of(net, data, setting, seed, part)}
    points = [whole]
    joined = JoinedChannels(net, data["train"][0][:2])
    # The same share of each group of channels, which was best on validation images for each method.
    path = cut_path(joined.pool(scores), num_cuts=200, per_layer=True)
    for share in setting.shares:
        small = next(net for net in map(joined.cut, path) if sizes(net)["flops"] <= share * whole["flops"])
        update_bn(data["train"][0].split(500), small)
        points.append({"share": share, **sizes(small), **errors_of(small, data, setting, seed, part)})
    return {"seconds": seconds, "points": points}


def sizes(net: nn.Module) -> Row:
    return {"weights": count_weights(net).total, "flops": count_flops(net, INPUT_SHAPE).total}


def errors_of(net: nn.Module, data: Split, setting: Setting, seed: int, part: str) -> Row:
    """The error of a network as it is, and that of a copy after fine-tuning."""
    tuned = deepcopy(net)
    torch.manual_seed(seed)
    plain = replace(setting, learning_rate=setting.tuning_learning_rate, decay=0.0, penalty=0.0)
    train(tuned, data["train"], setting.tuning_epochs, plain)
    return {"error": error(net, data[part]), "tuned_error": error(tuned, data[part])}


def points_at(results: Results, method: str, share: float) -> list[Row]:
    """By seed, what was measured at one size."""
    rows = results.where(part="test", method=method)
    return [point for row in rows for point in row["points"] if point["share"] == share]


def errors(results: Results, method: str, share: float) -> list[float]:
    """By seed, the errors at one size after fine-tuning."""
    return [point["tuned_error"] for point in points_at(results, method, share)]


def increases(results: Results, method: str, share: float) -> list[float]:
    """By seed, how much higher the errors are than those of the method's own whole network."""
    return paired(errors(results, method, share), errors(results, method, 1.0))


MEASURES = {"test error, %,": errors, "increase of the test error, points,": increases}


def claims(results: Results) -> list[Claim]:
    """At each size, fewer errors than each other method, and a smaller increase over the own whole network."""
    found = []
    for (name, measure), share in product(MEASURES.items(), results.setting["shares"]):
        ours = measure(results, "posterior", share)
        for method in ("magnitude", "scales"):
            theirs = measure(results, method, share)
            text = f"Residual network, {share:.0%} of the FLOPs: {name} below that of pruning by {METHODS[method][0]}"
            # By more than two standard errors of the paired differences.
            held = is_below(paired(ours, theirs))
            found.append(Claim(text, with_error(theirs, 2), with_error(ours, 2), str(len(ours)), held))
    return found


def report(results: Results) -> str:
    """Sizes and errors of each method."""
    setting, lines = results.setting, []
    for share in (1.0, *setting["shares"]):
        for method, (name, _) in METHODS.items():
            points = points_at(results, method, share)
            if not points:
                continue
            numbers = [f"{mean(point[key] for point in points):,.0f}" for key in ("flops", "weights")]
            cut = with_error([point["error"] for point in points], 2)
            rise = with_error(increases(results, method, share), 2) if share < 1 else ""
            lines.append([f"{share:.0%}", name, *numbers, cut, with_error(errors(results, method, share), 2), rise])
    headings = ["share of FLOPs", "channels chosen by", "FLOPs", "weights", "as cut, %", "fine-tuned, %", "increase"]
    seconds = {method: mean(results.values("seconds", part="test", method=method)) for method in METHODS}
    chosen = results.where(part="test", method="scales")[0]
    pairs = len(results.where(part="validation", method="magnitude"))
    return f"""### A residual network, pruned

A residual network of width {setting["width"]} on {setting["num_train"]:,} images of Fashion-MNIST \
(`python -m benchmarks.compression.residual_net --data-dir DIR`). Each method trains for {setting["epochs"]} epochs, \
then cuts channels (those that an addition joins together) to a share of the operations and fine-tunes for \
{setting["tuning_epochs"]} epochs. Epochs are equal, not times: the posterior trains \
{seconds["posterior"] / seconds["magnitude"]:.1f} times as long as the plain network. All methods give joined channels \
their largest score, cut the same share of each group, and then take new statistics for the batch norms.

Settings were chosen by the validation error after cuts and fine-tuning, with another seed. Plain training has a \
learning rate of {chosen["learning_rate"]:g} and a weight decay of {chosen["decay"]:g}, the best of {pairs} pairs. \
Scales of batch norms also have an L1 penalty of {chosen["penalty"]:g} each, the best of {len(setting["penalties"])}. \
The posterior has a radius for each column, the weights of one input channel, and a KL of weight \
{setting["kl_weight"]:g}, the best of 7 pairs of grouping and weight, at a learning rate of \
{setting["learning_rate"]:g}. The network is small and training short, so that the experiment takes minutes.

Test errors, and the increase of the fine-tuned error, in points, over that of the method's own whole network after \
the same fine-tuning:

{markdown_table(headings, lines)}

{results.plot("Test error by size, fine-tuned (solid) and as cut (dashed)")}"""


def draw(results: Results) -> None:
    """Error against operations and weights, with standard errors over seeds."""
    figure = Figure(figsize=(9, 3.4), dpi=110)
    shares = (1.0, *results.setting["shares"])
    for ax, against in zip(figure.subplots(1, 2, sharey=True), ("flops", "weights"), strict=True):
        for method, (label, color) in METHODS.items():
            found = [points_at(results, method, share) for share in shares]
            x = [mean(point[against] for point in points) for points in found]
            for key, style, name in (("tuned_error", "-", label), ("error", "--", None)):
                y = torch.tensor([[point[key] for point in points] for points in found])
                count = y.shape[1]
                spread = y.std(1) / count**0.5 if count > 1 else torch.zeros(len(x))
                ax.errorbar(x, y.mean(1), spread, color=color, linestyle=style, marker="o", markersize=3, label=name)
        ax.set(xscale="log", yscale="log", xlabel={"flops": "FLOPs", "weights": "Weights"}[against])
        ticks = {"flops": [200_000, 500_000, 1_000_000, 2_000_000], "weights": [6_000, 15_000, 30_000, 70_000]}[against]
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.set_yticks([10, 20, 40, 80], ["10", "20", "40", "80"])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
        if against == "flops":
            ax.set_ylabel("Test error, %")
            ax.legend(frameon=False)
    figure.tight_layout()
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
