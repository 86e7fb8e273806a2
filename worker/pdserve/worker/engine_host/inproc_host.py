"""`InprocHost`: an `EngineHost` in this process: the engine in a thread, transfers in the asyncio thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc

from pdserve.common.errors import ConfigError, PdServeError, WorkerLost
from pdserve.common.request.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
    StreamingUpdate,
)
from pdserve.common.security.role_guard import CallerRoles
from pdserve.common.tasks.first_done import first_done
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_thread import ENGINE_FAILED, EngineThread, in_event_loop
from pdserve.engine.lora.lora_runner import Adapters
from pdserve.engine.output_stream import refused_outputs
from pdserve.engine.request import Request
from pdserve.engine.request_verifier import RequestVerifier
from pdserve.engine.scheduler.kv_messages import IntoEngine
from pdserve.kv_transfer.control.attach_servicer import AttachServicer
from pdserve.kv_transfer.control.receiver_transfer import SourceRef
from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, PeerId
from pdserve.kv_transfer.control.transfer_view import TransfersPage
from pdserve.v1 import kv_source_pb2_grpc
from pdserve.worker.engine_host.engine_host import (
    AbortedRequest,
    EngineEvents,
    HostInfo,
    RequestEnd,
    TransferCounts,
)
from pdserve.worker.engine_host.host_transfers import HostTransfers, MakeTransfers
from pdserve.worker.engine_watchdog import dump_stacks

END_S = 30.0
"""Seconds for the engine's thread to end its last step."""


