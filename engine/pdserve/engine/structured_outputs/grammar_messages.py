"""Messages between a worker and its grammar processes, over sockets that preserve packets.

worker -> fork server   `Spawn` with the two sockets of a new process, `Kill`
fork server -> worker   `Ready`, once; `Exited`, `Broken`
worker -> process       control: `Open`; steps: operations, three int32 each
process -> worker       control: `Compiled`, `Opened`; steps: a `Record` per sequence and token

Every process is a child of the worker; no message leaves the machine.
"""

from __future__ import annotations

import enum
import mmap
import os
import socket
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve.common.request.structured_outputs import FIELD, StructuredOutputsParams

MAX_PACKET_BYTES = 192 << 10
"""Linux's default buffer of a local socket holds 208 KiB, its own bookkeeping included."""
REPLAY_TOKENS = 8192
"""Output tokens in one `Open`, at most."""

WHITESPACE_CHARS = 16
"""Default limit of white space in a row in JSON: a line break and an indent of seven levels by two characters, or three by four."""


WAIT_FACTOR = 3.0
"""Times the limit of CPU time for which a request waits for the compilation of its grammar: CPUs may be busy."""


class GrammarLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of one grammar; times are seconds of CPU time."""

    compile_s: float = 10.0
    """Limit for compiling it. Requests wait for `WAIT_FACTOR` times as long."""
    token_s: float = 0.05
    """Limit for accepting one token and computing the next mask."""
    kill_s: float = 0.25
    """Limit for one token after which the process is killed."""
    request_s: float = 1.0
    """Limit of all sequences of a request together; `per_token_s` adds to it."""
    per_token_s: float = 0.005
    """Addition to `request_s` for each token of the request's sequences."""
    memory_mib: int = 2048
    """Address space of the process in addition to its initial one."""
    whitespace_chars: int = WHITESPACE_CHARS
    """White space in a row in JSON; 0: no limit."""
    string_chars: int = 0
    """Characters of a string in JSON whose schema has no limit; 0: no limit."""


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Compile a grammar in a new process."""

    process: int
    params: StructuredOutputsParams
    limits: GrammarLimits


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a process in any state; no effect if it has ended."""

    process: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The fork server has read the vocabulary."""


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A process has ended. status: as `os.waitpid` gives it."""

    process: int
    status: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The fork server failed, and ends."""

    reason: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """Open a sequence, or send more of its existing output."""

    slot: int
    eos_token_ids: tuple[int, ...]
    output_token_ids: bytes
    """int32 each; at most `REPLAY_TOKENS`."""
    is_last: bool
    """True if no more output follows; the answer is `Opened`."""


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """First message of a process. error: for the client; empty if the grammar is compiled."""

    error: str = ""
    is_clients_fault: bool = True


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A sequence is open."""

    slot: int
    allowed: bytes
    """The first mask, as from `Grammar.allowed`; empty with an error."""
    has_ended: bool = False
    error: str = ""
    is_clients_fault: bool = True


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(packet: bytes, *kinds: type[msgspec.Struct]) -> Any:
    """Raises: msgspec.DecodeError."""
    union: Any = kinds[0]
    for kind in kinds[1:]:
        union |= kind
    return msgspec.msgpack.decode(packet, type=union)


class Operation(enum.IntEnum):
    """Requests on the steps socket: (operation, slot, value)."""

    ACCEPT = 0
    """value: the sequence's next token; answered with a `Record`."""
    FORK = 1
    """value: slot of the sequence whose state the new one copies."""
    CLOSE = 2
    DRAFT = 3
    """value: a token that may follow the last one and the drafts before it; answered with a `Record`. The sequence is accepted
    and confirmed no further."""
    CONFIRM = 4
    """value: number of drafts, from the first, that have become the sequence's tokens; the others are rolled back."""


class Outcome(enum.IntEnum):
    """Result of a token."""

    ACCEPTED = 0
    ENDED = 1
    """Accepted, and no token can follow."""
    REFUSED = 2
    """Not accepted, although the mask allowed it; of a draft: it has no mask after it, for any reason."""
    TOKEN_TOO_SLOW = 3
    REQUEST_TOO_SLOW = 4


HEADER = np.dtype([("slot", np.int32), ("outcome", np.int32), ("spent_us", np.int32)])
"""Header of a record; the mask of the next token follows it."""


def record_dtype(vocab_size: int) -> np.dtype[Any]:
    """One record: `HEADER`, then the mask in whole int32 words."""
    return np.dtype(
        [*((name, HEADER[name]) for name in HEADER.names or ()), ("allowed", np.uint8, mask_bytes(vocab_size))]
    )


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask."""
    return 4 * -(-vocab_size // 32)


def operations(packet: bytes) -> NDArray[np.int32]:
    """`[K, 3]`"""
    return np.frombuffer(packet, np.int32).reshape(-1, 3)


def packet_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that preserve packets; reading returns nothing after the other end was closed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def token_too_slow(spent_s: float, limits: GrammarLimits) -> str:
    """Message for the client."""
    return (
        f"{FIELD} takes too long to be matched: {spent_s:.2g} s of CPU time for one token, "
        f"at most {limits.token_s:g} s is possible"
    )


def request_too_slow(limits: GrammarLimits) -> str:
    """Message for the client."""
    return (
        f"{FIELD} takes too long to be matched: all sequences of a request may take {limits.request_s:g} s of CPU "
        f"time, and {limits.per_token_s * 1e3:g} ms more for each token"
    )


NOBODY = -1
NO_DRAFT = 0
"""In place of the number of a list of drafts: the record of a token."""


def map_progress(descriptor: int) -> NDArray[np.int32]:
    """`[2]`, in memory that worker and process share: the slot that is or was matched last, initially `NOBODY`; 1 while a draft
    is matched, else 0.

    The worker reads it after a process was killed, to find the sequence that caused it.
    """
    return np.frombuffer(mmap.mmap(descriptor, mmap.PAGESIZE), np.int32, 2)


def make_progress() -> tuple[int, NDArray[np.int32]]:
    """A descriptor to pass to the process and close, and the worker's view of the memory."""
    descriptor = os.memfd_create("grammar-progress", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    progress = map_progress(descriptor)
    progress[:] = NOBODY, 0
    return descriptor, progress
