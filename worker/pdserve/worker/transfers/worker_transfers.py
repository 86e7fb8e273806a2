"""`WorkerTransfers`: all transfers of a worker, in the process that has its pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pdserve.common.errors import Draining, InvalidRequest, PdServeError
from pdserve.common.kv_layout import KvLayout
from pdserve.common.net.connection_watch import ConnectionWatch
from pdserve.common.net.rpc import MAX_PEER_CONNECTIONS_PER_ADDRESS, abort_with, bind, make_server
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest
from pdserve.common.security.call_guard import CallGuard
from pdserve.common.security.call_proof import CallSigner, CallVerifier
from pdserve.common.security.deployment_key import DATA_PLANE, DeploymentKey
from pdserve.common.security.role_guard import CallerRoles, RoleGuard
from pdserve.common.security.tls import TlsIdentity
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.tasks.background_task import background_task
from pdserve.engine.client.engine_side import EngineSide
from pdserve.engine.runner.loading.loaded_model import LoadedModel
from pdserve.engine.scheduler.kv_messages import Migrating, OutOfEngine
from pdserve.engine.scheduler_output import RequestFailure
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.attach_client import ReceiverInfo
from pdserve.kv_transfer.control.attach_servicer import AttachServicer
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer, SourceRef
from pdserve.kv_transfer.control.source_transfer import (
    ExpectedTransfer,
    LeaseLimits,
    PeerId,
    SourceResult,
    SourceTransfer,
    TransferTarget,
)
from pdserve.kv_transfer.control.source_transfers import SourceTransfers
from pdserve.kv_transfer.control.transfer_state import SourceState
from pdserve.kv_transfer.control.transfer_view import TransfersPage
from pdserve.kv_transfer.make_connectors import serve_pools
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.pull.digest_rule import DigestRule
from pdserve.v1 import kv_source_pb2_grpc
from pdserve.worker.kv_transfer_manager import KvTransferManager
from pdserve.worker.peer_channels import MAX_RECEIVED_BYTES, PeerChannels
from pdserve.worker.ranks.join_ranks import join_ranks
from pdserve.worker.transfers.transfer_messages import (
    BlocksLanded,
    ReceivedBlocks,
    Receiving,
    SourceEnded,
    TransferCounts,
    TransferProperties,
    typed,
)

log = logging.getLogger(__name__)

RECEIVING_EVERY_S = 1.0
"""Seconds between reports, and until the first: most transfers have ended by then."""

_OTHER_STREAMS = 36
"""Streams of a connection besides one per sequence whose blocks another worker fetches."""
_STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class TransferMemory:
    """The blocks that a worker's transfers read and write."""

    layout: KvLayout
    connectors: ConnectorSet
    """They serve the pools, those of other ranks included."""
    pools: Sequence[PoolMemory]
    """Rank 0's, by shape of blocks."""

    @classmethod
    def of(cls, settings: WorkerSettings, model: LoadedModel, tls: TlsIdentity | None = None) -> TransferMemory:
        """Give a model's pool to connectors. Raises: ConfigError; WorkerLost when another rank has ended."""
        connectors, pools = serve_pools(settings, model.pools, tls)
        if model.ranks is not None:
            join_ranks(connectors, model.ranks)
        return cls(model.layout, connectors, pools)


