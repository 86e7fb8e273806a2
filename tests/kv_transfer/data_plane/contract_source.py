"""Sources in another process for the contract suite: `contract_source FD`.

A source's pool is a file that both processes map, on the pretended device, and its connector, `tcp` or `nixl`, reads into a ring.
FD is a socket over which `ContractProcess` calls connectors: a JSON list per line, both ways. Calls are answered in order; what
listeners and grants hear comes between.
"""

from __future__ import annotations

import json
import mmap
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import BlockConnector, BlockRead, BlockToRead, Grant, ReadOrder, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from tests.support.engine.pretend_pool import reachable_by_nixl

from .device_ring import device_ring


class Sources:
    """All sources of this process, by number."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self._writing = threading.Lock()
        self._sources: dict[int, Source] = {}

    def serve(self) -> None:
        for line in self._lines:
            number, name, *arguments = json.loads(line)
            try:
                if name == "open":
                    self._sources[number] = Source(self.tell, *arguments)
                    self.tell(None, None)
                else:
                    self.tell(None, getattr(self._sources[number], f"do_{name}")(*arguments))
            except (ValueError, IndexError) as error:
                self.tell("raised", type(error).__name__, str(error))

    def tell(self, *event: Any) -> None:
        with self._writing:
            self._lines.write(json.dumps(event) + "\n")
            self._lines.flush()


class Source:
    """One connector, and what was asked of it."""

    def __init__(self, tell: Callable[..., None], kind: str, read_stall_s: float, path: str, block_bytes: int) -> None:
        self.tell = tell
        with Path(path).open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        pool = HostPool(memory, block_bytes, len(memory) // block_bytes)
        end = device_ring(kind, make_connector(kind, read_stall_s), pool)
        end.serve()
        self._connector = end.connector
        self._grants: dict[str, Grant] = {}
        self._reads: dict[int, BlockRead] = {}

    def do_metadata(self) -> str:
        return self._connector.metadata.hex()

    def do_grant(self, token: str) -> None:
        self._grants[token] = self._connector.grant(bytes.fromhex(token))

    def do_publish(self, token: str, first_index: int, blocks: list[int]) -> None:
        self._grants[token].publish(first_index, blocks)

    def do_close_grant(self, token: str, number: int) -> None:
        self._grants[token].close(lambda: self.tell("fenced", number))

    def do_read(self, number: int, metadata: str, token: str, blocks: list[list[int]]) -> None:
        wanted = [BlockToRead(*block) for block in blocks]
        listener = _Listener(self, number)
        order = ReadOrder(bytes.fromhex(metadata), bytes.fromhex(token), wanted)
        self._reads[number] = self._connector.read(order, listener)

    def do_cancel(self, number: int) -> None:
        self._reads[number].cancel()

    def do_close(self) -> None:
        self._connector.close()


class _Listener:
    def __init__(self, source: Source, number: int) -> None:
        self._source, self._number = source, number

    def landed(self, first: int, count: int) -> None:
        self._source.tell("landed", self._number, first, count)

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        self._source.tell("ended", self._number, outcome.value, cause and cause.message)


def main() -> None:
    lines = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
    with reachable_by_nixl():
        Sources(lines).serve()


def make_connector(kind: str, read_stall_s: float) -> BlockConnector:
    if kind == "tcp":
        from .tcp_link import small_settings

        return TcpConnector(small_settings(read_stall_s=read_stall_s))
    from pdserve.kv_transfer.nixl.nixl import NixlConnector

    from .nixl_link import nixl_settings

    return NixlConnector(nixl_settings(read_stall_s))


if __name__ == "__main__":
    main()
