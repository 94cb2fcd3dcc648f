# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Continual learning with the networks, epochs and rows of published results.

python -m benchmarks.continual.published_settings
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from benchmarks.common import Claim, Form, Job, Results, Row, main, markdown_table
from benchmarks.continual._cells import (
    FAST,
    METHODS,
    SCORES,
    compute_cells,
    described,
    keeping_of,
    percent,
    seconds,
    tested_rows,
)
from benchmarks.continual._chains import (
    LOCAL_NOISE,
    Holding,
    Tuned,
    fields,
    learn,
    permuted_mnist,
    row_keys,
    split_images,
)
from pyro_radial.continual import recipes

NOTHING = Holding()
SPLIT_MNIST = partial(split_images, "mnist")
SPLIT_FASHION_MNIST = partial(split_images, "fashion_mnist")


class Line(NamedTuple):
    """A cell with what is learned, and with what it is compared."""

    tasks: Callable[..., Any]
    #: Training images of a task.
    rows: int
    sizes: tuple[int, ...]
    batch_size: int
    #: Accuracies in percent by source, the best first.
    published: Mapping[str, float]
    pairs: Sequence[tuple[Tuned, Holding]]
    #: The radial normal form is like mean field wherever both were measured.
    methods: Sequence[str] = METHODS[:1]
    num_tasks: int = 5
    num_samples: int = 32
    #: Of the tasks, before the share that is held out.
    heads: tuple[str, ...] = ()
    #: The share of the rows that test runs do not learn.
    left_out: float = 0.0
    #: Of all data; None for all.
    taken: int | None = None
    #: Of products of matrices. "medium" has large networks multiply in bfloat16, where the processor can.
    precision: str = "highest"
    #: At most so many are tested, to save time.
    seeds: int = 5

    def stream(self, data_dir: Path | None, part: str) -> Callable[[], Any]:
        """The tasks, with a tenth held out to choose a setting."""
        held_out = 0.1 if part == "validation" else self.left_out
        return partial(self.tasks, data_dir, self.taken, self.num_tasks, *self.heads, held_out)

    def setting(self, setting: Tuned, part: str) -> Tuned:
        """The setting with the number of steps over which its rates fall."""
        rows = self.rows * (0.9 if part == "validation" else 1.0)
        batch = min(setting.batch_size, self.batch_size)
        return replace(setting, batch_size=batch, decay_over=setting.epochs * ceil(rows / batch))

    def small(self) -> "Line":
        """The same in seconds."""
        pairs = [
            (replace(setting, epochs=2, **FAST), replace(keeping, coreset=min(keeping.coreset, 20)))
            for setting, keeping in self.pairs[::3]
        ]
        fewer = {"pairs": pairs, "methods": METHODS[1:], "sizes": (784, 20), "num_tasks": 2, "num_samples": 2}
        return self._replace(**fewer, taken=300, rows=300, batch_size=64)


def functions(weight: float, size: int = 200, **holding: Any) -> Holding:
    return Holding("functions", size, weight, 200, **holding)


def tuned(epochs: int, **setting: Any) -> Tuned:
    """A setting with rates that fall to zero."""
    return Tuned(epochs, **{"batch_size": 512, "decay_over": 1, **setting})


def local(epochs: int, later_kl: float = 1.0, **setting: Any) -> Tuned:
    """The recipe with little noise."""
    return tuned(epochs, **{**LOCAL_NOISE, "later_kl": later_kl, **setting})


def natural(epochs: int, rate: float, curvature: float, decay: float) -> Tuned:
    return local(epochs, natural=True, learning_rate=rate, hess_init=curvature, beta2=decay, scale_rate=None)


#: From the inputs of the task in training: rows, and images of one color.
CURRENT = partial(functions, size=2000, inputs="current")
ALONE = fields(recipes.functions(heads=True), "init_stddev", "later_kl")
BOUNDED = {"init_stddev": 0.005, "noise": "local"}

