# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Energies of crystals of titanium and oxygen, and what a network sees of each atom's neighbors.

``load()`` reads a sample of the structures of Artrith and Urban (2016), "An implementation of artificial neural-network
potentials for atomistic materials simulations", from a folder, or downloads it once.
"""

import hashlib
import io
import os
import re
import tarfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["ELEMENTS", "AtomicEnergies", "Crystals", "load"]

URL = (
    "https://github.com/atomisticnet/aenet-PyTorch/raw/c1cf315c39382663e14654ccf5bade967acebe73/example/dir_xsf.tar.gz"
)
SHA256 = "70e7c2ace9bec3d6fde85e2853d8477126fa6854c106be4b827c7e79513e8eb8"
ELEMENTS = ("Ti", "O")
#: How far an atom sees others, in angstrom, and the highest orders: of distances, and of angles between two of them.
RADIAL_CUTOFF, RADIAL_ORDER = 6.5, 20
ANGULAR_CUTOFF, ANGULAR_ORDER = 5.0, 6
#: Units in each of two layers.
HIDDEN = 15


class Crystals(NamedTuple):
    """Structures as features ``[N, A, F]``, atoms and energies.

    :param features: what each atom sees of its neighbors. Places of titanium come first, then those of oxygen; where
        there is no atom, features are zero.
    :param is_atom: ``[N, A]``, one where there is an atom.
    :param energies: ``[N]``, in eV for each atom, less a linear fit on the numbers of both elements.
    :param places: how many places each element has.
    """

    features: Tensor
    is_atom: Tensor
    energies: Tensor
    places: tuple[int, ...]


class AtomicEnergies(nn.Module):
    """A network for each element, whose outputs are summed over atoms and divided by their number.

    The last layers of the networks are one: it is linear in the sums of the hidden units and in the numbers of atoms.

    :param places: how many places for atoms each element has.
    """

    def __init__(self, num_features: int, places: Sequence[int], hidden: int = HIDDEN) -> None:
        super().__init__()
        self.places = list(places)
        sizes = ((num_features, hidden), (hidden, hidden))
        self.elements = nn.ModuleList(
            nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh()))) for _ in places
        )
        self.output = nn.Linear(len(places) * (hidden + 1), 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return energies ``[N, 1]`` from features and, at the end, whether there is an atom: ``[N, A, F + 1]``."""
        sums = []
        for net, of_element in zip(self.elements, x.split(self.places, 1), strict=True):
            is_atom = of_element[..., -1:]
            sums += [(net(of_element[..., :-1]) * is_atom).sum(1), is_atom.sum(1)]
        energies: Tensor = self.output(torch.cat(sums, -1) / x[..., -1:].sum(1))
        return energies


class _Structure(NamedTuple):
    energy: float
    cell: np.ndarray
    elements: np.ndarray
    positions: np.ndarray


def load(data_dir: str | Path | None = None, most_atoms: int = 47) -> Crystals:
    """Return all structures of at most so many atoms, in random order.

    :param data_dir: a folder with ``tio2/structures.tar.gz``; by default ``$PYRO_RADIAL_DATA``, then the cache, to
        which a missing file is downloaded.
    :param most_atoms: ten of 1,000 structures have more; their places would take time and memory in all others.
    """
    structures = [structure for structure in _read(_archive(data_dir)) if len(structure.elements) <= most_atoms]
    # Files have no order of their own.
    structures.sort(key=lambda structure: structure.energy)
    structures = [structures[k] for k in np.random.default_rng(0).permutation(len(structures))]
    counts = np.array([np.bincount(structure.elements, minlength=len(ELEMENTS)) for structure in structures])
    places = counts.max(0)
    starts = places.cumsum() - places
    described = [_descriptors(structure) for structure in structures]
    features = np.zeros((len(structures), places.sum(), described[0].shape[-1]), np.float32)
    is_atom = np.zeros(features.shape[:2], np.float32)
    for k, structure in enumerate(structures):
        for element, (start, count) in enumerate(zip(starts, counts[k], strict=True)):
            features[k, start : start + count] = described[k][structure.elements == element]
            is_atom[k, start : start + count] = 1.0
    energies = np.array([structure.energy for structure in structures])
    energies = energies - counts @ np.linalg.lstsq(counts, energies, rcond=None)[0]
    per_atom = torch.tensor(energies / counts.sum(1), dtype=torch.float32)
    return Crystals(torch.tensor(features), torch.tensor(is_atom), per_atom, tuple(map(int, places)))


