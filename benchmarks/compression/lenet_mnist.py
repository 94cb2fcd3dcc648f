# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""LeNet-5-Caffe on MNIST and a residual network on Fashion-MNIST, pruned by a posterior's scores and by magnitude.

python -m benchmarks.compression.lenet_mnist --data-dir DIR
"""

import math
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

import torch
import torch_pruning
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
    main,
    markdown_table,
    with_error,
)
from benchmarks.uncertainty._residual_net import residual_net
from pyro_radial import AutoRadialDirectional, BayesianModule, SupervisedModel, TermsELBO, fit
from pyro_radial.compression import PosteriorImportance, mean_network
from pyro_radial.compression.prune import count_weights_and_flops
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior

LENET, RESIDUAL = "LeNet-5 on MNIST", "a residual network on Fashion-MNIST"
POSTERIOR, MAGNITUDE = "posterior", "magnitude"
WHOLE, HALF, QUARTER, PAPER = "whole", "half of the channels", "a quarter of the channels", "3-11-40, distilled"
#: The best row in table 2 of the paper, 4-7-110-66 at an error of 1.0 %, recounted.
PAPER_FLOPS, PAPER_WEIGHTS = 113_148, 8_720
#: The channels of LeNet's layers in about this size; of the sizes on earlier frontiers the best on validation images.
PAPER_CHANNELS = {"0": 3, "2": 11, "5": 40}
#: Grouping of the prior, by network: the better one of rows and columns on validation images, chosen before.
GROUPINGS: dict[str, str | dict[str, str]] = {
    LENET: {"0.weight": "row", "2.weight": "row", "5.weight": "row", "7.weight": "column"},
    RESIDUAL: "column",
}


@dataclass(frozen=True)
class Setting:
    """The training of networks, posteriors and pruned networks."""

    num_train: int = 12_000
    epochs: int = 5
    batch_size: int = 100
    learning_rate: float = 2e-3
    radius_learning_rate: float = 2e-2
    global_scale: float = 1e-2
    init_mean_cosine: float = 0.98
    #: Of the KL, for LeNet and the residual network.
    kl_weights: tuple[float, float] = (0.1, 0.03)
    tuning_epochs: int = 4
    #: Of distillation, on all images that are not for validation.
    num_distilled: int = 55_000
    distilled_batch_size: int = 200
    teacher_epochs: int = 4
    student_epochs: int = 30
    temperature: float = 4.0
    label_share: float = 0.1


SMALL = Setting(num_train=60, epochs=1, batch_size=30, tuning_epochs=1)
FORMS = {"default": Setting(), "small": replace(SMALL, num_distilled=100, teacher_epochs=1, student_epochs=1)}


def run(output: Path, *, data_dir: Path, form: Form = "default", seeds: int = 3, workers: int = 2) -> None:
    """Errors on test images before and after the same training of pruned networks.

    A network and a posterior of it train for as many epochs. Torch-Pruning removes channels of the plain network by the
    magnitude of their weights, and of the posterior's mean network by the posterior's scores, as many of each layer.
    Batch norms get new statistics. Both small networks then train alike, on the same images. LeNet is also pruned by
    the posterior to the size of Oh, Adamczewski and Park (2019), table 2, and trained for longer, on all images and on
    the logits of a whole network beside the labels. Sizes count as in the table, recounted: weights without biases,
    multiply-adds plus one for each output.
    """
    setting = FORMS[form]
    results = Results(output, {"torch": torch.__version__, **asdict(setting)})
    jobs = []
    for seed in range(FIRST_SEED, FIRST_SEED + (1 if form == "small" else seeds)):
        for network in (LENET, RESIDUAL):
            for scores in (POSTERIOR, MAGNITUDE):
                keys = {"network": network, "scores": scores, "seed": seed}
                arguments = (data_dir, setting, network, scores, seed, results.checkpoint("teacher.pt"))
                jobs.append(Job(keys, all_sizes, arguments))
    compute_all(results, jobs, workers)


def all_sizes(data_dir: Path, setting: Setting, network: str, scores: str, seed: int, teacher: Path) -> Row:
    """Train a network, prune it to each size, and train these."""
    everything, test = load(data_dir, network, setting.num_distilled)
    train = (everything[0][: setting.num_train], everything[1][: setting.num_train])
    torch.manual_seed(seed)
    whole = make_lenet() if network == LENET else residual_net(8, (1, 1, 1), 0.0)
    importance, guide = torch_pruning.importance.GroupMagnitudeImportance(), None
    if scores == POSTERIOR:
        whole, guide = train_posterior(whole, train, setting, network, seed)
        update_bn(train[0].split(1_000), whole)
    else:
        train_plain(whole, train, setting.epochs, setting)
    points = [measure(whole, WHOLE, test)]
    for size in (HALF, QUARTER, PAPER) if (network, scores) == (LENET, POSTERIOR) else (HALF, QUARTER):
        small = deepcopy(whole)
        if guide is not None:
            importance = PosteriorImportance(small, guide)
        remove(small, size, importance)
        update_bn(train[0].split(1_000), small)
        point = measure(small, size, test)
        torch.manual_seed(seed)
        if size == PAPER:
            distilled = replace(setting, batch_size=setting.distilled_batch_size)
            logits = teacher_logits(everything, distilled, teacher)
            train_plain(small, everything, setting.student_epochs, distilled, logits)
        else:
            train_plain(small, train, setting.tuning_epochs, setting)
        points.append(point | {"tuned_error": error(small, test)})
        print(network, scores, seed, points[-1], flush=True)
    return {"points": points}


def make_lenet() -> nn.Sequential:
    features = [nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


def load(data_dir: Path, network: str, num_train: int) -> tuple[Pair, Pair]:
    """Standardized images in a fixed order, without the last ones for validation, and the test set."""
    images = flat_images("mnist" if network == LENET else "fashion_mnist", data_dir)
    (x, y), test = ((pixels.reshape(-1, 1, 28, 28), labels) for pixels, labels in images)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train = order[: -min(5_000, len(x) // 10)][:num_train]
    return (x[train], y[train]), test


def train_posterior(
    net: nn.Module, rows: Pair, setting: Setting, network: str, seed: int
) -> tuple[nn.Module, AutoRadialDirectional]:
    """The mean network of a posterior, and its guide; the weight of the KL rises from zero over the first half."""
    x, y = rows
    prior = RadialDirectionalPrior(GROUPINGS[network], setting.global_scale)
    model = SupervisedModel(BayesianModule(net, prior), likelihoods.Categorical(num_data=len(x)))
    guide = AutoRadialDirectional(model, init_mean_cosine=setting.init_mean_cosine, shared_concentration=False)
    guide.setup(x[:2], y[:2])
    steps = setting.epochs * math.ceil(len(x) / setting.batch_size)
    weight = setting.kl_weights[0 if network == LENET else 1]
    loss = TermsELBO(strict_kl=True, kl_weight=lambda step: weight * min(1.0, 2 * (step + 1) / steps))
    optim = partial(two_rates, setting)
    options = {"epochs": setting.epochs, "batch_size": setting.batch_size, "seed": seed, "progress": False}
    fit(model, guide, rows, optim=optim, scheduler="cosine", loss=loss, **options)
    return mean_network(model.bnn, guide), guide


def two_rates(setting: Setting, parameters: list[Tensor]) -> torch.optim.Adam:
    """Adam with a larger rate for radii and concentrations, which travel far on their logarithms."""
    directions = [parameter for parameter in parameters if parameter.dim() > 1]
    radii = [parameter for parameter in parameters if parameter.dim() < 2]
    rates = (setting.learning_rate, setting.radius_learning_rate)
    groups = [{"params": group, "lr": rate} for group, rate in zip((directions, radii), rates, strict=True)]
    return torch.optim.Adam(groups)


def train_plain(net: nn.Module, rows: Pair, epochs: int, setting: Setting, teacher: Tensor | None = None) -> None:
    """Training with a rate that falls to zero, on the labels, and on a teacher's logits if there are any."""
    x, y = rows
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), lr=setting.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(x) / setting.batch_size))
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(setting.batch_size):
            optimizer.zero_grad()
            logits = net(x[index])
            loss = nn.functional.cross_entropy(logits, y[index])
            if teacher is not None:
                # The KL from the teacher's softened classes, in the scale of Hinton et al. (2015).
                heat = setting.temperature
                student, target = ((values / heat).log_softmax(-1) for values in (logits, teacher[index]))
                kl = heat**2 * nn.functional.kl_div(student, target, log_target=True, reduction="batchmean")
                loss = setting.label_share * loss + (1.0 - setting.label_share) * kl
            loss.backward()
            optimizer.step()
            schedule.step()


