# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Make the page of results from the saved results of all experiments.

python -m benchmarks.report            # print it
python -m benchmarks.report --write    # write RESULTS.md
python -m benchmarks.report --draw     # draw all plots again from the saved results
"""

import argparse
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.common import Results, markdown_table

__all__ = ["PAGE", "committed", "experiments", "is_measured", "page"]

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
#: Folders of code that experiments share.
HELPERS = frozenset({"data"})
HEAD = """# Results

`python -m benchmarks.report --write` makes this page from the saved results of the experiments; do not edit it by hand.
[README.md](README.md) describes how to run an experiment and how to add one. `python -m benchmarks.SUBJECT.NAME` runs
the experiment `SUBJECT.NAME`.

The first table lists our claims and whether the saved results support them (✓) or not (✗). A number with ± is a mean
with its standard error. We count a published log-likelihood as reached if it exceeds ours by at most that error. Where
an experiment has fixed splits of the data, the column "seeds" counts splits."""


def experiments() -> list[ModuleType]:
    """Return all modules in the folders of subjects, except those whose names begin with an underscore."""
    files = sorted(
        file for file in HERE.glob("*/*.py") if not file.name.startswith("_") and file.parent.name not in HELPERS
    )
    return [import_module(f"{__package__}.{file.parent.name}.{file.stem}") for file in files]


def committed(experiment: ModuleType) -> Results:
    """Return the saved results of an experiment, which lie beside it."""
    path = Path(str(experiment.__file__)).with_suffix(".json")
    return Results(path) if path.exists() else Results(path, {})


def is_measured(experiment: ModuleType) -> bool:
    """Return whether an experiment has saved results."""
    return committed(experiment).path.exists()


def page() -> str:
    """Return the table of all claims, followed by the sections of the experiments, by subject."""
    lines, sections, waiting, subject = [], [], [], ""
    for experiment in experiments():
        results = committed(experiment)
        name = experiment.__name__.partition(".")[2]
        if not is_measured(experiment):
            needs = getattr(experiment, "NEEDS", None)
            waiting.append(f"`python -m {experiment.__name__}`{f' (needs {needs})' if needs else ''}")
            continue
        for claim in experiment.claims(results):
            held = "✓" if claim.held else "✗"
            link = f"[`{name}`](#{name})"
            lines.append([claim.text, claim.published, claim.ours, claim.seeds, held, link])
        folder = import_module(experiment.__name__.rpartition(".")[0])
        if folder.__name__ != subject:
            subject = folder.__name__
            sections.append(f"## {str(folder.__doc__).rstrip('.')}")
        sections.append(f'<a id="{name}"></a>\n\n{experiment.report(results)}')
    claims = markdown_table(["claim", "published", "ours", "seeds", "held", "experiment"], lines)
    notes = [f"Not measured yet: {'; '.join(waiting)}."] if waiting else []
    return "\n\n".join([HEAD, claims, *notes, *sections]) + "\n"


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
