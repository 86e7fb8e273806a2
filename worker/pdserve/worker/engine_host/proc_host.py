"""`ProcHost`: an `EngineHost` whose engine, pool and transfers are in a process of their own (`host_process.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec

from pdserve.common.errors import PdServeError, WorkerLost
from pdserve.common.request.engine_types import EngineCoreRequest, SchedulerStats, StreamingUpdate
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.role_guard import CallerRoles
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from pdserve.common.tasks.first_done import first_done
from pdserve.engine.child_process import ChildProcess, exit_text, start_module
from pdserve.engine.output_stream import refused_outputs
from pdserve.engine.request_messages import ENCODING_ERRORS, encode, unsendable
from pdserve.engine.request_verifier import RequestVerifier
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.scheduler_output import RequestFailure
from pdserve.kv_transfer.control.receiver_transfer import SourceRef
from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, PeerId
from pdserve.kv_transfer.control.transfer_view import TransfersPage
from pdserve.v1 import kv_source_pb2_grpc
from pdserve.worker.engine_host.carrying_servicer import CarryingServicer
from pdserve.worker.engine_host.engine_host import EngineEvents, HostInfo, TransferCounts
from pdserve.worker.engine_host.frame_socket import FrameSocket
from pdserve.worker.engine_host.host_frames import (
    STACKS_SIGNAL,
    AbortRequest,
    AddLora,
    AddRequest,
    AttachEvent,
    BeginTransfers,
    BlocksLanded,
    CloseHost,
    EndSequence,
    EngineStarted,
    FailIdleSessions,
    FailRequests,
    GetTransfers,
    HostFailed,
    HostLoaded,
    HostState,
    LoadedBytes,
    LoadHost,
    LoraAdded,
    MeetPeer,
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
    decode_from_host,
)

log = logging.getLogger(__name__)

END_S = 30.0
"""Seconds for the process to end its last step and its transfers, before it is killed."""
REAP_S = 3.0
"""Seconds for the process to end after it has closed its socket, before it is killed."""
STACKS_S = 0.5
"""Seconds in which a stuck process must write its stacks, before it is killed."""
ANSWER_S = 5.0
"""Seconds for the process to answer a question."""
LORA_S = 120.0
"""Seconds for it to read and check an adapter."""
PROCESS_ENDED = "the engine's process has ended; the worker's log has the details"
_MODULE = "pdserve.worker.engine_host.host_process"


def start_program(descriptor: int) -> ChildProcess:
    """Start the program of the engine's process."""
    return start_module(_MODULE, descriptor)


