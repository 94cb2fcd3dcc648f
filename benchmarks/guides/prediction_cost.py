# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare the cost of predictions, by predict and by a SampledNetwork, with passes of a plain network.

python -m benchmarks.guides.prediction_cost
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from pyro.infer.autoguide import AutoNormal
from torch import nn

from benchmarks.common import Claim, Form, Results, Row, keep_pages, main, markdown_table, medians
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import SampledNetwork
from pyro_radial.nn import likelihoods

__all__ = ["claims", "draw", "report", "run"]

UNIT = "plain network"
GUIDES: dict[str, Any] = {"AutoRadial": AutoRadial, "AutoMeanField": AutoMeanField, "Pyro's AutoNormal": AutoNormal}
SERVED = "SampledNetwork"
#: The most that is asked for, by rows, of predict with AutoRadial.
MOST = {32: 8.0, 1000: 1.5}


class Size(NamedTuple):
    """The hidden layers, how many draws, at how many rows, and how often it is timed."""

    hidden: tuple[int, ...] = (200, 200, 200, 200)
    draws: int = 64
    rows: tuple[int, ...] = (32, 1000)
    chunks: tuple[int, ...] = (1, 4, 8, 16, 64)
    rounds: int = 15


SIZES = {"default": Size(), "small": Size((20,), 4, (8, 16), (1, 8), 2)}


def run(output: Path, *, form: Form = "default") -> None:
    """Time ways of predicting with one network; they take turns, and only the time of this thread counts."""
    torch.set_num_threads(1)
    keep_pages()
    size = SIZES[form]
    setting = {"threads": 1, "rounds": size.rounds, "draws": size.draws, "torch": torch.__version__}
    results = Results(output, setting)
    ways = [
        UNIT,
        *(f"predict, {guide}" for guide in GUIDES),
        *(f"{SERVED}, {number} at a time" for number in size.chunks),
    ]
    for rows in size.rows:
        results.add_all([{"rows": rows, "way": way} for way in ways], partial(measure, rows, size))


def measure(rows: int, size: Size) -> list[Row]:
    """Milliseconds of all draws at some rows, and as multiples of as many passes of the plain network."""
    pyro.set_rng_seed(0)
    sizes = [784, *size.hidden, 10]
    net = nn.Sequential(*[layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())][:-1]).eval()
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=60_000)).eval()
    x, y = torch.randn(rows, 784), torch.randint(10, (rows,))
    guides = {}
    for name, make in GUIDES.items():
        guides[name] = make(model)
        guides[name](x, y)
    subjects: dict[str, Callable[[], Any]] = {UNIT: lambda: [net(x) for _ in range(size.draws)]}
    for name, guide in guides.items():
        subjects[name] = partial(predict, model, guide, x, size.draws)
    for number in size.chunks:
        subjects[str(number)] = partial(SampledNetwork(model, guides["AutoRadial"], size.draws, number), x)
    with torch.no_grad():
        times = medians(subjects, size.rounds, block=1, warmup=2)
    return [{"ms": value, "ratio": value / times[UNIT]} for value in times.values()]


def claims(results: Results) -> list[Claim]:
    """Check predict with the radial guide, and compare it with a SampledNetwork, by number of rows."""
    found = []
    draws, default = results.setting["draws"], f"{SERVED}, 8 at a time"
    for rows in results.distinct("rows"):
        (row,) = results.where(rows=rows, way="predict, AutoRadial")
        (served,) = results.where(rows=rows, way=default)
        most = MOST.get(rows, max(MOST.values()))
        text = f"`predict`: {draws} draws at {rows:,} rows take at most {most:g} times as long as {draws} plain passes"
        found.append(Claim(text, "", f"{row['ratio']:.2f} times", "1", row["ratio"] <= most))
        text = f"A `SampledNetwork` of {draws} draws at {rows:,} rows takes less time than `predict`"
        numbers = f"{served['ratio']:.2f} times the plain passes against {row['ratio']:.2f}"
        found.append(Claim(text, "", numbers, "1", served["ratio"] < row["ratio"]))
    return found


def report(results: Results) -> str:
    """Report multiples of the passes of the plain network."""
    draws, rows = results.setting["draws"], results.distinct("rows")
    lines = []
    for way in results.distinct("way"):
        cells = [row for number in rows for row in results.where(rows=number, way=way)]
        lines.append([way, *(f"{row['ms']:.1f} ms, {row['ratio']:.2f}" for row in cells)])
    return f"""### Cost of predictions

The table gives the time of {draws} draws of functions, as a multiple of {draws} passes of the plain network, \
784-200-200-200-200-10, in evaluation mode and without gradients. Times are medians of {results.setting["rounds"]} \
interleaved rounds of processor time on one thread (`python -m benchmarks.guides.prediction_cost`). `predict` draws \
the weights each time, and runs Pyro's own guide once for every draw. A `SampledNetwork` draws them only once, and \
evaluates several draws at a time with `torch.vmap`.

{markdown_table(["", *(f"{number:,} rows" for number in rows)], lines)}

{results.plot("Time of predictions by rows")}"""


def draw(results: Results) -> None:
    """A bar for each way, by rows."""
    rows = results.distinct("rows")
    figure = Figure(figsize=(9, 2.8), layout="constrained", dpi=110)
    for number, ax in zip(rows, figure.subplots(1, len(rows), sharey=True), strict=True):
        ways = results.distinct("way")
        ax.barh(ways, results.values("ratio", rows=number), color="#0072B2")
        ax.set(title=f"{number:,} rows", xlabel="multiple of the plain network")
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