PERMUTED_MNIST = Line(
    permuted_mnist,
    60_000,
    (784, 100, 100),
    512,
    {"CoVON, as others quote it": 92.1, "TD-VCL, replays two tasks": 89.0, "S-FSVI": 84.06, "VCL": 78.0},
    [
        (local(12), NOTHING),
        (local(12, past_weight=0.7), NOTHING),
        (local(12, past_weight=1.5), NOTHING),
        (local(12, past_weight=2.0), NOTHING),
        (local(12, past_weight=3.0), NOTHING),
        (natural(12, 0.1, 0.1, 0.999), NOTHING),
        (local(12), CURRENT(1.0)),
        (local(12), CURRENT(1.0, source="one color")),
        (local(20, past_weight=2.0), NOTHING),
    ],
    num_tasks=10,
    num_samples=10,
)
COVON = Line(
    permuted_mnist,
    60_000,
    (784, 200, 200),
    256,
    {"CoVON, as others quote it": 92.1},
    [
        (local(40, past_weight=2.0), NOTHING),
        (local(40, past_weight=3.0), NOTHING),
    ],
    num_tasks=10,
    num_samples=10,
    precision="medium",
    seeds=3,
)


def by_bayes_rule(line: Line, epochs: int) -> Line:
    """The same with past data counted once, for as many epochs as the best setting has; nothing is chosen."""
    return line._replace(pairs=[(local(epochs), NOTHING)], published={})


LINES = {
    "split MNIST, a head a task, 200 inputs kept": Line(
        SPLIT_MNIST,
        12_000,
        (784, 400),
        256,
        {"S-FSVI, 60 epochs": 99.76},
        [
            (tuned(60, **ALONE), functions(20.0)),
            (tuned(60, **ALONE), functions(5.0)),
            (tuned(60, **ALONE, learning_rate=5e-4), functions(20.0)),
            (local(60, 0.3), functions(10.0)),
        ],
        METHODS,
        heads=("multi",),
        left_out=0.1,
    ),
    "split Fashion-MNIST, a head a task, nothing kept": Line(
        SPLIT_FASHION_MNIST,
        12_000,
        (784, 256, 256),
        256,
        {"S-FSVI, 60 epochs, functions held at the batch": 99.17},
        [
            (tuned(60, **BOUNDED), NOTHING),
            (tuned(60, **ALONE), CURRENT(1.0)),
            (tuned(60, **ALONE), CURRENT(10.0)),
            (tuned(60, **ALONE, prior_stddev=10.0), CURRENT(10.0)),
            (tuned(60, **BOUNDED), CURRENT(1.0)),
            (tuned(60, **BOUNDED), CURRENT(10.0)),
            (tuned(60, **BOUNDED, past_weight=2.0), NOTHING),
            (tuned(60, **BOUNDED), CURRENT(10.0, source="one color")),
            (tuned(60, **BOUNDED), functions(10.0, source="pixel statistics")),
        ],
        heads=("multi",),
    ),
    "permuted MNIST, nothing kept": PERMUTED_MNIST,
    "permuted MNIST, nothing kept, by Bayes' rule": by_bayes_rule(PERMUTED_MNIST, 20),
    "permuted MNIST, CoVON's network and epochs, nothing kept": COVON,
    "permuted MNIST, CoVON's network and epochs, nothing kept, by Bayes' rule": by_bayes_rule(COVON, 40),
    "permuted MNIST, ten images of a task kept": Line(
        permuted_mnist,
        60_000,
        (784, 300, 300),
        512,
        {"S-FSVI, 10 epochs, with images of one color": 89.59},
        [
            (local(10), functions(20.0, 10)),
            (local(10), functions(200.0, 10)),
            (local(10), functions(10.0, source="ten rows, one color")),
            (local(10, past_weight=2.0), functions(10.0, source="ten rows, one color")),
        ],
        num_tasks=10,
        num_samples=10,
        precision="medium",
    ),
    "permuted MNIST, 200 inputs kept": Line(
        permuted_mnist,
        60_000,
        (784, 500, 500),
        512,
        {"S-FSVI, 20 epochs": 97.50},
        [
            (local(20, 0.3), functions(10.0)),
            (local(20, past_weight=2.0), functions(10.0)),
            (tuned(20, **ALONE), functions(20.0)),
            (local(20, 0.3, learning_rate=1e-3, scale_rate=3e-3), functions(10.0)),
            (local(20, 0.1), functions(20.0)),
            (local(20, 0.1, past_weight=2.0), functions(20.0)),
            (local(20, 0.1, past_weight=4.0), functions(20.0)),
        ],
        num_tasks=10,
        num_samples=10,
        precision="medium",
    ),
    "split MNIST, two outputs for all tasks, nothing kept": Line(
        SPLIT_MNIST,
        12_000,
        (784, 256, 256),
        256,
        {"TD-VCL, replays 40 rows of a task": 66.0, "VCL": 64.0},
        [
            (local(20), NOTHING),
            (local(20, past_weight=2.0), NOTHING),
            (tuned(20, **BOUNDED), NOTHING),
            (natural(20, 0.1, 0.1, 0.999), NOTHING),
            (local(20), CURRENT(1.0)),
            (tuned(20, **BOUNDED), CURRENT(1.0)),
            (tuned(20, **BOUNDED), CURRENT(10.0)),
            (tuned(20, **BOUNDED), functions(10.0, source="pixel statistics")),
        ],
        heads=("shared",),
    ),
    "split Fashion-MNIST, ten outputs for all tasks, 200 inputs kept": Line(
        SPLIT_FASHION_MNIST,
        12_000,
        (784, 200, 200, 200, 200),
        256,
        {},
        [
            (tuned(10, **ALONE), functions(20.0)),
            (tuned(10, **ALONE), functions(60.0)),
            (tuned(5, **ALONE), functions(20.0)),
            (tuned(20, **ALONE), functions(60.0)),
            (tuned(10, **ALONE, learning_rate=3e-4), functions(20.0)),
        ],
        heads=("single",),
    ),
}

