"""The bytes between two TCP connectors: a fixed request, a fixed answer, then the blocks themselves.

    request   magic 4s | version u16 | 0 u16 | serial u64 | token 16s | first_index u32 | count u32 | block_bytes u64
    answer    magic 4s | version u16 | status u16 | serial u64 | first_index u32 | count u32 | block_bytes u64
    blocks    count * block_bytes, only if the status is 0; any other status is a `ReadRefusal`

Big-endian. A connection carries one request at a time; the answer repeats the request's serial, so that bytes of another
answer are detected.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pdserve.kv_transfer.pull.read_grants import TOKEN_BYTES, ReadRefusal

VERSION = 1
_REQUEST_MAGIC = b"PDKr"
_ANSWER_MAGIC = b"PDKa"
_REQUEST = struct.Struct(f"!4sHHQ{TOKEN_BYTES}sIIQ")
_ANSWER = struct.Struct("!4sHHQIIQ")
_GRANTED = 0

MAX_INDEX = 0xFFFF_FFFF


class MalformedFrame(Exception):
    """Invalid bytes instead of a frame; the connection cannot be used any more."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request for `count` blocks from `first_index` on, of the token's transfer."""

    NUM_BYTES = _REQUEST.size

    serial: int
    token: bytes
    first_index: int
    count: int
    block_bytes: int

    def encode(self) -> bytes:
        return _REQUEST.pack(
            _REQUEST_MAGIC, VERSION, 0, self.serial, self.token, self.first_index, self.count, self.block_bytes
        )

    @staticmethod
    def decode(frame: bytes | bytearray) -> ReadRequest:
        """Decode and check a request. Raises: MalformedFrame."""
        magic, version, reserved, serial, token, first_index, count, block_bytes = _REQUEST.unpack(frame)
        if magic != _REQUEST_MAGIC or version != VERSION or reserved != 0:
            raise MalformedFrame("not a read request of this version")
        if count == 0 or first_index + count > MAX_INDEX:
            raise MalformedFrame(f"a read request for {count} blocks from index {first_index} on")
        return ReadRequest(serial, token, first_index, count, block_bytes)


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """Header of the blocks that follow, or refusal."""

    NUM_BYTES = _ANSWER.size

    serial: int
    refusal: ReadRefusal | None
    first_index: int
    count: int
    block_bytes: int

    @staticmethod
    def to_request(request: ReadRequest, refusal: ReadRefusal | None = None) -> ReadAnswer:
        """The answer to a request: its blocks, or a refusal without blocks."""
        count = 0 if refusal else request.count
        return ReadAnswer(request.serial, refusal, request.first_index, count, request.block_bytes)

    def encode(self) -> bytes:
        status = self.refusal.value if self.refusal else _GRANTED
        return _ANSWER.pack(_ANSWER_MAGIC, VERSION, status, self.serial, self.first_index, self.count, self.block_bytes)

    @staticmethod
    def decode(frame: bytes | bytearray, request: ReadRequest) -> ReadAnswer:
        """Decode an answer. Raises: MalformedFrame if it does not answer exactly this request."""
        magic, version, status, serial, first_index, count, block_bytes = _ANSWER.unpack(frame)
        if magic != _ANSWER_MAGIC or version != VERSION:
            raise MalformedFrame("not a read answer of this version")
        try:
            refusal = None if status == _GRANTED else ReadRefusal(status)
        except ValueError:
            raise MalformedFrame(f"a read answer of unknown status {status}") from None
        answer = ReadAnswer(serial, refusal, first_index, count, block_bytes)
        if answer != ReadAnswer.to_request(request, refusal):
            raise MalformedFrame(
                f"an answer of {count} blocks of {block_bytes} bytes from index {first_index} on (serial {serial}) "
                f"to a request of {request.count} blocks of {request.block_bytes} bytes from index "
                f"{request.first_index} on (serial {request.serial})"
            )
        return answer
