"""`HostTransfers`: all transfers of a worker, in the process that has its pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.common.errors import Draining
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.security.role_guard import CallerRoles
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.attach_servicer import AttachServicer
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer, SourceRef
from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, PeerId, SourceTransfer
from pdserve.kv_transfer.control.source_transfers import SourceTransfers
from pdserve.worker.engine_host.engine_host import EngineEvents, ReceivedBlocks, TransferCounts
from pdserve.worker.engine_host.transfer_progress import TransferProgress
from pdserve.worker.kv_transfer_manager import KvTransferManager
from pdserve.worker.peer_channels import PeerChannels

if TYPE_CHECKING:
    from pdserve.worker.engine_host.inproc_host import InprocHost

MakeAttach = Callable[[SourceTransfers, CallerRoles], AttachServicer]
MakeTransfers = Callable[["InprocHost", PeerId], "HostTransfers"]


@dataclass(eq=False)
class HostTransfers:
    """Used in the asyncio thread."""

    manager: KvTransferManager
    source_transfers: SourceTransfers
    connectors: ConnectorSet
    peers: PeerChannels
    events: Callable[[], EngineEvents]
    make_attach: MakeAttach
    _sources: dict[str, SourceTransfer] = field(default_factory=dict, init=False)
    """Request -> its transfer, until the request is released."""
    _receivers: dict[str, ReceiverTransfer] = field(default_factory=dict, init=False)
    """Request -> its transfer, until the engine has nothing of the request any more."""
    _is_source: bool = field(default=False, init=False)

    @property
    def counts(self) -> TransferCounts:
        manager = self.manager
        return TransferCounts(
            num_open=manager.num_open,
            num_expected=len(self.source_transfers),
            num_pinned=manager.num_pinned,
            num_fallbacks=manager.num_fallbacks,
            is_quarantine_full=manager.is_quarantine_full,
            num_ended=manager.num_ended,
        )

    def attach_servicer(self, callers: CallerRoles) -> AttachServicer:
        """The servicer of `Attach`: this worker is a source."""
        self._is_source = True
        return self.make_attach(self.source_transfers, callers)

    def meet(self, worker_id: str, epoch: int, address: str) -> None:
        """A peer has started: connect to it, and prepare to read from it unless this worker is the source."""
        self.peers.meet(address)
        if not self._is_source:
            self.connectors.meet(worker_id, epoch)

    def begin(self, request: EngineCoreRequest, transfer: ExpectedTransfer | SourceRef) -> None:
        """Begin the transfer of a request that is about to be queued.

        Raises: InvalidRequest, TransferFailed as `SourceTransfers.expect`, `KvTransferManager.source` and `receive`.
        """
        if isinstance(transfer, SourceRef):
            self._receive(request.request_id, transfer)
        else:
            self._expect(request, transfer)

    def _expect(self, request: EngineCoreRequest, expected: ExpectedTransfer) -> None:
        self.manager.verify_new(request.request_id)
        transfer = self.source_transfers.expect(expected)
        self.manager.source(request, transfer)
        self._sources[request.request_id] = transfer
        transfer.over.add_done_callback(
            lambda over: self.events().source_ended(request.request_id, over.result(), transfer.cause)
        )

    def _receive(self, request_id: str, source: SourceRef) -> None:
        landed = self.manager.receive(request_id, source)
        if (transfer := self.manager.transfer(request_id)) is not None:
            self._receivers[request_id] = transfer
            progress = TransferProgress(transfer, lambda awaits: self.events().receiving(request_id, awaits))
            landed.add_done_callback(lambda _: progress.close())
        landed.add_done_callback(lambda landed: self._landed(request_id, landed))

    def _landed(self, request_id: str, landed: asyncio.Future[ReceiverTransfer]) -> None:
        if not landed.cancelled():
            transfer = landed.result()
            self.events().blocks_landed(request_id, transfer.num_blocks, transfer.connector_name)

    def released(self, request_id: str) -> None:
        """The request's call has ended, and with it the transfer to its receiver."""
        if (transfer := self._sources.pop(request_id, None)) is not None:
            transfer.cancel()

    def take_received(self, request_id: str) -> ReceivedBlocks | None:
        """The transfer that delivered a released request's blocks; None without one, and when it was taken."""
        transfer = self._receivers.pop(request_id, None)
        return None if transfer is None else ReceivedBlocks.of(transfer)

    async def close(self) -> None:
        """End all transfers, close all connections. May be called again."""
        self.source_transfers.revoke_all(Draining("the source is leaving"))
        self.manager.close()
        await self.peers.close()
        await asyncio.to_thread(self.connectors.close)