#: Lines with a claim of their own, and what they are to reach.
QUOTED = (("permuted MNIST, CoVON's network and epochs, nothing kept", 93.0, "93 %"),)


def run(
    output: Path,
    *,
    form: Form = "default",
    data_dir: Path | None = None,
    line: str | None = None,
    seeds: int = 5,
    workers: int = 2,
    threads: int = 1,
) -> None:
    """Choose each method's setting with seed 0 on a held-out tenth at full length; test it from seed 10 on.

    :param line: the only line to run.
    """
    results = Results(output, {"torch": torch.__version__, "threads": threads, "form": form})
    wanted = [line] if line else list(LINES)
    for name in wanted:
        own = LINES[name] if form == "default" else LINES[name].small()

        def job(
            method: str, setting: Any, seed: int, part: str, keeping: Any, name: str = name, own: Line = own
        ) -> Job:
            keys = {"line": name, **row_keys(method, setting, seed, part, keeping)}
            run_of = (method, own.setting(setting, part), seed, part, keeping, results.checkpoint(*keys.values()))
            given = (own.stream(data_dir, part), own.sizes, own.num_samples, *run_of)
            return Job(keys, learned, (own.precision, *given))

        number = min(seeds, own.seeds) if form == "default" else 1
        compute_cells(results, [own], job, number, workers, threads, line=name)


def learned(precision: str, *run: Any) -> Row:
    """What :func:`learn` measures; on validation rows, a training that diverges has learned nothing."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return learn(*run)
    except FloatingPointError:
        if "validation" not in run:
            raise
        return {"average_accuracy": 0.0}
    finally:
        torch.set_float32_matmul_precision(before)


def measured(results: Results) -> dict[str, Line]:
    """The lines with test rows."""
    small = results.setting["form"] == "small"
    found = {name: line for name, line in LINES.items() if results.where(line=name, measured_on="test")}
    return {name: line.small() if small else line for name, line in found.items()}


def tested(results: Results) -> dict[tuple[str, str], list[Row]]:
    """The tested rows by line and method."""
    lines = measured(results).items()
    return {(name, m): tested_rows(results, line, m, line=name) for name, line in lines for m in line.methods}


def claims(results: Results) -> list[Claim]:
    """Compare with the best published result of each line, and one with what it is to reach."""
    accuracies = {name: rows for (name, method), rows in tested(results).items() if method == METHODS[0]}
    means = {name: 100.0 * mean(row["average_accuracy"] for row in rows) for name, rows in accuracies.items()}
    best = {name: max(LINES[name].published.values()) for name in means if LINES[name].published}
    reached = [name for name, accuracy in best.items() if means[name] >= accuracy]
    seeds = str(min(map(len, accuracies.values()), default=0))
    text = "Continual learning in published settings: mean field is not below the best published accuracy"
    found = [Claim(text, f"{len(best)} settings", f"{len(reached)} of {len(best)}", seeds, reached == list(best))]
    for name, least, whom in QUOTED:
        if name in means:
            ours = percent(accuracies[name], "average_accuracy")
            text = f"{name}: {METHODS[0]} is not below {whom}"
            found.append(Claim(text, f"{least:g}", ours, str(len(accuracies[name])), means[name] >= least))
    return found


def at_the_mean(results: Results) -> str:
    """Say how accurate the networks with mean weights are, where that is measured."""
    sentences = []
    for (name, _), rows in tested(results).items():
        if all("at_mean" in row for row in rows):
            sentences.append(f"{name}: {percent(rows, 'at_mean')}")
    if not sentences:
        return ""
    return f"\nCoVON is evaluated at the mean of its weights. With mean weights ours have: {'; '.join(sentences)}.\n"


def weights_compared(results: Results) -> list[list[str]]:
    """Return the validation accuracies of settings with a weight of past data, beside those of Bayes' rule."""
    table = []
    for name in measured(results):
        rows = results.where(line=name, measured_on="validation")
        by_setting = {_without_weight(row): row for row in rows if row["past_weight"] == 1.0}
        for row in rows:
            twin = by_setting.get(_without_weight(row))
            if row["past_weight"] != 1.0 and twin is not None:
                accuracies = [f"{100 * r['average_accuracy']:.2f}" for r in (row, twin)]
                table.append([name, f"{row['past_weight']:g}", f"{row['epochs']}", *accuracies])
    return table


