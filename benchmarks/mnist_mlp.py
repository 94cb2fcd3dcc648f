# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""MNIST with a 784-200-200-10 net, 5 epochs: radial, mean field, and the same net without a posterior.

All take the same steps of the same Adam (1e-3) on the same batches of 128; predictions average 64 draws.

    python benchmarks/mnist_mlp.py --data-dir DIR     # DIR holds mnist.npz or images/mnist.npz
"""

import argparse
import itertools
from functools import partial
from pathlib import Path

import torch
from common import RESULTS, Pair, Row, Table, flat_images, mean_and_error
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import accuracy, expected_calibration_error, negative_log_likelihood

EPOCHS, BATCH_SIZE, NUM_SAMPLES = 5, 128, 64
GUIDES = {
    "AutoRadial": AutoRadial,
    "AutoMeanField": AutoMeanField,
    # The start that an earlier, shorter measurement had picked; see benchmarks/init_scale.py.
    "AutoRadial from 0.003": partial(AutoRadial, init_stddev=0.003),
}


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def point_estimate(data: tuple[Pair, Pair], seed: int) -> torch.Tensor:
    """Test probabilities of the plain network, on the batches that ``fit`` takes with this seed."""
    (x, y), (x_test, _) = data
    net = make_net()
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed + epoch))
        for index in order.split(BATCH_SIZE):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            optimiser.step()
    with torch.no_grad():
        return net(x_test).softmax(-1)


def posterior_mean(data: tuple[Pair, Pair], guide_name: str, seed: int) -> torch.Tensor:
    """Test probabilities averaged over draws of the guide."""
    (x, y), (x_test, _) = data
    model = SupervisedModel(BayesianModule(make_net()), likelihoods.Categorical(len(x)))
    guide = GUIDES[guide_name](model)
    fit(model, guide, (x, y), epochs=EPOCHS, batch_size=BATCH_SIZE, seed=seed)
    return predict(model, guide, x_test, num_samples=NUM_SAMPLES).mean


def score(data: tuple[Pair, Pair], method: str, seed: int) -> Row:
    torch.manual_seed(seed)
    probabilities = posterior_mean(data, method, seed) if method in GUIDES else point_estimate(data, seed)
    labels = data[1][1]
    return {
        "accuracy": float(accuracy(probabilities, labels)),
        "nll": float(negative_log_likelihood(probabilities, labels)),
        "calibration_error": float(expected_calibration_error(probabilities, labels)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "mnist_mlp.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = flat_images("mnist", args.data_dir)
    table = Table(args.output, {"torch": torch.__version__, "threads": args.threads, "num_samples": NUM_SAMPLES})
    methods = [*GUIDES, "no posterior"]
    for seed, method in itertools.product(range(args.seeds), methods):
        table.add({"method": method, "seed": seed}, lambda m=method, s=seed: score(data, m, s))
    for method in methods:
        rows = [row for row in table.rows if row["method"] == method]
        scores = (
            f"{name} {mean_and_error([r[name] for r in rows])}" for name in ("accuracy", "nll", "calibration_error")
        )
        print(f"{method:22s}", *scores, sep="  ")


if __name__ == "__main__":
    main()
