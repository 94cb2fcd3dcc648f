# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare predictions of one pass and of fewer draws with those of many, and time them.

python -m benchmarks.uncertainty.one_pass --data-dir DIR
"""

import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Pair,
    Results,
    Row,
    compute_all,
    main,
    markdown_table,
    medians,
    perceptron,
    uci_split,
    with_error,
)
from benchmarks.uncertainty._adult import encoded_adult
from benchmarks.uncertainty._comparison import images_of
from benchmarks.uncertainty._lenet import lenet
from benchmarks.uncertainty._residual_net import residual_net
from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.infer import Prediction, SampledNetwork
from pyro_radial.nn import likelihoods

LENET, RESIDUAL, ADULT = "LeNet, Fashion-MNIST", "residual network, Fashion-MNIST", "108-100-100-2, adult"
MEAN_WEIGHTS, DRAWS, ONE_PASS = WAYS = "mean weights", "64 draws", "one pass"
#: A width for each weight, before any training: only the time of its pass is of interest.
BY_WEIGHT = "one pass, a width for each weight"


#: Draws from the guide's own runs, and those of ``predict``.
INDEPENDENT, EVEN = KINDS = "independent", "even"
MANY = 256


class Size(NamedTuple):
    """Epochs by network, training and test rows at most, timed rows, rounds of timing and seeds.

    ``draws`` are the numbers of draws whose errors are measured, at so many ``rows``, beside the mean of so many
    ``references``.
    """

    epochs: dict[str, int]
    train: int | None = None
    test: int | None = None
    timed: int = 4_000
    rounds: int = 3
    seeds: int = 1
    draws: tuple[int, ...] = (4, 8, 16, 32, 64)
    rows: int = 1_000
    references: int = 6
    few_rows: tuple[int, ...] = (1, 100, 1_000)


SIZES = {
    "default": Size({LENET: 6, RESIDUAL: 3, "concrete": 100, ADULT: 4}),
    "small": Size({LENET: 1, RESIDUAL: 1, "yacht": 1}, 200, 20, 20, 1, 1, (4,), 20, 1, (1,)),
}


def run(output: Path, *, data_dir: Path, form: Form = "default", workers: int = 1, threads: int = 1) -> None:
    """Train each network once by ``fit``, with one width for each tensor, and predict its test rows in three ways.

    Times are CPU times of predictions of 4,000 rows, in turns, and count passes of the plain network over them. The
    same posterior predicts with fewer draws, independent ones and the even ones of ``predict``, and with many.
    """
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    jobs: list[Job] = []
    for seed in range(FIRST_SEED, FIRST_SEED + size.seeds):
        for network in size.epochs:
            jobs.append(Job({"network": network, "seed": seed}, compare, (data_dir, network, seed, size)))
    compute_all(results, jobs, workers, threads)


def compare(data_dir: Path, network: str, seed: int, size: Size) -> Row:
    """Train a network, and return the NLL and the time of each prediction."""
    (x, y), (test_x, test_y) = (
        (inputs[:number], targets[:number])
        for (inputs, targets), number in zip(load(data_dir, network, seed), (size.train, size.test), strict=True)
    )
    torch.manual_seed(seed)
    model = make(network, x)
    guide = AutoRadial(model, widths="predictive")
    start = time.process_time()
    fit(model, guide, (x, y), epochs=size.epochs[network], seed=seed, progress=False)
    seconds = time.process_time() - start
    torch.manual_seed(seed)
    draws = predict(model, guide, test_x, 64)
    net = model.bnn.to_module(guide.median()).eval()
    with torch.no_grad():
        plain = Prediction(net(test_x).unsqueeze(0), model.likelihood, first_noise(draws))
    predictions = {MEAN_WEIGHTS: plain, DRAWS: draws, ONE_PASS: predict(model, guide, test_x, method="propagate")}
    row: Row = {f"nll, {way}": -float(prediction.log_prob(test_y).mean()) for way, prediction in predictions.items()}
    row |= prediction_times(network, net, model, guide, repeated(test_x, size.timed), size.rounds)
    row |= times_of_few_rows(net, model, guide, test_x, size)
    row |= errors_of_draws(model, guide, (test_x[: size.rows], test_y[: size.rows]), size)
    return row | {"seconds": seconds}


def times_of_few_rows(net: nn.Module, model: Any, guide: Any, x: Tensor, size: Size) -> Row:
    """Return the time of 64 draws at some rows, by ``predict`` and by draws that are kept, in 64 plain passes."""
    served = SampledNetwork(model, guide, 64)
    times: Row = {}
    for number in size.few_rows:
        rows = repeated(x, number)
        steps = {
            "plain": torch.no_grad()(partial(net, rows)),
            "predict": partial(predict, model, guide, rows, 64),
            "served": partial(served.predict, rows),
        }
        milliseconds = medians(steps, size.rounds, block=1)
        for way in ("predict", "served"):
            times[f"{way}, {number} rows"] = milliseconds[way] / milliseconds["plain"] / 64
    return times


def errors_of_draws(model: Any, guide: Any, data: Pair, size: Size) -> Row:
    """Return errors of the NLL and of the uncertainty by kind and number of draws, beside many independent draws."""
    many = [scores_of_draws(model, guide, data, INDEPENDENT, MANY) for _ in range(size.references)]
    nll, uncertainty = (mean(values) for values in zip(*many, strict=True))
    errors: Row = {}
    for kind in KINDS:
        for number in size.draws:
            scores = [scores_of_draws(model, guide, data, kind, number) for _ in range(max(4, 256 // number))]
            errors[f"excess, {kind}, {number}"] = mean(own for own, _ in scores) - nll
            errors[f"error, {kind}, {number}"] = mean((own - nll) ** 2 for own, _ in scores) ** 0.5
            relative = [own / uncertainty - 1.0 for _, own in scores]
            errors[f"uncertainty, {kind}, {number}"] = mean(own**2 for own in relative) ** 0.5
    return errors


def scores_of_draws(model: Any, guide: Any, data: Pair, kind: str, number: int) -> tuple[float, float]:
    """Return the NLL, and the mean mutual information of classes or the root of the mean epistemic variance."""
    x, y = data
    if kind == EVEN:
        prediction = predict(model, guide, x, num_samples=number)
    else:
        runs = [guide(x) for _ in range(number)]
        samples = {name: torch.stack([run[name].detach() for run in runs]) for name in runs[0]}
        prediction = predict(model, samples, x)
    has_classes = isinstance(model.likelihood, likelihoods.Categorical)
    uncertainty = prediction.mutual_information if has_classes else prediction.epistemic_variance
    size = float(uncertainty.mean())
    return -float(prediction.log_prob(y).mean()), size if has_classes else size**0.5


def repeated(x: Tensor, rows: int) -> Tensor:
    """Return so many rows of inputs, again from the first one after the last."""
    return x[torch.arange(rows) % len(x)]


def first_noise(draws: Prediction) -> dict[str, Tensor]:
    return {argument: values[:1] for argument, values in draws.noise.items()}


def prediction_times(network: str, net: nn.Module, model: Any, guide: Any, x: Tensor, rounds: int) -> Row:
    """Return the CPU time of each prediction, in passes of the plain network."""
    other_model = make(network, x)
    by_weight = AutoRadial(other_model)
    by_weight.setup(x, torch.zeros(len(x), 1) if isinstance(model.likelihood, likelihoods.Gaussian) else None)
    steps = {
        MEAN_WEIGHTS: torch.no_grad()(partial(net, x)),
        DRAWS: partial(predict, model, guide, x, 64),
        ONE_PASS: partial(predict, model, guide, x, method="propagate"),
        BY_WEIGHT: partial(predict, other_model, by_weight, x, method="propagate"),
    }
    milliseconds = medians(steps, rounds, block=1)
    times = {f"passes, {way}": milliseconds[way] / milliseconds[MEAN_WEIGHTS] for way in (DRAWS, ONE_PASS, BY_WEIGHT)}
    return {"plain_milliseconds": milliseconds[MEAN_WEIGHTS], **times}


def make(network: str, x: Tensor) -> SupervisedModel:
    """Return the model of a network."""
    nets = {
        LENET: partial(lenet, 0.0),
        RESIDUAL: partial(residual_net, 8, (1, 1, 1), 0.0),
        ADULT: partial(perceptron, (x.shape[1], 100, 100, 2)),
    }
    if network in nets:
        return SupervisedModel(BayesianModule(nets[network]()), likelihoods.Categorical())
    net = perceptron((x.shape[1], 50, 50, 1))
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(scale=0.5, learn_scale=True))


def load(data_dir: Path, network: str, seed: int) -> tuple[Pair, Pair]:
    """Return training and test rows; those of a regression are a standard split, all of them standardized."""
    if network in (LENET, RESIDUAL):
        return images_of(data_dir).train, images_of(data_dir).test()
    if network == ADULT:
        return encoded_adult(data_dir)
    rows = uci_split(data_dir, network, seed)
    return rows["train"], rows["test"]


def claims(results: Results) -> list[Claim]:
    """Few draws and one pass are as good as many draws, and take little time."""
    lost = [row[f"nll, {ONE_PASS}"] - row[f"nll, {DRAWS}"] for row in results.where(network=LENET)]
    slowest = max(results.rows, key=lambda row: row[f"passes, {ONE_PASS}"])
    few = 8 if 8 in results.setting["draws"] else min(results.setting["draws"])
    excess = results.values(f"excess, {EVEN}, {few}", network=LENET)
    by_rows = {
        number: results.values(f"predict, {number} rows", network=LENET) for number in results.setting["few_rows"]
    }
    first, last = min(by_rows), max(by_rows)
    served = results.values(f"served, {first} rows", network=LENET)
    return [
        Claim(
            f"LeNet, Fashion-MNIST: the mean NLL of {few} even draws is at most 0.001 from that of {MANY}",
            "",
            f"{mean(excess):+.4f}",
            str(len(excess)),
            abs(mean(excess)) <= 0.001,
        ),
        Claim(
            "LeNet, Fashion-MNIST: the NLL of one pass by means and variances is at most 0.005 above that of 64 draws",
            "",
            with_error(lost, 4),
            str(len(lost)),
            mean(lost) <= 0.005,
        ),
        Claim(
            "A prediction in one pass takes at most three plain passes, slowest of four networks",
            "2.3",
            f"{slowest[f'passes, {ONE_PASS}']:.1f} ({slowest['network']})",
            "1",
            slowest[f"passes, {ONE_PASS}"] <= 3.0,
        ),
        Claim(
            f"LeNet: 64 draws at one image take at most 0.3 times 64 plain passes, and at {last:,} rows 0.8 times",
            "",
            f"{mean(by_rows[first]):.2f} ({mean(served):.2f} with draws that are kept); {mean(by_rows[last]):.2f}",
            "1",
            mean(by_rows[first]) <= 0.3 and mean(by_rows[last]) <= 0.8,
        ),
    ]


def report(results: Results) -> str:
    """Report the NLL of the three predictions of each network, the errors of fewer draws, and times."""
    lines = []
    for network in results.distinct("network"):
        rows = results.where(network=network)
        cells = [with_error([row[f"nll, {way}"] for row in rows], 4) for way in WAYS]
        cells += [with_error([row[f"passes, {way}"] for row in rows], 1) for way in (DRAWS, ONE_PASS, BY_WEIGHT)]
        lines.append([network, *cells, f"{mean(row['plain_milliseconds'] for row in rows):.1f}"])
    headings = ["", *(f"NLL, {way}" for way in WAYS), *(f"passes, {way}" for way in (DRAWS, ONE_PASS, BY_WEIGHT))]
    epochs = ", ".join(f"{network} {number}" for network, number in results.setting["epochs"].items())
    seeds = "one seed" if results.setting["seeds"] == 1 else f"{results.setting['seeds']} seeds"
    return f"""### Predictions in one pass and by few draws

