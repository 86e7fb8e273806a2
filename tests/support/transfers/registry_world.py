"""Workers without an engine, routers without requests, and discovery by Redis and by addresses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import grpc
import pytest

from pdserve.common.net.rpc import bind, make_server
from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.request.engine_types import SchedulerStats
from pdserve.common.request.known_adapters import NO_ADAPTERS
from pdserve.common.security.call_guard import CallGuard
from pdserve.common.security.call_proof import CallVerifier
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.router.placement.prefix_index import PrefixIndex
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.kv_event_subscription import FeedSource
from pdserve.router.workers.redis_discovery import RedisDirectory, make_directory
from pdserve.router.workers.worker_watcher import CompatibilityCheck
from pdserve.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from pdserve.worker.kv_event_publisher import KvEventPublisher
from pdserve.worker.peer_channels import PeerRule
from pdserve.worker.redis_publisher import RedisPublisher, make_publisher
from pdserve.worker.transfers.transfer_messages import TransferCounts
from pdserve.worker.worker_roles import WorkerRoles
from pdserve.worker.worker_servicer import WorkerServicer
from tests.support.models.kv_layouts import make_layout
from tests.support.processes.redis_server import RedisServer
from tests.support.processes.reserved_port import reserved_port
from tests.support.run.waiting import eventually

LAYOUT = make_layout(head_dim=8, model_fingerprint="ab" * 16)
TOKENIZER = "cd" * 16
EXPECTED = CompatibilityCheck(key=DEVELOPMENT_KEY, tokenizer_fingerprint=TOKENIZER)


def block(number: int) -> bytes:
    """A block's hash."""
    return number.to_bytes(8, "little")


class StandIn:
    """The part of an engine that `WorkerServicer` uses."""

    def __init__(self) -> None:
        self.cached_blocks = KvEventPublisher()
        self.stats = SchedulerStats(num_blocks_total=100, num_blocks_free=100)
        self.draining = False
        self.prefill_tokens_per_s = 0.0
        self.num_sessions = self.max_sessions = self.max_waiting = 0
        self.transfer_counts = TransferCounts()
        self.known_adapters = NO_ADAPTERS
        self.met: set[str] = set()
        """Addresses of peers."""
        self._tick = 0

    def meet(self, worker_id: str, epoch: int, address: str) -> None:
        self.met.add(address)

    @property
    def tick(self) -> int:
        self._tick += 1
        return self._tick


