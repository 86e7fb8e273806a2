"""The process of an engine.

Usage, by `ProcessClient` only: python -m pdserve.engine.client.engine_process DESCRIPTOR

DESCRIPTOR is this process's end of a socket pair; the process ends when the other end is closed, by the client or by the end of its
process. A program with transfers calls `run_engine_process` with what makes them.
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

import msgspec
import uvloop

from pdserve.common.errors import ConfigError, InternalError, InvalidRequest, PdServeError, PeerError
from pdserve.common.ipc.frame_socket import FrameSocket
from pdserve.common.ipc.frames import receive_frame, send_frame
from pdserve.common.processes.child_life import end_after, leave_signals_to_peer
from pdserve.common.processes.shared_interpreter import share_interpreter
from pdserve.common.request.engine_types import EngineCoreOutputs
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.telemetry.logging_setup import configure_logging
from pdserve.engine.client.engine_side import EngineSide, EngineTransfers, at_once
from pdserve.engine.client.inproc_client import failure_text
from pdserve.engine.client.loaded_engine import LoadedEngine
from pdserve.engine.client.messages import (
    STATE_EVERY_S,
    AddRequest,
    CloseEngine,
    EngineFailed,
    EngineState,
    FromEngine,
    Loaded,
    LoadedBytes,
    LoadModel,
    decode_to_engine,
)
from pdserve.engine.client.process_client import STACKS_SIGNAL
from pdserve.engine.engine_thread import ENGINE_FAILED, in_event_loop
from pdserve.engine.request_messages import decode_request, encode, output_messages
from pdserve.engine.runner.loading.loaded_model import LoadedModel, LoadProgress, load_model
from pdserve.engine.scheduler_output import RequestFailure

log = logging.getLogger(__name__)

MakeTransfers = Callable[[WorkerSettings, LoadedModel, DeploymentKey], EngineTransfers]
"""Makes the transfers of an engine over a loaded model, in the event loop."""

LAST_STEP_S = 3.0
"""Seconds that a step, or loading, may go on after the client's end; then the process ends in the middle of it."""


class EngineProcess:
    """Passes the client's messages to an `EngineSide`, and its own back. Made and used in the event loop."""

    def __init__(self, engine: LoadedEngine, transfers: EngineTransfers | None, client: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._close = asyncio.Event()
        self._has_failed = False
        self._socket = FrameSocket(client, self._on_message, self._close.set)
        self._transfers = transfers
        self._side = EngineSide(
            engine.make_core(),
            self._send,
            # with transfers, outputs are theirs, too, in the event loop
            at_once if transfers is None else in_event_loop(self._loop),
            transfers,
            num_threads=engine.num_threads,
            cpu_core=engine.cpu_core,
            failure_text=failure_text if transfers is None else lambda _: ENGINE_FAILED,
        )

    async def run(self) -> int:
        """Until the client ends this, or the engine fails. Returns the exit status."""
        gc.collect()
        gc.freeze()  # what loading made stays; no collection has to look at it
        transfers = self._transfers
        self._send(Loaded(self._engine.info, None if transfers is None else transfers.properties))
        reporting = asyncio.create_task(self._report(), name="state")
        try:
            await self._close.wait()
        finally:
            reporting.cancel()
            if transfers is not None:
                await transfers.close()
            await asyncio.to_thread(self._side.stop)
            await asyncio.to_thread(self._engine.close)
            self._socket.close()
        return int(self._has_failed)

    async def _report(self) -> None:
        heartbeat = self._side.core.heartbeat
        while True:
            state = None if self._transfers is None else self._transfers.state
            self._send(EngineState(heartbeat.tick, heartbeat.ticked_at, state))
            await asyncio.sleep(STATE_EVERY_S)

    def _on_message(self, payload: bytes) -> None:
        message = decode_to_engine(payload)
        match message:
            case AddRequest():
                self._add(message)
            case CloseEngine():
                self._close.set()
            case LoadModel():
                raise PeerError("a second model was to be loaded")
            case _:
                self._side.handle(message)

    def _add(self, message: AddRequest) -> None:
        try:
            request = decode_request(message.request)
        except InvalidRequest as refusal:
            self._side.refuse(message.request_id, refusal)
            return
        self._side.add_request(request, message.transfer)

    def _send(self, message: FromEngine) -> None:
        """Any thread may call it."""
        if isinstance(message, EngineCoreOutputs):
            for payload in output_messages(message):
                self._socket.send(payload)
            return
        self._socket.send(encode(message))
        if isinstance(message, EngineFailed):
            self._has_failed = True
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._close.set)


async def _serve(
    settings: WorkerSettings,
    model: LoadedModel,
    key: DeploymentKey,
    make_transfers: MakeTransfers | None,
    client: socket.socket,
) -> int:
    transfers = None if make_transfers is None else make_transfers(settings, model, key)
    engine = LoadedEngine(model, settings, key, outbox=transfers)
    return await EngineProcess(engine, transfers, client).run()


def run_engine_process(make_transfers: MakeTransfers | None = None, rank_program: str | None = None) -> int:
    """Serve the client whose socket the command line names. Returns the exit status: 1 when the engine failed or could not be
    loaded.

    rank_program: `load_model`'s.
    """
    leave_signals_to_peer()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    share_interpreter()
    with socket.socket(fileno=int(sys.argv[1])) as client:
        end_after(client.dup(), LAST_STEP_S)

        def send(message: FromEngine) -> None:
            with contextlib.suppress(OSError):  # the client has ended
                send_frame(client, encode(message))

        def progress(loaded: LoadProgress) -> None:
            send(LoadedBytes(loaded.loaded_bytes, loaded.total_bytes))

        try:
            payload = receive_frame(client)
            if payload is None:
                return 0
            load = decode_to_engine(payload)
            if not isinstance(load, LoadModel):
                raise PeerError("the first message is not LoadModel")
            settings = load.decoded_settings()
            if settings.section:
                configure_logging(f"{settings.section} engine", settings.log_level, settings.log_format)
            model = load_model(Path(load.folder), settings, progress, rank_program)
            return uvloop.run(_serve(settings, model, DeploymentKey(load.deployment_key), make_transfers, client))
        except PdServeError as error:
            if not isinstance(error, ConfigError):
                log.exception("the engine's process failed")
            send(EngineFailed(RequestFailure.of(error)))
        except (OSError, msgspec.MsgspecError) as error:
            log.error("a message to the engine's process cannot be read: %s", error)
        except Exception as error:
            log.exception("the engine's process failed")
            send(EngineFailed(RequestFailure.of(InternalError(failure_text(error)[:500]))))
    return 1


if __name__ == "__main__":
    sys.exit(run_engine_process())
