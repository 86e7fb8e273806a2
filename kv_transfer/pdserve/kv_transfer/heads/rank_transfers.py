"""`RankTransfers`: the interface of the blocks of one shape on one rank, with their pool and its connectors, in this process or in
another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from pdserve.common.security.block_digest import BlockDigest
from pdserve.kv_transfer.connector import BlockRead, Grant, ReadListener, ReadOrder


class RankTransfers(Protocol):
    """Thread-safe. Numbers of blocks are those of the pool divided into `parts` (`PoolMemory.divided`)."""

    def metadata(self, connector: str) -> bytes:
        """As `BlockConnector.metadata`, of this rank's endpoint."""

    def grant(self, token: bytes, parts: int = 1) -> Grant:
        """As `BlockConnector.grant`, on all of this rank's connectors."""

    def read(self, connector: str, order: ReadOrder, listener: ReadListener) -> BlockRead:
        """As `BlockConnector.read`, into this rank's pool."""

    def digests(
        self, blocks: Sequence[int], indexes: Sequence[int], digest: BlockDigest, parts: int
    ) -> Future[list[int]]:
        """The digests of blocks of this rank's pool, which have these indexes in their transfer. May block while it computes.

        The future raises as `PoolMemory.digests`, and WorkerLost when the rank has ended.
        """

    def meet(self, worker_id: str, epoch: int) -> None:
        """As `SupportsPeerWarmup.meet`."""

    def forget(self, connector: str, metadata: bytes) -> None:
        """As `SupportsPeerEviction.forget`."""

    def close(self) -> None:
        """As `BlockConnector.close`, for all connectors of this rank."""