class Worker:
    """One life of a worker: its watch, and its publisher when there is a Redis."""

    def __init__(self, world: World, worker_id: str, role: WorkerRole, port: int, publishes: bool, host: str) -> None:
        self.engine = StandIn()
        guard = CallGuard(CallVerifier(DEVELOPMENT_KEY, lambda: self.key))
        self._server: grpc.aio.Server = make_server(guard)
        self.port = bind(self._server, "127.0.0.1", port)
        self.identity = WorkerIdentity(
            worker_id=worker_id,
            epoch=secrets.randbits(64),
            protocol_version=PROTOCOL_VERSION,
            role=role,
            address=f"{host}:{self.port}",
            attach_address=f"{host}:{self.port}",
            layout=LAYOUT,
            tokenizer_fingerprint=TOKENIZER,
            max_model_len=64,
            vocab_size=16,
            num_blocks=100,
            connectors=("local",),
            max_local_prefill_tokens=None,
            max_num_seqs=4,
            hidden_size=8,
            sampler_version=2,
        )
        peers = PeerRule(False, False)
        roles = WorkerRoles(role, {}, "it has one", lambda: None)
        self.servicer = WorkerServicer(
            self.identity,
            self.engine,  # type: ignore[arg-type]
            roles,
            lambda: 0,
            peers,
            DEVELOPMENT_KEY,
            lambda: None,
        )
        add_WorkerServiceServicer_to_server(self.servicer, self._server)
        self._publisher: RedisPublisher | None = None
        if world.has_redis and publishes:
            settings = WorkerSettings(redis=world.redis.url, redis_namespace=world.namespace, worker_id=worker_id)
            self._publisher = make_publisher(settings, self.identity, self.engine.cached_blocks, DEVELOPMENT_KEY)
        self._publishing: asyncio.Task[None] | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.identity.key

    @property
    def address(self) -> str:
        return self.identity.address

    @property
    def hashes(self) -> set[bytes]:
        return self.engine.cached_blocks.hashes

    def change(self, stored: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        self.engine.cached_blocks.apply(map(block, stored), map(block, removed))

    @property
    def publisher(self) -> RedisPublisher:
        """For tests with a Redis."""
        assert self._publisher is not None
        return self._publisher

    async def start(self) -> Worker:
        await self._server.start()
        if self._publisher is not None:
            self._publishing = asyncio.create_task(self._publisher.run())
        return self

    async def kill(self) -> None:
        """End as a killed process does, without deleting anything."""
        await self.stop_publishing()
        await self._server.stop(None)

    async def leave(self) -> None:
        """End as a drained process does."""
        await self.stop_publishing()
        if self._publisher is not None:
            await self._publisher.leave()
        await self.kill()

    async def stop_publishing(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait({self._publishing})


class Router:
    """Fleet and index."""

    def __init__(self, world: World, prefill: list[str], decode: list[str], finds: bool) -> None:
        self.index = PrefixIndex()
        self._directory: RedisDirectory | None = None
        if world.has_redis and finds:
            settings = RouterSettings(redis=world.redis.url, redis_namespace=world.namespace)
            self._directory = make_directory(settings, self.index, DEVELOPMENT_KEY)
        held = self.index if self._directory is None else None
        self.fleet = Fleet(prefill, decode, EXPECTED, held, self._directory)

    @property
    def directory(self) -> RedisDirectory:
        """For tests with a Redis."""
        assert self._directory is not None
        return self._directory

    def knows(self, worker: Worker) -> bool:
        """True if the worker may be given work."""
        role = WorkerRole(worker.identity.role_name)
        return worker.key in [live.key for live in self.fleet.workers(role)]

    def agrees(self, worker: Worker) -> bool:
        """True if the index has exactly the worker's blocks for it."""
        return self.index.num_blocks(worker.key) == len(worker.hashes) and all(
            self.index.match([held], [worker.key], 0.0)[worker.key] for held in worker.hashes
        )

    async def joined(self, *workers: Worker) -> None:
        await eventually(lambda: all(self.knows(worker) and self.agrees(worker) for worker in workers))


class World:
    """Workers and routers that find each other through `redis`, or by address when there is none."""

    namespace = "test"

    def __init__(self, redis: RedisServer | None) -> None:
        self._redis = redis
        self._workers: list[Worker] = []
        self._routers: list[Router] = []
        self._addresses: dict[WorkerRole, list[str]] = {WorkerRole.PREFILL: [], WorkerRole.DECODE: []}
        self._ports = ExitStack()
        """Workers come back at theirs."""

    @property
    def has_redis(self) -> bool:
        return self._redis is not None

    @property
    def redis(self) -> RedisServer:
        """For tests that need one."""
        assert self._redis is not None
        return self._redis

    async def worker(
        self,
        worker_id: str = "decode-0",
        role: WorkerRole = WorkerRole.DECODE,
        *,
        port: int = 0,
        publishes: bool = True,
        host: str = "127.0.0.1",
    ) -> Worker:
        """A started worker."""
        port = port or self._ports.enter_context(reserved_port())
        worker = Worker(self, worker_id, role, port, publishes, host)
        self._workers.append(worker)
        if worker.address not in self._addresses[role]:
            self._addresses[role].append(worker.address)
        return await worker.start()

    async def router(self, *, flags: bool = False, finds: bool = True) -> Router:
        """A started router. flags: give it the addresses of all workers made so far, as it needs without a Redis."""
        by_flags = flags or not self.has_redis
        prefill, decode = (
            self._addresses[role] if by_flags else [] for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
        )
        router = Router(self, prefill, decode, finds)
        self._routers.append(router)
        await router.fleet.__aenter__()
        return router

    async def close(self) -> None:
        for router in self._routers:
            await router.fleet.__aexit__()
        await asyncio.gather(*(worker.leave() for worker in self._workers))
        self._ports.close()


def source(router: Router, worker: Worker) -> FeedSource:
    """The current source of a worker's blocks at this router."""
    feed = router.directory._feeds.get(worker.key)
    return feed.source if feed is not None else FeedSource.NONE


async def settled(world: World, router: Router, *workers: Worker) -> None:
    """Everything agrees, through Redis, and a router that comes now finds the same there."""
    for each in (router, await world.router()):
        await eventually(partial(_agrees, each, workers))


def _agrees(router: Router, workers: Sequence[Worker]) -> bool:
    return all(
        source(router, worker) is FeedSource.REDIS and router.knows(worker) and router.agrees(worker)
        for worker in workers
    )


def lines(caplog: pytest.LogCaptureFixture, text: str, name: str = "") -> list[str]:
    return [record.message for record in caplog.records if text in record.message and name in record.name]
