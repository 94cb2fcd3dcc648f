# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Image sets from folders, from a server on the loopback interface, and from scikit-learn."""

import contextlib
import gzip
import hashlib
import io
import socket
import struct
import sys
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from pyro_radial.datasets import download, images, load
from pyro_radial.datasets.images import SOURCES, Source, idx_digest

ARRAYS = {
    "train_images": np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8),
    "train_labels": np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8),
    "test_images": np.random.default_rng(1).integers(0, 256, (3, 4, 5), dtype=np.uint8),
    "test_labels": np.array([2, 1, 0], dtype=np.uint8),
}


def npz_bytes(**arrays):
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def idx_bytes(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


class Site:
    """A web site on the loopback interface: content by path, and a record of what was asked for."""

    def __init__(self):
        self.content, self.missing_bytes, self.requests = {}, {}, []
        self.stalled, self.release = set(), threading.Event()
        self.chunked, self.endless, self.slow = set(), set(), set()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                site.requests.append(self.path)
                if self.path not in site.content:
                    self.send_error(404)
                    return
                body = site.content[self.path]
                self.send_response(200)
                if self.path in site.chunked:
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    if self.path not in site.endless | site.slow:
                        self.wfile.write(f"{len(body):x}\r\n".encode())
                else:
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                if self.path in site.endless | site.slow:
                    # A server's answer that would not end, or only in hours.
                    piece, pause = (bytes(1 << 16), 0.0) if self.path in site.endless else (b"x", 0.05)
                    with contextlib.suppress(OSError):
                        while not site.release.wait(pause):
                            self.wfile.write(
                                b"%x\r\n%s\r\n" % (len(piece), piece) if self.path in site.chunked else piece
                            )
                    return
                if self.path in site.stalled:
                    site.release.wait()
                    return
                self.wfile.write(body[: len(body) - site.missing_bytes.get(self.path, 0)])

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.release.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    site = Site()
    yield site
    site.close()


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No folder but those below ``tmp_path`` is searched."""
    monkeypatch.delenv("PYRO_RADIAL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_source(url="http://127.0.0.1:9/", *, archive=False, arrays=ARRAYS):
    digests = {name: idx_digest(array) for name, array in arrays.items()}
    files = {f"{url}{name}.gz": {name: digest} for name, digest in digests.items()}
    return Source(class_names=("a", "b", "c"), files={f"{url}tiny.npz": digests} if archive else files)


def fetch(source, folder):
    return images._fetch(source, folder / "tiny.npz")


@pytest.fixture
def tiny(monkeypatch, site, nowhere):
    """A published set of four gzipped IDX files, known to ``load``."""
    site.content = {f"/{name}.gz": idx_bytes(array) for name, array in ARRAYS.items()}
    source = make_source(site.url)
    monkeypatch.setitem(SOURCES, "tiny", source)
    return source


def assert_is_tiny(dataset):
    assert dataset.name == "tiny"
    assert dataset.class_names == ("a", "b", "c")
    assert dataset.val_images is None
    assert dataset.val_labels is None
    assert dataset.train_images.dtype == dataset.test_images.dtype == torch.float32
    assert dataset.train_labels.dtype == dataset.test_labels.dtype == torch.int64
    assert dataset.train_images.shape == (6, 1, 4, 5)
    expected = torch.from_numpy(ARRAYS["test_images"].astype(np.float32) / 255)
    torch.testing.assert_close(dataset.test_images[:, 0], expected, rtol=0, atol=0)
    assert dataset.train_labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_downloads_once_then_reads_the_cache(tiny, site, nowhere, capsys):
    assert_is_tiny(load("tiny"))
    assert sorted(site.requests) == sorted(f"/{name}.gz" for name in ARRAYS)
    assert "train_images.gz: 100%" in capsys.readouterr().err
    assert [path.name for path in (nowhere / "xdg" / "pyro_radial").iterdir()] == ["tiny.npz"]
    site.requests.clear()
    assert_is_tiny(load("tiny"))
    assert site.requests == []


def test_downloads_an_archive_of_color_images_with_columns_of_labels(site, tmp_path, monkeypatch):
    pixels = np.random.default_rng(2).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    arrays = ARRAYS | {
        "train_images": pixels,
        "val_images": pixels[:2],
        "val_labels": np.array([1, 0], np.uint8),
    }
    site.content["/tiny.npz"] = npz_bytes(
        **{name: array[:, None] if array.ndim == 1 else array for name, array in arrays.items()}
    )
    monkeypatch.setitem(SOURCES, "tiny", make_source(site.url, archive=True, arrays=arrays))
    path = fetch(SOURCES["tiny"], tmp_path)
    assert path == tmp_path / "tiny.npz"
    assert site.requests == ["/tiny.npz"]
    dataset = load("tiny", tmp_path)
    assert dataset.val_labels.tolist() == [1, 0]
    assert dataset.train_images.shape == (6, 3, 4, 5)
    assert dataset.train_images.is_contiguous()
    assert dataset.train_images[4, 2, 1, 3].item() == pytest.approx(pixels[4, 1, 3, 2] / 255)
    torch.testing.assert_close(dataset.val_images, dataset.train_images[:2])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("lost", [1, 20, 10_000])
def test_a_cut_off_download_leaves_nothing(tiny, site, tmp_path, lost, chunked):
    if chunked:  # Such an answer does not tell its length in advance.
        site.chunked.add("/test_images.gz")
    body = site.content["/test_images.gz"]
    site.missing_bytes["/test_images.gz"] = min(lost, len(body))
    with pytest.raises(ValueError, match=r"test_images\.gz was cut off after \d+ bytes"):
        fetch(tiny, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (idx_bytes(ARRAYS["train_images"])[:-9], "test_images.*end-of-stream marker"),
        (b"<html>moved</html>", "test_images.*Not a gzipped file"),
        (gzip.compress(b"\0\0\x08", mtime=0), "test_images.*requires a buffer of at least"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x05abcd", mtime=0), "test_images.*of 5 unsigned bytes, found 4 bytes"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x04abcd", mtime=0), "test_images.*of type 13"),
        (idx_bytes(ARRAYS["train_images"]), "test_images.*MD5.*expected"),
    ],
    ids=["truncated", "a page", "a short header", "too few bytes", "another type", "another array"],
)
def test_a_damaged_download_leaves_nothing(tiny, site, tmp_path, body, message):
    site.content["/test_images.gz"] = body
    with pytest.raises(ValueError, match=message) as caught:
        fetch(tiny, tmp_path / "cache")
    assert f"{site.url}test_images.gz is damaged" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_failing_disk_leaves_no_half_file(tiny, tmp_path, monkeypatch):
    def fail(stream, **arrays):
        stream.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="no space left"):
        fetch(tiny, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_page_is_reported_with_every_place_searched(tiny, site, nowhere):
    del site.content["/train_labels.gz"]
    with pytest.raises(ConnectionError, match="HTTP Error 404") as caught:
        load("tiny")
    assert f"{site.url}train_labels.gz" in str(caught.value)
    assert str(nowhere / "data") in str(caught.value)
    assert str(nowhere / "xdg" / "pyro_radial") in str(caught.value)
    assert "PYRO_RADIAL_DATA" in str(caught.value)


def test_a_server_that_is_not_there(monkeypatch, nowhere):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setitem(SOURCES, "tiny", make_source())
    with pytest.raises(ConnectionError, match=r"cannot download http://127\.0\.0\.1:9/.*place the file"):
        load("tiny")


def test_a_server_that_falls_silent(tiny, site, monkeypatch, tmp_path):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    site.stalled.add("/test_labels.gz")
    with pytest.raises(ConnectionError, match=r"test_labels\.gz: .*timed out"):
        fetch(tiny, tmp_path)


def test_a_server_that_takes_forever(tiny, site, monkeypatch, tmp_path):
    monkeypatch.setattr(download, "TOTAL_TIME", 0.5)
    site.slow.add("/test_labels.gz")
    site.content["/test_labels.gz"] = bytes(10_000)
    with pytest.raises(ConnectionError, match=r"test_labels\.gz: it took more than 0\.5 seconds, after \d+ bytes"):
        fetch(tiny, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("begun", [b"HTTP/1.0 200 O", b"HTTP/1.0 200 OK\r\nX-Filler: "])
def test_headers_that_take_forever(monkeypatch, begun):
    """Each byte comes in time, but the line never ends."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "TOTAL_TIME", 0.3)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(begun)
                for _ in range(60):  # At most three seconds.
                    if done.wait(0.05):
                        break
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(ConnectionError, match=r"it took more than 0\.3 seconds, before any content"):
                download.download_file(f"http://127.0.0.1:{server.getsockname()[1]}/file", io.BytesIO())
        finally:
            done.set()
            thread.join()


def test_an_archive_that_unpacks_to_too_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "tiny", make_source())
    monkeypatch.setattr(images, "MAX_BYTES", 1 << 16)
    zeros = np.zeros((1, 1 << 10, 1 << 10), np.uint8)
    (tmp_path / "tiny.npz").write_bytes(npz_bytes(**ARRAYS | {"train_images": zeros}))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"tiny\.npz is damaged: .*'train_images': it unpacks to 1048704 bytes"):
        load("tiny", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < zeros.nbytes / 2


def test_a_file_with_too_many_bytes(tiny, site, monkeypatch, tmp_path):
    monkeypatch.setattr(download, "MAX_BYTES", 1000)
    site.content["/test_labels.gz"] = bytes(1001)
    with pytest.raises(
        ValueError, match=r"test_labels\.gz is damaged: it has 1001 bytes or more, expected at most 1000"
    ):
        fetch(tiny, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_answer_without_end(tiny, site, monkeypatch, tmp_path):
    monkeypatch.setattr(download, "MAX_BYTES", 1_000_000)
    site.endless.add("/test_labels.gz")
    site.chunked.add("/test_labels.gz")
    with pytest.raises(ValueError, match=r"test_labels\.gz is damaged: it has \d+ bytes or more"):
        fetch(tiny, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_small_file_that_unpacks_to_too_many_bytes(tiny, site, monkeypatch, tmp_path):
    monkeypatch.setattr(images, "MAX_BYTES", 1000)
    site.content["/test_images.gz"] = gzip.compress(b"\0\0\x08\x01\0\x10\0\0" + bytes(1 << 20))
    with pytest.raises(ValueError, match="expected an IDX file of 1048576 unsigned bytes, found 992 bytes"):
        fetch(tiny, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_download_goes_to_the_disk_piece_by_piece(tiny, site, tmp_path):
    # Noise does not compress, so that the file is as large as the array.
    content = idx_bytes(np.random.default_rng(3).integers(0, 256, (1, 1 << 23), dtype=np.uint8))
    site.content["/test_images.gz"] = content
    path = tmp_path / "file"
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with path.open("wb") as file:
        download.download_file(f"{site.url}test_images.gz", file)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert path.read_bytes() == content
    assert peak < len(content) / 4


def test_an_explicit_folder_is_the_only_one_searched(tiny, site, nowhere):
    fetch(tiny, nowhere / "data")
    site.requests.clear()
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        load("tiny", nowhere / "elsewhere")
    assert site.requests == []


def test_search_order(tiny, site, nowhere, monkeypatch):
    broken = npz_bytes(**ARRAYS)[:50]
    places = [nowhere / "named" / "images", nowhere / "data", nowhere / "xdg" / "pyro_radial"]
    monkeypatch.setenv("PYRO_RADIAL_DATA", str(nowhere / "named"))
    # A damaged file shows which place was read; once it is removed, the next place has its turn.
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        (place / "tiny.npz").write_bytes(broken)
    for place in places:
        with pytest.raises(ValueError, match="is damaged") as caught:
            load("tiny")
        assert str(place / "tiny.npz") in str(caught.value)
        (place / "tiny.npz").unlink()
    assert site.requests == []
    assert_is_tiny(load("tiny"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "not a zip file"),
        (npz_bytes(**ARRAYS)[:-30], "not a zip file"),
        (npz_bytes(train_images=ARRAYS["train_images"]), "cannot read array .*no item named"),
        (npz_bytes(**ARRAYS | {"test_labels": np.array([2, 1], np.uint8)}), r"'test_labels' of shape \[2\]"),
        (
            npz_bytes(**ARRAYS | {"test_images": np.full((3, 4, 5), np.nan)}),
            "'test_images': array must be of dtype uint8, got float64",
        ),
        (npz_bytes(**ARRAYS | {"test_labels": np.array([2, 1, None])}), "'test_labels'.*Object arrays"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, monkeypatch, content, message):
    monkeypatch.setitem(SOURCES, "tiny", make_source())
    (tmp_path / "tiny.npz").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load("tiny", tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tiny.npz'} is damaged")


def test_a_single_changed_pixel_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "tiny", make_source())
    pixels = ARRAYS["train_images"].copy()
    pixels[3, 2, 1] ^= 1
    (tmp_path / "tiny.npz").write_bytes(npz_bytes(**ARRAYS | {"train_images": pixels}))
    with pytest.raises(ValueError, match=r"'train_images'.*MD5"):
        load("tiny", tmp_path)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="name must be one of digits, fashion_mnist, mnist, retinamnist, got 'cifar'"):
        load("cifar")


def test_idx_digest_is_that_of_the_written_file():
    written = gzip.decompress(idx_bytes(ARRAYS["train_images"]))
    assert idx_digest(ARRAYS["train_images"]) == hashlib.md5(written).hexdigest()
    with pytest.raises(ValueError, match="float64"):
        idx_digest(np.zeros(3))


def test_digits_are_split_once_and_for_all():
    first, second = load("digits"), load("digits")
    assert first.train_images.shape == (1437, 1, 8, 8)
    assert first.test_images.shape == (360, 1, 8, 8)
    torch.testing.assert_close(first.test_images, second.test_images, rtol=0, atol=0)
    assert idx_digest(first.test_labels.to(torch.uint8).numpy()) == "09470596626ea8c4f540705f98d30af4"
    both = torch.cat([first.train_images, first.test_images]).flatten(1)
    assert len(both.unique(dim=0)) == 1797  # Every image is in exactly one part.
    assert (both.min(), both.max()) == (0, 1)
    assert first.test_labels.bincount().min() >= 35


def test_digits_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pyro-radial\[data\]"):
        load("digits")


@pytest.mark.parametrize(
    ("name", "train", "test", "num_classes"),
    [
        ("mnist", (60_000, 1, 28, 28), (10_000, 1, 28, 28), 10),
        ("fashion_mnist", (60_000, 1, 28, 28), (10_000, 1, 28, 28), 10),
        ("retinamnist", (1080, 3, 28, 28), (400, 3, 28, 28), 5),
    ],
)
def test_real_data(data_dir, name, train, test, num_classes):
    dataset = load(name, data_dir)
    assert dataset.train_images.shape == train
    assert dataset.test_images.shape == test
    assert len(dataset.class_names) == num_classes
    assert dataset.train_labels.bincount().count_nonzero() == num_classes
    assert dataset.test_images.min() >= 0
    assert dataset.test_images.max() == 1


def test_retinamnist_has_a_validation_split(data_dir):
    dataset = load("retinamnist", data_dir)
    # Class counts published with MedMNIST v2.
    assert dataset.val_labels.bincount().tolist() == [54, 12, 28, 20, 6]
    assert dataset.val_images.shape == (120, 3, 28, 28)


def test_every_source_gives_a_digest_of_every_array():
    for source in SOURCES.values():
        digests = {array: digest for arrays in source.files.values() for array, digest in arrays.items()}
        assert digests.keys() >= ARRAYS.keys()
        assert all(len(digest) == 32 for digest in digests.values())
