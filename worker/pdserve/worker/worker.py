"""`Worker`: an engine, its transfers and its gRPC server, started and stopped together. What its process needs besides is in
`worker_process.py`.

It serves the calls of every role that it can take; its role is what routers may place at it (`worker_roles.py`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.common import clock
from pdserve.common.address.host_address import host_and_port
from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import ConfigError, Draining, PdServeError
from pdserve.common.net.health_probe import LIVE_SERVICE, READY_SERVICES
from pdserve.common.net.rpc import (
    MAX_STREAMS_PER_CONNECTION,
    abort_with,
    bind,
    make_server,
)
from pdserve.common.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from pdserve.common.request.known_adapters import KnownAdapters
from pdserve.common.security.call_guard import CallGuard
from pdserve.common.security.call_proof import CallVerifier
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.peer_message import COMMAND_BYTES, max_request_bytes
from pdserve.common.security.role_guard import CallerRoles, RoleGuard
from pdserve.common.security.tls import TlsIdentity
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.tasks.background_task import background_task
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.client.inproc_client import InprocClient
from pdserve.engine.sampling.sampler import SAMPLER_VERSION
from pdserve.engine.stats.stat_logger import load_stat_loggers
from pdserve.engine.stats.stat_recorder import StatRecorder
from pdserve.v1 import kv_source_pb2_grpc, step_stream_pb2_grpc, worker_pb2_grpc
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.fetch_servicer import FetchServicer
from pdserve.worker.lora_modules import LoraModules
from pdserve.worker.peer_channels import PeerRule
from pdserve.worker.redis_publisher import make_publisher
from pdserve.worker.request_reader import RequestReader
from pdserve.worker.source_reader import SourceReader
from pdserve.worker.step_stream.step_stream_servicer import BeginCall, StepStreamServicer
from pdserve.worker.telemetry.metrics_server import Health
from pdserve.worker.telemetry.worker_telemetry import WorkerTelemetry
from pdserve.worker.transfers.transfer_messages import TransferProperties, typed
from pdserve.worker.transfers.worker_transfers import WorkerTransfers
from pdserve.worker.worker_roles import WorkerRoles
from pdserve.worker.worker_servicer import WorkerServicer

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
HEALTH_EVERY_S = 0.25
TICK_STILL_S = 3.0
"""Seconds without progress of the engine's loop after which the worker reports `stuck`."""
_OTHER_STREAMS = 36
"""Further streams of a connection, in addition to one per sequence whose blocks another worker fetches."""
QUIET_S = 1.5
"""Seconds without a transfer after which nobody is expected to read what is cached in a worker that drains."""
LAST_WORDS_S = 0.5
"""Seconds for streams that a drain cuts off to report it to their routers."""
_STARTED_FOR_ONE_ROLE = ConfigError("it was started for one role")

MakeCalls = Callable[["Worker", WorkerSettings], Mapping[str, BeginCall]]
"""Returns the handlers of the calls that routers make at a worker of a role, by the kinds of `Submission.call`. The settings are
those in this role."""


