# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Arrays read from npz archives and gzipped IDX files, each checked against its digest."""

import gzip
import hashlib
import struct
import zipfile
import zlib
from collections.abc import Mapping
from math import prod
from typing import IO

import numpy as np

__all__ = ["idx_digest", "read_idx", "read_npz", "verified"]

# What damaged bytes raise: a MemoryError from an absurd size, a RuntimeError from an "encrypted" member, ...
_DAMAGE = (
    *(EOFError, MemoryError, OSError, RuntimeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)


def idx_digest(array: np.ndarray) -> str:
    """MD5 of an array written as an IDX file, the format in which MNIST was published.

    The file is two zero bytes, the type code 8 (unsigned byte), the number of dimensions, each size as a
    big-endian 32-bit integer, then the bytes in row-major order (LeCun, Cortes and Burges, *The MNIST
    database*). One digest serves every container: IDX file, npz archive, array in memory. It guards against
    damage, not against forgery.

    :param array: uint8 array of any shape.
    :returns: 32 hexadecimal digits.
    :raises ValueError: if the array is not uint8.

    Example::

        >>> idx_digest(np.zeros((2, 3), dtype=np.uint8))
        '3f925bb2f8977f5ba2add3bce51c0f66'
    """
    if array.dtype != np.uint8:
        raise ValueError(f"array must be of dtype uint8, got {array.dtype}")
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return hashlib.md5(header + array.tobytes(), usedforsecurity=False).hexdigest()


def verified(arrays: Mapping[str, np.ndarray], digests: Mapping[str, str], where: str) -> dict[str, np.ndarray]:
    """The arrays that have a digest, labels as ``[N]``, each of them intact.

    :param arrays: arrays by name.
    :param digests: what :func:`idx_digest` gives for each.
    :param where: the file or address to name in the message.
    :returns: arrays by name.
    :raises ValueError: if an array is missing or differs; the message names it.
    """
    intact = {}
    for name, digest in digests.items():
        if name not in arrays:
            raise ValueError(f"{where} is damaged: it lacks array {name!r}; it has {sorted(arrays)}")
        array = arrays[name]
        if array.dtype != np.uint8:
            raise ValueError(f"{where} is damaged: array {name!r} has dtype {array.dtype}, expected uint8")
        if name.endswith("_labels") and array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]  # MedMNIST keeps labels as a column.
        if (actual := idx_digest(array)) != digest:
            raise ValueError(
                f"{where} is damaged: array {name!r} of shape {list(array.shape)} has MD5 {actual}, expected {digest}"
            )
        intact[name] = array
    return intact


def read_npz(stream: IO[bytes], where: str) -> dict[str, np.ndarray]:
    """All arrays of an npz archive.

    :param stream: the archive.
    :param where: the file or address to name in the message.
    :returns: arrays by name.
    :raises ValueError: if it is no such archive.
    """
    name = None
    try:
        with zipfile.ZipFile(stream) as archive:
            arrays = {}
            for member in archive.namelist():
                name = member.removesuffix(".npy")
                with archive.open(member) as content:
                    arrays[name] = np.lib.format.read_array(content, allow_pickle=False)
            return arrays
    except _DAMAGE as error:
        part = "" if name is None else f": array {name!r}"
        raise ValueError(f"{where} is damaged{part}: expected an npz archive of arrays, {error}") from error


def read_idx(content: bytes, name: str, where: str) -> np.ndarray:
    """The array of a gzipped IDX file of unsigned bytes.

    :param content: the file.
    :param name: the array to name in the message.
    :param where: the file or address to name in the message.
    :returns: a uint8 array.
    :raises ValueError: if it is no such file.
    """
    try:
        data = gzip.decompress(content)
        zeros, code, ndim = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{ndim}I", data, 4)
    except _DAMAGE as error:
        raise ValueError(f"{where} is damaged: array {name!r}: expected a gzipped IDX file, {error}") from error
    size = len(data) - 4 - 4 * ndim
    if (zeros, code) != (0, 8) or size != prod(shape):
        raise ValueError(
            f"{where} is damaged: array {name!r}: expected an IDX file of {prod(shape)} unsigned bytes, "
            f"found {size} bytes of type {code}"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)