`predict(model, guide, x, method="propagate")` beside 64 draws and the network of mean weights, for radial posteriors \
with one width for each tensor, trained by `fit` with nothing chosen, {seeds} \
(`python -m benchmarks.uncertainty.one_pass --data-dir DIR`). Training is short; epochs: {epochs}. Times are CPU \
times for {results.setting["timed"]:,} rows, in passes of the plain network over them, which take the \
milliseconds of the last column; a posterior with a width for each weight needs a product more in each layer. The \
target of concrete is standardized.

{markdown_table([*headings, "a plain pass, ms"], lines)}

The draws of `predict` come in pairs, with radii from each of equally likely intervals ("even"). Beside them are draws \
from runs of the guide ("independent"). Errors are root mean squares over repeated predictions of \
{results.setting["rows"]:,} rows, beside the mean of {results.setting["references"]} predictions by {MANY} \
independent draws; "excess" is the mean difference. The error of the uncertainty is relative, of the mean mutual \
information, and for concrete of the root of the mean epistemic variance.

{table_of_draws(results)}

64 draws at few rows, in times of 64 plain passes over them: of `predict`, which makes the draws, and of a \
`SampledNetwork`, which keeps them.

{table_of_few_rows(results)}"""


def table_of_draws(results: Results) -> str:
    """Make a table of the errors by network and number of draws."""
    names = {"excess": "NLL, excess", "error": "NLL, error", "uncertainty": "uncertainty, error"}
    lines = []
    for network in results.distinct("network"):
        for number in results.setting["draws"]:
            cells = []
            for name in names:
                for kind in KINDS:
                    value = mean(results.values(f"{name}, {kind}, {number}", network=network))
                    cells.append(f"{value:.2f}" if name == "uncertainty" else f"{value:.4f}")
            lines.append([network, str(number), *cells])
    return markdown_table(["", "draws", *(f"{name}, {kind}" for name in names.values() for kind in KINDS)], lines)


def table_of_few_rows(results: Results) -> str:
    """Make a table of the times of 64 draws by network and number of rows."""
    numbers = results.setting["few_rows"]
    lines = []
    for network in results.distinct("network"):
        cells = [
            f"{mean(results.values(f'{way}, {number} rows', network=network)):.2f}"
            for way in ("predict", "served")
            for number in numbers
        ]
        lines.append([network, *cells])
    headings = [
        f"{way}, {number:,} {'row' if number == 1 else 'rows'}" for way in ("predict", "served") for number in numbers
    ]
    return markdown_table(["", *headings], lines)


if __name__ == "__main__":
    main(run, report)
