"""`python -m pdserve.kv_transfer.nixl.nixl_probe source|reader`: whether NIXL works between two processes of this machine.

source   prints a `NixlView`, then the metadata of a connector that serves a small pool, and serves until its input ends
reader   reads that metadata from its input, pulls the pool over NIXL, checks every block, and prints a `ReadView`

Processes of their own, since a UCX that does not fit the machine may abort whoever starts it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from importlib import metadata

import msgspec

from pdserve.common.child_answers import ChildAnswers
from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.block_digest import XXH3
from pdserve.kv_transfer.connector import BlockToRead, PoolMemory, ReadOutcome
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_agent import why_no_nixl
from pdserve.kv_transfer.nixl.ucx_transports import Ucx, UcxTransport

NUM_BLOCKS = 16
BLOCK_BYTES = 1 << 16
_TOKEN = bytes(16)
_READ_S = 20.0


class NixlView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """NIXL and UCX as a worker of this machine would find them."""

    why_not: str | None
    """Why there can be no agent here; None when one was made."""
    nixl: str
    """The package's version; empty when it is not installed."""
    ucx: str = ""
    tls: str = ""
    """`UCX_TLS` as a worker has it."""
    tls_is_given: bool = False
    """True if the environment says so; else it is our default."""
    found: list[UcxTransport] = []
    """Everything that UCX finds here."""
    used: list[UcxTransport] = []
    """The transports that `tls` allows."""


class ReadView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the read between two processes went."""

    why_not: str | None
    seconds: float = 0.0
    """Connecting included."""


def nixl_view() -> NixlView:
    """Look at what is here. UCX may abort this process."""
    try:
        version = metadata.version("nixl")
    except metadata.PackageNotFoundError:
        version = ""
    tls_is_given = "UCX_TLS" in os.environ
    reason = why_no_nixl()
    view = NixlView(why_not=reason, nixl=version, tls=os.environ.get("UCX_TLS", ""), tls_is_given=tls_is_given)
    if reason is not None:
        return view
    # UCX's own report is only for people: a library with another format costs us the list, not NIXL
    with contextlib.suppress(OSError, AttributeError):
        ucx = Ucx()
        view = msgspec.structs.replace(
            view, ucx=".".join(map(str, ucx.version)), found=ucx.transports("all"), used=ucx.transports()
        )
    return view


def _pool() -> PoolMemory:
    return PoolMemory(memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES)), BLOCK_BYTES, NUM_BLOCKS)


def _content(block: int) -> bytes:
    return bytes([block + 1]) * BLOCK_BYTES


def serve_source(answers: ChildAnswers) -> None:
    view = nixl_view()
    answers.say(view)
    if view.why_not is not None:
        return
    pool = _pool()
    for block in range(NUM_BLOCKS):
        pool.block(block)[:] = _content(block)
    connector = NixlConnector()
    connector.serve(pool)
    answers.say(connector.metadata)
    sys.stdin.buffer.read()
    connector.close()


class _Listener:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.why_not: str | None = "it did not end"

    def landed(self, first: int, count: int) -> None: ...

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        self.why_not = None if outcome is ReadOutcome.DONE else (cause.message if cause else outcome.value)
        self.over.set()


def read_source(answers: ChildAnswers) -> None:
    source = msgspec.json.decode(sys.stdin.buffer.readline(), type=bytes)
    connector = NixlConnector()
    connector.serve(_pool())
    blocks = [
        BlockToRead(index, XXH3.of(memoryview(_content(index)), index), index, index) for index in range(NUM_BLOCKS)
    ]
    listener = _Listener()
    started = time.monotonic()
    connector.read(source, _TOKEN, blocks, listener)
    listener.over.wait(_READ_S)
    answers.say(ReadView(listener.why_not, time.monotonic() - started))
    connector.close()


if __name__ == "__main__":
    {"source": serve_source, "reader": read_source}[sys.argv[1]](ChildAnswers())
