# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What an atom sees does not depend on how its crystal is written down, and energies are means over atoms."""

import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from tutorials import atoms

CELL = np.array([[4.0, 0.2, 0.0], [0.3, 5.0, 0.1], [0.0, -0.4, 4.5]])
POSITIONS = np.array([[0.1, 0.2, 0.3], [1.9, 2.4, 0.2], [2.2, 0.4, 2.5]])
ELEMENTS = np.array([0, 1, 1])


def descriptors(cell=CELL, elements=ELEMENTS, positions=POSITIONS):
    return atoms._descriptors(atoms._Structure(0.0, cell, elements, positions))


@pytest.mark.parametrize("change", ["moved", "turned", "other cell", "outside of the cell", "twice the cell"])
def test_descriptors_do_not_depend_on_how_a_crystal_is_written(change):
    turn = Rotation.from_euler("xyz", [0.3, -1.0, 2.0]).as_matrix()
    twice = CELL * np.array([[2.0], [1.0], [1.0]])
    changed = {
        "moved": lambda: descriptors(positions=POSITIONS + np.array([0.7, -0.2, 1.3])),
        "turned": lambda: descriptors(cell=CELL @ turn, positions=POSITIONS @ turn),
        "other cell": lambda: descriptors(cell=np.stack([CELL[0], CELL[1] + CELL[0], CELL[2]])),
        "outside of the cell": lambda: descriptors(positions=POSITIONS + np.array([[3], [-2], [1]]) * CELL[1]),
        "twice the cell": lambda: descriptors(
            twice, np.tile(ELEMENTS, 2), np.concatenate([POSITIONS, POSITIONS + CELL[0]])
        )[:3],
    }[change]()
    assert np.allclose(changed, descriptors(), rtol=1e-9, atol=1e-9)


def test_descriptors_sum_over_the_neighbors_of_an_atom():
    # Two atoms, alone in a wide cell.
    distance = 2.0
    sums = descriptors(20 * np.eye(3), np.array([0, 1]), np.array([[0.0, 0.0, 0.0], [distance, 0.0, 0.0]]))
    fade = 0.5 * (np.cos(np.pi * distance / atoms.RADIAL_CUTOFF) + 1)
    expected = np.cos(np.arange(21) * np.arccos(2 * distance / atoms.RADIAL_CUTOFF - 1)) * fade
    # The neighbor of titanium is oxygen, whose sign is negative.
    assert np.allclose(sums[0, :42], np.concatenate([expected, -expected]))
    assert np.allclose(sums[1, :42], np.concatenate([expected, expected]))
    # One neighbor makes no angle.
    assert not sums[:, 42:].any()


def test_the_energy_is_a_mean_over_atoms_of_networks_by_element():
    torch.manual_seed(0)
    net = atoms.AtomicEnergies(3, places=(2, 4))
    x = torch.randn(1, 6, 4)
    x[..., -1] = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    weights, hidden = net.output.weight.flatten(), atoms.HIDDEN
    expected = sum(
        net.elements[element](x[0, place, :3]) @ weights[start : start + hidden] + weights[start + hidden]
        for place, element, start in ((0, 0, 0), (2, 1, 16), (3, 1, 16), (4, 1, 16))
    )
    assert torch.allclose(net(x), expected / 4, atol=1e-6)
    # What is in an empty place does not matter.
    other = x.clone()
    other[0, 1, :3] = 100.0
    assert torch.equal(net(other), net(x))


def test_files_are_read_in_an_order_of_their_own(tmp_path):
    text = "# total energy = {energy} eV\n\nCRYSTAL\nPRIMVEC\n 6 0 0\n 0 6 0\n 0 0 6\nPRIMCOORD\n{count} 1\n{atoms}\n"
    line = "{element} {x} 0.5 0.0 0.1 0.2 0.3\n"
    (tmp_path / "tio2").mkdir()
    energies = []
    for names in ("abc", "cab"):
        with tarfile.open(tmp_path / "tio2" / "structures.tar.gz", "w:gz") as archive:
            for number, name in enumerate(names):
                kinds = ["Ti", "O", "O"] if name != "c" else ["Ti", "O", "O", "O"]
                rows = "".join(line.format(element=kind, x=1.5 * k) for k, kind in enumerate(kinds))
                content = text.format(energy=-100.0 - ord(name), count=len(kinds), atoms=rows).encode()
                member = tarfile.TarInfo(f"folder/{number}.xsf")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        crystals = atoms.load(tmp_path)
        assert crystals.features.shape == (3, 4, 56)
        assert crystals.places == (1, 3)
        assert sorted(crystals.is_atom.sum(1).tolist()) == [3.0, 3.0, 4.0]
        energies.append(crystals.energies)
    assert torch.equal(*energies)


def test_a_folder_without_the_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tio2/structures\.tar\.gz in"):
        atoms.load(tmp_path)


def test_a_download_is_checked_and_kept(tmp_path, monkeypatch):
    published = b"the file"
    monkeypatch.delenv("PYRO_RADIAL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(atoms, "urlopen", lambda url, timeout: io.BytesIO(published))
    with pytest.raises(OSError, match="not the file that was published"):
        atoms._archive(None)
    assert not list(tmp_path.rglob("*.gz"))
    monkeypatch.setattr(atoms, "SHA256", hashlib.sha256(published).hexdigest())
    assert atoms._archive(None) == published
    monkeypatch.setattr(atoms, "urlopen", None)
    assert atoms._archive(None) == published
