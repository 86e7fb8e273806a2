"""`ConnectorSet`: the connectors of one worker, best first, and the choice of one for a transfer.

The receiver lists its connectors, and the source chooses the first that both have. If a read fails, the receiver continues with the
next one that both have, and avoids the failed one with that peer for `AVOID_S`.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from pdserve.common import clock
from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.common.security.block_digest import BlockDigest
from pdserve.kv_transfer.connector import (
    BlockConnector,
    BlockRead,
    Grant,
    ReadListener,
    ReadOrder,
    SupportsPeerEviction,
    SupportsPeerWarmup,
)
from pdserve.kv_transfer.heads.head_groups import RankPart
from pdserve.kv_transfer.heads.rank_transfers import RankTransfers
from pdserve.kv_transfer.memory.pool_memory import PoolMemory

log = logging.getLogger(__name__)

AVOID_S = 60.0
"""Seconds for which a connector that failed with a peer is avoided."""
MAX_AVOIDED = 1024


class ConnectorSet:
    """The connectors of one worker, and as `RankTransfers` those of its rank 0 for blocks of the first shape. Thread-safe.

    connectors: best first, at least one, with distinct names. optional: names of connectors that may fail to start.
    """

    def __init__(
        self,
        connectors: Sequence[BlockConnector],
        optional: Collection[str] = (),
        now: Callable[[], float] = clock.monotonic,
    ) -> None:
        if not connectors:
            raise ConfigError("a worker needs at least one connector")
        self._connectors = {connector.name: connector for connector in connectors}
        self._optional = frozenset(optional)
        self._now = now
        self._lock = threading.Lock()
        self._avoided: dict[tuple[str, str], float] = {}
        self._lives = PeerEndpoints()
        self._pool: PoolMemory | None = None
        self._others: dict[tuple[int, int], RankTransfers] = {}
        """(rank, shape) -> its blocks, without those of this object."""
        self.num_fallbacks = 0
        """Number of transfers that continued over another connector."""

    @property
    def names(self) -> tuple[str, ...]:
        """Best first."""
        return tuple(self._connectors)

    def get(self, name: str) -> BlockConnector | None:
        return self._connectors.get(name)

    def choose(self, wanted: Iterable[str]) -> BlockConnector | None:
        """The first of the receiver's connectors that this side has."""
        return next((self._connectors[name] for name in wanted if name in self._connectors), None)

    def serve(self, pool: PoolMemory, wrap: Callable[[BlockConnector], BlockConnector] = lambda plain: plain) -> None:
        """As `BlockConnector.serve`, for all; an optional connector that fails is removed.

        wrap: makes connectors that are used instead, for a pool that they do not read into themselves. Raises: ConfigError.
        """
        for name, plain in list(self._connectors.items()):
            connector = self._connectors[name] = wrap(plain)
            try:
                connector.serve(pool)
            except ConfigError as error:
                self._leave_out(name, error)
        self._pool = pool

    def join(self, others: Mapping[tuple[int, int], RankTransfers], names: Collection[str]) -> None:
        """Add the pools of other ranks and shapes, which serve as this one does. others: by (rank, shape). names: connectors that
        all of them have. Raises: ConfigError."""
        self._others.update(others)
        for name in [name for name in self._connectors if name not in names]:
            self._leave_out(name, ConfigError("another rank cannot use it"))

    def _leave_out(self, name: str, error: ConfigError) -> None:
        if name not in self._optional or len(self._connectors) == 1:
            raise error
        log.warning("the connector %s is left out: %s", name, error.message)
        self._connectors.pop(name).close()

    def meet(self, worker_id: str, epoch: int) -> None:
        """Prepare for a started peer; free the resources of its earlier epochs. Returns at once."""
        with self._lock:
            ended = self._lives.begun(worker_id, epoch)
        self._forget(ended)
        for connector in self._connectors.values():
            if isinstance(connector, SupportsPeerWarmup):
                connector.meet(worker_id, epoch)
        for other in self._others.values():
            other.meet(worker_id, epoch)

    # ---- RankTransfers of rank 0

    def of_part(self, part: RankPart) -> RankTransfers:
        """The blocks of one shape on one of this worker's ranks."""
        return self._others.get((part.rank, part.shape), self)

    def metadata(self, connector: str) -> bytes:
        """As `RankTransfers.metadata`."""
        return self._connectors[connector].metadata

    def grant(self, token: bytes, parts: int = 1) -> Grant:
        """A grant on every connector, since the receiver's connector is known only when it attaches, and may change.

        Raises: ValueError if the token is already granted.
        """
        return Grants([connector.grant(token, parts) for connector in self._connectors.values()])

    def read(self, connector: str, order: ReadOrder, listener: ReadListener) -> BlockRead:
        """As `RankTransfers.read`."""
        return self._connectors[connector].read(order, listener)

    def digests(
        self, blocks: Sequence[int], indexes: Sequence[int], digest: BlockDigest, parts: int
    ) -> Future[list[int]]:
        """As `RankTransfers.digests`; computed when this returns."""
        found: Future[list[int]] = Future()
        try:
            if self._pool is None:
                raise RuntimeError("serve() comes first")
            found.set_result(self._pool.divided(parts).digests(blocks, indexes, digest))
        except Exception as error:
            found.set_exception(error)
        return found

    def forget(self, connector: str, metadata: bytes) -> None:
        """As `RankTransfers.forget`."""
        known = self.get(connector)
        if known is not None and isinstance(known, SupportsPeerEviction):
            known.forget(metadata)

    # ---- peers

    def reached(self, worker_id: str, epoch: int, name: str, metadata: bytes, part: RankPart) -> None:
        """Record that this epoch of a worker is read over the connector `name`; its other epochs have ended. part: of the worker.

        Raises: TransferFailed if blocks have landed from another endpoint of this connector, rank and shape.
        """
        with self._lock:
            ended = self._lives.reached(worker_id, epoch, name, metadata, (part.rank, part.shape))
        self._forget(ended)

    def landed(self, worker_id: str, epoch: int, name: str) -> None:
        """Record that verified blocks have come from this epoch of a worker over the connector `name`."""
        with self._lock:
            self._lives.landed(worker_id, epoch, name)

    def lost(self, worker_id: str, epoch: int) -> None:
        """Free the resources of an epoch of a worker that no longer responds."""
        with self._lock:
            ended = self._lives.lost(worker_id, epoch)
        self._forget(ended)

    def _forget(self, ways: Mapping[Endpoint, bytes]) -> None:
        for (name, _), metadata in ways.items():
            for pool in (self, *self._others.values()):
                pool.forget(name, metadata)

    def failed(self, peer: str, name: str) -> None:
        """Record that a read from this peer failed over this connector and its transfer continues over another."""
        with self._lock:
            self.num_fallbacks += 1
            if len(self._avoided) >= MAX_AVOIDED:
                del self._avoided[next(iter(self._avoided))]
            self._avoided[peer, name] = self._now() + AVOID_S

    def avoided(self, peer: str) -> set[str]:
        """Connectors to avoid with this peer for now; never all connectors of this side."""
        with self._lock:
            now = self._now()
            avoided = {name for name in self._connectors if self._avoided.get((peer, name), now) > now}
        return avoided if len(avoided) < len(self._connectors) else set()

    def close(self) -> None:
        """As `BlockConnector.close`, for all."""
        for connector in self._connectors.values():
            connector.close()
        for other in self._others.values():
            other.close()


