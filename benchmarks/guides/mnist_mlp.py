# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a 784-200-200-10 network on MNIST with a radial posterior, with mean field and without a posterior.

python -m benchmarks.guides.mnist_mlp
"""

import itertools
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.common import Claim, Form, Pair, Results, Row, flat_images, main, markdown_table, with_error
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import accuracy, expected_calibration_error, negative_log_likelihood

__all__ = ["claims", "draw", "report", "run"]

GUIDES = {
    "AutoRadial": AutoRadial,
    "AutoMeanField": AutoMeanField,
    # The start that an earlier, shorter measurement had picked; see init_scale.
    "AutoRadial from 0.003": partial(AutoRadial, init_stddev=0.003),
}
PLAIN = "no posterior"
SCORES = {
    "accuracy": "test accuracy",
    "nll": "negative log-likelihood",
    "calibration_error": "calibration error",
}


class Size(NamedTuple):
    """How much is trained and tested."""

    epochs: int = 5
    num_samples: int = 64
    rows: int | None = None
    batch_size: int = 128


SIZES = {"default": Size(), "small": Size(1, 4, 200)}


def run(
    output: Path, *, form: Form = "default", data_dir: Path | None = None, seeds: int = 3, threads: int = 1
) -> None:
    """Train all methods with the same steps of Adam (1e-3) on the same batches; predictions average 64 draws."""
    torch.set_num_threads(threads)
    size = SIZES[form]
    train, test = ((x[: size.rows], y[: size.rows]) for x, y in flat_images("mnist", data_dir))
    results = Results(output, {"torch": torch.__version__, "threads": threads, "num_samples": size.num_samples})
    for seed, method in itertools.product(range(seeds if form == "default" else 1), [*GUIDES, PLAIN]):
        results.add({"method": method, "seed": seed}, partial(score, train, test, method, seed, size))


def score(train: Pair, test: Pair, method: str, seed: int, size: Size) -> Row:
    torch.manual_seed(seed)
    predicted = posterior_mean if method in GUIDES else point_estimate
    probabilities = predicted(train, test[0], method, seed, size)
    return {
        "accuracy": float(accuracy(probabilities, test[1])),
        "nll": float(negative_log_likelihood(probabilities, test[1])),
        "calibration_error": float(expected_calibration_error(probabilities, test[1])),
    }


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def point_estimate(train: Pair, x_test: Tensor, method: str, seed: int, size: Size) -> Tensor:
    """Test probabilities of the plain network, on the batches that ``fit`` takes with this seed."""
    x, y = train
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(size.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed + epoch))
        for index in order.split(size.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            optimizer.step()
    with torch.no_grad():
        return net(x_test).softmax(-1)


def posterior_mean(train: Pair, x_test: Tensor, method: str, seed: int, size: Size) -> Tensor:
    """Test probabilities averaged over draws of the guide."""
    model = SupervisedModel(BayesianModule(make_net()), likelihoods.Categorical(num_data=len(train[0])))
    guide = GUIDES[method](model)
    fit(model, guide, train, epochs=size.epochs, batch_size=size.batch_size, seed=seed, progress=False)
    return predict(model, guide, x_test, num_samples=size.num_samples).mean


def claims(results: Results) -> list[Claim]:
    """Compare a radial posterior with no posterior."""
    seeds = str(len(results.distinct("seed")))
    found = []
    for name, noun in (("nll", "negative log-likelihood"), ("calibration_error", "calibration error")):
        ours, plain = (results.values(name, method=method) for method in ("AutoRadial", PLAIN))
        text = f"MNIST: a radial posterior has a lower {noun} than no posterior"
        numbers = f"{with_error(ours, 4)} against {with_error(plain, 4)}"
        found.append(Claim(text, "", numbers, seeds, sum(ours) < sum(plain)))
    return found


def report(results: Results) -> str:
    """Report scores by method."""
    lines = [
        [method, *(with_error(results.values(name, method=method), 4) for name in SCORES)]
        for method in results.distinct("method")
    ]
    return f"""### MNIST

MNIST, 784-200-200-10, 5 epochs of Adam at 1e-3, library defaults; mean and standard error of \
{len(results.distinct("seed"))} seeds, {results.setting["num_samples"]} draws (`python -m benchmarks.guides.mnist_mlp`).

This is not a blind test of the default start. A first measurement on validation data (MNIST for 2 epochs with one \
seed) had picked 0.003, and this table showed that it is no better than having no posterior. After that we ran the \
longer measurement of [initial scales](#guides.init_scale).

{markdown_table(["", *SCORES.values()], lines)}

{results.plot("Scores by method and seed")}"""


def draw(results: Results) -> None:
    """The scores of every seed."""
    figure = Figure(figsize=(10, 2.4), layout="constrained", dpi=110)
    methods = results.distinct("method")
    for (name, title), ax in zip(SCORES.items(), figure.subplots(1, len(SCORES), sharey=True), strict=True):
        for place, method in enumerate(methods):
            values = results.values(name, method=method)
            ax.plot(values, [place] * len(values), "o", color="#0072B2", alpha=0.6)
        ax.set(title=title, yticks=range(len(methods)), yticklabels=methods)
        ax.spines[["top", "right"]].set_visible(False)
        ax.locator_params(axis="x", nbins=4)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
