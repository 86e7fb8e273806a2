"""`SoundFile`: a client's file of sound, whose header is checked before anything is decoded.

libsndfile reads it. A compressed file of a few kilobytes may hold hours of silence, so the number of samples comes from the header,
and no more are decoded.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.common.errors import InvalidRequest

MIN_RATE, MAX_RATE = 4_000, 192_000
"""Samples per second that are read."""
MAX_CHANNELS = 8
_FRAMES = 1 << 16
"""Frames that are decoded at once: all channels as numbers would be several times the file."""
_PCM = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")
_ENCODINGS: Mapping[str, tuple[str, ...]] = {
    "WAV": _PCM,
    "WAVEX": _PCM,
    "FLAC": ("PCM_S8", "PCM_16", "PCM_24"),
    "OGG": ("VORBIS", "OPUS"),
    "MP3": ("MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"),
}
"""Format -> encodings, by libsndfile's names; it knows many more, which few files need and any client could send."""
_NEEDED = "WAV of PCM or floats, FLAC, OGG and MP3 are read"
_STREAMED = (0, 2**32 - 1)
"""Sizes in the header of a WAV file that was written before its end was known."""


@dataclass(frozen=True, slots=True)
class SoundFile:
    """The header's numbers, and the file."""

    file: bytes
    num_frames: int
    """Samples of each channel; 0 if the header says none."""
    num_channels: int
    rate: int
    """Samples per second."""

    @classmethod
    def read(cls, file: bytes, field: str) -> SoundFile:
        """field: the client's name of the file. Raises: InvalidRequest for another format, and for a file that is cut."""
        _verify_begin(file, field)
        with _opened(file, field) as reader:
            if reader.subtype not in _ENCODINGS.get(reader.format, ()):
                raise InvalidRequest(f"{field} is {reader.format} with {reader.subtype}: {_NEEDED}", field)
            if reader.channels > MAX_CHANNELS:
                raise InvalidRequest(f"{field} has {reader.channels} channels, 1 to {MAX_CHANNELS} are read", field)
            if not MIN_RATE <= reader.samplerate <= MAX_RATE:
                raise InvalidRequest(
                    f"{field} has {reader.samplerate} samples per second, {MIN_RATE} to {MAX_RATE} are read", field
                )
            return cls(file, reader.frames, reader.channels, reader.samplerate)

    @property
    def seconds(self) -> float:
        return self.num_frames / self.rate

    def mono(self, field: str) -> NDArray[np.float32]:
        """`[num_frames]`: the mean of all channels; 1 is the largest value of PCM. Raises: InvalidRequest for a damaged file."""
        mixed = np.empty(self.num_frames, np.float32)
        with _opened(self.file, field) as reader:
            for first in range(0, self.num_frames, _FRAMES):
                place = mixed[first : first + _FRAMES]
                values: NDArray[np.float32] = reader.read(len(place), dtype="float32", always_2d=True)
                if len(values) < len(place):
                    raise InvalidRequest(
                        f"{field} is cut: its header says {self.num_frames} samples, {first + len(values)} are there",
                        field,
                    )
                # numbers beyond float32 become infinite or NaN, which the caller refuses
                with np.errstate(over="ignore", invalid="ignore"):
                    values.mean(axis=1, dtype=np.float32, out=place)
        return mixed


def _verify_begin(file: bytes, field: str) -> None:
    """Raises: InvalidRequest for what is none of the formats, by its first bytes, and for a WAV file that is cut."""
    if file[:4] == b"RIFF" and file[8:12] == b"WAVE":
        (size,) = struct.unpack_from("<I", file, 4)
        if size + 8 > len(file) and size not in _STREAMED:
            raise InvalidRequest(
                f"{field} is cut: its header says {size + 8} bytes, {len(file)} are there", field
            )  # fmt: skip
        return
    is_mpeg = file[:3] == b"ID3" or (len(file) > 1 and file[0] == 0xFF and file[1] >= 0xE0)
    if not is_mpeg and file[:4] not in (b"fLaC", b"OggS"):
        raise InvalidRequest(f"{field} is no file of sound that is read: {_NEEDED}", field)


@contextmanager
def _opened(file: bytes, field: str) -> Iterator[Any]:
    """A `soundfile.SoundFile`. Raises: InvalidRequest for what libsndfile cannot read, when it opens the file or later."""
    # imported here: a router of a model without sound does not need it
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(file)) as reader:
            yield reader
    except soundfile.LibsndfileError as error:
        raise InvalidRequest(f"{field} cannot be read: {error.error_string!s:.200}", field) from None
