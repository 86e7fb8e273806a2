"""Messages of a socket between two processes of an engine: each is its length, then its bytes."""

from __future__ import annotations

import socket
import struct

from pdserve.common.errors import PeerError

MAX_FRAME_BYTES = 1 << 28
"""Log-probabilities of a prompt of 100,000 tokens with 20 candidates each take 30 MB."""
LENGTH = struct.Struct(">I")
"""In front of a message's bytes."""


def send_frame(peer: socket.socket, payload: bytes) -> None:
    """Blocks. Raises: OSError; PeerError for a payload that the peer would refuse, of which nothing was sent."""
    peer.sendall(packed_length(payload))
    peer.sendall(payload)


def receive_frame(peer: socket.socket) -> bytearray | None:
    """Blocks; None at the end of the socket. Raises: OSError; PeerError for a length beyond the limit."""
    head = _received(peer, LENGTH.size)
    if head is None:
        return None
    [length] = LENGTH.unpack(head)
    verify_length(length)
    return _received(peer, length)


def packed_length(payload: bytes) -> bytes:
    """Raises: PeerError for more bytes than a message may have."""
    verify_length(len(payload))
    return LENGTH.pack(len(payload))


def verify_length(length: int) -> None:
    """Raises: PeerError for more bytes than a message may have."""
    if length > MAX_FRAME_BYTES:
        raise PeerError(f"a message has {length} bytes, at most {MAX_FRAME_BYTES} can be sent")


def _received(peer: socket.socket, length: int) -> bytearray | None:
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        count = peer.recv_into(rest)
        if count == 0:
            return None
        rest = rest[count:]
    return data
