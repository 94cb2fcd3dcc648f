# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Make the page of results from the saved results of all experiments.

python -m benchmarks.report            # print it
python -m benchmarks.report --write    # write RESULTS.md
python -m benchmarks.report --draw     # draw all plots again from the saved results
"""

import argparse
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import ModuleType

from benchmarks.common import Claim, Results, markdown_table

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
HEAD = """# Results

These experiments measure how well posteriors of this package predict, what they cost, how they learn tasks one after
another, and where other methods are better. Claims are aims that we set before the final runs: most of them come from
published results or from what a simpler method does. The saved results support a claim (✓) or do not (✗).
[PAST.md](PAST.md) has the aims that were not reached in two versions, and a line for each experiment that has left.

A number with ± is a mean with its standard error. Where an experiment has fixed splits of the data, the column "seeds"
counts splits. `python -m benchmarks.SUBJECT.NAME` runs the experiment `SUBJECT.NAME`; [README.md](README.md) describes
how to add one. `python -m benchmarks.report --write` makes this page from the saved results."""
COLUMNS = ("claim", "published", "ours", "seeds", "held", "experiment")
#: The claims of the summary, by experiment and the words that only they begin with.
MAIN = (
    ("uncertainty.lenet5", "LeNet, Fashion-MNIST: the NLL of radial, natural gradient is at most"),
    ("uncertainty.lenet5", "LeNet, Fashion-MNIST: the NLL of radial, natural gradient is below that of plain, SGD"),
    ("uncertainty.retinopathy", "RetinaMNIST: the best method with radial posteriors"),
    (
        "continual.published_settings",
        "permuted MNIST, CoVON's network and epochs, nothing kept: mean field is not below",
    ),
    ("continual.permuted_mnist", "Permuted MNIST, 200 inputs kept"),
    ("functional.panels", "One dimension, four kernels, three units"),
    ("functional.uci_laplace", "UCI: function-space Laplace against its exact process in log-likelihood, worst split"),
    ("compression.lenet_mnist", "LeNet-5 on MNIST, at most 113,148 FLOPs"),
    ("guides.step_time", "A step of `AutoRadial, compiled` is at least as fast"),
    ("guides.pyro_examples", "A compiled step is at least twice as fast"),
    ("guides.against_numpyro", "A compiled step is at least 4 times as fast"),
    ("guides.coverage", "Counts: 90 % intervals of a full covariance"),
)


def experiments() -> list[ModuleType]:
    """Return all modules in the folders of subjects, except those whose names begin with an underscore."""
    files = sorted(file for file in HERE.glob("*/*.py") if not file.name.startswith("_"))
    return [import_module(f"{__package__}.{file.parent.name}.{file.stem}") for file in files]


def committed(experiment: ModuleType) -> Results:
    """Return the saved results of an experiment, which lie beside it."""
    return Results(Path(str(experiment.__file__)).with_suffix(".json"))


def claims_of(experiment: ModuleType) -> list[Claim]:
    """Return the claims of an experiment about its saved results; an experiment may have none."""
    return experiment.claims(committed(experiment)) if hasattr(experiment, "claims") else []


def page() -> str:
    """Return a summary, followed by the claims and the sections of the experiments, by subject."""
    summary, main_lines, chapters = [], [], []
    for subject, group in groupby(experiments(), lambda experiment: experiment.__name__.split(".")[1]):
        claims: list[tuple[str, Claim]] = []
        sections = []
        for experiment in group:
            name = experiment.__name__.partition(".")[2]
            claims += [(name, claim) for claim in claims_of(experiment)]
            sections.append(f'<a id="{name}"></a>\n\n{experiment.report(committed(experiment))}')
        title = str(import_module(f"{__package__}.{subject}").__doc__).rstrip(".")
        verdicts = [claim.supported for _, claim in claims]
        published = [claim.supported for _, claim in claims if claim.published]
        counts = [f"{sum(flags)} of {len(flags)}" for flags in (verdicts, published)]
        summary.append([f"[{title}](#results.{subject})", *counts])
        main_lines += [_line(name, claim) for name, claim in claims if is_main(name, claim)]
        table = markdown_table(COLUMNS, [_line(*claim) for claim in claims])
        chapters += [f'<a id="results.{subject}"></a>\n\n## {title}', table, *sections]
    counted = markdown_table(["subject", "claims held", "of those about published results"], summary)
    return "\n\n".join([HEAD, counted, "The main ones:", markdown_table(COLUMNS, main_lines), *chapters]) + "\n"


def is_main(name: str, claim: Claim) -> bool:
    """Return whether a claim belongs to the summary."""
    return any(name == experiment and claim.text.startswith(words) for experiment, words in MAIN)


def _line(name: str, claim: Claim) -> list[str]:
    return [
        claim.text,
        claim.published,
        claim.ours,
        claim.seeds,
        "✓" if claim.supported else "✗",
        f"[`{name}`](#{name})",
    ]


def main() -> None:
    """Print or write the page, or draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write the page")
    action.add_argument("--draw", action="store_true", help="draw all plots")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(page())
    elif args.draw:
        for experiment in experiments():
            if hasattr(experiment, "draw"):
                experiment.draw(committed(experiment))
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