def join_shapes(of_shapes: Sequence[ConnectorSet]) -> ConnectorSet:
    """The connectors of the first shape, joined with those of the others. Raises: ConfigError if they have none in common."""
    first, *others = of_shapes
    names = {name for name in first.names if all(name in other.names for other in others)}
    first.join({(0, shape): other for shape, other in enumerate(others, 1)}, names)
    return first


class Grants:
    """A `Grant` on several connectors."""

    def __init__(self, grants: Sequence[Grant]) -> None:
        self._grants = grants

    def publish(self, first_index: int, blocks: Sequence[int]) -> None:
        """As `Grant.publish`."""
        for grant in self._grants:
            grant.publish(first_index, blocks)

    def close(self, on_fenced: Callable[[], None]) -> None:
        """As `Grant.close`; fenced when the grants of all connectors are."""
        countdown = _Countdown(len(self._grants), on_fenced)
        for grant in self._grants:
            grant.close(countdown.one_less)


class _Countdown:
    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count = count
        self._then = then
        self._lock = threading.Lock()

    def one_less(self) -> None:
        with self._lock:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self._then()


MAX_WORKERS = 256

Endpoint = tuple[str, tuple[int, int]]
"""(connector, (rank, shape)) of a peer."""


@dataclass(slots=True)
class _Life:
    epoch: int
    ways: dict[Endpoint, bytes] = field(default_factory=dict)
    proved: set[str] = field(default_factory=set)
    """Connectors over which blocks have landed."""


class PeerEndpoints:
    """Endpoints of each worker's current epoch, so that their resources can be freed after it.

    Above a limit, the least recently read worker is forgotten. Not thread-safe.
    """

    def __init__(self) -> None:
        self._lives: OrderedDict[str, _Life] = OrderedDict()

    def reached(
        self, worker_id: str, epoch: int, connector: str, metadata: bytes, pool: tuple[int, int] = (0, 0)
    ) -> dict[Endpoint, bytes]:
        """Record that an epoch is read at an endpoint. Returns the endpoints to free: those of another epoch, which has ended,
        and an endpoint that this one replaces because nothing has landed from it. Without that, a peer that names
        a wrong endpoint first would keep the worker out for as long as it lives.

        Raises: TransferFailed for a second endpoint after blocks have landed: each costs threads, agents, and a share of a ring.
        """
        ended = self.begun(worker_id, epoch)
        life = self._lives.setdefault(worker_id, _Life(epoch))
        known = life.ways.get((connector, pool), metadata)
        if known != metadata:
            if connector in life.proved:
                raise TransferFailed(
                    f"source {worker_id} has named another endpoint of its connector {connector} before"
                )
            ended[connector, pool] = known
        life.ways[connector, pool] = metadata
        self._lives.move_to_end(worker_id)
        if len(self._lives) > MAX_WORKERS:
            self._lives.popitem(last=False)
        return ended

    def landed(self, worker_id: str, epoch: int, connector: str) -> None:
        """Record that blocks have landed from the epoch's endpoints of a connector: from now on they are its only ones."""
        life = self._lives.get(worker_id)
        if life is not None and life.epoch == epoch:
            life.proved.add(connector)

    def begun(self, worker_id: str, epoch: int) -> dict[Endpoint, bytes]:
        """Record that an epoch has started. Returns the endpoints of another epoch of the worker, which has ended."""
        life = self._lives.get(worker_id)
        return {} if life is None or life.epoch == epoch else self._lives.pop(worker_id).ways

    def lost(self, worker_id: str, epoch: int) -> dict[Endpoint, bytes]:
        """Remove a peer that no longer responds. Returns its endpoints."""
        life = self._lives.get(worker_id)
        return self._lives.pop(worker_id).ways if life is not None and life.epoch == epoch else {}
