"""The process of a worker's engine, its pool and its transfers.

Usage, by `ProcHost` alone: python -m pdserve.worker.engine_host.host_process DESCRIPTOR

DESCRIPTOR is this process's end of a socket pair. The process ends when the other end is closed, by the worker or by the end of its
process; the kernel kills it together with that.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from pdserve.common.errors import ConfigError, InternalError, InvalidRequest, PdServeError, PeerError
from pdserve.common.net.tls_renewal import TlsRenewal
from pdserve.common.processes.child_life import end_after, end_with_parent, leave_signals_to_peer
from pdserve.common.processes.shared_interpreter import share_interpreter
from pdserve.common.request.engine_types import EngineCoreOutputs
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.role_guard import CallerRoles
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.tasks.background_task import background_task
from pdserve.common.tasks.first_done import first_done
from pdserve.common.telemetry.logging_setup import configure_logging
from pdserve.engine.request_messages import decode_request, encode, output_messages
from pdserve.engine.runner.loaded_model import LoadedModel, LoadProgress, load_model
from pdserve.engine.scheduler_output import RequestFailure
from pdserve.engine.socket_frames import receive_frame, send_frame
from pdserve.kv_transfer.control.transfer_state import SourceState
from pdserve.kv_transfer.make_connectors import make_connectors
from pdserve.worker.engine_host.carried_streams import CarriedStreams
from pdserve.worker.engine_host.engine_host import RequestEnd
from pdserve.worker.engine_host.frame_socket import FrameSocket
from pdserve.worker.engine_host.host_frames import (
    STACKS_SIGNAL,
    STATE_EVERY_S,
    AbortRequest,
    AddLora,
    AddRequest,
    AttachMessage,
    BeginTransfers,
    BlocksLanded,
    CloseAttach,
    CloseHost,
    EndSequence,
    EngineStarted,
    FailIdleSessions,
    FailRequests,
    FromHost,
    GetTransfers,
    HostFailed,
    HostLoaded,
    HostState,
    LoadedBytes,
    LoadHost,
    LoraAdded,
    MeetPeer,
    OpenAttach,
    Receiving,
    Released,
    ReleaseRequest,
    RemoveLora,
    ResumeRequest,
    RevokeTransfers,
    ServeAttach,
    SourceEnded,
    StartEngine,
    StepOutputs,
    ToHost,
    Transfers,
    decode_to_host,
)
from pdserve.worker.engine_host.inproc_host import InprocHost
from pdserve.worker.engine_host.make_inproc_host import make_inproc_host
from pdserve.worker.ranks.join_ranks import WORKER_RANK

log = logging.getLogger(__name__)

LAST_STEP_S = 3.0
"""Seconds that a step, or loading, may go on after the worker's end; then the process ends in the middle of it."""


