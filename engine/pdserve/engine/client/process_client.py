"""`ProcessClient`: an engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from pdserve.common import clock
from pdserve.common.errors import Cancelled, PdServeError, WorkerLost
from pdserve.common.ipc.child import Child
from pdserve.common.ipc.child_process import ChildProcess, exit_text, start_module
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY, DeploymentKey
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.tasks.first_done import first_done
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.client.messages import (
    AddRequest,
    CallUtility,
    CloseEngine,
    EngineState,
    FromEngine,
    Loaded,
    LoadedBytes,
    LoadModel,
    ToEngine,
    UtilityOutput,
    decode_from_engine,
)
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.output_stream import refused_outputs
from pdserve.engine.request_messages import ENCODING_ERRORS, encode, unsendable
from pdserve.engine.request_verifier import RequestVerifier
from pdserve.engine.sampling.logits_processors import LogitsProcessors

log = logging.getLogger(__name__)

ENGINE_PROGRAM = "pdserve.engine.client.engine_process"
"""The program of an engine without services."""
LAST_STEP_S = 5.0
"""Seconds for the process to end after its socket is closed, before it is killed."""
END_S = 30.0
"""Seconds for the process to end its last step and its transfers, before it is killed."""
STACKS_SIGNAL = signal.SIGUSR1
"""Has the engine's process write the stacks of its threads."""
STACKS_S = 0.5
"""Seconds in which a stuck process must write its stacks, before it is killed."""
PROCESS_ENDED = "the engine's process has ended; the worker's log has the details"


def start_program(descriptor: int, module: str) -> ChildProcess:
    """Start the program of an engine's process."""
    return start_module(module, descriptor)


