"""`EngineSide`: an engine, the thread it runs in, and its transfers. It executes the commands of an `EngineCoreClient`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from pdserve.common.errors import InternalError, PdServeError, WorkerLost
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from pdserve.engine.client.messages import (
    AbortedRequest,
    CallUtility,
    Command,
    EngineFailed,
    EngineStarted,
    FromEngine,
    MigrateSequence,
    Released,
    ReleaseRequest,
    StartEngine,
    ToEngine,
    TransferEvent,
    UtilityOutput,
)
from pdserve.engine.client.utilities import BESIDE_STEPS, UTILITIES, answer_of
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_thread import ENGINE_FAILED, EngineThread
from pdserve.engine.output_stream import refused_outputs
from pdserve.engine.request import Request
from pdserve.engine.scheduler.kv_messages import KvOutbox
from pdserve.engine.scheduler_output import RequestFailure

MakeThread = Callable[..., EngineThread]
CallSoon = Callable[[Callable[[], None]], object]
"""Runs a callback after earlier ones, in this thread or in another one."""


def at_once(callback: Callable[[], None]) -> None:
    """A `CallSoon` for outputs that the engine's thread may hand over itself."""
    callback()


class EngineTransfers(KvOutbox, Protocol):
    """The transfers of an engine's blocks (vLLM's KV connector). Made before the engine, of which it is the outbox; `send` is
    called in the engine's thread, all else in the thread of the engine's side."""

    @property
    def properties(self) -> object:
        """The properties that the client needs."""

    @property
    def state(self) -> object:
        """Its present state, for the client. Any thread may read it."""

    @property
    def utilities(self) -> Mapping[str, Callable[..., object]]:
        """Functions that `EngineCoreClient.utility` calls, here. Raise: PdServeError."""

    def bind(self, side: EngineSide) -> None:
        """The engine is there. Called once, before all else."""

    def begin(self, request: EngineCoreRequest, transfer: object) -> None:
        """Begin the transfers of a request that is about to be queued: to its receiver or from its source, and from its
        `block_source`. Raises: PdServeError."""

    def migrate(self, request_id: str, index: int, receiver: object) -> None:
        """The engine is about to end a sequence of the request with `Migrating`; its blocks then go to the receiver."""

    def released(self, request_id: str) -> None:
        """The request's call has ended, and with it the transfers to its receivers."""

    def take_received(self, request_id: str) -> object:
        """The transfer that delivered a released request's blocks; None without one, and when it was taken."""

    def outputs(self, outputs: EngineCoreOutputs) -> None:
        """The results of a step, after the client got them."""

    async def close(self) -> None:
        """End all transfers, close all connections. May be called again, and without `bind`."""


