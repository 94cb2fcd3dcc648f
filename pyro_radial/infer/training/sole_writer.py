# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""For callers that have not moved to Checkpoint yet."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pyro_radial.infer.training.checkpoint import Checkpoint

__all__ = ["sole_writer"]


def sole_writer(path: Path | None) -> AbstractContextManager[Any]:
    """Hold a file."""
    return nullcontext() if path is None else Checkpoint(path)
