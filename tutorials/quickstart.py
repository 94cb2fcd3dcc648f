# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network learns digits from 200 labels, of which one in five is wrong, with and without a posterior.

Run it as ``python tutorials/quickstart.py``; ``--help`` lists the options.
"""

# Each method trains to the end, with no images held out. The prior is the weight decay of the plain network.
# The KL weight of the posterior is 0.3: with so few images the best posterior of the true ELBO is nearly the prior.
# It is the best of three, and the plain network's learning rate of two, with seeds 0 to 2, which are not the default.

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from image_sets import load
from plots import COLORS, MARKERS, new_figure, plot_images, plot_referral
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
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import referral_curve
from pyro_radial.uncertainty.referral import ReferralCurve

PLAIN, RADIAL = "plain network", "AutoRadial"
NUM_TRAIN, SHARE_WRONG, BATCH_SIZE, EPOCHS, NUM_DRAWS = 200, 0.2, 32, 120, 32
#: The default prior first.
PRIOR_STDDEVS = (1.0, 0.6, 0.4)
SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
#: The share of the images that a person checks in the summary.
CHECKED = 0.2
SHOWN = 8
WRONG = "#D55E00"

Predictions = dict[tuple[str, float], Prediction]


@dataclass(frozen=True)
class Task:
    """Images and labels to learn from, and other images with the labels that people gave and the true digits."""

    images: Tensor
    labels: Tensor
    later: Tensor
    later_labels: Tensor
    digits: Tensor


def make_task(seed: int) -> Task:
    """Draw the images to learn from, and give one in five a wrong label."""
    data = load("digits")
    images = torch.cat([data.train_images, data.test_images])
    digits = torch.cat([data.train_labels, data.test_labels])
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits), generator=generator)
    images, digits = images[order], digits[order]
    is_wrong = torch.rand(len(digits), generator=generator) < SHARE_WRONG
    others = (digits + torch.randint(1, 10, digits.shape, generator=generator)) % 10
    labels = torch.where(is_wrong, others, digits)
    known, later = slice(NUM_TRAIN), slice(NUM_TRAIN, None)
    return Task(images[known], labels[known], images[later], labels[later], digits[later])


def make_net() -> nn.Module:
    """A plain convolutional network for images of 8x8 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def train(method: str, prior_stddev: float, task: Task, epochs: int, seed: int) -> Prediction:
    """Train the network by a method, and predict the later images."""
    torch.manual_seed(seed)  # All start from the same weights.
    bnn = BayesianModule(make_net(), dist.Normal(0.0, prior_stddev))
    model = SupervisedModel(bnn, likelihoods.Categorical())
    settings: dict[str, Any] = {"epochs": epochs, "batch_size": BATCH_SIZE, "seed": seed}
    if method == PLAIN:
        guide = AutoMeanField(model, families={".": families.Delta()})  # one value for every weight
        settings["optim"] = partial(torch.optim.Adam, lr=3e-3)
    else:
        guide = AutoRadial(model)
        settings["optim"] = NaturalGradient(lr=0.3)
        settings["loss"] = TermsELBO(kl_weight=0.3)
    fit(model, guide, (task.images, task.labels), **settings)
    # All draws of a plain network are the same.
    return predict(model, guide, task.later, 1 if method == PLAIN else NUM_DRAWS)


def misread(probabilities: Tensor, digits: Tensor) -> float:
    """The share of images whose digit is misread, in percent."""
    return 100.0 * float((probabilities.argmax(-1) != digits).float().mean())


def nll(prediction: Prediction, task: Task) -> Tensor:
    """The negative log-likelihood of each later label, in nats."""
    return -prediction.log_prob(task.later_labels)


def format_table(predictions: Predictions, task: Task) -> str:
    """One row for each prior."""
    lines = [f"{'':10}{'NLL of labels':>28}{'digits misread, %':>32}", f"{'prior':10}" + f"{PLAIN:>16}{RADIAL:>14}" * 2]
    for stddev in PRIOR_STDDEVS:
        pair = [predictions[method, stddev] for method in (PLAIN, RADIAL)]
        scores = [nll(prediction, task).mean() for prediction in pair]
        errors = [misread(prediction.mean, task.digits) for prediction in pair]
        lines.append(
            f"N(0, {stddev}²){scores[0]:15.2f}{scores[1]:14.2f}{errors[0]:16.1f}{errors[1]:14.1f}",
        )
    return "\n".join(lines)


def best_decay(predictions: Predictions, task: Task) -> float:
    """The prior with which the plain network has the lowest NLL of the later labels."""
    return min(PRIOR_STDDEVS, key=lambda stddev: float(nll(predictions[PLAIN, stddev], task).mean()))