class Worker:
    """One epoch of one worker. Made and used in the asyncio thread."""

    def __init__(
        self,
        settings: WorkerSettings,
        role: WorkerRole,
        engine: EngineCoreClient,
        deployment_key: DeploymentKey,
        calls: Mapping[WorkerRole, MakeCalls],
        tls: TlsIdentity | None = None,
        other: WorkerSettings | ConfigError = _STARTED_FOR_ONE_ROLE,
    ) -> None:
        """engine: not started yet, with its transfers. other: settings in the other role, or why the worker cannot take that."""
        self.settings = settings
        self.core = engine
        info = engine.info
        self._max_request_bytes = (
            MAX_MESSAGE_BYTES - COMMAND_BYTES
            if settings.enable_prompt_embeds or info.takes_media
            else max_request_bytes(info.max_model_len, info.vocab_size)
        )
        self._callers = CallerRoles(tls.server if tls is not None else None)
        verifier = CallVerifier(deployment_key, lambda: self.identity.key)
        self.server = make_server(
            RoleGuard(self._callers, abort_with),
            CallGuard(verifier),
            max_received_bytes=self._max_request_bytes + COMMAND_BYTES,
            max_streams=max(MAX_STREAMS_PER_CONNECTION, settings.max_num_seqs + _OTHER_STREAMS),
        )
        self.port = bind(self.server, settings.host, settings.port, tls.server if tls is not None else None)
        self.sources = SourceReader(settings.host)
        self.reader = RequestReader(
            BlockHasher(deployment_key, settings.block_size), info.max_model_len, info.vocab_size,
            info.images, info.encoder_decoder,
        )  # fmt: skip
        loggers = load_stat_loggers(settings.stat_loggers, info)
        engine.recorder = StatRecorder(loggers) if loggers else None
        self.engine = EngineClient(engine, settings.waiting_limit, settings.session_limit)
        self.identity = self._identity(role)
        self.roles = self._roles(role, other)
        engine.call_utility("begin_transfers", *self.identity.key)
        self._health = health.aio.HealthServicer()
        self.telemetry = WorkerTelemetry(self.identity, self.engine, self.roles)
        self.publisher = make_publisher(settings, self.identity, self.engine.cached_blocks, deployment_key)
        if (publisher := self.publisher) is not None:
            self.telemetry.watch_redis(publisher.breaker, publisher.counts)
        self._publishing: asyncio.Task[None] | None = None
        self._reporting_health: asyncio.Task[None] | None = None
        peers = PeerRule(tls is not None, settings.insecure)
        self.drain_asked = asyncio.Event()
        """Set when a router asks for a drain; whoever runs the worker then drains and stops it."""
        self._watch = WorkerServicer(
            self.identity, self.engine, self.roles, self._num_other_calls, peers, deployment_key, self._ask_drain
        )
        self.lora_modules = LoraModules(engine, settings.lora_modules or {}, settings.lora_dir, self._offer_adapters)
        self._following_adapters: asyncio.Task[None] | None = None
        self._calls = {
            role: made(self, self.roles.settings_in(role)) for role, made in calls.items() if self.roles.can_take(role)
        }
        self._step_streams = self._add_servicers()

    def _ask_drain(self) -> None:
        self.engine.draining = True  # so that no later report says otherwise
        self.drain_asked.set()

    def _offer_adapters(self, adapters: KnownAdapters) -> None:
        self.engine.known_adapters = adapters
        self._watch.announce()

    def _roles(self, role: WorkerRole, other: WorkerSettings | ConfigError) -> WorkerRoles:
        settings, objection = {role: self.settings}, ""
        if isinstance(other, ConfigError):
            objection = other.message
        elif role is WorkerRole.PREFILL and self.core.info.num_labels:
            objection = "the model has a classification head and generates no text"
        elif role is WorkerRole.PREFILL and other.drafts_with_model:
            objection = "speculative_config names a model, which a worker that is started for prefill does not load"
        else:
            settings[role.other] = other
        return WorkerRoles(role, settings, objection, self._role_changed)

    def _role_changed(self) -> None:
        settings = self.roles.settings
        self.engine.max_waiting, self.engine.max_sessions = settings.waiting_limit, settings.session_limit
        self._watch.announce()

    def _num_other_calls(self) -> int:
        return self._step_streams.num_calls(self._calls.get(self.roles.role.other, ()))

    def _identity(self, role: WorkerRole) -> WorkerIdentity:
        settings, info = self.settings, self.core.info
        transfers = typed(self.core.transfers, TransferProperties)
        prompts = info.encoder_decoder
        host = settings.peers_host
        address = host_and_port(host, self.port)
        return WorkerIdentity(
            worker_id=settings.name(self.port),
            epoch=secrets.randbits(64),
            protocol_version=PROTOCOL_VERSION,
            role=role,
            address=address,
            attach_address=host_and_port(host, transfers.attach_port or self.port),
            layout=info.layout,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            num_blocks=info.num_blocks,
            connectors=transfers.connectors,
            max_local_prefill_tokens=settings.limits.max_local_prefill_tokens,
            max_num_seqs=settings.max_num_seqs,
            hidden_size=0 if info.num_labels or prompts is not None else info.hidden_size,
            decoder_prompt_len=0 if prompts is None else prompts.num_decoder_prompt_tokens,
            num_labels=info.num_labels,
            sampler_version=SAMPLER_VERSION,
            data_parallel_rank=settings.data_parallel_rank,
            max_logprobs=settings.limits.max_logprobs,
            max_n_sequences=settings.limits.max_n_sequences,
            max_request_bytes=self._max_request_bytes,
        )

    def _add_servicers(self) -> StepStreamServicer:
        fetches = FetchServicer(self.reader, self.sources, self.engine, self.telemetry.fetched)
        handlers = {kind: begin for calls in self._calls.values() for kind, begin in calls.items()}
        step_streams = StepStreamServicer({**handlers, "fetch": fetches.begin_fetch})
        step_stream_pb2_grpc.add_StepStreamServiceServicer_to_server(step_streams, self.server)
        names = ["pdserve.v1.StepStreamService", *self._serve_source()]
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._watch, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names += ["pdserve.v1.WorkerService", health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.server)
        return step_streams

    def _serve_source(self) -> list[str]:
        """Add `KvSourceService`, by which other workers read blocks; returns its name, or none if the engine's process serves
        it."""
        if not isinstance(self.core, InprocClient):
            return []
        transfers = self.core.side.transfers
        assert isinstance(transfers, WorkerTransfers)
        servicer = transfers.attach_servicer(self._callers)
        kv_source_pb2_grpc.add_KvSourceServiceServicer_to_server(servicer, self.server)
        return ["pdserve.v1.KvSourceService"]

    async def start(self, before_serving: Callable[[], Awaitable[None]] | None = None) -> None:
        """Warm the engine up, then start serving. before_serving: awaited in between.

        Raises: ConfigError if an adapter of the settings cannot be used.
        """
        try:
            await asyncio.wrap_future(self.core.start(warm_up=True))
        except PdServeError as error:
            raise RuntimeError("the engine failed while it was warmed up") from error
        await self.lora_modules.start()
        if before_serving is not None:
            await before_serving()
        await self.server.start()
        self._reporting_health = background_task("health", self._report_health)
        if self.publisher is not None:
            self._publishing = background_task("publisher", self.publisher.run)
        if self.lora_modules.watches:
            self._following_adapters = background_task("adapters", self.lora_modules.run)

    @property
    def num_open(self) -> int:
        """What a drain still waits for: the largest of the numbers of requests, of transfers and of unread answers."""
        return max(self.engine.num_streams, self.engine.transfer_counts.num_expected, self._step_streams.num_waiting)

    def health(self) -> Health:
        """`ok` if the engine makes progress and the worker accepts requests; else why not."""
        engine, age_s = self.engine, self.engine.tick_age_s
        status = "ok"
        if engine.died.is_set():
            status = "dead"
        elif engine.draining:
            status = "draining"
        elif age_s >= TICK_STILL_S:
            status = "stuck"
        elif engine.transfer_counts.is_quarantine_full:
            status = "quarantined"
        return Health(ok=status == "ok", status=status, engine_tick=engine.tick, engine_tick_age_s=round(age_s, 3))

    async def _report_health(self) -> None:
        """gRPC's health follows `health`, within `HEALTH_EVERY_S`."""
        last_set: int | None = None
        states = health_pb2.HealthCheckResponse
        await self._health.set(LIVE_SERVICE, states.SERVING)
        while True:
            state = states.SERVING if self.health().ok else states.NOT_SERVING
            if state != last_set:
                last_set = state
                for service in READY_SERVICES:
                    await self._health.set(service, state)
            await asyncio.sleep(HEALTH_EVERY_S)

    @property
    def _may_be_read(self) -> bool:
        """True if a router may have others read what is cached here."""
        return self._watch.num_routers > 0 and self.engine.stats.num_blocks_cached > 0

    async def drain(self) -> None:
        """Accept nothing new, let running requests finish and others read what is cached, within `drain_s`; then revoke transfers
        and fail the rest."""
        self.engine.draining = True
        self._watch.announce()
        self.core.fail_idle_sessions(Draining("the worker is draining"))
        deadline = clock.monotonic() + self.settings.drain_s
        quiet_at = clock.monotonic() + QUIET_S if self._may_be_read else 0.0
        # three counters and a clock end this loop, not one event
        while (self.num_open or clock.monotonic() < quiet_at) and clock.monotonic() < deadline:
            if self.engine.transfer_counts.num_expected and self._may_be_read:
                quiet_at = clock.monotonic() + QUIET_S
            await asyncio.sleep(0.05)
        self.engine.revoke_transfers(Draining("the source is draining"))
        if self.engine.num_streams:
            # their routers learn the cause and place them elsewhere
            self.core.fail_requests(Draining("the worker has drained for as long as it may"))
            await asyncio.sleep(LAST_WORDS_S)

    async def stop(self) -> None:
        """End everything; no port stays open and no thread keeps running.

        If the engine has died, calls are cut off without grace, which a router treats as the death of the worker.
        """
        if self.publisher is not None:
            if self._publishing is not None:
                self._publishing.cancel()
                await asyncio.wait({self._publishing})
            await self.publisher.leave()
        for task in (self._reporting_health, self._following_adapters):
            if task is not None:
                task.cancel()
        if not self.engine.died.is_set():
            self._step_streams.close()
        await self.server.stop(None if self.engine.died.is_set() else STOP_GRACE_S)
        await self.engine.close()
        await self.telemetry.close()
