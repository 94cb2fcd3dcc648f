# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Image sets from a folder, from their publisher's files, and from scikit-learn."""

import gzip
import struct

import numpy as np
import pytest
import torch

from tutorials import image_sets
from tutorials.image_sets import digest, load

RNG = np.random.default_rng(0)
ARRAYS = {
    "train_images": RNG.integers(0, 256, (6, 4, 5), dtype=np.uint8),
    "train_labels": np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8),
    "test_images": RNG.integers(0, 256, (3, 4, 5), dtype=np.uint8),
    "test_labels": np.array([2, 1, 0], dtype=np.uint8),
}


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A published set of four gzipped IDX files, which no folder has."""
    files = {}
    for name, array in ARRAYS.items():
        header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        files["http://tiny/" + image_sets.IDX_FILES[name]] = gzip.compress(header + array.tobytes())
    monkeypatch.setitem(image_sets.CLASS_NAMES, "tiny", ("a", "b", "c"))
    monkeypatch.setitem(image_sets.URLS, "tiny", "http://tiny/")
    monkeypatch.setitem(image_sets.DIGESTS, "tiny", {name: digest(array) for name, array in ARRAYS.items()})
    monkeypatch.setattr(image_sets, "_fetch", files.__getitem__)
    monkeypatch.delenv("PYRO_RADIAL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    return files


def test_a_set_is_downloaded_once(tiny, tmp_path):
    images = load("tiny")
    assert images.class_names == ("a", "b", "c")
    assert (images.train_images.dtype, tuple(images.train_images.shape)) == (torch.float32, (6, 1, 4, 5))
    assert torch.equal(images.test_images[:, 0], torch.tensor(ARRAYS["test_images"]) / 255)
    assert images.train_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert [path.name for path in (tmp_path / "xdg" / "pyro_radial").iterdir()] == ["tiny.npz"]
    tiny.clear()
    assert torch.equal(load("tiny").train_images, images.train_images)


def test_a_download_that_is_not_the_published_file_leaves_nothing(tiny, tmp_path):
    name = "http://tiny/" + image_sets.IDX_FILES["test_labels"]
    tiny[name] = gzip.compress(gzip.decompress(tiny[name])[:-1] + b"\x07")
    with pytest.raises(ValueError, match=r"http://tiny/ is damaged: test_labels has MD5 \w+, expected"):
        load("tiny")
    assert list((tmp_path / "xdg" / "pyro_radial").iterdir()) == []


@pytest.mark.parametrize("content", [b"no archive", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_named(tiny, tmp_path, content):
    (tmp_path / "tiny.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"tiny\.npz is damaged"):
        load("tiny", tmp_path)


def test_digits_are_split_once_and_for_all():
    digits = load("digits")
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digest(digits.test_labels.to(torch.uint8).numpy()) == "09470596626ea8c4f540705f98d30af4"
    both = torch.cat([digits.train_images, digits.test_images]).flatten(1)
    assert len(both.unique(dim=0)) == 1797  # Every image is in exactly one part.


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "retinamnist"])
def test_the_real_sets_are_the_published_ones(data_dir, name):
    images = load(name, data_dir)
    assert set(images.test_labels.tolist()) == set(range(len(images.class_names)))
