# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The stored values: small summaries of results, one JSON file for each program."""

import json
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "values"
FEW = 6


def summary(value: torch.Tensor) -> list[float]:
    """Return all entries of a small tensor, else mean, root mean square, a weighted sum, and the first entries."""
    entries = value.detach().double().flatten()
    if len(entries) <= 2 * FEW:
        return entries.tolist()
    weights = torch.cos(torch.arange(len(entries), dtype=torch.float64))
    moments = [entries.mean(), entries.square().mean().sqrt(), (weights * entries).sum()]
    return [float(moment) for moment in moments] + entries[:FEW].tolist()


def write(results: dict[str, dict[str, torch.Tensor]]) -> None:
    """Store the results of programs."""
    FOLDER.mkdir(exist_ok=True)
    for program, values in results.items():
        lines = [f"{json.dumps(name)}: {json.dumps(summary(value))}" for name, value in values.items()]
        (FOLDER / f"{program}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(program: str) -> dict[str, list[float]]:
    return json.loads((FOLDER / f"{program}.json").read_text())


def mismatches(values: dict[str, torch.Tensor], stored: dict[str, list[float]], rtol: float = 1e-5) -> dict[str, tuple]:
    """Return found and stored summaries of each result that is not within a relative tolerance.

    Entries that are tiny beside the others of a result are compared relative to those.
    """
    found = {name: summary(value) for name, value in values.items()}
    wrong = {}
    for name in sorted(set(found) | set(stored)):
        one, other = (torch.tensor(values.get(name, []), dtype=torch.float64) for values in (found, stored))
        tiny = 1e-4 * rtol * float(other.nan_to_num().abs().max()) if other.numel() else 0.0
        if one.shape != other.shape or not torch.allclose(one, other, rtol=rtol, atol=tiny, equal_nan=True):
            wrong[name] = (found.get(name), stored.get(name))
    return wrong
