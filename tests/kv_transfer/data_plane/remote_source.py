"""`RemoteSource`: a connector in another process, over whose pool both processes look; see `contract_source.py`."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import ReadListener, ReadOrder, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool
from tests.support.processes.forked_process import ForkedProcess
from tests.support.run.waiting import HANG_S

_ERRORS = {"ValueError": ValueError, "IndexError": IndexError}
_ROOT = Path(__file__).parents[3]


class ContractProcess:
    """The other process. Calls return when it has made them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._calling, self._answers = threading.Lock(), queue.SimpleQueue[Any]()
        self._heard: dict[int, Callable[..., None]] = {}
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rw")
        with theirs:
            self._process = ForkedProcess(
                ["-m", "tests.kv_transfer.data_plane.contract_source", str(theirs.fileno())],
                output=2,
                environ=os.environ | {"PYTHONPATH": str(_ROOT)},
                pass_fds=(theirs.fileno(),),
            )
        self._listening = threading.Thread(target=self._listen, name="contract-process", daemon=True)
        self._listening.start()

    def call(self, *call: Any) -> Any:
        """Raises: ValueError or IndexError, as the connector there does."""
        with self._calling:
            self._lines.write(json.dumps(call) + "\n")
            self._lines.flush()
            kind, *answer = self._answers.get(timeout=HANG_S)
        if kind == "raised":
            name, message = answer
            raise _ERRORS[name](message)
        return answer[0]

    def expect(self, heard: Callable[..., None]) -> int:
        """The number under which the other process reports events, to `heard`."""
        number = next(self._numbers)
        self._heard[number] = heard
        return number

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        assert self._process.wait(HANG_S) == 0
        self._listening.join(HANG_S)
        self._lines.close()
        self._socket.close()

    def _listen(self) -> None:
        for line in self._lines:
            event, *arguments = json.loads(line)
            if event in (None, "raised"):
                self._answers.put((event, *arguments))
            else:
                number, *rest = arguments
                self._heard[number](event, *rest)


class RemoteSource:
    """A `BlockConnector` of the other process, as far as the contract suite uses a source."""

    def __init__(self, process: ContractProcess, kind: str, pool: HostPool, read_stall_s: float) -> None:
        """pool: moves to memory that both processes map, with its bytes."""
        self.name = kind
        self.block_bytes = pool.block_bytes
        self._process = process
        self._source = process.expect(lambda *_: None)
        with tempfile.NamedTemporaryFile() as file:
            _share(pool, file.fileno())
            self._call("open", kind, read_stall_s, file.name, pool.block_bytes)
        self.metadata = bytes.fromhex(self._call("metadata"))

    def grant(self, token: bytes) -> _RemoteGrant:
        self._call("grant", token.hex())
        return _RemoteGrant(self, token)

    def read(self, order: ReadOrder, listener: ReadListener) -> _RemoteRead:
        """The digest is `XXH3`."""
        assert order.digest is XXH3

        def heard(event: str, *arguments: Any) -> None:
            if event == "landed":
                listener.landed(*arguments)
            else:
                outcome, cause = arguments
                listener.ended(ReadOutcome(outcome), cause and TransferFailed(cause))

        number = self._process.expect(heard)
        wanted = [[block.index, block.digest, block.local_block, block.location] for block in order.blocks]
        self._call("read", number, order.metadata.hex(), order.token.hex(), wanted)
        return _RemoteRead(self, number)

    def close(self) -> None:
        self._call("close")

    def publish(self, token: bytes, first_index: int, blocks: Sequence[int]) -> None:
        self._call("publish", token.hex(), first_index, list(blocks))

    def close_grant(self, token: bytes, on_fenced: Callable[[], None]) -> None:
        self._call("close_grant", token.hex(), self._process.expect(lambda _: on_fenced()))

    def cancel(self, number: int) -> None:
        self._call("cancel", number)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._process.call(self._source, name, *arguments)


class _RemoteGrant:
    def __init__(self, source: RemoteSource, token: bytes) -> None:
        self._source, self._token = source, token

    def publish(self, first_index: int, blocks: Sequence[int]) -> None:
        self._source.publish(self._token, first_index, blocks)

    def close(self, on_fenced: Callable[[], None]) -> None:
        self._source.close_grant(self._token, on_fenced)


class _RemoteRead:
    def __init__(self, source: RemoteSource, number: int) -> None:
        self._source, self._number = source, number

    def cancel(self) -> None:
        self._source.cancel(self._number)


def _share(pool: HostPool, descriptor: int) -> None:
    """Move a pool's bytes to a file that is mapped by whoever opens it."""
    os.ftruncate(descriptor, len(pool.view))
    memory = memoryview(mmap.mmap(descriptor, len(pool.view)))
    memory[:] = pool.view
    object.__setattr__(pool, "view", memory)  # the test has this pool already