def _without_weight(row: Row) -> str:
    """Name all that was set in a run but the weight of past data."""
    names = [field.name for kind in (Tuned, Holding) for field in fields_of(kind)]
    return str([row["method"], row["seed"], *(row[name] for name in names if name != "past_weight")])


def report(results: Results) -> str:
    """Report the accuracies of each line, beside the published ones."""
    lines = []
    for (name, method), rows in tested(results).items():
        line = measured(results)[name]
        setting = f"{described(rows[0])}; kept: {keeping_of(rows[0])}"
        scores = [percent(rows, score) for score in SCORES]
        lines.append([name, method, "-".join(map(str, line.sizes)), setting, *scores, seconds(rows), str(len(rows))])
        if method == line.methods[-1]:
            published = line.published.items()
            lines += [[name, source, "", "", f"{accuracy:g}", "", "", "", ""] for source, accuracy in published]
    tried = []
    for name in measured(results):
        rows = sorted(results.where(line=name, measured_on="validation"), key=lambda row: -row["average_accuracy"])
        tried += [
            [name, row["method"], f"{described(row)}; kept: {keeping_of(row)}", f"{100 * row['average_accuracy']:.2f}"]
            for row in rows
        ]
    heading = ["", "", "network", "setting", *SCORES.values(), "seconds", "seeds"]
    return f"""### Networks, epochs and rows of published results

Continual learning in the settings of published results (`python -m benchmarks.continual.published_settings`). Test \
runs learn all 60,000 images, but those of split MNIST with a head a task learn 54,000. Each method's setting is the \
best of its line's candidates on a held-out tenth, at full length, with seed 0; the table's seeds start at 10. \
Accuracies are in percent, mean and standard error over seeds; seconds are median CPU seconds of a run on one thread. \
"from" is the first standard deviation, then come the rates of means and scales; batches have 256 images of a split \
set, or 512 permuted ones, CoVON's 256. Networks of 200 to 500 units multiply their matrices in bfloat16 \
(`torch.set_float32_matmul_precision("medium")`), where the processor can. `--line NAME --output FILE` runs one line, \
in ten minutes to four hours of one core. CoVON's network has three seeds, to save time. Lines \
"by Bayes' rule" count past data once, for as many epochs as the best setting above them. Published settings come from \
the authors' configuration files (S-FSVI) and code (TD-VCL; its split MNIST with one head has two outputs for all \
tasks).

{markdown_table(heading, lines)}
{at_the_mean(results)}
Counting the data of past tasks more than once (`PriorChain(weight=...)`) is not Bayes' rule. The same settings with \
a weight of one, on the rows held out:

{markdown_table(["", "weight", "epochs", "accuracy", "with a weight of one"], weights_compared(results))}

All candidates, by the accuracy on the rows held out:

{markdown_table(["", "method", "setting", "average accuracy"], tried)}"""


if __name__ == "__main__":
    main(run, report)