class ProcessClient(EngineCoreClient):
    """The process ends with `close`, with this object, and with this process however that ends."""

    def __init__(
        self,
        folder: Path,
        settings: WorkerSettings,
        deployment_key: DeploymentKey = DEVELOPMENT_KEY,
        program: str = ENGINE_PROGRAM,
        loop: asyncio.AbstractEventLoop | None = None,
        on_progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Start the process, and have it load the model; `loaded` follows.

        program: a module that calls `run_engine_process`. loop: that of this thread, in which a subscriber is called; None: a
        thread reads. on_progress: takes the bytes of weights that are loaded, and of all.
        """
        super().__init__()
        self.loaded: Future[None] = Future()
        """Its errors: as `LoadedEngine`; WorkerLost when the process ended meanwhile."""
        self._settings = settings
        self._on_progress = on_progress
        self._has_reader_thread = loop is None
        # here too, since `check` is called before anything is computed
        self._logits_processors = LogitsProcessors.from_entry_points(settings.logits_processors)
        self._tick, self._ticked_at = 0, clock.monotonic()
        self._transfer_state: Any = None
        self._num_unsent = 0
        """Added requests that could not be sent to the engine."""
        self._adapters: dict[str, str] = {}
        """Folder -> fingerprint of the adapter that was read there."""
        self._adding: dict[int, str] = {}
        """Call -> folder of an adapter that is being read."""
        self._is_closing = False
        self._has_ended = asyncio.Event()
        receive, end = weakref.WeakMethod(self._receive), weakref.WeakMethod(self._process_ended)
        self._child = Child(
            lambda descriptor: start_program(descriptor, program), partial(_call, receive), partial(_call, end), loop
        )
        self._close_child = weakref.finalize(self, self._child.close, LAST_STEP_S)
        self._send(LoadModel.of(str(folder), settings, deployment_key.secret))

    @classmethod
    def load(cls, folder: Path, settings: WorkerSettings) -> Self:
        """A client whose engine has loaded, and starts; blocks. Raises: as `loaded`."""
        client = cls(folder, settings)
        try:
            client.loaded.result()
        except BaseException:
            client.close()
            raise
        client.start(warm_up=False)
        return client

    @property
    def process_id(self) -> int:
        return self._child.process.pid

    @property
    def tick(self) -> int:
        return self._tick

    @property
    def ticked_at(self) -> float:
        return self._ticked_at

    @property
    def transfer_state(self) -> Any:
        return self._transfer_state

    def close(self) -> None:
        self._is_closing = True
        self._end(Cancelled("the engine was shut down"))
        self._close_child()
        self._log_stats()

    async def shutdown(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if self._started.done():
                self._send(CloseEngine())
            else:
                self._child.process.kill()  # it loads, or warms up
        await first_done(self._has_ended.wait(), timeout_s=END_S)
        self._child.hang_up()
        await asyncio.to_thread(self.close)

    def kill(self) -> None:
        self._child.process.send_signal(STACKS_SIGNAL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.process.wait(STACKS_S)
        self._child.process.kill()

    def _send(self, message: ToEngine) -> None:
        match message:
            case CallUtility(call_id, "add_lora", [folder]):
                self._adding[call_id] = folder
            case CallUtility(_, "remove_lora", [folder]):
                self._adapters.pop(folder, None)
        self._child.send(encode(message))

    def _add_request(self, request: EngineCoreRequest, transfer: object) -> None:
        try:
            self._send(AddRequest(request.request_id, msgspec.Raw(encode(request)), transfer))
        except ENCODING_ERRORS as error:
            self._num_unsent += 1
            self._pass_on(refused_outputs(request.request_id, unsendable(request, error)))

    # ---- from the process, in the event loop

    def _receive(self, payload: bytes) -> None:
        self._on_message(decode_from_engine(payload))

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case EngineCoreOutputs():
                if message.scheduler_stats is not None:
                    message.scheduler_stats.num_added_reqs += self._num_unsent
                super()._on_message(message)
            case EngineState(tick, ticked_at, transfers):
                self._tick, self._ticked_at, self._transfer_state = tick, ticked_at, transfers
            case UtilityOutput(call_id, result, failure):
                folder = self._adding.pop(call_id, None)
                if folder is not None and failure is None:
                    self._adapters[folder] = result
                super()._on_message(message)
            case LoadedBytes(loaded_bytes, total_bytes):
                self._on_progress(loaded_bytes, total_bytes)
            case Loaded(info, transfers):
                self._has_loaded(info, transfers)
            case _:
                super()._on_message(message)

    def _has_loaded(self, info: EngineInfo, transfers: Any) -> None:
        self.info, self.transfers = info, transfers
        self.stats = SchedulerStats(num_blocks_total=info.num_blocks, num_blocks_free=info.num_blocks)
        settings, prompts = self._settings, info.encoder_decoder
        self.verifier = RequestVerifier(
            max_model_len=info.max_model_len if prompts is None else prompts.max_sequence_len(info.block_size),
            encoder=info.encoder,
            encoder_decoder=prompts,
            max_num_seqs=info.max_num_seqs,
            max_sequences=info.max_num_seqs if transfers is None else settings.limits.max_n_sequences,
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            num_labels=info.num_labels,
            enable_prompt_embeds=settings.enable_prompt_embeds,
            has_grammars=info.has_grammars,
            logits_processors=self._logits_processors,
            knows_adapter=(lambda known: known in self._adapters.values()) if settings.enable_lora else None,
            has_transfers=transfers is not None,
        )
        if not self.loaded.done():
            self.loaded.set_result(None)

    def _process_ended(self, child: Child) -> None:
        """The process has ended, or what it sends cannot be used."""
        is_news = not self._is_closing and self._ended_with is None
        if self._has_reader_thread:
            self._end(WorkerLost(_how_ended(child)))
            return
        self._end(WorkerLost(PROCESS_ENDED))
        self._has_ended.set()
        if is_news:
            threading.Thread(target=lambda: log.error("%s", _how_ended(child)), name="engine-end", daemon=True).start()

    def _end(self, cause: PdServeError) -> None:
        super()._end(cause)
        if not self.loaded.done():
            self.loaded.set_exception(self._ended_with or cause)


def _call(method: weakref.WeakMethod[Any], *arguments: Any) -> None:
    """Call a method of a client that is still there: its process must not keep it."""
    if (bound := method()) is not None:
        bound(*arguments)


def _how_ended(child: Child) -> str:
    """How the process ended, which closed its socket; waits for it."""
    try:
        return f"the engine's process {exit_text(child.wait(LAST_STEP_S))}"
    except subprocess.TimeoutExpired:
        return "the engine's process closed its socket"
