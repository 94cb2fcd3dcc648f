# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network learns digits from 200 labels, of which one in five is wrong, with and without a posterior.

Run it as ``python tutorials/quickstart.py``; ``--help`` lists the options.
"""

# The plain network is shown at three weight decays. Nothing is chosen for the posterior: its prior is the default, and
# fit finds its widths, with a tenth of the images. The plain network trains on all of them to the end.
# Its learning rate is the best of two with seeds 0 to 2, which are not the default.

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from image_sets import load
from plots import COLORS, MARKERS, new_figure, plot_images, plot_referral
from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import referral_curve
from pyro_radial.uncertainty.referral import ReferralCurve

NUM_TRAIN, SHARE_WRONG, BATCH_SIZE, EPOCHS, NUM_DRAWS = 200, 0.2, 32, 120, 32
#: The plain network's weight decay, as standard deviations of a normal prior.
PRIOR_STDDEVS = (1.0, 0.6, 0.4)
SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
#: The share of the images that a person checks in the summary.
CHECKED = 0.2
SHOWN = 8
PLAIN, RADIAL = "plain network", "AutoRadial"
WRONG = "#D55E00"


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


def train_plain(prior_stddev: float, task: Task, epochs: int, seed: int) -> Tensor:
    """Train the network with the weight decay of a prior, and return the probabilities of later labels."""
    torch.manual_seed(seed)  # All start from the same weights.
    net = make_net()
    decay = 1 / (NUM_TRAIN * prior_stddev**2)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=decay)
    for _ in range(epochs):
        for rows in torch.randperm(NUM_TRAIN).split(BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(net(task.images[rows]), task.labels[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return net(task.later).softmax(-1)


def train_radial(task: Task, epochs: int, seed: int) -> Tensor:
    """Train a posterior over the network by default settings, and return the probabilities of later labels."""
    torch.manual_seed(seed)
    model = SupervisedModel(BayesianModule(make_net()), likelihoods.Categorical())
    guide = AutoRadial(model, widths="predictive")
    fit(model, guide, (task.images, task.labels), epochs=epochs, batch_size=BATCH_SIZE, seed=seed)
    return predict(model, guide, task.later, NUM_DRAWS).mean


def misread(probabilities: Tensor, digits: Tensor) -> float:
    """The share of images whose digit is misread, in percent."""
    return 100.0 * float((probabilities.argmax(-1) != digits).float().mean())


def nll(probabilities: Tensor, task: Task) -> Tensor:
    """The negative log-likelihood of each later label, in nats."""
    return -probabilities.gather(-1, task.later_labels[:, None]).squeeze(-1).log()


def entropy(probabilities: Tensor) -> Tensor:
    """The entropy of each prediction, in nats."""
    return torch.special.entr(probabilities).sum(-1)


def format_table(by_method: dict[str, Tensor], task: Task) -> str:
    """One row for each method."""
    lines = [f"{'':40}{'NLL of labels':>14}{'digits misread, %':>19}"]
    for method, probabilities in by_method.items():
        score = nll(probabilities, task).mean()
        lines.append(f"{method:40}{score:14.2f}{misread(probabilities, task.digits):19.1f}")
    return "\n".join(lines)


def compare(plain: Tensor, radial: Tensor, task: Task) -> str:
    """The NLL of a plain network minus that of the posterior, with its error."""
    gain = nll(plain, task) - nll(radial, task)
    mean, error = float(gain.mean()), float(gain.std()) / len(gain) ** 0.5
    verdict = "more than chance explains" if abs(mean) > 2 * error else "which may be chance"
    return f"{abs(mean):.2f} ± {error:.2f} {'lower' if mean > 0 else 'higher'}, {verdict}"


def interpret(plain: dict[float, Tensor], radial: Tensor, curves: dict[str, ReferralCurve], task: Task) -> str:
    """Say what the posterior is for."""
    tuned = min(plain, key=lambda stddev: float(nll(plain[stddev], task).mean()))
    left = {name: float(curve.score[SHARES.index(CHECKED)]) for name, curve in curves.items()}
    return (
        "A plain network learns wrong labels by heart unless its weight decay fits; "
        "a posterior averages over networks.\n"
        f"Against the plain network at the least decay its NLL is {compare(plain[PRIOR_STDDEVS[0]], radial, task)}.\n"
        f"Against the best decay, N(0, {tuned}²), picked on these very labels, it is "
        f"{compare(plain[tuned], radial, task)}.\n"
        f"If a person checks the {100 * CHECKED:.0f} % that are least sure, the plain network misreads "
        f"{left[PLAIN]:.1f} % of the others and AutoRadial {left[RADIAL]:.1f} %."
    )


def draw_scores(plain: dict[float, Tensor], radial: Tensor, task: Task) -> Figure:
    """The NLL of the plain network by its weight decay, with standard errors, and that of the posterior as a line."""
    figure = new_figure(5.0, 3.6)
    ax = figure.add_subplot()
    losses = [nll(probabilities, task) for probabilities in plain.values()]
    means = [float(loss.mean()) for loss in losses]
    errors = [float(loss.std()) / len(loss) ** 0.5 for loss in losses]
    ax.errorbar(list(plain), means, errors, color=COLORS[0], marker=MARKERS[0], capsize=3, label=PLAIN)
    ax.axhline(float(nll(radial, task).mean()), color=COLORS[1], label=f"{RADIAL}, nothing chosen")
    ax.set(xscale="log", xlabel="Weight decay, as the width of a prior", ylabel="NLL of later labels, nats")
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


def draw_images(probabilities: Tensor, task: Task) -> Figure:
    """The images that the posterior is most and least sure of."""
    order = entropy(probabilities).argsort()
    rows = torch.cat([order[:SHOWN], order[-SHOWN:].flip(0)])
    guesses = probabilities.argmax(-1)[rows]
    digits = task.digits[rows]
    titles = [f"reads {guess}, is {digit}" for guess, digit in zip(guesses.tolist(), digits.tolist(), strict=True)]
    axes = plot_images(task.later[rows], titles, num_columns=SHOWN, row_labels=["most sure", "least sure"])
    for ax, is_right in zip(axes, (guesses == digits).tolist(), strict=True):
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
    plain = {}
    for stddev in PRIOR_STDDEVS:
        print(f"{PLAIN}, decay of N(0, {stddev}²)", flush=True)
        plain[stddev] = train_plain(stddev, task, args.epochs, args.seed)
    print(f"{RADIAL}, nothing chosen", flush=True)
    radial = train_radial(task, args.epochs, args.seed)
    by_method = {f"{PLAIN}, decay of N(0, {stddev}²)": plain[stddev] for stddev in plain}
    by_method[f"{RADIAL}, nothing chosen"] = radial
    curves = {
        name: referral_curve(misread, probabilities, task.digits, entropy(probabilities), SHARES)
        for name, probabilities in ((PLAIN, plain[PRIOR_STDDEVS[0]]), (RADIAL, radial))
    }
    print(f"\n{format_table(by_method, task)}\n\n{interpret(plain, radial, curves, task)}\n")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    figures = {
        "by_prior": draw_scores(plain, radial, task),
        "misread": draw_errors(curves),
        "images": draw_images(radial, task),
    }
    for name, figure in figures.items():
        path = args.output_dir / f"{name}.png"
        figure.savefig(path)
        print(path)
    print(
        "\nNext: tutorials/first_steps.ipynb does the same by hand in Pyro, and says what the numbers mean."
        "\nFor your own data, start from train_radial in this file."
    )


if __name__ == "__main__":
    main()
