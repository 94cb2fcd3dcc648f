# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a small convolutional network without and with a posterior and see how well each knows what it does not know.

Run it as ``python tutorials/quickstart.py``; ``--help`` lists the options.
"""

# The posteriors have a prior N(0, 1) on every weight, natural gradients, and a KL weight of 0.1: with so few images the
# best posterior of the true ELBO is the prior, which predicts nothing. The plain network has the same prior as its
# weight decay. Rates and the KL weight are the best of three on the validation images. Each keeps its best epoch.
# One seed and few images cannot rank methods: see benchmarks/RESULTS.md for that.

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from image_sets import Images, load
from plots import plot_images
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    BayesianModule,
    NaturalGradient,
    SupervisedModel,
    TermsELBO,
    fit,
    predict,
)
from pyro_radial.infer import Prediction
from pyro_radial.infer.autoguide import AutoPerSite, families
from pyro_radial.infer.training.fit import FitResult
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import auroc, expected_calibration_error, reliability
from pyro_radial.uncertainty.plots import plot_reliability

PLAIN = "plain network"
BLUE, ORANGE = "#0072B2", "#D55E00"


def point(model: nn.Module) -> AutoPerSite:
    """The plain network as a guide: a point estimate of every weight."""
    return AutoMeanField(model, families={".": families.Delta()})


def adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the plain network."""
    return torch.optim.Adam(parameters, lr=3e-3)


#: The guide of each method and its optimizer.
METHODS: dict[str, tuple[Callable[[nn.Module], AutoPerSite], Any]] = {
    PLAIN: (point, adam),
    "AutoMeanField": (AutoMeanField, NaturalGradient(lr=0.3)),
    "AutoRadial": (AutoRadial, NaturalGradient(lr=0.3)),
}
EPOCHS = {"digits": 60, "fashion_mnist": 3, "mnist": 3, "retinamnist": 30}
#: With few images a network can be wrong and sure of it.
NUM_TRAIN = {"digits": 200}
SMALL = 10_000  # Fewer images than this are trained on in batches of 32, more in batches of 128.
UNSEEN_CLASSES = 2
KL_WEIGHT = 0.1
NUM_DRAWS = 32
#: Few, so that most hold enough of a few hundred test images.
NUM_BINS = 4
SHOWN = 8
WRONG = "#D55E00"
PLOTS = {
    "reliability": "Is a confidence of 90 % right 90 % of the time?",
    "certainty": "What AutoRadial is most and least certain of",
    "training_terms": "The terms of the training loss",
}

Labeled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Labeled images to learn from and be tested on, and images of another kind."""

    train: Labeled
    validation: Labeled
    test: Labeled
    #: Test images of classes that training never shows.
    unseen: Labeled
    class_names: tuple[str, ...]
    unseen_names: tuple[str, ...]


@dataclass(frozen=True)
class Scores:
    """What the table shows of one method, over the test images and those of another kind."""

    accuracy: float
    negative_log_likelihood: float
    calibration_error: float
    auroc_entropy: float
    auroc_mutual_information: float


@dataclass(frozen=True)
class Outcome:
    """One method: its training and its predictions."""

    training: FitResult
    test: Prediction
    unseen: Prediction


def make_task(data: Images, num_train: int | None = None) -> Task:
    """Learn all classes but the last two, from the first images; the test images of those two are the other kind."""
    num_classes = len(data.class_names)
    num_known = num_classes - UNSEEN_CLASSES
    train = _of_classes(range(num_known), data.train_images, data.train_labels)
    if data.val_images is None or data.val_labels is None:
        train, validation = _split(*train)
    else:
        validation = _of_classes(range(num_known), data.val_images, data.val_labels)
    return Task(
        (train[0][:num_train], train[1][:num_train]),
        validation,
        test=_of_classes(range(num_known), data.test_images, data.test_labels),
        unseen=_of_classes(range(num_known, num_classes), data.test_images, data.test_labels),
        class_names=data.class_names[:num_known],
        unseen_names=data.class_names[num_known:],
    )


def _of_classes(classes: range, images: Tensor, labels: Tensor) -> Labeled:
    chosen = (labels >= classes.start) & (labels < classes.stop)
    return images[chosen], labels[chosen]


def _split(images: Tensor, labels: Tensor, fraction: float = 0.1) -> tuple[Labeled, Labeled]:
    """Images to train on, and a random fraction of them held out for validation, the same in every run."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, kept = order.tensor_split([round(fraction * len(labels))])
    return (images[kept], labels[kept]), (images[held_out], labels[held_out])


