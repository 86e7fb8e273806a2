"""`measure_transfer`: the rate and latency of blocks between two processes of this machine, over the worker's own connector."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from pdserve.cli.profile.transfer_source import TOKEN, SourceAnswer, serve_blocks
from pdserve.cli.up.cluster_plan import ChildPlan
from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.common.kv_layout import BlockShape
from pdserve.common.security.block_digest import GMAC, KEY_BYTES, XXH3, BlockDigest, Gmac
from pdserve.kv_transfer.connector import BlockToRead, ReadOrder, ReadOutcome
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.simulator.profile import TransferTime

POOL_BYTES = 64 << 20
REPEATS = 9
ENDS_WITHIN_S = 120.0


class Arrival:
    """A `ReadListener` that waits for the end."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._cause: TransferFailed | None = None

    def landed(self, first: int, count: int) -> None:
        """No effect."""

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        self._cause = cause or (None if outcome is ReadOutcome.DONE else TransferFailed(f"a read was {outcome.value}"))
        self._ended.set()

    def wait(self) -> None:
        """Raises: TransferFailed."""
        if not self._ended.wait(ENDS_WITHIN_S):
            raise TransferFailed(f"a read of blocks did not end within {ENDS_WITHIN_S:g} s")
        if self._cause is not None:
            raise self._cause


def measure_transfer(plan: ChildPlan, shape: BlockShape) -> tuple[str, TransferTime]:
    """The connector's name, and its times. plan: the worker whose settings, environment and file the source has, too.

    Raises: ConfigError, TransferFailed.
    """
    num_blocks = max(2, POOL_BYTES // shape.block_bytes)
    config = [word for word in plan.flags if word != "--config"]
    command = [
        sys.executable, "-m", "pdserve.cli.profile.transfer_source", plan.role, msgspec.json.encode(shape).decode(),
        str(num_blocks), *config,
    ]  # fmt: skip
    connectors, pool = serve_blocks(plan.settings, shape, num_blocks)
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=plan.environ, start_new_session=True
        ) as source:
            assert source.stdin is not None
            assert source.stdout is not None
            try:
                metadata = _metadata(source.stdout.readline())
                name = next(name for name in connectors.names if name in metadata)
                return name, time_of_reads(connectors, pool, name, metadata[name], _digest(plan.settings.kv_digest))
            finally:
                source.stdin.close()
    finally:
        connectors.close()


def _metadata(line: bytes) -> dict[str, bytes]:
    """Raises: ConfigError."""
    try:
        answer = msgspec.json.decode(line, type=SourceAnswer)
    except msgspec.MsgspecError:
        raise ConfigError("the process from which blocks are read has ended; its output has the reason") from None
    if answer.problem:
        raise ConfigError(answer.problem)
    return answer.metadata


def _digest(setting: str) -> BlockDigest:
    """As workers of one machine choose it."""
    return Gmac(bytes(KEY_BYTES)) if setting == GMAC else XXH3


def time_of_reads(
    connectors: ConnectorSet, pool: PoolMemory, name: str, metadata: bytes, digest: BlockDigest
) -> TransferTime:
    """The line through the times of one block and of the whole pool."""
    # both pools are zeros
    digests = pool.digests(range(pool.num_blocks), range(pool.num_blocks), digest)
    blocks = [BlockToRead(number, value, number, number) for number, value in enumerate(digests)]

    def read_s(blocks: Sequence[BlockToRead]) -> float:
        arrival = Arrival()
        began = time.perf_counter()
        connectors.read(name, ReadOrder(metadata, TOKEN, blocks, digest), arrival)
        arrival.wait()
        return time.perf_counter() - began

    read_s(blocks)  # connects
    one_s, all_s = (statistics.median(read_s(part) for _ in range(REPEATS)) for part in (blocks[:1], blocks))
    block_s = max(1e-9, all_s - one_s) / (len(blocks) - 1)
    return TransferTime(bytes_per_s=pool.block_bytes / block_s, latency_s=max(0.0, one_s - block_s))
