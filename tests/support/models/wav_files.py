"""WAV files with any header."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def wav_file(
    samples: NDArray[Any],
    rate: int,
    *,
    kind: int = 1,
    bits: int = 16,
    channels: int = 1,
    extensible: bool = False,
    chunks: Sequence[tuple[bytes, bytes]] = (),
    header: Mapping[str, int] | None = None,
) -> bytes:
    """samples: `[n]` from -1 to 1, the same in all channels. kind: 1 for PCM, 3 for floats. chunks: before the samples.

    header: numbers in place of the right ones: `kind`, `channels`, `rate`, `block` and `bits`.
    """
    frames = np.repeat(np.asarray(samples, np.float64)[:, None], channels, axis=1)
    if kind == 3:
        data = frames.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = (np.round(frames * 127) + 128).astype(np.uint8).tobytes()
    elif bits == 24:
        wide = np.round(frames * (2**23 - 1)).astype("<i4")
        data = wide.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    else:
        data = np.round(frames * (2 ** (bits - 1) - 1)).astype(f"<i{bits // 8}").tobytes()
    said = {"kind": kind, "channels": channels, "rate": rate, "block": channels * bits // 8, "bits": bits} | dict(
        header or {}
    )
    first = 0xFFFE if extensible else said["kind"]
    given = struct.pack(
        "<HHIIHH",
        first,
        said["channels"],
        said["rate"],
        said["rate"] * said["block"] % 2**32,
        said["block"],
        said["bits"],
    )
    if extensible:
        guid = struct.pack("<H", said["kind"]) + bytes.fromhex("000000001000800000aa00389b71")
        given += struct.pack("<HHI", 22, said["bits"], 0) + guid
    parts = [(b"fmt ", given), *chunks, (b"data", data)]
    body = b"WAVE" + b"".join(
        name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2) for name, content in parts
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body
