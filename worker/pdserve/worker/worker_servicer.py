"""`WorkerServicer`: sends a worker's state to routers, and tells the worker the addresses of its peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from pdserve.common.address.peer_address import peer_host, verify_worker_id
from pdserve.common.errors import DeadlineExceeded, Draining, InvalidRequest, KeyMismatch, ProtocolMismatch
from pdserve.common.kv_events import KvCacheEvents
from pdserve.common.method_handler import Context
from pdserve.common.rate_limited_log import RateLimitedLog
from pdserve.common.request.known_adapters import NO_ADAPTERS, KnownAdapters
from pdserve.common.request.wire.messages import layout_to_wire, role_from_wire, role_to_wire
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.watch_proof import WatchAnswer
from pdserve.common.tasks.first_done import first_done
from pdserve.common.worker_identity import MAX_ROLE_DWELL_S, WorkerIdentity
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.kv_event_publisher import KvEventSubscriber
from pdserve.worker.peer_channels import PeerRule
from pdserve.worker.worker_roles import WorkerRoles

log = logging.getLogger(__name__)

LOAD_EVERY_S = 1.0
HANDSHAKE_S = 5.0
"""Seconds for a router to send each of the first two messages of a watch."""
TOO_LATE = "the proof of the deployment key did not arrive"
"""Begins the error of a handshake that took longer than `HANDSHAKE_S`."""
BLOCKS_EVERY_S = 0.02


@dataclass(eq=False)
class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves `WorkerService`."""

    _identity: WorkerIdentity
    _engine: EngineClient
    _roles: WorkerRoles
    _num_other_calls: Callable[[], int]
    """Returns the open calls of the role that the worker has not."""
    _peers: PeerRule
    """The rule by which this worker connects to a peer."""
    _key: DeploymentKey
    _drain: Callable[[], None]
    """Begins the worker's drain, after which its process ends; may be called again."""
    _warnings: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(log), init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    num_routers: int = field(default=0, init=False)
    """Watches that have proved the key."""

    def announce(self) -> None:
        """Send the load, and the adapters if they have changed, to routers now instead of within `LOAD_EVERY_S`."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Watch(
        self, request_iterator: AsyncIterator[worker_pb2.WatchRequest], context: Context
    ) -> AsyncIterator[worker_pb2.WatchEvent]:
        try:
            opening = await _next(request_iterator)
            answer = WatchAnswer(self._key, self._identity_message().SerializeToString(), opening)
            yield worker_pb2.WatchEvent(welcome=answer.welcome)
            answer.verify(await _next(request_iterator))
        except (DeadlineExceeded, KeyMismatch, ProtocolMismatch) as error:
            host = peer_host(context.peer())
            how = "timed out" if isinstance(error, DeadlineExceeded) else "is refused"
            self._warnings.warning(host, "a watch from %s %s: %s", host, how, error.message)
            raise
        with contextlib.ExitStack() as stack:
            follower = self._engine.cached_blocks.follow() if opening.blocks else None
            if follower is not None:
                stack.callback(follower.close)
            self.num_routers += 1
            stack.callback(self._left)
            async for event in self._events(follower):
                yield event

    def _left(self) -> None:
        self.num_routers -= 1

    async def _events(self, follower: KvEventSubscriber | None) -> AsyncIterator[worker_pb2.WatchEvent]:
        loop = asyncio.get_running_loop()
        sequence, adapters = 0, NO_ADAPTERS
        while True:
            announced, next_load = self._changed, loop.time() + LOAD_EVERY_S
            if adapters != self._engine.known_adapters:
                adapters = self._engine.known_adapters
                yield worker_pb2.WatchEvent(adapters=_adapters_message(adapters))
            yield worker_pb2.WatchEvent(load=self._load_message())
            while not announced.is_set() and loop.time() < next_load:
                waiting: list[Awaitable[object]] = (
                    [announced.wait()] if follower is None else [announced.wait(), follower.wait()]
                )
                await first_done(*waiting, timeout_s=next_load - loop.time())
                for change in () if follower is None else follower.take():
                    sequence += 1
                    yield worker_pb2.WatchEvent(blocks=_blocks_message(sequence, change))
                if not announced.is_set() and follower is not None:
                    # steps are shorter than this, so one message covers several
                    await asyncio.sleep(min(BLOCKS_EVERY_S, max(0.0, next_load - loop.time())))

    async def Meet(self, request: worker_pb2.MeetRequest, context: Context) -> worker_pb2.MeetResponse:
        verify_worker_id("worker_id", request.worker_id)
        self._peers.verify(request.address)
        self._engine.meet(request.worker_id, request.epoch, request.address)
        return worker_pb2.MeetResponse()

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        log.info("a router at %s asks for a drain", peer_host(context.peer()))
        self._drain()
        return worker_pb2.DrainResponse()

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Context) -> worker_pb2.SetRoleResponse:
        role, host = role_from_wire(request.role), peer_host(context.peer())
        if role is None:
            raise InvalidRequest(
                f"role is {request.role}, {worker_pb2.ROLE_PREFILL} (prefill) or "
                f"{worker_pb2.ROLE_DECODE} (decode) is needed",
                "role",
            )
        if not 0 <= request.dwell_s <= MAX_ROLE_DWELL_S:
            raise InvalidRequest(
                f"dwell_s is {request.dwell_s}, 0 to {MAX_ROLE_DWELL_S:g} seconds are possible", "dwell_s"
            )
        if self._engine.draining:
            raise Draining("the worker is draining")
        if self._roles.change(role, request.dwell_s):
            log.info("a router at %s has set the role: %s", host, role.value)
        return worker_pb2.SetRoleResponse()

    def _identity_message(self) -> worker_pb2.Identity:
        identity = self._identity
        fields = {name: getattr(identity, name) for name in WorkerIdentity.__struct_fields__}
        return worker_pb2.Identity(
            **fields | {"role": role_to_wire(identity.role), "layout": layout_to_wire(identity.layout)}
        )

    def _load_message(self) -> worker_pb2.Load:
        stats = self._engine.stats
        return worker_pb2.Load(
            engine_tick=self._engine.tick,
            draining=self._engine.draining,
            num_running=stats.num_running_reqs,
            num_waiting=stats.num_waiting_reqs,
            num_remote_kv=stats.num_remote_kv_reqs,
            num_waiting_tokens=stats.num_waiting_tokens,
            blocks_total=stats.num_blocks_total,
            blocks_free=stats.num_blocks_free,
            blocks_cached=stats.num_blocks_cached,
            blocks_in_use=stats.num_blocks_in_use,
            blocks_quarantined=stats.num_blocks_quarantined,
            num_preemptions=stats.num_preemptions,
            prompt_tokens_computed=stats.num_computed_prompt_tokens,
            prefill_tokens_per_s=self._engine.prefill_tokens_per_s,
            open_transfers=self._engine.transfer_counts.num_open,
            num_sessions=self._engine.num_sessions,
            max_sessions=self._engine.max_sessions,
            max_waiting=self._engine.max_waiting or 0,
            loaded_adapters=stats.loaded_loras,
            role=role_to_wire(self._roles.role),
            num_other_calls=self._num_other_calls(),
        )


async def _next(requests: AsyncIterator[worker_pb2.WatchRequest]) -> worker_pb2.WatchRequest:
    """The next message of a handshake. Raises: KeyMismatch if the stream ends first, DeadlineExceeded if it is too late."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            return await anext(requests)
    except StopAsyncIteration:
        raise KeyMismatch("the watch ended without a proof of the deployment key") from None
    except TimeoutError:
        # the machine may be busy or the network slow: the key may be right
        raise DeadlineExceeded(f"{TOO_LATE} within {HANDSHAKE_S:g} s") from None


def _adapters_message(adapters: KnownAdapters) -> worker_pb2.Adapters:
    entries = [worker_pb2.Adapter(name=name, fingerprint=fingerprint) for name, fingerprint in adapters.items()]
    return worker_pb2.Adapters(adapters=entries)


def _blocks_message(sequence: int, change: KvCacheEvents) -> worker_pb2.Blocks:
    return worker_pb2.Blocks(
        sequence=sequence,
        cleared=change.cleared,
        stored=b"".join(change.stored),
        removed=b"".join(change.removed),
    )
