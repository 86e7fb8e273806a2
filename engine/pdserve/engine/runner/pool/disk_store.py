"""`DiskStore`: a `BlockStore` of append-only segment files in one folder.

    segment   records, one after the other; its number is its file's name. Only the newest one grows.
    record    header (magic, bytes of the name, bytes of the block, digest, name, CRC-32 of all this), then the block

    index     names and places of a segment's records, with a CRC-32, in a file next to it, once the segment does not grow any more

What was written is found again when the store is opened: by the index, or where there is none by the headers. Nothing is
synchronised: after a crash a block may lack bytes, which its digest tells; a header that is torn ends what is known of its segment.

When the folder is full, a segment is given up as a log-structured file system would choose it: one that is old and of which little
was read since it was written. What was read is written again, so that blocks are given up by their use, not only by their age.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from pdserve.common import clock
from pdserve.engine.runner.pool.segment_files import SegmentFile, SegmentFolder

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
MIN_SEGMENTS = 8
"""Smaller stores have smaller segments, so that giving up one costs an eighth of the store at most."""
FULL_S = 10.0
"""Seconds without writes after one that failed."""
_HEADER = struct.Struct("<4sHQQ")
_MAGIC = b"pdkv"
_MAX_NAME_BYTES = 64
_FIXED_BYTES = _HEADER.size + 4


@dataclass(slots=True, eq=False)
class _Segment:
    number: int
    file: SegmentFile
    """A read that goes on keeps it, also when the segment is removed."""
    num_bytes: int = 0
    """Where the next record begins."""
    names: dict[bytes, None] = field(default_factory=dict)
    """Of blocks that no later segment has."""
    used_bytes: int = 0
    """Of blocks that were read since they were written."""


@dataclass(frozen=True, slots=True)
class _Place:
    segment: _Segment
    offset: int
    """Of the record."""
    num_bytes: int
    """Of the block."""


class DiskStore:
    """One process's folder of segments."""

    def __init__(self, folder: SegmentFolder, max_bytes: int) -> None:
        """max_bytes: of all segments. Raises: OSError."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = min(SEGMENT_BYTES, max_bytes // MIN_SEGMENTS)
        self._lock = threading.Lock()
        """Of the fields below; no file is read or written under it."""
        self._places: dict[bytes, _Place] = {}
        self._used: set[bytes] = set()
        """Names that were read since they were written."""
        self._segments: dict[int, _Segment] = {}
        self._last: _Segment | None = None
        """The one that grows."""
        self._full_until = 0.0
        for number, file in folder.open_all().items():
            self._open(_Segment(number, file))
        self._next_number = max(self._segments, default=0) + 1

    @property
    def num_bytes(self) -> int:
        """Of all segments."""
        return sum(segment.num_bytes for segment in self._segments.values())

    def names(self) -> list[bytes]:
        with self._lock:
            return list(self._places)

    def find(self, names: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            return [name for name in names if name in self._places]

    def write(self, name: bytes, data: memoryview, digest: int) -> list[bytes]:
        lost: list[bytes] = []
        if clock.monotonic() < self._full_until:
            return [name]
        try:
            try:
                self._append(name, data, digest, lost)
            except OSError as error:
                # the disk may have less room than the store may take
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._give_up_segment(lost):
                    raise
                self._append(name, data, digest, lost)
        except OSError as error:
            log.warning("blocks are not kept in %s for %.0f s: %s", self._folder, FULL_S, error)
            self._full_until = clock.monotonic() + FULL_S
            lost.append(name)
        return [each for each in lost if each not in self._places]

    def read(self, name: bytes, into: memoryview) -> int | None:
        with self._lock:
            place = self._places.get(name)
            if place is None:
                return None
            if name not in self._used:
                self._used.add(name)
                place.segment.used_bytes += place.num_bytes
        digest = None
        try:
            digest = _read_record(name, place, into)
        finally:
            if digest is None:
                self.forget(name)
        return digest

    def forget(self, name: bytes) -> None:
        with self._lock:
            self._drop(name)

    def clear(self) -> None:
        with self._lock:
            segments, self._segments = self._segments, {}
            self._places.clear()
            self._used.clear()
            self._last = None
        for number in segments:
            self._folder.remove(number)

    def close(self) -> None:
        if self._last is not None:
            self._write_index(self._last)
        with self._lock:
            self._segments, self._places, self._last = {}, {}, None

    # ---- of the thread that writes

    def _append(self, name: bytes, data: memoryview, digest: int, lost: list[bytes]) -> None:
        """lost: names of blocks that are given up for it are added. Raises: OSError."""
        header = _make_header(name, len(data), digest)
        num_bytes = len(header) + len(data)
        if num_bytes > self._max_bytes:
            raise OSError(errno.EFBIG, f"a block has {num_bytes} bytes, and the store {self._max_bytes}")
        if not self._fits_last(num_bytes):
            while self._segments and self.num_bytes + max(self._segment_bytes, num_bytes) > self._max_bytes:
                self._give_up_segment(lost)
        self._put(name, header, data)

    def _fits_last(self, num_bytes: int) -> bool:
        """A record that is larger than a segment has one of its own."""
        return self._last is not None and (
            self._last.num_bytes == 0 or self._last.num_bytes + num_bytes <= self._segment_bytes
        )

    def _put(self, name: bytes, header: bytes | bytearray, data: memoryview) -> None:
        num_bytes = len(header) + len(data)
        segment = self._last if self._last is not None and self._fits_last(num_bytes) else self._begin_segment()
        if (written := segment.file.write(header, data, segment.num_bytes)) != num_bytes:
            raise OSError(errno.ENOSPC, f"{written} of {num_bytes} bytes were written")
        with self._lock:
            self._add(name, _Place(segment, segment.num_bytes, len(data)))
            segment.num_bytes += num_bytes

    def _begin_segment(self) -> _Segment:
        if self._last is not None:
            self._write_index(self._last)
        self._last = _Segment(self._next_number, self._folder.create(self._next_number))
        self._next_number += 1
        with self._lock:
            self._segments[self._last.number] = self._last
        return self._last

    def _give_up_segment(self, lost: list[bytes]) -> bool:
        """Remove a segment, and write again what was read of it, up to half a segment. False if there is none but the last."""
        old = [segment for segment in self._segments.values() if segment is not self._last]
        if not old:
            if self._last is None:
                return False
            old, self._last = [self._last], None
        victim = max(old, key=self._worth_of_removal)
        kept: list[tuple[bytes, _Place]] = []
        with self._lock:
            left = self._segment_bytes // 2
            for name in list(victim.names):
                place = self._places[name]
                if name in self._used and place.num_bytes <= left:
                    left -= place.num_bytes
                    kept.append((name, place))
                else:
                    lost.append(name)
                self._drop(name)
            del self._segments[victim.number]
        self._folder.remove(victim.number)
        for name, place in kept:
            self._write_again(name, place, lost)
        return True

    def _worth_of_removal(self, segment: _Segment) -> float:
        used = min(1.0, segment.used_bytes / max(1, segment.num_bytes))
        age = self._next_number - segment.number
        return (1.0 - used) * age / (1.0 + used)

    def _write_again(self, name: bytes, place: _Place, lost: list[bytes]) -> None:
        """The file of the block is removed, but still open."""
        header, data = bytearray(_FIXED_BYTES + len(name)), bytearray(place.num_bytes)
        try:
            place.segment.file.read([header, memoryview(data)], place.offset)
            self._put(name, header, memoryview(data))
        except OSError:
            lost.append(name)

    def _write_index(self, segment: _Segment) -> None:
        """Of a segment that does not grow any more. Without it the headers are read at the next start."""
        with self._lock:
            places = [(name, self._places[name]) for name in segment.names]
        records = [(name, place.offset, place.num_bytes) for name, place in places]
        with contextlib.suppress(OSError):
            self._folder.write_index(segment.number, _make_index(segment.num_bytes, records))

    # ---- under the lock

    def _add(self, name: bytes, place: _Place) -> None:
        self._drop(name)
        self._places[name] = place
        place.segment.names[name] = None

    def _drop(self, name: bytes) -> None:
        place = self._places.pop(name, None)
        if place is None:
            return
        del place.segment.names[name]
        if name in self._used:
            self._used.remove(name)
            place.segment.used_bytes -= place.num_bytes

    # ---- at the start

    def _open(self, segment: _Segment) -> None:
        index = self._folder.read_index(segment.number)
        for name, place in _read_index(segment, index) or _records(segment):
            self._add(name, place)
        self._segments[segment.number] = segment


def _records(segment: _Segment) -> Iterator[tuple[bytes, _Place]]:
    """The whole records of a segment; sets its `num_bytes`."""
    size = segment.file.size
    while True:
        offset = segment.num_bytes
        header = bytearray(_FIXED_BYTES + _MAX_NAME_BYTES)
        found = _read_header(header[: segment.file.read([header], offset)])
        if found is None:
            return
        name, num_bytes, _ = found
        end = offset + _FIXED_BYTES + len(name) + num_bytes
        if end > size:
            return
        segment.num_bytes = end
        yield name, _Place(segment, offset, num_bytes)


def _make_index(num_bytes: int, records: Sequence[tuple[bytes, int, int]]) -> bytes:
    """num_bytes: of the segment. records: name, offset, and bytes of the block of each."""
    data = msgspec.msgpack.encode((num_bytes, records))
    return zlib.crc32(data).to_bytes(4, "little") + data


def _read_index(segment: _Segment, data: bytes | None) -> list[tuple[bytes, _Place]] | None:
    """data: as read. None if there is no whole index of the segment; else sets its `num_bytes`."""
    if data is None or int.from_bytes(data[:4], "little") != zlib.crc32(data[4:]):
        return None
    try:
        num_bytes, records = msgspec.msgpack.decode(data[4:], type=tuple[int, list[tuple[bytes, int, int]]])
    except msgspec.DecodeError:
        return None
    if num_bytes > segment.file.size:
        return None
    segment.num_bytes = num_bytes
    return [(name, _Place(segment, offset, size)) for name, offset, size in records]


def _read_record(name: bytes, place: _Place, into: memoryview) -> int | None:
    """Read a block; returns its digest, None if there is no such record. Raises: OSError."""
    header = bytearray(_FIXED_BYTES + len(name))
    if place.num_bytes != len(into):
        return None
    if place.segment.file.read([header, into], place.offset) != len(header) + len(into):
        return None
    found = _read_header(header)
    return None if found is None or found[0] != name else found[2]


def _make_header(name: bytes, num_bytes: int, digest: int) -> bytes:
    header = _HEADER.pack(_MAGIC, len(name), num_bytes, digest) + name
    return header + zlib.crc32(header).to_bytes(4, "little")


def _read_header(data: bytes | bytearray) -> tuple[bytes, int, int] | None:
    """(name, bytes of the block, digest); None if there is no whole header. data: may be longer."""
    if len(data) < _FIXED_BYTES:
        return None
    magic, name_bytes, num_bytes, digest = _HEADER.unpack_from(data)
    end = _HEADER.size + name_bytes
    if (
        magic != _MAGIC
        or len(data) < end + 4
        or int.from_bytes(data[end : end + 4], "little") != zlib.crc32(data[:end])
    ):
        return None
    return bytes(data[_HEADER.size : end]), num_bytes, digest
