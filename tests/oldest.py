# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The oldest versions that the package says it runs with, for pip: ``python -m tests.oldest``."""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def oldest() -> list[str]:
    """``["torch==2.7", ...]``: each dependency at its lower bound."""
    dependencies = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    pinned = []
    for dependency in dependencies:
        match = re.match(r"([\w.-]+)>=([\d.]+)", dependency)
        if match is None:
            raise ValueError(f"a dependency must have a lower bound, as in name>=1.0, got {dependency!r}")
        pinned.append(f"{match[1]}=={match[2]}")
    return pinned


if __name__ == "__main__":
    print("\n".join(oldest()))
