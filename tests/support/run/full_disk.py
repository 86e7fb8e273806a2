"""`full_disk`: a disk that has room for some bytes more."""

from __future__ import annotations

import errno
import os

import pytest


def full_disk(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> list[int]:
    """Let `LineFile` write so many bytes, the last write in part. Returns a list with the room that is left, which may be set."""
    real, room = os.write, [num_bytes]

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        num = real(file, data[: room[0]])
        room[0] -= num
        return num

    monkeypatch.setattr("pdserve.common.telemetry.line_writer.os.write", write)
    return room