class EngineSide:
    """Used by the thread in which `call_soon` runs its callbacks; without a thread of the engine's own, by the one that steps
    it."""

    def __init__(
        self,
        core: EngineCore,
        send: Callable[[FromEngine], None],
        call_soon: CallSoon = at_once,
        transfers: EngineTransfers | None = None,
        *,
        num_threads: int = 1,
        cpu_core: int | None = None,
        failure_text: Callable[[Exception], str] = lambda error: ENGINE_FAILED,
        make_thread: MakeThread = EngineThread,
    ) -> None:
        """send: takes what the client gets; called where `call_soon` runs. failure_text: the message about an error that ends
        the engine. make_thread: takes the arguments of `EngineThread`."""
        self.core = core
        self.transfers = transfers
        self._send = send
        self._call_soon = call_soon
        self._threads = (num_threads, cpu_core)
        self._failure_text = failure_text
        self._make_thread = make_thread
        self.thread: EngineThread | None = None
        """None before `StartEngine`: commands run at once."""
        self.stats = SchedulerStats(num_blocks_total=core.config.num_blocks, num_blocks_free=core.config.num_blocks)
        self._num_unseen = 0
        """Requests that the engine has taken in and the client has not added, less those that were refused here."""
        if transfers is not None:
            transfers.bind(self)

    def handle(self, message: ToEngine) -> None:
        """Execute a command of the client, except `AddRequest`, which is `add_request`, and the messages of a process."""
        match message:
            case Command():
                self.post(message.run)
            case ReleaseRequest(request_id):
                self._release(request_id)
            case MigrateSequence():
                self._migrate(message)
            case CallUtility():
                self._call(message)
            case StartEngine(warm_up):
                self._start(warm_up)
            case _:
                raise InternalError(f"{type(message).__name__} is no message to an engine that runs")

    def add_request(self, request: EngineCoreRequest, transfer: object = None) -> None:
        """Queue a request. A transfer that cannot begin ends it."""
        if transfer is not None or request.block_source is not None:
            try:
                if self.transfers is None:
                    raise InternalError("this engine has no transfers")
                self.transfers.begin(request, transfer)
            except PdServeError as error:
                self.refuse(request.request_id, error)
                return
        self.post(lambda core: core.add_request(request))

    def refuse(self, request_id: str, error: PdServeError) -> None:
        """An added request ends here: the engine never takes it in."""
        self._num_unseen -= 1
        self._send(refused_outputs(request_id, error))

    def stop(self, cause: PdServeError | None = None) -> None:
        """End the engine's thread, after the step that it is in; waits. cause: with which open requests end; None: without
        outputs."""
        if self.thread is not None:
            if cause is not None:
                self.thread.post(lambda core: core.fail_all(cause))
            self.thread.stop()

    def post(self, command: Callable[[EngineCore], object]) -> None:
        """Run something in the engine's thread, before its next step."""
        if self.thread is None:
            command(self.core)
        else:
            self.thread.post(command)

    # ---- for the transfers

    def submit_quietly(self, request: EngineCoreRequest) -> None:
        """Queue a request of the transfers' own."""
        self._num_unseen += 1
        self.post(lambda core: core.add_request(request))

    def transfer_event(self, request_id: str, event: object) -> None:
        """Send news of a request's transfer."""
        self._send(TransferEvent(request_id, event))

    # ---- details

    def _start(self, warm_up: bool) -> None:
        num_threads, cpu_core = self._threads
        self.thread = self._make_thread(
            self.core, self._call_soon, self._on_outputs, self._died, num_threads, cpu_core, self._failure_text
        )
        self.thread.start()
        if warm_up:
            self.post(lambda core: core.warm_up())
        self.post(lambda _: self._call_soon(lambda: self._send(EngineStarted())))

    def _release(self, request_id: str) -> None:
        self.post(lambda core: self._abort_and_notify(core, request_id))
        if self.transfers is not None:
            self.transfers.released(request_id)

    def _migrate(self, message: MigrateSequence) -> None:
        if self.transfers is None:
            raise InternalError("this engine has no transfers")
        request_id, index, without = message.request_id, message.index, message.without_draft_head
        self.transfers.migrate(request_id, index, message.receiver)
        self.post(lambda core: core.scheduler.migrate(request_id, index, without_draft_head=without))

    def _abort_and_notify(self, core: EngineCore, request_id: str) -> None:
        request = core.abort_request(request_id)
        if self.thread is None:
            self._released(request_id, request)
        else:
            self.thread.call_after_step(lambda: self._released(request_id, request))

    def _released(self, request_id: str, request: Request | None) -> None:
        aborted = None if request is None else AbortedRequest.of(request)
        received = None if self.transfers is None else self.transfers.take_received(request_id)
        self._send(Released(request_id, aborted, received))

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        if (stats := outputs.scheduler_stats) is not None:
            stats.num_added_reqs -= self._num_unseen
            self.stats = stats
        self._send(outputs)
        if self.transfers is not None and outputs.outputs:
            self.transfers.outputs(outputs)

    def _died(self, error: Exception) -> None:
        self._send(EngineFailed(RequestFailure.of(WorkerLost(self._failure_text(error)))))

    def _call(self, call: CallUtility) -> None:
        own = {} if self.transfers is None else self.transfers.utilities
        if (function := own.get(call.name)) is not None:
            self._answer(call.call_id, lambda: function(*call.args))
        elif (beside := BESIDE_STEPS.get(call.name)) is not None:
            read = partial(answer_of, beside, call.name, self.core, call.args)
            threading.Thread(target=self._answer, args=(call.call_id, read), name=call.name, daemon=True).start()
        else:
            utility = UTILITIES.get(call.name)
            self.post(lambda core: self._answer(call.call_id, lambda: answer_of(utility, call.name, core, call.args)))

    def _answer(self, call_id: int, function: Callable[[], Any]) -> None:
        """Send a function's result or failure, from whatever thread it ran in."""
        try:
            output = UtilityOutput(call_id, function())
        except PdServeError as error:
            output = UtilityOutput(call_id, failure=RequestFailure.of(error))
        self._send(output)
