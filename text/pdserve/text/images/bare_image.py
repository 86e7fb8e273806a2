"""`bare_image`: a client's file reduced to what its pixels need, with size and orientation, before Pillow reads any of it.

Pillow keeps and interprets metadata as it opens a file: EXIF data, profiles, texts, further frames. Their number and cost are the
client's choice, so they are dropped here, in loops over at most `MAX_PARTS` parts of a file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

MAX_PARTS = 16_384
"""Segments, chunks or blocks of a file that are walked over."""
MAX_SCANS = 100
"""Scans of a JPEG file, each of which may change all pixels. Encoders write about 10 in a progressive file."""

_PNG_HEAD, _PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
_PNG_KEPT = (b"PLTE", b"tRNS", b"IDAT")
_EXIF_HEAD = b"Exif\0\0"
_ORIENTATION = 0x0112
_SHORT, _LONG = 3, 4
"""Types of numbers in EXIF data."""
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset((0x00, 0x01, *range(0xD0, 0xD9), 0xFF))
"""Second bytes of JPEG markers without a length, and of those that are none."""
_START_OF_SCAN, _END_OF_IMAGE, _COMMENT = 0xDA, 0xD9, 0xFE
_APPLICATION = frozenset(range(0xE1, 0xF0)) - {0xEE}
"""Markers of metadata. JFIF (0xE0) and Adobe (0xEE) say which colours the numbers are."""


class BareImage(NamedTuple):
    """A file without metadata, of which nothing is decoded."""

    data: bytes
    size: tuple[int, int]
    """Width and height by its header."""
    orientation: int = 1
    """EXIF's number, 1 to 8; 1: upright."""
    num_scans: int = 1
    """Times that a decoder goes over the pixels."""


class NoImage(ValueError):
    """Bytes that are no image of a known format."""


class TooManyParts(ValueError):
    """The message is the rest of a sentence about the file."""


def bare_image(data: bytes) -> BareImage:
    """Raises: NoImage, TooManyParts."""
    for head, read in _READERS.items():
        if data.startswith(head):
            try:
                return read(data)
            except (struct.error, IndexError) as error:
                raise NoImage("its header is cut") from error
    raise NoImage("its first bytes are those of no known format")


def _too_many(parts: str) -> TooManyParts:
    return TooManyParts(f"has more than {MAX_PARTS} {parts}")


def _jpeg(data: bytes) -> BareImage:
    view = memoryview(data)
    kept = [view[:2]]
    place, size, orientation = 2, None, 1
    for _ in range(MAX_PARTS):
        place = data.find(b"\xff", place)
        if place < 0 or data[place + 1] == _END_OF_IMAGE:
            raise NoImage("it has no scan")
        marker = data[place + 1]
        if marker in _ALONE:
            place += 1 if marker == 0xFF else 2
            continue
        if marker == _START_OF_SCAN:
            break
        [length] = struct.unpack_from(">H", data, place + 2)
        end = place + 2 + length
        if length < 2 or end > len(data):
            raise NoImage("a segment is cut")
        if marker in _FRAME_HEADERS and size is None:
            height, width = struct.unpack_from(">HH", data, place + 5)
            size = width, height
        if marker == 0xE1 and orientation == 1 and data.startswith(_EXIF_HEAD, place + 4):
            orientation = _exif_orientation(view[place + 10 : end])
        if marker not in _APPLICATION and marker != _COMMENT:
            kept.append(view[place:end])
        place = end
    else:
        raise _too_many("segments")
    if size is None:
        raise NoImage("it has no frame")
    # within a scan 0xFF precedes only 0 or the number of a restart
    last = data.find(bytes((0xFF, _END_OF_IMAGE)), place)
    last = len(data) if last < 0 else last + 2
    num_scans = data.count(bytes((0xFF, _START_OF_SCAN)), place, last)
    return BareImage(b"".join([*kept, view[place:last]]), size, orientation, num_scans)


