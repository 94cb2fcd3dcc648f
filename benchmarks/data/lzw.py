# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Read files of the Unix program ``compress``, which Python's standard library does not read."""

from pyro_radial.datasets.download import MAX_BYTES

MAGIC = b"\x1f\x9d"
CLEAR = 256


def decompress(content: bytes) -> bytes:
    """Decompress the content of a ``.Z`` file.

    Codes have 9 bits at first, and one more whenever the table of known strings is full. They come in groups of eight;
    a change of the width, or of the table, leaves the rest of the group unused.

    Source: Welch (1984), "A Technique for High-Performance Data Compression"; the layout is that of ``compress`` 4.0.
    """
    if content[:2] != MAGIC or len(content) < 3:
        raise ValueError("content must begin with 1f 9d, as a .Z file does")
    most, clears = content[2] & 31, bool(content[2] & 128)
    if not 9 <= most <= 16:
        raise ValueError(f"content must have codes of 9 to 16 bits, got {most}")
    first = 257 if clears else 256
    strings = [bytes([byte]) for byte in range(256)] + [b""] * (first - 256)
    pieces: list[bytes] = []
    previous = b""
    width, start, place, size = 9, 24, 24, 0
    while place + width <= 8 * len(content):
        window = int.from_bytes(content[place // 8 : place // 8 + 4], "little")
        code = (window >> place % 8) & ((1 << width) - 1)
        place += width
        if code == CLEAR and clears:
            del strings[first:]
            place, previous = _end_of_group(start, place, width), b""
            width, start = 9, place
            continue
        if code > len(strings) or (code == len(strings) and not previous):
            raise ValueError(f"content must have only codes of earlier strings, got {code} of {len(strings)}")
        string = strings[code] if code < len(strings) else previous + previous[:1]
        pieces.append(string)
        size += len(string)
        if size > MAX_BYTES:
            raise ValueError(f"content must unpack to at most {MAX_BYTES} bytes, got more")
        if previous and len(strings) < 1 << most:
            strings.append(previous + string[:1])
        previous = string
        if len(strings) == 1 << width and width < most:
            place = _end_of_group(start, place, width)
            width, start = width + 1, place
    return b"".join(pieces)


def _end_of_group(start: int, place: int, width: int) -> int:
    """The end of the group of eight codes that contains ``place``; groups count from the first code of this width."""
    group = 8 * width
    return start + -(-(place - start) // group) * group
