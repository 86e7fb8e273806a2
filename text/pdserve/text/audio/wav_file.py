"""`WavFile`: the sound of a WAV file, checked before anything is made of it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.common.errors import InvalidRequest
from pdserve.text.audio.resampling import MAX_RATE, MIN_RATE

MAX_CHANNELS = 8
_MAX_CHUNKS = 1024
_FRAMES = 1 << 16
"""Frames that are converted at once."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_FORMATS = {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)}
"""(kind, bits of a sample)"""
_GUID_END = bytes.fromhex("000000001000800000aa00389b71")
"""Behind the kind in the subformat of an extensible header."""


@dataclass(frozen=True, slots=True)
class WavFile:
    """The header's numbers, and the bytes of the samples."""

    kind: int
    bits: int
    num_channels: int
    rate: int
    """Samples per second."""
    data: memoryview

    @property
    def num_frames(self) -> int:
        """Samples of each channel."""
        return len(self.data) * 8 // (self.bits * self.num_channels)

    @classmethod
    def read(cls, file: bytes, field: str) -> WavFile:
        """field: the client's name of the file. Raises: InvalidRequest for another format, and for a file that is cut or empty."""
        if len(file) < 12 or file[:4] != b"RIFF" or file[8:12] != b"WAVE":
            raise InvalidRequest(
                f"{field} is no WAV file: PCM of 8, 16, 24 or 32 bits and floats of 32 or 64 bits are read", field
            )
        header: tuple[int, int, int, int] | None = None
        start = 12
        for _ in range(_MAX_CHUNKS):
            if start + 8 > len(file):
                break
            name, size = struct.unpack_from("<4sI", file, start)
            start += 8
            if start + size > len(file) and name in (b"fmt ", b"data"):
                raise InvalidRequest(
                    f"{field} is cut: its header says {size} bytes of {name.decode().strip()}, {len(file) - start} are there",
                    field,
                )
            if name == b"fmt ":
                header = _header(memoryview(file)[start : start + size], field)
            elif name == b"data":
                if header is None:
                    raise InvalidRequest(f"{field} has its samples before their format", field)
                kind, bits, num_channels, rate = header
                whole = size - size % (bits // 8 * num_channels)
                if not whole:
                    raise InvalidRequest(f"{field} has no samples", field)
                return cls(kind, bits, num_channels, rate, memoryview(file)[start : start + whole])
            start += size + size % 2
        raise InvalidRequest(f"{field} has no samples among its first {_MAX_CHUNKS} chunks", field)

    def mono(self) -> NDArray[np.float32]:
        """`[num_frames]`: the mean of all channels. 1 is the largest value of PCM."""
        mixed = np.empty(self.num_frames, np.float32)
        frame_bytes = self.bits // 8 * self.num_channels
        # all channels as numbers would be several times the file
        for first in range(0, self.num_frames, _FRAMES):
            # numbers beyond float32 become infinite or NaN, which the reader refuses
            with np.errstate(over="ignore", invalid="ignore"):
                values = self._values(self.data[first * frame_bytes : (first + _FRAMES) * frame_bytes])
                values.reshape(-1, self.num_channels).mean(axis=1, dtype=np.float32, out=mixed[first : first + _FRAMES])
        return mixed

    def _values(self, data: memoryview) -> NDArray[np.float32]:
        """Samples of all channels. data: whole frames."""
        if self.kind == _FLOAT:
            return np.frombuffer(data, f"<f{self.bits // 8}").astype(np.float32)
        if self.bits == 8:
            return (np.frombuffer(data, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
        if self.bits == 24:
            parts = np.frombuffer(data, np.uint8).reshape(-1, 3)
            wide = np.zeros((len(parts), 4), np.uint8)
            wide[:, 1:] = parts
            return wide.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
        return np.frombuffer(data, f"<i{self.bits // 8}").astype(np.float32) / np.float32(2 ** (self.bits - 1))


def _header(chunk: memoryview, field: str) -> tuple[int, int, int, int]:
    """(kind, bits, channels, rate) of a format chunk. Raises: InvalidRequest."""
    if len(chunk) < 16:
        raise InvalidRequest(f"{field} has a format of {len(chunk)} bytes, at least 16 are needed", field)
    kind, num_channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == _EXTENSIBLE and len(chunk) >= 40 and bytes(chunk[26:40]) == _GUID_END:
        kind = struct.unpack_from("<H", chunk, 24)[0]
    if (kind, bits) not in _FORMATS:
        raise InvalidRequest(
            f"{field} has format {kind} with {bits} bits: PCM (1) of 8, 16, 24 or 32 bits and floats (3) of 32 or 64 bits are read",
            field,
        )
    if not 1 <= num_channels <= MAX_CHANNELS:
        raise InvalidRequest(f"{field} has {num_channels} channels, 1 to {MAX_CHANNELS} are read", field)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidRequest(f"{field} has {rate} samples per second, {MIN_RATE} to {MAX_RATE} are read", field)
    if block != num_channels * bits // 8:
        raise InvalidRequest(
            f"{field} says {block} bytes for {num_channels} samples of {bits} bits, which have {num_channels * bits // 8}",
            field,
        )
    return kind, bits, num_channels, rate