def make_net(images: Tensor, num_classes: int) -> nn.Module:
    """A plain convolutional network for images of any size from 4x4 and any number of channels."""
    _, channels, height, width = images.shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), num_classes),
    )


def run_method(name: str, task: Task, epochs: int, seed: int) -> Outcome:
    """Train the network by one method and predict."""
    images, labels = task.train
    make_guide, optim = METHODS[name]
    torch.manual_seed(seed)  # All methods start from the same weights.
    bnn = BayesianModule(make_net(images, len(task.class_names)))
    model = SupervisedModel(bnn, likelihoods.Categorical(num_data=len(labels)))
    guide = make_guide(model)
    training = fit(
        model,
        guide,
        task.train,
        epochs=epochs,
        batch_size=32 if len(labels) < SMALL else 128,
        optim=optim,
        loss=TermsELBO(kl_weight=1.0 if name == PLAIN else KL_WEIGHT),
        validation=task.validation,
        seed=seed,
    )
    return Outcome(
        training,
        predict(model, guide, task.test[0], NUM_DRAWS, progress=True),
        predict(model, guide, task.unseen[0], NUM_DRAWS, progress=True),
    )


def score(outcome: Outcome, labels: Tensor) -> Scores:
    """Scores on the test images, and how well either uncertainty tells the other kind apart."""
    probs = outcome.test.mean
    return Scores(
        float((probs.argmax(-1) == labels).float().mean()),
        -float(outcome.test.log_prob(labels).mean()),
        float(expected_calibration_error(probs, labels)),
        auroc(outcome.test.entropy, outcome.unseen.entropy),
        auroc(outcome.test.mutual_information, outcome.unseen.mutual_information),
    )


def describe(task: Task, name: str) -> str:
    """What is learned from what, in words."""
    uses = {"train on": task.train, "choose the epoch by": task.validation, "test on": task.test}
    return (
        f"{name}, the classes {', '.join(task.class_names)}: "
        f"{', '.join(f'{len(labels)} images to {use}' for use, (_, labels) in uses.items())}.\n"
        f"Images of another kind: {len(task.unseen[1])} of the classes {' and '.join(task.unseen_names)}, "
        "which training never shows."
    )


def format_table(scores: dict[str, Scores]) -> str:
    """The scores, one row for each method, under two lines of headings."""
    headings = [
        ("", "accuracy"),
        ("", "NLL"),
        ("calibration", "error"),
        ("AUROC by", "entropy"),
        ("AUROC by", "mutual inf."),
    ]
    lines = [
        f"{'' if row == 0 else 'method':15}" + "".join(f"{column[row]:>13}" for column in headings) for row in (0, 1)
    ]
    for method, of_method in scores.items():
        *values, mutual = astuple(of_method)
        # Draws of a point are identical, so nothing in them differs.
        last = f"{'-':>13}" if method == PLAIN else f"{mutual:13.3f}"
        lines.append(f"{method:15}" + "".join(f"{value:13.3f}" for value in values) + last)
    return "\n".join(lines)


def interpret(outcomes: dict[str, Outcome], scores: dict[str, Scores], labels: Tensor) -> str:
    """Say in two sentences what the table means, with the error of the comparison."""
    gain = outcomes["AutoRadial"].test.log_prob(labels) - outcomes[PLAIN].test.log_prob(labels)
    mean, error = float(gain.mean()), float(gain.std()) / len(gain) ** 0.5
    verdict = "which is more than chance" if abs(mean) > 2 * error else "which may be chance"
    entropy = {name: f"{100 * of_method.auroc_entropy:.0f} %" for name, of_method in scores.items()}
    return (
        f"AutoRadial gives the true class of a test image {abs(mean):.3f} ± {error:.3f} nats "
        f"{'more' if mean > 0 else 'less'} log-probability than the plain network, {verdict}.\n"
        f"In {entropy['AutoRadial']} of pairs its entropy is higher on an image of an unseen class than on a known "
        f"one, with the plain network in {entropy[PLAIN]}; guessing has 50 %."
    )