class ProcHost:
    """Used in the asyncio thread."""

    def __init__(
        self, settings: WorkerSettings, deployment_key: DeploymentKey, on_progress: Callable[[int, int], None]
    ) -> None:
        """Start the process; `load` follows. on_progress: takes the bytes of loaded weights, and of all.

        To be called in a thread that lives as long as this process, since the kernel kills the other process with it.
        """
        self._settings = settings
        self._deployment_key = deployment_key
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._info: HostInfo | None = None
        self.tick = 0
        self.ticked_at = time.monotonic()
        self.stats = SchedulerStats()
        self.counts = TransferCounts()
        self._num_unsent = 0
        """Submitted requests that could not be sent to the engine."""
        self.dead = asyncio.Event()
        self._ended_with: PdServeError | None = None
        self._reaping: asyncio.Future[int] | None = None
        self._is_closing = False
        self._loaded = asyncio.Event()
        self._started = asyncio.Event()
        self._events: EngineEvents | None = None
        self._attaches: CarryingServicer | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._adapters: dict[str, str] = {}
        """Folder -> fingerprint of the adapter that was read there."""
        self._call_ids = itertools.count()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = start_program(theirs.fileno())
            except BaseException:
                ours.close()
                raise
        self._socket = FrameSocket(ours, self._on_message, self._on_end)

    async def load(self, folder: Path) -> None:
        """Load the model there. Raises: ConfigError, UnsupportedModel; WorkerLost when the process ends meanwhile."""
        settings = self._settings
        verifies = LogitsProcessors.from_entry_points(settings.logits_processors)
        self._send(
            LoadHost(
                folder=str(folder),
                deployment_key=self._deployment_key.secret,
                prefill=settings if isinstance(settings, PrefillSettings) else None,
                decode=settings if isinstance(settings, DecodeSettings) else None,
            )
        )
        await first_done(self._loaded.wait(), self.dead.wait())
        if self._info is None:
            raise self._ended_with or WorkerLost(PROCESS_ENDED)
        engine = self._info.engine
        self.stats = SchedulerStats(num_blocks_total=engine.num_blocks, num_blocks_free=engine.num_blocks)
        prompts = engine.encoder_decoder
        self.verifier = RequestVerifier(
            max_model_len=engine.max_model_len if prompts is None else prompts.max_sequence_len(engine.block_size),
            encoder=engine.encoder,
            encoder_decoder=prompts,
            max_num_seqs=engine.max_num_seqs,
            max_sequences=settings.limits.max_n_sequences,
            vocab_size=engine.vocab_size,
            hidden_size=engine.hidden_size,
            num_labels=engine.num_labels,
            enable_prompt_embeds=settings.enable_prompt_embeds,
            has_grammars=self._info.has_grammars,
            logits_processors=verifies,
            knows_adapter=(lambda known: known in self._adapters.values()) if settings.enable_lora else None,
            has_transfers=True,
        )

    @property
    def info(self) -> HostInfo:
        if self._info is None:
            raise RuntimeError("the engine's process has not loaded its model")
        return self._info

    @property
    def process_id(self) -> int:
        return self._process.pid

    def subscribe(self, events: EngineEvents) -> None:
        self._events = events
        if self._ended_with is not None:
            self._loop.call_soon(events.died_with, self._ended_with)

    def begin_transfers(self, identity: PeerId) -> None:
        self._send(BeginTransfers(identity))

    def add_attach(self, server: grpc.aio.Server, callers: CallerRoles) -> None:
        self._attaches = CarryingServicer(self._send, callers)
        kv_source_pb2_grpc.add_KvSourceServiceServicer_to_server(self._attaches, server)
        self._send(ServeAttach())

    async def start(self) -> None:
        self._send(StartEngine())
        await first_done(self._started.wait(), self.dead.wait())

    async def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if self._started.is_set():
                self._send(CloseHost())
            else:
                self._process.kill()  # it loads, or warms up
        await first_done(self.dead.wait(), timeout_s=END_S)
        self._socket.close()
        await self._reaped()

    def _reaped(self) -> asyncio.Future[int]:
        """The exit status of the process, which ends now, or is killed."""
        if self._reaping is None:
            self._reaping = asyncio.ensure_future(asyncio.to_thread(self._wait))
        return self._reaping

    def _wait(self) -> int:
        try:
            return self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        self._process.send_signal(STACKS_SIGNAL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STACKS_S)
        self._process.kill()

    # ---- commands

    def add_request(self, request: EngineCoreRequest, transfer: ExpectedTransfer | SourceRef | None) -> None:
        try:
            self._send(
                AddRequest(
                    request.request_id,
                    msgspec.Raw(encode(request)),
                    expected=transfer if isinstance(transfer, ExpectedTransfer) else None,
                    source=transfer if isinstance(transfer, SourceRef) else None,
                )
            )
        except ENCODING_ERRORS as error:
            self._num_unsent += 1
            self.subscriber.outputs(refused_outputs(request.request_id, unsendable(request, error)))

    def resume_request(self, update: StreamingUpdate) -> None:
        self._send(ResumeRequest(update))

    def release_request(self, request_id: str) -> None:
        self._send(ReleaseRequest(request_id))

    def abort_request(self, request_id: str) -> None:
        self._send(AbortRequest(request_id))

    def end_sequence(self, request_id: str, index: int, turn: int | None) -> None:
        self._send(EndSequence(request_id, index, turn))

    def fail_idle_sessions(self, cause: PdServeError) -> None:
        self._send(FailIdleSessions(RequestFailure.of(cause)))

    def fail_requests(self, cause: PdServeError) -> None:
        self._send(FailRequests(RequestFailure.of(cause)))

    def revoke_transfers(self, cause: PdServeError) -> None:
        self._send(RevokeTransfers(RequestFailure.of(cause)))

    def meet(self, worker_id: str, epoch: int, address: str) -> None:
        self._send(MeetPeer(worker_id, epoch, address))

    async def add_lora(self, folder: str) -> str:
        """Raises: WorkerLost, too, when the process ends, or does not answer."""
        added = await self._answer(lambda call_id: AddLora(call_id, folder), LORA_S)
        if added.cause is not None:
            raise added.cause.error()
        self._adapters[folder] = added.fingerprint
        return str(added.fingerprint)

    async def remove_lora(self, folder: str) -> None:
        self._adapters.pop(folder, None)
        self._send(RemoveLora(folder))

    async def transfers(self) -> TransfersPage:
        """Raises: WorkerLost when the process ends, or does not answer."""
        page: TransfersPage = (await self._answer(GetTransfers, ANSWER_S)).page
        return page

    async def _answer(self, question: Callable[[int], ToHost], timeout_s: float) -> Any:
        """The message that answers `question(call_id)`. Raises: WorkerLost."""
        if self.dead.is_set():
            raise WorkerLost(PROCESS_ENDED)
        call_id = next(self._call_ids)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._answers[call_id] = answer
        self._send(question(call_id))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise WorkerLost(f"the engine's process has not answered for {timeout_s:g} s") from None
        finally:
            del self._answers[call_id]

    def _send(self, message: ToHost) -> None:
        self._socket.send(encode(message))

    # ---- from the process

    def _on_message(self, payload: bytes) -> None:
        message = decode_from_host(payload)
        match message:
            case StepOutputs(outputs):
                if (stats := outputs.scheduler_stats) is not None:
                    stats.num_added_reqs += self._num_unsent
                    self.stats = stats
                self.subscriber.outputs(outputs)
            case HostState(tick, ticked_at, counts):
                self.tick, self.ticked_at, self.counts = tick, ticked_at, counts
            case Released(request_id, end):
                self.subscriber.released(request_id, end)
            case Receiving(request_id, awaits_source):
                self.subscriber.receiving(request_id, awaits_source)
            case BlocksLanded(request_id, num_blocks, connector):
                self.subscriber.blocks_landed(request_id, num_blocks, connector)
            case SourceEnded(request_id, state, cause):
                self.subscriber.source_ended(request_id, state, None if cause is None else cause.error())
            case AttachEvent():
                if self._attaches is not None:
                    self._attaches.take(message)
            case Transfers(call_id) | LoraAdded(call_id):
                if (answer := self._answers.get(call_id)) is not None and not answer.done():
                    answer.set_result(message)
            case LoadedBytes(loaded_bytes, total_bytes):
                self._on_progress(loaded_bytes, total_bytes)
            case HostLoaded(info):
                self._info = info
                self._loaded.set()
            case EngineStarted():
                self._started.set()
            case HostFailed(cause):
                self._has_ended(cause.error())

    def _on_end(self) -> None:
        """The process has ended, or what it sends cannot be used."""
        is_news = not self._is_closing and not self.dead.is_set()
        self._has_ended(WorkerLost(PROCESS_ENDED))
        reaped = self._reaped()
        if is_news:
            reaped.add_done_callback(lambda status: log.error("the engine's process %s", exit_text(status.result())))

    def _has_ended(self, cause: PdServeError) -> None:
        if self.dead.is_set():
            return
        self._ended_with = cause
        self.dead.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(WorkerLost(PROCESS_ENDED))
        if self._attaches is not None:
            self._attaches.end_all(cause)
        if self._events is not None and not self._is_closing:
            self._events.died_with(cause)

    @property
    def subscriber(self) -> EngineEvents:
        if self._events is None:
            raise RuntimeError("nothing has subscribed to the engine")
        return self._events
