# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Tables from folders."""

import pytest
import torch

from benchmarks.decisions._tables import TABLES, TableSource, load_table, rows_digest

SMALL = "a,1.5,x\nb,?,y\n\n|a comment\na,-2,x.\n"
ROWS = [["a", "1.5", "x"], ["b", "?", "y"], ["a", "-2", "x"]]


@pytest.fixture
def small(monkeypatch):
    url = "http://localhost:9/small.data"
    source = TableSource((url,), rows_digest(ROWS), label=2, numeric=(1,), drop_missing=True)
    monkeypatch.setitem(TABLES, "small", source)


def test_numbers_stay_and_categories_are_zeros_and_ones(tmp_path, small):
    (tmp_path / "small.data").write_text(SMALL)
    table = load_table("small", tmp_path)
    # The row with a missing field is left out, and its category with it.
    assert table.features.tolist() == [[1.0, 1.5], [1.0, -2.0]]
    assert table.labels.tolist() == [0, 0]


def test_damage_and_absence_are_named(tmp_path, small):
    with pytest.raises(
        FileNotFoundError, match=r"no small\.data and .*; download and unpack http://localhost:9/small\.data"
    ):
        load_table("small", tmp_path)
    (tmp_path / "small.data").write_text(SMALL.replace("1.5", "1.6"))
    with pytest.raises(ValueError, match=r"small\.data damaged: 3 rows have MD5"):
        load_table("small", tmp_path)
    (tmp_path / "small.data").unlink()
    (tmp_path / "small.data.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"small\.data\.gz is damaged: expected a text of rows"):
        load_table("small", tmp_path)


SHAPES = {
    "mushroom": ((8124, 117), [4208, 3916]),
    "statlog": ((43_500, 9), [34108, 37, 132, 6748, 2458, 6, 11]),
    "adult": ((45_222, 92), None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_published_tables_have_their_sizes(data_dir, name):
    table = load_table(name, data_dir)
    shape, counts = SHAPES[name]
    assert (table.features.dtype, tuple(table.features.shape)) == (torch.float32, shape)
    assert counts is None or table.labels.bincount().tolist() == counts
    assert table.labels.unique().tolist() == list(range({"mushroom": 2, "statlog": 7, "adult": 14}[name]))
