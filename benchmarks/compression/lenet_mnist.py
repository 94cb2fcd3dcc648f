# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""LeNet-5-Caffe (20-50-800-500) on MNIST, cut down by what its own posterior says (Oh, Adamczewski and Park, 2019).

python -m benchmarks.compression.lenet_mnist --data-dir DIR
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.common import (
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
from pyro_radial import AutoRadialDirectional, BayesianModule, SupervisedModel, TermsELBO, fit
from pyro_radial.compression import cut_network, mean_network, unit_scores
from pyro_radial.compression.graph import count_flops, count_weights
from pyro_radial.compression.prune import CutRecord, evaluate_cut
from pyro_radial.compression.scores import Cut, Scores
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior

INPUT_SHAPE = (1, 28, 28)
NUM_VALIDATION = 5_000
GROUPING = {"0.weight": "row", "2.weight": "row", "5.weight": "row", "7.weight": "column"}
Split = dict[str, Pair]


@dataclass(frozen=True)
class Setting:
    """One way to train and cut."""

    first_epochs: int = 5
    epochs: int = 5
    num_stages: int = 6
    num_train: int = 55_000
    batch_size: int = 200
    learning_rate: float = 2e-3
    radius_learning_rate: float = 2e-2
    kl_weight: float = 0.1
    global_scale: float = 1e-2
    init_mean_cosine: float = 0.98
    #: Nats of validation loss that the cuts after a stage may cost.
    tolerance: float = 0.03
    #: What a saving of operations counts beside one of weights.
    flops_weight: float = 5.0
    #: One of so many units that are left in a layer goes at a time.
    units_per_cut: int = 10
    #: Steps of plain training in which a candidate may adapt before its loss is taken.
    adaptation_steps: int = 40
    #: Of the whole network, the teacher, and of cut ones with at most so many weights, the students.
    teacher_epochs: int = 5
    student_epochs: int = 15
    student_weights: int = 40_000
    temperature: float = 4.0
    label_share: float = 0.1


FORMS = {
    "default": Setting(),
    "small": Setting(1, 1, 2, 100, 50, units_per_cut=2, adaptation_steps=1, teacher_epochs=1, student_epochs=1),
}
# Recounted from table 2 of the paper, FLOPs and weights; the first is the paper's own method.
PUBLISHED = {
    "RDP": (113_148, 8_720),
    "BC-GNJ": (288_300, 4_100),
    "BC-GHS": (156_900, 2_800),
    "FDOO (100K)": (111_600, 58_700),
    "GD": (254_800, 5_900),
}
BUDGETS = {"the paper's, recounted": PUBLISHED["RDP"], "the aim": (100_000, 4_100), "BC-GNJ's": PUBLISHED["BC-GNJ"]}


def run(output: Path, *, data_dir: Path, form: Form = "default", seeds: int = 3, workers: int = 2) -> None:
    """Table 2 and figure 7 of "Radial and Directional Posteriors for Bayesian Neural Networks".

    Stages of training alternate with cuts. In a stage the network of that size is trained with a direction and a sparse
    radius for each group; then, units ranked by the scores of this posterior, the cheapest cuts are made until the loss
    has risen by a tolerance: the loss on 5,000 validation images after a few steps of adaptation, per saving. No
    threshold of a score is set by hand. Every size on the way is a point of the frontier: the error of its plain mean
    network as trained, and after fine-tuning a copy, small ones with the logits of the fine-tuned whole network as
    targets beside the labels. Sizes count as in table 2, recounted: weights without biases, multiply-adds plus one per
    output.
    """
    setting = FORMS[form]
    results = Results(output, {"torch": torch.__version__, **asdict(setting)})
    jobs = [
        Job({"seed": seed}, all_stages, (data_dir, setting, seed, results.checkpoint(seed)))
        for seed in range(1 if form == "small" else seeds)
    ]
    compute_all(results, jobs, workers)


def make_net() -> nn.Sequential:
    features = [nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


def load(data_dir: Path, num_train: int) -> Split:
    """Standardized images: a part to train on, the last of a fixed order to validate, and the test set."""
    (x, y), test = flat_images("mnist", data_dir)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held_out = min(NUM_VALIDATION, len(x) // 10)
    train, validation = order[:-held_out][:num_train], order[-held_out:]
    parts = {"train": (x[train], y[train]), "validation": (x[validation], y[validation]), "test": test}
    return {part: (images.reshape(-1, *INPUT_SHAPE), labels) for part, (images, labels) in parts.items()}


@torch.no_grad()
def logits_of(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([net(part) for part in x.split(1_000)])


def evaluate(net: nn.Module, rows: Pair) -> tuple[float, float]:
    """Mean negative log-likelihood, and the share of errors in percent."""
    logits = logits_of(net, rows[0])
    return float(nn.functional.cross_entropy(logits, rows[1])), 100 * float(
        (logits.argmax(-1) != rows[1]).double().mean()
    )


def train_posterior(
    net: nn.Module, data: Split, setting: Setting, epochs: int, ramp: bool, seed: int, checkpoint: Path
) -> tuple[SupervisedModel, AutoRadialDirectional]:
    """A posterior around this network; in the first stage the weight of its KL rises from zero."""
    x, y = data["train"]
    prior = RadialDirectionalPrior(GROUPING, setting.global_scale)
    model = SupervisedModel(BayesianModule(net, prior), likelihoods.Categorical(num_data=len(x)))
    guide = AutoRadialDirectional(model, init_mean_cosine=setting.init_mean_cosine, shared_concentration=False)
    guide.setup(x[:2], y[:2])
    steps = epochs * math.ceil(len(x) / setting.batch_size)
    weight = setting.kl_weight
    loss = TermsELBO(strict_kl=True, kl_weight=(lambda step: weight * min(1.0, (step + 1) / steps)) if ramp else weight)
    fit(
        model,
        guide,
        (x, y),
        epochs=epochs,
        batch_size=setting.batch_size,
        optim=partial(two_rates, guide, setting),
        loss=loss,
        seed=seed,
        checkpoint=checkpoint,
        progress=False,
    )
    return model, guide


def two_rates(guide: nn.Module, setting: Setting, parameters: list[Tensor]) -> torch.optim.Adam:
    """Adam with a larger rate for radii, scales and concentrations, which travel far on their logarithms."""
    far = {
        id(p)
        for name, p in guide.named_parameters()
        if "radius" in name or name.startswith(("scales.", "concentrations."))
    }
    groups = [
        {"params": [p for p in parameters if id(p) not in far], "lr": setting.learning_rate},
        {"params": [p for p in parameters if id(p) in far], "lr": setting.radius_learning_rate},
    ]
    return torch.optim.Adam(groups)


def units(scores: Scores) -> dict[str, Tensor]:
    """One score for each unit that may go: of a unit of the last hidden layer what comes in and what goes out."""
    return {"0": scores.outputs["0"], "2": scores.outputs["2"], "5": scores.outputs["5"] + scores.inputs["7"]}


def fine_tune(net: nn.Sequential, data: Split, setting: Setting, seed: int, teacher: nn.Module | None) -> None:
    """Plain training with a rate that falls to zero: on the labels, and on a teacher's logits where there is one."""
    torch.manual_seed(seed)
    x, y = data["train"]
    logits = torch.empty(len(x), 0) if teacher is None else logits_of(teacher, x)
    epochs = setting.teacher_epochs if teacher is None else setting.student_epochs
    optimizer = torch.optim.Adam(net.parameters(), lr=setting.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(x) / setting.batch_size))
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(setting.batch_size):
            optimizer.zero_grad()
            output = net(x[index])
            loss = nn.functional.cross_entropy(output, y[index])
            if teacher is not None:
                share = setting.label_share
                loss = share * loss + (1.0 - share) * distillation_loss(output, logits[index], setting.temperature)
            loss.backward()
            optimizer.step()
            schedule.step()


def distillation_loss(output: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KL from the teacher's softened classes to the student's, in the scale of Hinton et al. (2015)."""
    student, teacher = ((values / temperature).log_softmax(-1) for values in (output, logits))
    return temperature**2 * nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")


def sizes(net: nn.Sequential) -> Row:
    """Units left in each layer as the paper counts them, with the inputs of the first linear layer."""
    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    architecture = [layers[0].out_channels, layers[1].out_channels, layers[2].in_features, layers[2].out_features]
    return {
        "architecture": "-".join(map(str, architecture)),
        "weights": count_weights(net),
        "flops": count_flops(net, INPUT_SHAPE),
    }


def all_stages(data_dir: Path, setting: Setting, seed: int, folder: Path) -> Row:
    """All stages of one seed; what a killed run had finished is read from the folder."""
    data = load(data_dir, setting.num_train)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    net, points, teacher = make_net(), [], None
    for stage in range(setting.num_stages):
        epochs = setting.epochs if stage else setting.first_epochs
        model, guide = train_posterior(net, data, setting, epochs, not stage, seed, folder / f"stage_{stage}.pt")
        scores, net = units(unit_scores(guide)), mean_network(model.bnn, guide)
        point = {"stage": stage, **sizes(net), **errors("", net, data)}
        if teacher is None or point["weights"] <= setting.student_weights:
            tuned = tuned_copy(net, data, setting, seed, teacher, folder / f"tuned_{stage}.pt")
            teacher = tuned if teacher is None else teacher
            point |= errors("tuned_", tuned, data)
        points.append(point)
        print(seed, point, flush=True)
        if stage == setting.num_stages - 1:
            break
        cut = next_cut(net, scores, data, setting, folder / f"cut_{stage}.pt")
        net = cut_network(net, cut)
    return {"points": points}


def next_cut(net: nn.Sequential, scores: dict[str, Tensor], data: Split, setting: Setting, saved: Path) -> Cut:
    """The end of the cheapest path, read from its file where there is one; a tolerance that allows none is doubled."""
    if saved.exists():
        return Cut(torch.load(saved, weights_only=True))
    path, tolerance = list[CutRecord](), setting.tolerance
    while len(path) < 2:
        path = cheapest_path(net, scores, partial(adapted_loss, data, setting), tolerance, setting)
        tolerance *= 2.0
    outputs = {layer: path[-1].cut.outputs[layer] for layer in scores}
    torch.save(outputs, saved)
    return Cut(outputs)


def cheapest_path(
    net: nn.Sequential,
    scores: dict[str, Tensor],
    loss: Callable[[nn.Module], float],
    limit: float,
    setting: Setting,
) -> list[CutRecord]:
    """Cuts, each inside the one before, by the layer where a share of the units costs least loss for what it saves."""
    cut = Cut({layer: torch.ones(len(values), dtype=torch.bool) for layer, values in scores.items()})
    path = [evaluate_cut(net, cut, loss, INPUT_SHAPE)]
    allowed = path[0].loss + limit
    while True:
        cuts = next_cuts(path[-1].cut, scores, setting.units_per_cut)
        candidates = [evaluate_cut(net, cut, loss, INPUT_SHAPE) for cut in cuts]
        candidates = [record for record in candidates if record.loss <= allowed]
        if not candidates:
            return path
        path.append(min(candidates, key=partial(price, path[-1], setting.flops_weight)))


def next_cuts(cut: Cut, scores: dict[str, Tensor], units_per_cut: int) -> list[Cut]:
    """For each layer, the cut without the worst share of the units that are left in it, at least one."""
    cuts = []
    for layer, values in scores.items():
        kept = cut.outputs[layer]
        left = int(kept.sum())
        if left > 1:
            worst = torch.where(kept, values, math.inf).argsort()[: max(1, left // units_per_cut)]
            cuts.append(Cut({name: cut.outputs[name].clone() for name in scores}))
            cuts[-1].outputs[layer][worst] = False
    return cuts


def price(before: CutRecord, flops_weight: float, after: CutRecord) -> float:
    saving = flops_weight * math.log(before.flops / after.flops) + math.log(before.weights / after.weights)
    return (after.loss - before.loss) / saving


def adapted_loss(data: Split, setting: Setting, net: nn.Module) -> float:
    """The validation loss after a few steps, in which the units that are left take over what those that are cut did."""
    net = deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    size = setting.batch_size
    for step in range(setting.adaptation_steps):
        x, y = (rows[step * size : (step + 1) * size] for rows in data["train"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return evaluate(net, data["validation"])[0]


def errors(prefix: str, net: nn.Module, data: Split) -> Row:
    return {f"{prefix}{part}_error": evaluate(net, data[part])[1] for part in ("validation", "test")}


def tuned_copy(
    net: nn.Sequential, data: Split, setting: Setting, seed: int, teacher: nn.Module | None, saved: Path
) -> nn.Sequential:
    """A fine-tuned copy, read from its file where there is one."""
    copy = deepcopy(net)
    if saved.exists():
        copy.load_state_dict(torch.load(saved, weights_only=True))
        return copy
    fine_tune(copy, data, setting, seed, teacher)
    torch.save(copy.state_dict(), saved)
    return copy


def best_within(rows: list[Row], flops: int, weights: int) -> list[Row]:
    """For each run, of the points inside a budget the one with the fewest errors on validation images."""
    fitting = [[p for p in row["points"] if p["flops"] <= flops and p["weights"] <= weights] for row in rows]
    return [min(points, key=lambda p: p["tuned_validation_error"]) for points in fitting if points]


def claims(results: Results) -> list[Claim]:
    """Compare with the paper's best row and with the strongest other method, both with an error of 1.0 %."""
    found = []
    for name, method in (("RDP", "radial-directional posteriors"), ("BC-GNJ", "BC-GNJ")):
        flops, weights = PUBLISHED[name]
        errors = [point["tuned_test_error"] for point in best_within(results.rows, flops, weights)]
        text = f"LeNet-5 on MNIST, at most {flops:,} FLOPs, {weights:,} weights: test error at most that of {method}, %"
        found.append(Claim(text, "1.0", with_error(errors, 2), str(len(errors)), mean(errors) <= 1.0))
    return found


def report(results: Results) -> str:
    """Report the best network within each budget, and the whole frontier."""
    lines, best = [], []
    for row in results.where():
        for point in row["points"]:
            keys = ("test_error", "tuned_validation_error", "tuned_test_error")
            errors = [f"{point[key]:.2f}" if key in point else "" for key in keys]
            size = [f"{point['flops']:,}", f"{point['weights']:,}"]
            lines.append([str(row["seed"]), point["architecture"], *size, *errors])
    for name, (flops, weights) in BUDGETS.items():
        chosen = best_within(results.where(), flops, weights)
        architectures = ", ".join(point["architecture"] for point in chosen) or "none"
        error = with_error([point["tuned_test_error"] for point in chosen], 2) if chosen else ""
        best.append([f"{name}: {flops:,} FLOPs, {weights:,} weights", architectures, error])
    setting = results.setting
    epochs = setting["first_epochs"] + (setting["num_stages"] - 1) * setting["epochs"]
    headings = ["seed", "units", "FLOPs", "weights", "mean, test", "tuned, validation", "tuned, test"]
    return f"""### LeNet on MNIST

LeNet-5-Caffe (20-50-800-500) on MNIST, pruned in stages by the scores of a radial-directional posterior, {epochs} \
epochs in all (`python -m benchmarks.compression.lenet_mnist --data-dir DIR`). "weights" excludes biases; "FLOPs" \
counts multiply-adds plus one per output. By this count the paper's best row, 4-7-110-66 at 1.0 %, has 113,148 FLOPs \
and 8,720 weights (its table says 125K and 20K). The weight of the KL is {setting["kl_weight"]:g}, not 1. Errors are \
in percent and belong to the plain network: with the posterior's mean, and after fine-tuning. Small networks are \
fine-tuned on the labels and on the logits of the fine-tuned full network. The best network by validation error within \
each budget, with its mean test error over seeds:

{markdown_table(["budget", "units left, by seed", "test error, %"], best)}

The whole frontier:

{markdown_table(headings, lines)}

{results.plot("Test error by size, beside published results")}"""


def draw(results: Results) -> None:
    """The frontier of every seed."""
    rows = results.where()
    figure = Figure(figsize=(9, 3.4), dpi=110)
    axes = figure.subplots(1, 2, sharey=True)
    for ax, against, column in zip(axes, ("flops", "weights"), (0, 1), strict=True):
        for prefix, color, label in (("", "0.6", "mean of the posterior"), ("tuned_", "#0072B2", "fine-tuned")):
            for row in rows:
                points = [point for point in row["points"] if f"{prefix}test_error" in point]
                sizes_of = [point[against] for point in points]
                found = [point[f"{prefix}test_error"] for point in points]
                ax.plot(sizes_of, found, color=color, marker="o", markersize=3, linewidth=1, label=label)
        for name, published in PUBLISHED.items():
            ax.plot(published[column], 1.0, marker="x", color="#D55E00", linestyle="", label="published, at 1.0 %")
            ax.annotate(
                name, (published[column], 1.0), rotation=60, fontsize=7, xytext=(0, 5), textcoords="offset points"
            )
        ax.set(xscale="log", yscale="log", xlabel={"flops": "FLOPs", "weights": "Weights"}[against])
    axes[0].set_ylabel("Test error, %")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[1].legend(
        *zip(*{label: (handle, label) for handle, label in zip(handles, labels, strict=True)}.values(), strict=True),
        frameon=False,
    )
    figure.tight_layout()
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
