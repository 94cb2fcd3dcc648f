# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where a guide's scales should start: the measurement behind the defaults of AutoRadial and AutoMeanField.

Each guide trains from each initial marginal standard deviation with three seeds and nothing else tuned, on MNIST (a
784-200-200-10 net, 5 epochs) and on two small regression sets (one hidden layer of 50, 200 epochs, learned noise). A
tenth of the *training* data is held out; the score is its negative log predictive density per datum.

    python benchmarks/init_scale.py --data-dir DIR     # DIR holds images/mnist.npz and uci/*.npz
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Row, Table, flat_images, uci_split
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods, priors

SEEDS = 3
STDDEVS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_guide(name: str, model: nn.Module, stddev: float) -> nn.Module:
    if name == "AutoRadial":
        return AutoRadial(model, init_stddev=stddev)
    return AutoMeanField(model, init_scale=stddev)


def mnist(data_dir: str) -> Split:
    (x, y), _ = flat_images("mnist", data_dir)
    return x[:54_000], y[:54_000], x[54_000:], y[54_000:]


def regression(data_dir: str, name: str) -> Split:
    """The training part of the first split, standardised; its last tenth is held out."""
    x, y = uci_split(data_dir, name, 0)["train"]
    cut = len(x) - len(x) // 10
    return x[:cut], y[:cut], x[cut:], y[cut:]


def make_model(data: str, split: Split) -> SupervisedModel:
    x = split[0]
    if data == "mnist":
        layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
        return SupervisedModel(BayesianModule(nn.Sequential(*layers)), likelihoods.Categorical(len(x)))
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    return SupervisedModel(
        BayesianModule(net, priors.FanIn()), likelihoods.Gaussian(len(x), scale=0.5, learn_scale=True)
    )


def score(data: str, split: Split, guide_name: str, stddev: float, seed: int) -> Row:
    torch.manual_seed(seed)
    model = make_model(data, split)
    guide = make_guide(guide_name, model, stddev)
    settings: dict[str, Any] = (
        {"epochs": 5, "batch_size": 128} if data == "mnist" else {"epochs": 200, "batch_size": 32}
    )
    fit(model, guide, split[:2], seed=seed, progress=False, **settings)
    torch.manual_seed(seed)
    density = predict(model, guide, split[2], num_samples=32).log_prob(split[3])
    return {"validation_nll": -float(density.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "init_scale.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = Table(args.output, {"torch": torch.__version__, "threads": args.threads, "stddevs": list(STDDEVS)})
    splits = {
        "mnist": mnist(args.data_dir),
        "boston": regression(args.data_dir, "bostonHousing"),
        "yacht": regression(args.data_dir, "yacht"),
    }
    for data, split in splits.items():
        for guide in ("AutoRadial", "AutoMeanField"):
            for stddev in STDDEVS:
                for seed in range(SEEDS):
                    keys = {"data": data, "guide": guide, "init_stddev": stddev, "seed": seed}
                    table.add(keys, lambda k=(data, split, guide, stddev, seed): score(*k))
    for guide in ("AutoRadial", "AutoMeanField"):
        print(guide)
        for stddev in STDDEVS:
            rows = [r for r in table.rows if r["guide"] == guide and r["init_stddev"] == stddev]
            by_data = {d: [r["validation_nll"] for r in rows if r["data"] == d] for d in splits}
            print(f"  {stddev:7g}", *(f"{d} {sum(v) / len(v):8.4f}" for d, v in by_data.items()))


if __name__ == "__main__":
    main()