def save_plots(outcomes: dict[str, Outcome], task: Task, folder: Path) -> dict[str, Path]:
    """Write every plot; the path of each by what it shows."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "reliability": draw_reliability(outcomes, task.test[1]),
        "certainty": draw_certainty(outcomes["AutoRadial"], task),
        "training_terms": draw_training_terms(outcomes),
    }
    paths = {name: folder / f"{name}.png" for name in figures}
    for name, figure in figures.items():
        figure.savefig(paths[name])
    return paths


def draw_reliability(outcomes: dict[str, Outcome], labels: Tensor) -> Figure:
    """Accuracy against confidence, all methods in one diagram."""
    ax = plot_reliability(
        {name: reliability(outcome.test.mean, labels, NUM_BINS) for name, outcome in outcomes.items()}
    )
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure


def draw_training_terms(outcomes: dict[str, Outcome]) -> Figure:
    """The terms of the loss by epoch, one panel for each method."""
    figure = Figure(figsize=(12.0, 3.4), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(outcomes), sharey=True)
    for ax, (name, outcome) in zip(panels, outcomes.items(), strict=True):
        history = outcome.training.history
        epochs = [record["epoch"] for record in history]
        total = [record["nll"] + record["kl"] for record in history]
        ax.plot(epochs, [record["nll"] for record in history], label="NLL", color=BLUE, linewidth=1.5)
        ax.plot(epochs, [record["kl"] for record in history], label="KL", color=ORANGE, linewidth=1.5)
        ax.plot(epochs, total, label="NLL + KL", color="0.85", linewidth=5, zorder=1)
        validated = [record for record in history if "validation_nll" in record]
        ax.plot(
            [record["epoch"] for record in validated],
            [record["validation_nll"] for record in validated],
            label="NLL, validation",
            color=BLUE,
            linestyle="--",
        )
        ax.axvline(outcome.training.best_epoch, color="0.6", linewidth=1, zorder=0, label="parameters kept")
        # The KL of thousands of weights is a hundred times the rest: only a logarithm shows both.
        ax.set(title=name, yscale="log", xlabel="Epoch", ylabel="Nats per datum")
        ax.legend(frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def draw_certainty(outcome: Outcome, task: Task) -> Figure:
    """The test images of least and of most predictive entropy, and the first images of another kind."""
    order = outcome.test.entropy.argsort()
    rows = {
        "most certain": (task.test, outcome.test, order[:SHOWN]),
        "least certain": (task.test, outcome.test, order[-SHOWN:].flip(0)),
        "never trained on": (task.unseen, outcome.unseen, torch.arange(SHOWN)),
    }
    images = torch.cat([images[index] for (images, _), _, index in rows.values()])
    captions = [
        caption
        for (_, labels), prediction, index in rows.values()
        for caption in _captions(prediction, labels, index, task.class_names + task.unseen_names)
    ]
    axes = plot_images(images, [text for text, _ in captions], num_columns=SHOWN, row_labels=list(rows))
    for ax, (_, right) in zip(axes, captions, strict=True):
        # Small enough for "says no retinopathy".
        ax.title.set(color="black" if right else WRONG, fontsize=7)
    figure = axes[0].figure
    assert isinstance(figure, Figure)
    return figure


def _captions(
    prediction: Prediction, labels: Tensor, index: Tensor, names: tuple[str, ...]
) -> Iterator[tuple[str, bool]]:
    """What each image was taken for, what it is and the entropy; and whether the two are the same."""
    said, entropy = prediction.mean.argmax(-1), prediction.entropy
    for i in index.tolist():
        guess, truth = int(said[i]), int(labels[i])
        yield f"says {names[guess]}\nis {names[truth]}\n{entropy[i]:.2f} nats", guess == truth


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dataset", choices=sorted(EPOCHS), default="digits", help="images (default: %(default)s)")
    parser.add_argument(
        "--data-dir", type=Path, help="folder with NAME.npz; without it the set is looked up or fetched"
    )
    parser.add_argument("--epochs", type=int, help=f"passes over the training images (default: {EPOCHS})")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("quickstart_output"), help="folder for the plots")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, predict, print the scores and save the plots."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    task = make_task(load(args.dataset, args.data_dir), NUM_TRAIN.get(args.dataset))
    print(describe(task, args.dataset))
    outcomes = {}
    for name in METHODS:
        print(f"\n{name}", flush=True)
        outcomes[name] = run_method(name, task, args.epochs or EPOCHS[args.dataset], args.seed)
    scores = {name: score(outcome, task.test[1]) for name, outcome in outcomes.items()}
    print(f"\n{format_table(scores)}\n\n{interpret(outcomes, scores, task.test[1])}\n")
    for name, path in save_plots(outcomes, task, args.output_dir).items():
        print(f"{PLOTS[name]}: {path}")
    print(
        "\nNext: tutorials/first_steps.ipynb does the same by hand in Pyro, and says what the numbers mean."
        "\nFor your own data, start from run_method in this file."
    )


if __name__ == "__main__":
    main()