def _png(data: bytes) -> BareImage:
    view, place, orientation = memoryview(data), len(_PNG_HEAD), 1
    length, name, width, height = struct.unpack_from(">I4sII", data, place)
    if name != b"IHDR":
        raise NoImage("it does not begin with a header")
    place += 12 + length
    kept = [view[:place]]
    for _ in range(MAX_PARTS):
        if place + 8 > len(data):
            break  # decoding says what is missing
        length, name = struct.unpack_from(">I4s", data, place)
        end = place + 12 + length
        if name == b"IEND":
            break
        if name in _PNG_KEPT:
            kept.append(view[place:end])
        elif name == b"eXIf" and orientation == 1:
            orientation = _exif_orientation(view[place + 8 : end - 4])
        place = end
    else:
        raise _too_many("chunks")
    return BareImage(b"".join([*kept, _PNG_END]), (width, height), orientation)


def _gif(data: bytes) -> BareImage:
    """The first frame, which may reach beyond the screen."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    screen, control, num_blocks = data[:place], b"", 0
    while True:
        num_blocks += 1
        if num_blocks > MAX_PARTS:
            raise _too_many("blocks before its first frame")
        kind = data[place]
        if kind == ord(","):
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, place + 1)
            size = max(width, left + frame_width), max(height, top + frame_height)
            return BareImage(b"".join([screen, control, memoryview(data)[place:]]), size)
        if kind == ord(";"):
            raise NoImage("it has no frame")
        if kind != ord("!"):
            place += 1  # decoders skip other bytes
            continue
        start, place = place, place + 2
        while length := data[place]:
            place += 1 + length
            num_blocks += 1
            if num_blocks > MAX_PARTS:
                raise _too_many("blocks before its first frame")
        place += 1
        if data[start + 1] == 0xF9:  # which colour is transparent
            control = data[start:place]


def _webp(data: bytes) -> BareImage:
    """The file as it is: libwebp reads it, not Python."""
    if len(data) < 30 or data[8:12] != b"WEBP":
        raise NoImage("its header is cut")
    match data[12:16]:
        case b"VP8X":
            width, height = (1 + int.from_bytes(data[place : place + 3], "little") for place in (24, 27))
            return BareImage(data, (width, height), _webp_orientation(data))
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return BareImage(data, (1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)))
        case b"VP8 ":
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
            return BareImage(data, (width, height))
    raise NoImage("its first chunk has no pixels")


def _webp_orientation(data: bytes) -> int:
    place = 12
    for _ in range(MAX_PARTS):
        if place + 8 > len(data):
            return 1
        name, length = struct.unpack_from("<4sI", data, place)
        if name == b"EXIF":
            return _exif_orientation(memoryview(data)[place + 8 : place + 8 + length])
        place += 8 + length + (length & 1)
    raise _too_many("chunks")


def _exif_orientation(exif: memoryview) -> int:
    """1 for data without a valid one."""
    if exif[: len(_EXIF_HEAD)] == _EXIF_HEAD:
        exif = exif[len(_EXIF_HEAD) :]
    order = _ORDERS.get(bytes(exif[:4]))
    if order is None or len(exif) < 8:
        return 1
    [first] = struct.unpack_from(f"{order}I", exif, 4)
    if first + 2 > len(exif):
        return 1
    [number] = struct.unpack_from(f"{order}H", exif, first)
    for place in range(first + 2, min(first + 2 + 12 * number, len(exif) - 11), 12):
        tag, kind, count = struct.unpack_from(f"{order}HHI", exif, place)
        if tag == _ORIENTATION:
            form = {_SHORT: "H", _LONG: "I"}.get(kind)
            if form is None or count != 1:
                return 1
            [value] = struct.unpack_from(f"{order}{form}", exif, place + 8)
            return value if 1 <= value <= 8 else 1
    return 1


_READERS: Mapping[bytes, Callable[[bytes], BareImage]] = {
    _PNG_HEAD: _png,
    b"\xff\xd8\xff": _jpeg,
    b"GIF87a": _gif,
    b"GIF89a": _gif,
    b"RIFF": _webp,
}
