# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the pages of measured figures are made with: results by name, Markdown tables, means with their errors."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).parent
# The figures of a regression, and what tables call them.
REGRESSION = {"rmse": "RMSE", "log_likelihood": "log-likelihood"}


def results(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_error(values: list[float], digits: int) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


def of_splits(rows: list[dict[str, Any]], figure: str, **keys: Any) -> list[float]:
    """A figure of the rows with these keys, in the order of their splits."""
    chosen = [row for row in rows if keys.items() <= row.items()]
    return [row[figure] for row in sorted(chosen, key=lambda row: row["split"])]


def paired(ours: list[float], theirs: list[float], digits: int) -> str:
    """The mean difference of figures of the same splits."""
    return with_error([a - b for a, b in zip(ours, theirs, strict=True)], digits)
