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

`python -m benchmarks.report --write` makes this page from the saved results of the experiments; do not edit it by hand.
[README.md](README.md) describes how to run an experiment and how to add one. `python -m benchmarks.SUBJECT.NAME` runs
the experiment `SUBJECT.NAME`. [PAST.md](PAST.md) has a line for each experiment that has left the tree.

The saved results support a claim (✓) or do not (✗). A number with ± is a mean with its standard error. We count a
published log-likelihood as reached if it exceeds ours by at most that error. Where an experiment has fixed splits of
the data, the column "seeds" counts splits."""
COLUMNS = ("claim", "published", "ours", "seeds", "held", "experiment")
#: The claims of the summary, by experiment and the words that only they begin with.
MAIN = (
    ("uncertainty.lenet5", "LeNet, Fashion-MNIST: the NLL of radial, natural gradient is at most"),
    ("uncertainty.lenet5", "LeNet, Fashion-MNIST: the NLL of radial, natural gradient is below that of plain, SGD"),
    (
        "uncertainty.residual_net",
        "A residual network on Fashion-MNIST: the NLL of radial, natural gradient is below that of plain",
    ),
    ("uncertainty.retinopathy", "RetinaMNIST: the best method with radial posteriors"),
    (
        "continual.published_settings",
        "permuted MNIST, CoVON's network and epochs, nothing kept: mean field is not below",
    ),
    ("continual.permuted_mnist", "Permuted MNIST, 200 inputs kept"),
    ("functional.panels", "One dimension"),
    ("functional.uci", "UCI: a network with a functional prior reaches the log-likelihood of FBNN"),
    ("functional.uci_laplace", "UCI: function-space Laplace against its exact process in log-likelihood, mean"),
    ("compression.lenet_mnist", "LeNet-5 on MNIST, at most 113,148 FLOPs"),
    ("guides.step_time", "A step of `AutoRadial, natural gradient, compiled` takes"),
    ("guides.pyro_examples", "A compiled step is at least twice as fast"),
    ("guides.against_numpyro", "A compiled step beats NumPyro's"),
)


def experiments() -> list[ModuleType]:
    """Return all modules in the folders of subjects, except those whose names begin with an underscore."""
    files = sorted(file for file in HERE.glob("*/*.py") if not file.name.startswith("_"))
    return [import_module(f"{__package__}.{file.parent.name}.{file.stem}") for file in files]


def committed(experiment: ModuleType) -> Results:
    """Return the saved results of an experiment, which lie beside it."""
    return Results(Path(str(experiment.__file__)).with_suffix(".json"))


def page() -> str:
    """Return a summary, followed by the claims and the sections of the experiments, by subject."""
    summary, chosen, parts = [], [], []
    for subject, group in groupby(experiments(), lambda experiment: experiment.__name__.split(".")[1]):
        claims: list[tuple[str, Claim]] = []
        sections = []
        for experiment in group:
            name = experiment.__name__.partition(".")[2]
            results = committed(experiment)
            claims += [(name, claim) for claim in experiment.claims(results)]
            sections.append(f'<a id="{name}"></a>\n\n{experiment.report(results)}')
        title = str(import_module(f"{__package__}.{subject}").__doc__).rstrip(".")
        held = [claim.held for _, claim in claims]
        published = [claim.held for _, claim in claims if claim.published]
        counts = [f"{sum(of)} of {len(of)}" for of in (held, published)]
        summary.append([f"[{title}](#results.{subject})", *counts])
        chosen += [_line(name, claim) for name, claim in claims if is_main(name, claim)]
        table = markdown_table(COLUMNS, [_line(*claim) for claim in claims])
        parts += [f'<a id="results.{subject}"></a>\n\n## {title}', table, *sections]
    counted = markdown_table(["subject", "claims held", "of those about published results"], summary)
    return "\n\n".join([HEAD, counted, "The main ones:", markdown_table(COLUMNS, chosen), *parts]) + "\n"


def is_main(name: str, claim: Claim) -> bool:
    """Return whether a claim belongs to the summary."""
    return any(name == experiment and claim.text.startswith(words) for experiment, words in MAIN)


def _line(name: str, claim: Claim) -> list[str]:
    return [claim.text, claim.published, claim.ours, claim.seeds, "✓" if claim.held else "✗", f"[`{name}`](#{name})"]


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