def teacher_logits(rows: Pair, setting: Setting, saved: Path) -> Tensor:
    """Logits of a whole LeNet that is the same for all students, and is read from its file once trained."""
    net = make_lenet()
    if not saved.exists():
        torch.manual_seed(0)
        train_plain(net, rows, setting.teacher_epochs, setting)
        saved.parent.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), saved)
    net.load_state_dict(torch.load(saved, weights_only=True))
    return logits_of(net, rows[0])


def remove(net: nn.Sequential, size: str, importance: torch_pruning.importance.Importance) -> None:
    """Remove the channels of least importance, as many of each layer as the size says."""
    ratios = {}
    for name, channels in PAPER_CHANNELS.items() if size == PAPER else ():
        layer = net.get_submodule(name)
        # Half a channel off, so that rounding cannot remove another one.
        ratios[layer] = 1.0 - (channels + 0.5) / layer.weight.shape[0]
    common = {"pruning_ratio": 0.5 if size == HALF else 0.75, "pruning_ratio_dict": ratios, "ignored_layers": [net[-1]]}
    torch_pruning.BasePruner(net, torch.zeros(1, 1, 28, 28), importance, **common).step()


@torch.no_grad()
def logits_of(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([net.eval()(images) for images in x.split(1_000)])


def measure(net: nn.Module, size: str, rows: Pair) -> Row:
    """The size of a network, and the share of errors in percent."""
    weights, flops = count_weights_and_flops(net, rows[0][:1])
    return {"size": size, "weights": weights, "flops": flops, "error": error(net, rows)}


def error(net: nn.Module, rows: Pair) -> float:
    return 100 * float((logits_of(net, rows[0]).argmax(-1) != rows[1]).double().mean())


def values(results: Results, column: str, network: str, size: str, scores: str) -> list[float]:
    """A column of all seeds."""
    points = [point for row in results.where(network=network, scores=scores) for point in row["points"]]
    return [point[column] for point in points if point["size"] == size]


def claims(results: Results) -> list[Claim]:
    """Compare with the paper's best row."""
    errors = values(results, "tuned_error", LENET, PAPER, POSTERIOR)
    if not errors:
        return []
    text = f"{LENET}, at most {PAPER_FLOPS:,} FLOPs, {PAPER_WEIGHTS:,} weights: test error at most the paper's"
    return [Claim(text, "1.0 %", f"{with_error(errors, 2)} %", str(len(errors)), mean(errors) <= 1.0)]


def report(results: Results) -> str:
    """The errors of all networks, before and after training."""
    lines = []
    for network in (LENET, RESIDUAL):
        for size in (WHOLE, HALF, QUARTER, PAPER):
            for scores in (POSTERIOR, MAGNITUDE):
                column = partial(values, results, network=network, size=size, scores=scores)
                if errors := column("error"):
                    tuned = "" if size == WHOLE else with_error(column("tuned_error"), 2)
                    counts = [f"{column(name)[0]:,}" for name in ("weights", "flops")]
                    lines.append([network, size, scores, *counts, with_error(errors, 2), tuned])
    setting = results.setting
    return f"""### Pruning by a posterior and by magnitude

LeNet-5-Caffe (20-50-500) and a residual network (three blocks, 8 to 32 channels), each trained for \
{setting["epochs"]} epochs on {setting["num_train"]:,} images, as a plain network or as a radial-directional posterior \
(`python -m benchmarks.compression.lenet_mnist --data-dir DIR`). Torch-Pruning removes as many channels of each layer, \
by the magnitude of the plain network's weights or by the posterior's scores. Both small networks then train alike, \
{setting["tuning_epochs"]} epochs on the same images; 3-11-40 trains {setting["student_epochs"]} epochs on \
{setting["num_distilled"]:,} images, with the logits of a whole network as targets beside the labels. "weights" \
excludes biases; "FLOPs" counts multiply-adds plus one per output. By this count the paper's best row, 4-7-110-66 at \
1.0 %, has {PAPER_FLOPS:,} FLOPs and {PAPER_WEIGHTS:,} weights (its table says 125K and 20K). Errors on test images in \
percent:

{markdown_table(["network", "size", "scores", "weights", "FLOPs", "error", "after training"], lines)}"""


if __name__ == "__main__":
    main(run, report)
