# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which data a run is of: shapes, dtypes and a digest of the content."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_radial._pyro.random_state import rng_state, set_rng_state
from pyro_radial.infer.training.data import Rows
from pyro_radial.infer.training.fingerprint import digest_of

__all__ = ["data_fingerprint"]

# A Dataset with more rows is known by so many of them.
SAMPLE = 256
CHUNK = 4096


def data_fingerprint(rows: Rows, device: torch.device) -> dict[str, Any]:
    """Names and values that are the same for the same data.

    Tensors are known by all of their content, a ``Dataset`` by that of at most 256 rows, at equal distances. One that
    answers differently each time, as augmentation does, is known by its class and length alone, and one with an
    attribute or method ``fingerprint`` by that too. Random numbers that this takes are given back.

    :param Rows rows: the data.
    :param torch.device device: whose random numbers are given back besides those of the CPU.
    :returns: "length", "class", and "fingerprint" or what is known of the content, by the place in x and y.
    """
    dataset = getattr(rows, "_dataset", None)
    known = {"length": len(rows), "class": "tensors" if dataset is None else type(dataset).__qualname__}
    if dataset is None:
        return known | _content(rows, torch.arange(len(rows)))
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return known | {"fingerprint": str(own() if callable(own) else own)}
    index = torch.linspace(0, len(rows) - 1, min(SAMPLE, len(rows)), dtype=torch.double).round().long()
    before = rng_state(device)
    contents = []
    try:
        for seed in (0, 1):
            pyro.set_rng_seed(seed)
            contents.append(_content(rows, index))
    finally:
        set_rng_state(before, device)
    return known | contents[0] if contents[0] == contents[1] else known


def _content(rows: Rows, index: Tensor) -> dict[str, str]:
    """For each tensor its dtype, the shape of a row and a digest of the rows."""
    digests: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for part in index.split(CHUNK):
        x, y = rows.take(part)
        for name, tensor in (*_leaves("x", x), *_leaves("y", y)):
            kinds[name] = f"{tensor.dtype} rows of shape {tuple(tensor.shape[1:])}"
            digests.setdefault(name, hashlib.sha256()).update(digest_of(tensor))
    return {name: f"{kinds[name]}, digest {digest.hexdigest()[:16]}" for name, digest in digests.items()}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(f"{name}.{key}", value[key])
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _leaves(f"{name}.{number}", part)