class InprocHost:
    """Used in the asyncio thread."""

    def __init__(
        self,
        core: EngineCore,
        num_threads: int = 1,
        cpu_core: int | None = None,
        info: HostInfo | None = None,
        make_transfers: MakeTransfers | None = None,
        close_model: Callable[[], None] | None = None,
    ) -> None:
        """make_transfers: None for an engine without transfers, for tests. close_model: called last, when no step runs any more."""
        self.core = core
        self._info = info
        self._make_transfers = make_transfers
        self._close_model = close_model
        self.kv_transfers: HostTransfers | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(core, in_event_loop(self._loop), self._dispatch, self._died, num_threads, cpu_core)
        self.stats = SchedulerStats(num_blocks_total=core.config.num_blocks, num_blocks_free=core.config.num_blocks)
        self._num_unseen = 0
        """Requests that the engine has taken in and the subscriber has not submitted, less those that were refused here."""
        self._events: EngineEvents | None = None
        self._on_output: Callable[[EngineCoreOutput], None] | None = None
        self.dead = asyncio.Event()

    @property
    def info(self) -> HostInfo:
        if self._info is None:
            raise RuntimeError("an engine without a model folder has no info")
        return self._info

    @property
    def verifier(self) -> RequestVerifier:
        return self.core.verifier

    @property
    def tick(self) -> int:
        return self.core.heartbeat.tick

    @property
    def ticked_at(self) -> float:
        return self.core.heartbeat.ticked_at

    @property
    def counts(self) -> TransferCounts:
        return TransferCounts() if self.kv_transfers is None else self.kv_transfers.counts

    def subscribe(self, events: EngineEvents) -> None:
        self._events = events

    def begin_transfers(self, identity: PeerId) -> None:
        if self._make_transfers is not None:
            self.kv_transfers = self._make_transfers(self, identity)

    def add_attach(self, server: grpc.aio.Server, callers: CallerRoles) -> None:
        kv_source_pb2_grpc.add_KvSourceServiceServicer_to_server(self.attach_servicer(callers), server)

    def attach_servicer(self, callers: CallerRoles) -> AttachServicer:
        """The servicer of `Attach`: this worker is a source."""
        return self._transfers.attach_servicer(callers)

    async def start(self) -> None:
        self.start_thread()
        warmed = asyncio.Event()
        self.call(lambda core: core.warm_up())
        self.call(lambda _: self._loop.call_soon_threadsafe(warmed.set))
        await first_done(warmed.wait(), self.dead.wait())

    def start_thread(self) -> None:
        """Start the engine's thread without warming it up."""
        self._thread.start()

    async def close(self) -> None:
        if self.kv_transfers is not None:
            await self.kv_transfers.close()
        await asyncio.to_thread(self.stop_thread)

    def stop_thread(self) -> None:
        """End the thread and what compiles and holds grammars; waits."""
        self._thread.stop()
        self.core.scheduler.grammars.close()
        if self._close_model is not None:
            self._close_model()

    def kill(self) -> None:
        dump_stacks()

    # ---- commands

    def add_request(self, request: EngineCoreRequest, transfer: ExpectedTransfer | SourceRef | None) -> None:
        if transfer is not None:
            try:
                self._transfers.begin(request, transfer)
            except PdServeError as error:
                self.refuse(request.request_id, error)
                return
        self.call(lambda core: core.add_request(request))

    def refuse(self, request_id: str, error: PdServeError) -> None:
        """A submitted request ends here: the engine never takes it in."""
        self._num_unseen -= 1
        self.subscriber.outputs(refused_outputs(request_id, error))

    def submit_quietly(self, request: EngineCoreRequest) -> None:
        """Queue a request of the transfers' own."""
        self._num_unseen += 1
        self.call(lambda core: core.add_request(request))

    def resume_request(self, update: StreamingUpdate) -> None:
        self.call(lambda core: core.resume_request(update))

    def release_request(self, request_id: str) -> None:
        self.call(lambda core: self._abort_and_notify(core, request_id))
        if self.kv_transfers is not None:
            self.kv_transfers.released(request_id)

    def abort_request(self, request_id: str) -> None:
        self.call(lambda core: core.abort_request(request_id))

    def end_sequence(self, request_id: str, index: int, turn: int | None) -> None:
        self.call(lambda core: core.end_sequence(request_id, index, turn))

    def fail_idle_sessions(self, cause: PdServeError) -> None:
        self.call(lambda core: core.fail_idle_sessions(cause))

    def fail_requests(self, cause: PdServeError) -> None:
        self.call(lambda core: core.fail_all(cause))

    def revoke_transfers(self, cause: PdServeError) -> None:
        if self.kv_transfers is not None:
            self.kv_transfers.source_transfers.revoke_all(cause)

    def meet(self, worker_id: str, epoch: int, address: str) -> None:
        self._transfers.meet(worker_id, epoch, address)

    async def add_lora(self, folder: str) -> str:
        return await asyncio.to_thread(self._adapters.add, Path(folder))

    async def remove_lora(self, folder: str) -> None:
        self.forget_lora(folder)

    def forget_lora(self, folder: str) -> None:
        """See `remove_lora`."""
        self._adapters.remove(Path(folder))

    @property
    def _adapters(self) -> Adapters:
        if self.core.adapters is None:
            raise ConfigError("enable_lora is false: this engine has no adapters")
        return self.core.adapters

    async def transfers(self) -> TransfersPage:
        return self.transfers_page()

    def transfers_page(self) -> TransfersPage:
        return self._transfers.manager.transfers()

    def call(self, command: Callable[[EngineCore], object]) -> None:
        """Run something in the engine's thread, before its next step."""
        self._thread.post(command)

    # ---- the transfers' side

    def apply(self, event: IntoEngine) -> None:
        """Pass an event of the transfers on."""
        self.call(lambda core: core.apply(event))

    def observe(self, on_output: Callable[[EngineCoreOutput], None]) -> None:
        """Call `on_output` in the asyncio thread with every output, after the subscriber got it. One observer."""
        self._on_output = on_output

    # ---- out of the engine's thread

    def _abort_and_notify(self, core: EngineCore, request_id: str) -> None:
        request = core.abort_request(request_id)
        self._thread.call_after_step(lambda: self._released(request_id, request))

    def _released(self, request_id: str, request: Request | None) -> None:
        aborted = None if request is None else AbortedRequest.of(request)
        received = None if self.kv_transfers is None else self.kv_transfers.take_received(request_id)
        self.subscriber.released(request_id, RequestEnd(aborted, received))

    def _dispatch(self, outputs: EngineCoreOutputs) -> None:
        if (stats := outputs.scheduler_stats) is not None:
            stats.num_added_reqs -= self._num_unseen
            self.stats = stats
        self.subscriber.outputs(outputs)
        if self._on_output is not None:
            for output in outputs.outputs:
                self._on_output(output)

    def _died(self, error: Exception) -> None:
        self.dead.set()
        self.subscriber.died_with(WorkerLost(ENGINE_FAILED))

    @property
    def subscriber(self) -> EngineEvents:
        if self._events is None:
            raise RuntimeError("nothing has subscribed to the engine")
        return self._events

    @property
    def _transfers(self) -> HostTransfers:
        if self.kv_transfers is None:
            raise RuntimeError("this engine has no transfers")
        return self.kv_transfers
