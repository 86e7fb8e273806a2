"""A source in another process, to be stopped, continued and killed."""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path

from pdserve.kv_transfer.connector import BlockToRead
from pdserve.kv_transfer.pull.digest import block_digests
from tests.support.processes.forked_process import ForkedProcess

from .recorded_read import RecordedRead, make_pool

SEED, NUM_BLOCKS, BLOCK_BYTES = 11, 512, 128 << 10


class SourceProcess:
    """Serves all blocks of `pool`, in order. environ: on top of this process's own."""

    def __init__(self, connector: str, **environ: str) -> None:
        self.token = secrets.token_bytes(16)
        self.pool = make_pool(SEED, NUM_BLOCKS, BLOCK_BYTES)
        arguments = [connector, str(SEED), str(NUM_BLOCKS), str(BLOCK_BYTES), self.token.hex()]
        script = Path(__file__).with_name("stopped_source.py")
        said, output = os.pipe()
        self._process = ForkedProcess([str(script), *arguments], output=output, errors=2, environ=os.environ | environ)
        os.close(output)
        with os.fdopen(said, "rb") as lines:
            self.metadata = bytes.fromhex(lines.readline().strip().decode())
        digests = block_digests(self.pool, range(NUM_BLOCKS))
        self.blocks = [BlockToRead(index, digests[index], index, index) for index in range(NUM_BLOCKS)]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class SignalOnLanding(RecordedRead):
    """Signals the source from the transport thread as soon as something has landed: in the middle of the read."""

    def __init__(self, source: SourceProcess, number: signal.Signals) -> None:
        super().__init__(NUM_BLOCKS)
        self._source = source
        self._signal = number

    def landed(self, first: int, count: int) -> None:
        if not self.ranges:
            self._source.signal(self._signal)
        super().landed(first, count)
