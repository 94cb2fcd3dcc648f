# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Tables from folders, and files of ``compress``."""

import dataclasses
import gzip
import random
import shutil
import subprocess

import pytest
import torch

from benchmarks.data import lzw, tables
from benchmarks.data.tables import TABLES, TableSource, load_table, rows_digest

SMALL = "a,1.5,x\nb,?,y\n\n|a comment\na,-2,x.\n"
ROWS = [["a", "1.5", "x"], ["b", "?", "y"], ["a", "-2", "x"]]


@pytest.fixture
def small(monkeypatch):
    source = TableSource(
        name="small", urls=("http://localhost:9/small.data",), digest=rows_digest(ROWS), label=2, numeric=(1,)
    )
    source = dataclasses.replace(source, drop_missing=True)
    monkeypatch.setitem(TABLES, "small", source)
    return source


def test_numbers_stay_and_categories_are_zeros_and_ones(tmp_path, small):
    (tmp_path / "small.data").write_text(SMALL)
    table = load_table("small", tmp_path)
    # The row with a missing field is left out, and its category with it.
    assert table.features.tolist() == [[1.0, 1.5], [1.0, -2.0]]
    assert table.feature_names == ("0=a", "1")
    assert (table.labels.tolist(), table.class_names) == ([0, 0], ("x",))


@pytest.mark.parametrize("place", [".", "bandits"])
def test_a_compressed_file_is_found_in_either_place(tmp_path, small, place):
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "small.data.gz").write_bytes(gzip.compress(SMALL.encode()))
    assert len(load_table("small", tmp_path).labels) == 2


def test_missing_is_a_category_where_rows_stay(tmp_path, small, monkeypatch):
    monkeypatch.setitem(TABLES, "small", dataclasses.replace(small, drop_missing=False, numeric=()))
    (tmp_path / "small.data").write_text(SMALL)
    table = load_table("small", tmp_path)
    assert table.feature_names == ("0=a", "0=b", "1=-2", "1=1.5", "1=?")
    assert table.labels.tolist() == [0, 1, 0]


def test_damage_and_absence_are_named(tmp_path, small):
    with pytest.raises(FileNotFoundError, match=r"no small\.data in"):
        load_table("small", tmp_path)
    (tmp_path / "small.data").write_text(SMALL.replace("1.5", "1.6"))
    with pytest.raises(ValueError, match=r"small\.data damaged: 3 rows have MD5"):
        load_table("small", tmp_path)
    (tmp_path / "small.data").unlink()
    (tmp_path / "small.data.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"small\.data\.gz is damaged: expected a text of rows"):
        load_table("small", tmp_path)
    with pytest.raises(ValueError, match="name must be one of adult, mushroom, small, statlog, got 'jester'"):
        load_table("jester")


def test_a_table_that_turns_out_wrong_is_fetched_again(tmp_path, small, monkeypatch):
    monkeypatch.delenv("PYRO_RADIAL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sent = [SMALL.replace("1.5", "1.6"), SMALL]
    monkeypatch.setattr(tables, "download_file", lambda url, file: file.write(sent.pop(0).encode()))
    with pytest.raises(ValueError, match=r"small\.data damaged: 3 rows have MD5"):
        load_table("small")
    assert len(load_table("small").labels) == 2
    assert sent == []


def test_a_file_of_the_user_that_is_wrong_stays(tmp_path, small):
    (tmp_path / "small.data").write_text("a,b\n")
    with pytest.raises(ValueError, match="damaged"):
        load_table("small", tmp_path)
    assert (tmp_path / "small.data").exists()


def test_decompression_has_a_limit(tmp_path, small, monkeypatch):
    monkeypatch.setattr(tables, "MAX_BYTES", 1000)
    monkeypatch.setattr(lzw, "MAX_BYTES", 1000)
    (tmp_path / "small.data.gz").write_bytes(gzip.compress(bytes(1001)))
    with pytest.raises(ValueError, match=r"small\.data\.gz is damaged: .*must unpack to at most 1000 bytes"):
        load_table("small", tmp_path)
    assert lzw.decompress(compress(bytes(1000))) == bytes(1000)
    with pytest.raises(ValueError, match="must unpack to at most 1000 bytes"):
        lzw.decompress(compress(bytes(1001)))


def test_a_server_that_is_not_there_is_named(tmp_path, small, monkeypatch):
    monkeypatch.delenv("PYRO_RADIAL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConnectionError, match=r"small\.data"):
        load_table("small")
    assert list((tmp_path / "pyro_radial").iterdir()) == []


SHAPES = {
    "mushroom": ((8124, 117), [4208, 3916]),
    "statlog": ((43_500, 9), [34108, 37, 132, 6748, 2458, 6, 11]),
    "adult": ((45_222, 92), None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_published_tables_have_their_sizes(data_dir, name):
    if tables._found(TABLES[name].urls[0].rsplit("/", 1)[-1], [data_dir]) is None:
        pytest.skip(f"no {name} here")
    table = load_table(name, data_dir)
    shape, counts = SHAPES[name]
    assert (table.features.dtype, tuple(table.features.shape)) == (torch.float32, shape)
    assert counts is None or table.labels.bincount().tolist() == counts
    assert len(table.class_names) == {"mushroom": 2, "statlog": 7, "adult": 14}[name]


def compress(content, most=16):
    """The other direction, as ``compress`` does it, without its clearing of the table."""
    codes = {bytes([byte]): byte for byte in range(256)}
    bits, place, width, start, known = 0, 0, 9, 0, 257
    prefix = b""

    def put(code):
        nonlocal bits, place, width, start
        bits |= code << place
        place += width
        if known > 1 << width and width < most:
            place = start + -(-(place - start) // (8 * width)) * 8 * width
            width, start = width + 1, place

    for byte in content:
        string = prefix + bytes([byte])
        if string in codes:
            prefix = string
            continue
        code = codes[prefix]
        if known < 1 << most:
            codes[string] = known
            known += 1
        put(code)
        prefix = bytes([byte])
    put(codes[prefix])
    return b"\x1f\x9d" + bytes([128 | most]) + bits.to_bytes(-(-place // 8), "little")


@pytest.mark.parametrize(("size", "most"), [(3, 16), (2000, 16), (30_000, 16), (30_000, 10)])
def test_files_of_compress_are_read(size, most):
    random.seed(0)
    content = bytes(random.choices(b"0123456789 \n", k=size))
    packed = compress(content, most)
    if shutil.which("gzip"):
        # That the encoder above is right.
        assert subprocess.run(["gzip", "-dc"], input=packed, capture_output=True, check=False).stdout == content
    assert lzw.decompress(packed) == content


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x90", b"\x1f\x9d\x85", b"\x1f\x9d\x90\xff\xff\xff"])
def test_what_is_no_file_of_compress_is_refused(content):
    with pytest.raises(ValueError, match="content must"):
        lzw.decompress(content)