def _archive(data_dir: str | Path | None) -> bytes:
    named = os.environ.get("PYRO_RADIAL_DATA") if data_dir is None else data_dir
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_radial"
    paths = [Path(folder) / "tio2" / "structures.tar.gz" for folder in (named, cache) if folder is not None]
    path = next((path for path in paths if path.is_file()), None)
    if path is not None:
        return path.read_bytes()
    if data_dir is not None:
        raise FileNotFoundError(f"no tio2/structures.tar.gz in {data_dir}")
    print(f"downloading crystals to {paths[-1]}")
    with urlopen(URL, timeout=30.0) as answer:
        content: bytes = answer.read()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise OSError(f"{URL} is not the file that was published")
    paths[-1].parent.mkdir(parents=True, exist_ok=True)
    unfinished = paths[-1].with_name(f".{uuid.uuid4().hex}")
    unfinished.write_bytes(content)
    unfinished.replace(paths[-1])
    return content


def _read(archive: bytes) -> Iterator[_Structure]:
    """Parse files of the XSF format: the energy, the cell's three vectors, then an atom in each line."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            file = files.extractfile(member) if member.name.endswith(".xsf") else None
            if file is None:
                continue
            lines = file.read().decode().splitlines()
            energy = float(re.findall(r"total energy = (\S+) eV", lines[0])[0])
            start = lines.index("PRIMVEC") + 1
            cell = np.array([line.split() for line in lines[start : start + 3]], float)
            atoms = [line.split() for line in lines[lines.index("PRIMCOORD") + 2 :] if line.strip()]
            elements = np.array([ELEMENTS.index(words[0]) for words in atoms])
            positions = np.array([words[1:4] for words in atoms], float)
            yield _Structure(energy, cell, elements, positions)


def _descriptors(structure: _Structure) -> np.ndarray:
    """Sum Chebyshev polynomials over the neighbors of each atom, as ``[A, F]``.

    Source: Artrith, Urban and Ceder (2017), "Efficient and accurate machine-learning interpolation of atomic energies
    in compositions with many species". Polynomials of the distance are summed over neighbors, and of the cosine of an
    angle over pairs of neighbors. Each sum is there twice: plain, and with a sign for each neighbor's element.
    """
    cell = structure.cell
    fractions = structure.positions @ np.linalg.inv(cell)
    positions = (fractions % 1.0) @ cell
    # As many copies of the cell on each side as reach the cutoff.
    copies = np.ceil(RADIAL_CUTOFF * np.linalg.norm(np.linalg.inv(cell), axis=0)).astype(int)
    shifts = np.stack(np.meshgrid(*(np.arange(-n, n + 1) for n in copies), indexing="ij"), -1).reshape(-1, 3) @ cell
    neighbors = (positions[:, None] + shifts).reshape(-1, 3)
    signs = np.repeat(np.where(structure.elements == 0, 1.0, -1.0), len(shifts))
    rows = []
    for center in positions:
        vectors = neighbors - center
        distances = np.linalg.norm(vectors, axis=1)
        is_near = (distances < RADIAL_CUTOFF) & (distances > 1e-6)
        near, vectors, weights = distances[is_near], vectors[is_near], signs[is_near]
        radial = _polynomials(2.0 * near / RADIAL_CUTOFF - 1.0, RADIAL_ORDER) * _fade(near, RADIAL_CUTOFF)
        is_near = near < ANGULAR_CUTOFF
        units = vectors[is_near] / near[is_near, None]
        fade, pair_signs = _fade(near[is_near], ANGULAR_CUTOFF), weights[is_near]
        first, second = np.triu_indices(len(units), 1)
        cosines = np.clip((units[first] * units[second]).sum(1), -1.0, 1.0)
        angular = _polynomials(cosines, ANGULAR_ORDER) * (fade[first] * fade[second])
        sums = (radial.sum(1), radial @ weights, angular.sum(1), angular @ (pair_signs[first] * pair_signs[second]))
        rows.append(np.concatenate(sums))
    return np.array(rows)


def _polynomials(x: np.ndarray, order: int) -> np.ndarray:
    """Chebyshev polynomials of orders zero to ``order``, as ``[order + 1, len(x)]``."""
    return np.polynomial.chebyshev.chebvander(x, order).T


def _fade(distances: np.ndarray, cutoff: float) -> np.ndarray:
    """One at a distance of zero, and smoothly zero at the cutoff."""
    return 0.5 * (np.cos(np.pi * distances / cutoff) + 1.0)
