# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare widths that follow predictions with those of the ELBO and with a plain network, from few rows to many.

python -m benchmarks.guides.widths
"""

import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Results,
    Row,
    compute_all,
    flat_images,
    main,
    markdown_table,
    paired,
    perceptron,
    with_error,
)
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.infer import FitOptions
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods

PREDICTIVE, PREDICTIVE_NORMAL = "radial, predictive widths", "mean field, predictive widths"
ELBO, PLAIN = "radial, ELBO widths", "plain network"
METHODS = (PREDICTIVE, PREDICTIVE_NORMAL, ELBO, PLAIN)


class Size(NamedTuple):
    """Training rows, test rows, hidden layers, steps and seeds."""

    rows: tuple[int, ...] = (500, 4_000)
    test: int = 10_000
    hidden: tuple[int, ...] = (100, 100)
    steps: int = 2_000
    seeds: int = 1


SIZES = {"default": Size(), "small": Size((200, 300), 40, (8,), 20, 2)}


def run(
    output: Path, *, form: Form = "default", data_dir: Path | None = None, workers: int = 2, threads: int = 1
) -> None:
    """Train a 784-100-100-10 network on parts of Fashion-MNIST, for 2,000 steps in batches of 128.

    No width and no prior is chosen: the prior is N(0, 1). The plain network is the posterior mode under the same prior,
    trained by the same optimizer as means with predictive widths. It holds a tenth of its rows out too, and keeps its
    epoch with the lowest NLL there.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    jobs: list[Job] = []
    for seed in range(FIRST_SEED, FIRST_SEED + size.seeds):
        for rows in size.rows:
            for method in METHODS:
                jobs.append(
                    Job({"method": method, "rows": rows, "seed": seed}, one, (method, rows, seed, size, data_dir))
                )
    compute_all(results, jobs, workers, threads)


def one(method: str, rows: int, seed: int, size: Size, data_dir: Path | None) -> Row:
    """Train one network on rows that the seed chooses, and score its predictions."""
    (x, y), (test_x, test_y) = flat_images("fashion_mnist", data_dir)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:rows]
    data = x[chosen], y[chosen]
    torch.manual_seed(seed)
    net = perceptron((x.shape[1], *size.hidden, 10))
    model = SupervisedModel(BayesianModule(net, dist.Normal(0.0, 1.0)), likelihoods.Categorical())
    guides: dict[str, Any] = {
        PREDICTIVE: lambda: AutoRadial(model, widths="predictive"),
        PREDICTIVE_NORMAL: lambda: AutoMeanField(model, widths="predictive"),
        ELBO: lambda: AutoRadial(model),
        PLAIN: lambda: AutoMeanField(model, families={"": families.Delta()}),
    }
    guide = guides[method]()
    epochs = max(1, round(size.steps / max(1, rows / 128)))
    start = time.process_time()
    if method == PLAIN:
        train_plain(model, guide, data, epochs, seed)
    else:
        options: Any = {"optim": partial(torch.optim.Adam, lr=0.03), "scheduler": "cosine"} if method == ELBO else {}
        fit(model, guide, data, epochs=epochs, seed=seed, progress=False, **options)
    seconds = time.process_time() - start
    torch.manual_seed(seed)
    draws = predict(model, guide, test_x[: size.test], num_samples=1 if method == PLAIN else 64)
    labels = test_y[: size.test]
    return {
        "nll": -float(draws.log_prob(labels).mean()),
        "accuracy": float((draws.mean.argmax(-1) == labels).double().mean()),
        "seconds": seconds,
    }


def train_plain(model: Any, guide: Any, data: tuple[Tensor, Tensor], epochs: int, seed: int) -> None:
    """Train on nine tenths of the rows, and return to the epoch that predicts the others best."""
    number = len(data[0]) // 10
    held_out = tuple(values[:number] for values in data)
    training = tuple(values[number:] for values in data)
    fit(
        model,
        guide,
        training,
        validation=held_out,
        epochs=epochs,
        optim=partial(torch.optim.SGD, lr=0.1 / len(training[0]), momentum=0.9),
        scheduler="cosine",
        options=FitOptions(clip_norm=float(len(training[0]))),
        seed=seed,
        progress=False,
    )


def values_of(results: Results, method: str, rows: int, name: str = "nll") -> list[float]:
    """Return a score of all seeds."""
    return results.values(name, method=method, rows=rows)


def claims(results: Results) -> list[Claim]:
    """Predictive widths are not far behind the better of the others anywhere."""
    worst = None
    for rows in results.setting["rows"]:
        best = min((ELBO, PLAIN), key=lambda method: mean(values_of(results, method, rows)))
        difference = paired(values_of(results, PREDICTIVE, rows), values_of(results, best, rows))
        if worst is None or mean(difference) > mean(worst[0]):
            worst = difference, rows, best
    assert worst is not None
    difference, rows, best = worst
    return [
        Claim(
            f"784-100-100-10, worst of {len(results.setting['rows'])} sizes: predictive widths are at most 0.005 nats "
            "behind the better of ELBO widths and the plain network",
            "",
            f"{with_error(difference, 3)} ({rows:,} rows, {best})",
            str(len(difference)),
            mean(difference) <= 0.005,
        )
    ]


def report(results: Results) -> str:
    """Report the NLL, the accuracy and the seconds by method and rows."""
    sizes = results.setting["rows"]
    tables = []
    for name, digits in (("nll", 3), ("accuracy", 3), ("seconds", 0)):
        lines = []
        for method in METHODS:
            cells = [with_error(values_of(results, method, rows, name), digits) for rows in sizes]
            lines.append([method, *cells])
        tables.append(markdown_table([name, *(f"{rows:,} rows" for rows in sizes)], lines))
    number = results.setting["seeds"]
    seeds = "one seed" if number == 1 else f"{number} seeds"
    hidden = "-".join(str(units) for units in results.setting["hidden"])
    return f"""### Widths by predictions or by the ELBO

A 784-{hidden}-10 network on parts of Fashion-MNIST, {results.setting["steps"]:,} steps in batches of 128, prior \
N(0, 1), {seeds}, {results.setting["test"]:,} test images; nothing was chosen \
(`python -m benchmarks.guides.widths`). Predictive widths and the plain network hold a tenth of the rows out. ELBO \
widths train by Adam at 0.03, a rate that falls to zero.

{(chr(10) * 2).join(tables)}"""


if __name__ == "__main__":
    main(run, report)