def compare(predictions: Predictions, task: Task, stddev: float) -> str:
    """The NLL of the plain network minus that of the posterior under the default prior, with its error."""
    gain = nll(predictions[PLAIN, stddev], task) - nll(predictions[RADIAL, PRIOR_STDDEVS[0]], task)
    mean, error = float(gain.mean()), float(gain.std()) / len(gain) ** 0.5
    verdict = "more than chance explains" if abs(mean) > 2 * error else "which may be chance"
    return f"{abs(mean):.2f} ± {error:.2f} {'lower' if mean > 0 else 'higher'}, {verdict}"


def interpret(predictions: Predictions, curves: dict[str, ReferralCurve], task: Task) -> str:
    """Say what the posterior is for."""
    default, tuned = PRIOR_STDDEVS[0], best_decay(predictions, task)
    left = {name: float(curve.score[SHARES.index(CHECKED)]) for name, curve in curves.items()}
    return (
        "A plain network learns wrong labels by heart unless its weight decay fits; "
        "a posterior averages over networks.\n"
        f"Under the default prior its NLL is {compare(predictions, task, default)}.\n"
        f"Against the plain network at its best decay, N(0, {tuned}²), picked on these very labels, it is "
        f"{compare(predictions, task, tuned)}.\n"
        f"If a person checks the {100 * CHECKED:.0f} % that are least sure, the plain network misreads "
        f"{left[PLAIN]:.1f} % of the others and AutoRadial {left[RADIAL]:.1f} %."
    )


def draw_scores(predictions: Predictions, task: Task) -> Figure:
    """The NLL of both methods by the width of the prior, with standard errors."""
    figure = new_figure(5.0, 3.6)
    ax = figure.add_subplot()
    for index, method in enumerate((PLAIN, RADIAL)):
        losses = [nll(predictions[method, stddev], task) for stddev in PRIOR_STDDEVS]
        means = [float(loss.mean()) for loss in losses]
        errors = [float(loss.std()) / len(loss) ** 0.5 for loss in losses]
        style = {"color": COLORS[index], "marker": MARKERS[index], "capsize": 3}
        ax.errorbar(PRIOR_STDDEVS, means, errors, label=method, **style)
    ax.set(xscale="log", xlabel="Standard deviation of the prior (weight decay)", ylabel="NLL of later labels, nats")
    ax.set_xticks(PRIOR_STDDEVS, [str(stddev) for stddev in PRIOR_STDDEVS])
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return figure


def draw_errors(curves: dict[str, ReferralCurve]) -> Figure:
    """The share of misread digits among those that nobody checks."""
    ax = plot_referral(curves)
    ax.set(xlabel="Checked by a person, %", ylabel="Misread digits, % of the others", ylim=(0.0, None))
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure


def draw_images(prediction: Prediction, task: Task) -> Figure:
    """The images that the posterior is most and least sure of."""
    order = prediction.entropy.argsort()
    chosen = torch.cat([order[:SHOWN], order[-SHOWN:].flip(0)])
    said = prediction.mean.argmax(-1)[chosen]
    digits = task.digits[chosen]
    titles = [f"reads {guess}, is {digit}" for guess, digit in zip(said.tolist(), digits.tolist(), strict=True)]
    axes = plot_images(task.later[chosen], titles, num_columns=SHOWN, row_labels=["most sure", "least sure"])
    for ax, is_right in zip(axes, (said == digits).tolist(), strict=True):
        ax.title.set(color="black" if is_right else WRONG, fontsize=7)
    figure = axes[0].figure
    assert isinstance(figure, Figure)
    return figure


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="passes over the images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=10, help="of everything random (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("quickstart_output"), help="folder for the plots")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, predict, print what is gained and save the plots."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    task = make_task(args.seed)
    print(
        f"{len(task.labels)} images of digits to learn from and {len(task.digits)} to test on; "
        f"{100 * SHARE_WRONG:.0f} % of all labels are wrong."
    )
    predictions: Predictions = {}
    for stddev in PRIOR_STDDEVS:
        for method in (PLAIN, RADIAL):
            print(f"\n{method}, prior N(0, {stddev}²)", flush=True)
            predictions[method, stddev] = train(method, stddev, task, args.epochs, args.seed)
    curves = {}
    for method in (PLAIN, RADIAL):
        prediction = predictions[method, PRIOR_STDDEVS[0]]
        curves[method] = referral_curve(misread, prediction.mean, task.digits, prediction.entropy, SHARES)
    print(f"\n{format_table(predictions, task)}\n\n{interpret(predictions, curves, task)}\n")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    figures = {
        "by_prior": draw_scores(predictions, task),
        "misread": draw_errors(curves),
        "images": draw_images(predictions[RADIAL, PRIOR_STDDEVS[0]], task),
    }
    for name, figure in figures.items():
        path = args.output_dir / f"{name}.png"
        figure.savefig(path)
        print(path)
    print(
        "\nNext: tutorials/first_steps.ipynb does the same by hand in Pyro, and says what the numbers mean."
        "\nFor your own data, start from train in this file."
    )


if __name__ == "__main__":
    main()