class WorkerTransfers:
    """An `EngineTransfers`. Made and used in the asyncio thread, but for `send`."""

    manager: KvTransferManager
    """From `begin_transfers` on."""
    source_transfers: SourceTransfers
    """From `begin_transfers` on."""
    _side: EngineSide
    _identity: PeerId

    def __init__(
        self,
        settings: WorkerSettings,
        memory: TransferMemory,
        deployment_key: DeploymentKey,
        tls: TlsIdentity | None = None,
    ) -> None:
        self._settings = settings
        self._layout = memory.layout
        self._deployment_key = deployment_key
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self.connectors, self._pools = memory.connectors, memory.pools
        self._digests = DigestRule(
            settings.kv_digest,
            lambda context: deployment_key.derive(DATA_PLANE, context),
            clear=tls is None or any(name != "tcp" for name in self.connectors.names),
        )
        client_tls = tls.client if tls is not None else None
        self.peers = PeerChannels(CallSigner(deployment_key), client_tls, insecure=settings.insecure)
        self.utilities: Mapping[str, Callable[..., object]] = {
            "begin_transfers": self.begin_transfers,
            "get_transfers": self.transfers,
            "meet": self.meet,
            "revoke_transfers": self.revoke_transfers,
        }
        self._attach_server: AttachServer | None = None
        self._has_begun = False
        self.renewal: asyncio.Task[None] | None = None
        """Renews `tls` until `close`, in a process of the engine's own."""
        self._sources: dict[str, list[SourceTransfer]] = {}
        """Request -> its transfers, until the request is released."""
        self._migrating: dict[str, dict[int, TransferTarget]] = {}
        """Request -> index of a sequence that another worker is to continue -> where its blocks go."""
        self._receivers: dict[str, ReceiverTransfer] = {}
        """Request -> its transfer, until the engine has nothing of the request any more."""

    def bind(self, side: EngineSide) -> None:
        self._side = side

    def serve_attach(self) -> None:
        """Take a port of this process's own for `Attach`; `begin_transfers` opens it. Raises: ConfigError."""
        self._attach_server = AttachServer(self._settings, self._deployment_key, self._tls)

    @property
    def properties(self) -> TransferProperties:
        port = 0 if self._attach_server is None else self._attach_server.port
        return TransferProperties(self.connectors.names, port)

    @property
    def state(self) -> TransferCounts:
        if not self._has_begun:
            return TransferCounts()
        manager = self.manager
        return TransferCounts(
            num_open=manager.num_open,
            num_expected=len(self.source_transfers),
            num_pinned=manager.num_pinned,
            num_fallbacks=manager.num_fallbacks,
            is_quarantine_full=manager.is_quarantine_full,
            num_ended=manager.num_ended,
        )

    # ---- utilities

    def begin_transfers(self, worker_id: str, epoch: int) -> None:
        """The worker has this identity; before the engine starts."""
        settings = self._settings
        self._identity = PeerId(worker_id, epoch)
        receiving = ReceiverInfo(
            identity=self._identity,
            layout=self._layout,
            connectors=self.connectors.names,
            engine_tick=self._tick,
            attach_timeout_s=settings.limits.attach_timeout_s,
            grace_s=settings.limits.lease_grace_s,
            digests=self._digests,
        )
        self.manager = KvTransferManager(self._side, self.connectors, self._pools, self.peers, receiving)
        limits = LeaseLimits(
            settings.limits.attach_timeout_s, settings.limits.lease_grace_s, settings.limits.lease_max_s
        )
        self.source_transfers = SourceTransfers(self.connectors, limits, self.manager)
        self._has_begun = True
        if self._attach_server is not None:
            self._attach_server.start(self._identity, self.attach_servicer)

    def _tick(self) -> int:
        return self._side.core.heartbeat.tick

    def attach_servicer(self, callers: CallerRoles) -> AttachServicer:
        """The servicer of `Attach`, after `begin_transfers`."""
        return AttachServicer(
            self.source_transfers,
            self.connectors,
            self._layout,
            self._identity.epoch,
            self._tick,
            self._digests,
            callers,
        )

    def transfers(self) -> TransfersPage:
        """Transfers under way, and those that ended recently."""
        return self.manager.transfers()

    def meet(self, worker_id: str, epoch: int, address: str) -> None:
        """A peer has started: connect to it, and prepare to read from it. Raises: InvalidRequest for an address that `PeerChannels`
        does not allow."""
        self.peers.meet(address)
        self.connectors.meet(worker_id, epoch)

    def revoke_transfers(self, code: str, message: str) -> None:
        """End all transfers as source, with an error."""
        self.source_transfers.revoke_all(RequestFailure(code, message).error())

    # ---- requests

    def begin(self, request: EngineCoreRequest, transfer: object) -> None:
        """Raises: InvalidRequest, TransferFailed as `SourceTransfers.expect`, `KvTransferManager.source` and `receive`."""
        if transfer is not None and not isinstance(transfer, ExpectedTransfer | SourceRef):
            # from another process
            try:
                transfer = msgspec.convert(transfer, ExpectedTransfer | SourceRef)
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"the transfer cannot be read: {error}") from error
        if isinstance(transfer, SourceRef):
            self._receive(request.request_id, transfer)
        elif isinstance(transfer, ExpectedTransfer):
            self._expect(request, transfer)
        if request.block_source is not None:
            self.manager.fetch(request, request.block_source)
            if (receiver := self.manager.transfer(request.request_id)) is not None:
                self._receivers[request.request_id] = receiver

    def _expect(self, request: EngineCoreRequest, expected: ExpectedTransfer) -> None:
        self.manager.verify_new(request.request_id)
        transfer = self.source_transfers.expect(expected)
        self.manager.source(request, transfer)
        self._follow(request.request_id, transfer)

    def _follow(self, request_id: str, transfer: SourceTransfer, index: int | None = None) -> None:
        """Report a transfer's end, and end it with its request. index: of the sequence that has migrated."""
        self._sources.setdefault(request_id, []).append(transfer)

        def ended(over: asyncio.Future[SourceState]) -> None:
            cause = None if transfer.cause is None else RequestFailure.of(transfer.cause)
            self._side.transfer_event(request_id, SourceEnded(over.result(), cause, index))

        transfer.over.add_done_callback(ended)

    def migrate(self, request_id: str, index: int, receiver: object) -> None:
        self._migrating.setdefault(request_id, {})[index] = typed(receiver, TransferTarget)

    def _migrated(self, message: Migrating) -> None:
        """A sequence has ended for another worker to continue: its blocks can be read."""
        target = self._migrating.get(message.core_request_id, {}).pop(message.index, None)
        if target is None:
            self.manager.forget(message.request_id)  # its call has ended meanwhile
            return
        migration = message.migration
        expected = ExpectedTransfer.of_tokens(
            target,
            message.request_id,
            migration.request_digest,
            self._layout,
            migration.num_tokens,
            without_draft_head=migration.without_draft_head,
        )
        try:
            self.manager.verify_new(message.request_id)
            transfer = self.source_transfers.expect(expected)
        except PdServeError as error:
            self.manager.forget(message.request_id)
            failed = SourceEnded(SourceState.FAILED, RequestFailure.of(error), message.index)
            self._side.transfer_event(message.core_request_id, failed)
            return
        self.manager.send(transfer, SourceResult(migration.num_sent_tokens, (migration.token_id,)))
        self._follow(message.core_request_id, transfer, message.index)

    def _receive(self, request_id: str, source: SourceRef) -> None:
        landed = self.manager.receive(request_id, source)
        if (transfer := self.manager.transfer(request_id)) is not None:
            self._receivers[request_id] = transfer
            progress = TransferProgress(
                transfer, lambda awaits: self._side.transfer_event(request_id, Receiving(awaits))
            )
            landed.add_done_callback(lambda _: progress.close())
        landed.add_done_callback(lambda landed: self._landed(request_id, landed))

    def _landed(self, request_id: str, landed: asyncio.Future[ReceiverTransfer]) -> None:
        if not landed.cancelled():
            transfer = landed.result()
            event = BlocksLanded(transfer.num_blocks, transfer.connector_name)
            self._side.transfer_event(request_id, event)

    def released(self, request_id: str) -> None:
        self._migrating.pop(request_id, None)
        for transfer in self._sources.pop(request_id, ()):
            transfer.cancel()

    def take_received(self, request_id: str) -> ReceivedBlocks | None:
        transfer = self._receivers.pop(request_id, None)
        return None if transfer is None else ReceivedBlocks.of(transfer)

    # ---- out of the engine

    def send(self, message: OutOfEngine) -> None:
        """Called by the engine thread; returns at once."""
        try:
            self._loop.call_soon_threadsafe(self._on_message, message)
        except RuntimeError:
            log.debug("the event loop has closed; %s is lost with the process", type(message).__name__)

    def _on_message(self, message: OutOfEngine) -> None:
        if isinstance(message, Migrating):
            self._migrated(message)
        else:
            self.manager.on_message(message)

    def outputs(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self.manager.on_output(output)

    async def close(self) -> None:
        if self._has_begun:
            self.source_transfers.revoke_all(Draining("the source is leaving"))
            self.manager.close()
        if self._attach_server is not None:
            await self._attach_server.close()
        if self.renewal is not None:
            self.renewal.cancel()
        await self.peers.close()
        await asyncio.to_thread(self.connectors.close)


class AttachServer:
    """Serves `Attach` on a port of its own, with the worker's identity, key and certificates: of an engine in a process of its
    own."""

    def __init__(self, settings: WorkerSettings, deployment_key: DeploymentKey, tls: TlsIdentity | None) -> None:
        """Take the port. Raises: ConfigError when it is in use."""
        self._callers = CallerRoles(tls.server if tls is not None else None)
        self._identity: PeerId | None = None
        self._server = make_server(
            RoleGuard(self._callers, abort_with),
            CallGuard(CallVerifier(deployment_key, self._key)),
            max_received_bytes=MAX_RECEIVED_BYTES,
            max_streams=settings.max_num_seqs + _OTHER_STREAMS,
        )
        tls_server = tls.server if tls is not None else None
        self.port = bind(self._server, settings.host, settings.attach_port, tls_server)
        self._tasks: list[asyncio.Future[None]] = []

    def _key(self) -> tuple[str, int]:
        assert self._identity is not None
        return self._identity.key

    def start(self, identity: PeerId, make_servicer: Callable[[CallerRoles], AttachServicer]) -> None:
        """Answer peers."""
        self._identity = identity
        kv_source_pb2_grpc.add_KvSourceServiceServicer_to_server(make_servicer(self._callers), self._server)
        connections = ConnectionWatch(self.port, MAX_PEER_CONNECTIONS_PER_ADDRESS)
        self._tasks = [
            asyncio.ensure_future(self._server.start()),
            background_task("connections", connections.run),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._server.stop(_STOP_GRACE_S)


class TransferProgress:
    """For the router of a request: reports when its transfer has asked for its blocks, when it begins or ceases to wait for its
    source, and while that publishes. Runs in the asyncio thread."""

    def __init__(self, transfer: ReceiverTransfer, report: Callable[[bool], None]) -> None:
        """report: called with `ReceiverTransfer.awaits_source`, at most once per `RECEIVING_EVERY_S`."""
        self._transfer = transfer
        self._report = report
        self._reported = (False, 0)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(RECEIVING_EVERY_S, self._look)

    def close(self) -> None:
        """Report nothing more."""
        self._timer.cancel()

    def _look(self) -> None:
        transfer = self._transfer
        if transfer.is_ending:
            return
        self._timer = self._loop.call_later(RECEIVING_EVERY_S, self._look)
        awaits = transfer.awaits_source
        now = (awaits, transfer.num_published if awaits else 0)
        if now != self._reported:
            self._reported = now
            self._report(awaits)