class HostProcess:
    """Passes the worker's commands to an `InprocHost`, and its events back. Made and used in the asyncio thread."""

    def __init__(self, host: InprocHost, worker: socket.socket) -> None:
        self._host = host
        self._socket = FrameSocket(worker, self._on_message, self._on_end)
        self._streams: CarriedStreams | None = None
        self._start = asyncio.Event()
        self._close = asyncio.Event()
        self._adding: set[asyncio.Task[None]] = set()
        """Adapters that are being read."""
        host.subscribe(self)

    async def run(self) -> int:
        """Until the worker ends this, or the engine fails. Returns the exit status."""
        self._send(HostLoaded(self._host.info))
        try:
            await first_done(self._start.wait(), self._close.wait())
            if not self._close.is_set():
                await self._serve()
        finally:
            if self._streams is not None:
                await self._streams.close()
            await self._host.close()
            self._socket.close()
        return int(self._host.dead.is_set())

    async def _serve(self) -> None:
        await first_done(self._host.start(), self._close.wait())
        gc.collect()
        gc.freeze()  # what loading made stays; no collection has to look at it
        if not self._host.dead.is_set():
            self._send(EngineStarted())
        reporting = asyncio.create_task(self._report(), name="state")
        try:
            await first_done(self._close.wait(), self._host.dead.wait())
        finally:
            reporting.cancel()

    async def _report(self) -> None:
        host = self._host
        while True:
            self._send(HostState(host.tick, host.ticked_at, host.counts))
            await asyncio.sleep(STATE_EVERY_S)

    # ---- from the worker

    def _on_end(self) -> None:
        self._close.set()

    def _on_message(self, payload: bytes) -> None:
        host, message = self._host, decode_to_host(payload)
        match message:
            case AddRequest():
                self._add(message)
            case ResumeRequest(update):
                host.resume_request(update)
            case ReleaseRequest(request_id):
                host.release_request(request_id)
            case AbortRequest(request_id):
                host.abort_request(request_id)
            case EndSequence(request_id, index, turn):
                host.end_sequence(request_id, index, turn)
            case OpenAttach() | AttachMessage() | CloseAttach():
                if self._streams is not None:
                    self._streams.take(message)
            case MeetPeer(worker_id, epoch, address):
                with contextlib.suppress(InvalidRequest):  # the worker has refused such addresses
                    host.meet(worker_id, epoch, address)
            case GetTransfers(call_id):
                self._send(Transfers(call_id, host.transfers_page()))
            case AddLora(call_id, folder):
                self._adding.add(task := asyncio.create_task(self._add_lora(call_id, folder)))
                task.add_done_callback(self._adding.discard)
            case _:
                self._on_rare(message)

    def _on_rare(self, message: ToHost) -> None:
        host = self._host
        match message:
            case FailIdleSessions(cause):
                host.fail_idle_sessions(cause.error())
            case FailRequests(cause):
                host.fail_requests(cause.error())
            case RevokeTransfers(cause):
                host.revoke_transfers(cause.error())
            case BeginTransfers(identity):
                host.begin_transfers(identity)
            case ServeAttach():
                self._streams = CarriedStreams(host.attach_servicer(CallerRoles(None)), self._send)
            case RemoveLora(folder):
                host.forget_lora(folder)
            case StartEngine():
                self._start.set()
            case CloseHost():
                self._close.set()
            case _:
                raise PeerError(f"{type(message).__name__} was sent twice, or to the wrong process")

    async def _add_lora(self, call_id: int, folder: str) -> None:
        try:
            self._send(LoraAdded(call_id, await self._host.add_lora(folder)))
        except PdServeError as error:
            self._send(LoraAdded(call_id, "", RequestFailure.of(error)))

    def _add(self, message: AddRequest) -> None:
        try:
            request = decode_request(message.request)
        except InvalidRequest as refusal:
            self._host.refuse(message.request_id, refusal)
            return
        self._host.add_request(request, message.expected or message.source)

    # ---- `EngineEvents`

    def outputs(self, outputs: EngineCoreOutputs) -> None:
        for payload in output_messages(outputs, StepOutputs):
            self._socket.send(payload)

    def receiving(self, request_id: str, awaits_source: bool) -> None:
        self._send(Receiving(request_id, awaits_source))

    def blocks_landed(self, request_id: str, num_blocks: int, connector: str) -> None:
        self._send(BlocksLanded(request_id, num_blocks, connector))

    def source_ended(self, request_id: str, state: SourceState, cause: PdServeError | None) -> None:
        self._send(SourceEnded(request_id, state, None if cause is None else RequestFailure.of(cause)))

    def released(self, request_id: str, end: RequestEnd) -> None:
        self._send(Released(request_id, end))

    def died_with(self, cause: PdServeError) -> None:
        self._send(HostFailed(RequestFailure.of(cause)))

    def _send(self, message: FromHost) -> None:
        self._socket.send(encode(message))


def _load(load: LoadHost, settings: WorkerSettings, send: Callable[[FromHost], None]) -> LoadedModel:
    def progress(loaded: LoadProgress) -> None:
        send(LoadedBytes(loaded.loaded_bytes, loaded.total_bytes))

    return load_model(Path(load.folder), settings, progress, WORKER_RANK)


async def _run(load: LoadHost, settings: WorkerSettings, model: LoadedModel, worker: socket.socket) -> int:
    tls = settings.tls()
    host = make_inproc_host(
        settings, model, make_connectors(settings, tls=tls), DeploymentKey(load.deployment_key), tls
    )
    renewing = background_task("certificates", TlsRenewal(settings, tls).run)
    try:
        return await HostProcess(host, worker).run()
    finally:
        renewing.cancel()


def main() -> int:
    end_with_parent()
    leave_signals_to_peer()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    share_interpreter()
    with socket.socket(fileno=int(sys.argv[1])) as worker:
        end_after(worker.dup(), LAST_STEP_S)

        def send(message: FromHost) -> None:
            with contextlib.suppress(OSError):  # the worker has ended
                send_frame(worker, encode(message))

        try:
            payload = receive_frame(worker)
            load = None if payload is None else decode_to_host(payload)
            settings = (load.prefill or load.decode) if isinstance(load, LoadHost) else None
            if not isinstance(load, LoadHost) or settings is None:
                raise PeerError("the first message is not LoadHost with the settings of a role")
            configure_logging(f"{settings.section} engine", settings.log_level, settings.log_format)
            model = _load(load, settings, send)
            return uvloop.run(_run(load, settings, model, worker))
        except PdServeError as error:
            if not isinstance(error, ConfigError):
                log.exception("the engine's process failed")
            send(HostFailed(RequestFailure.of(error)))
        except Exception as error:
            log.exception("the engine's process failed")
            send(HostFailed(RequestFailure.of(InternalError(f"{type(error).__name__}: {error}"[:500]))))
    return 1


if __name__ == "__main__":
    sys.exit(main())
