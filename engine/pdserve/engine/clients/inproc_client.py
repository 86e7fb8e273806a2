"""`InprocClient`: an engine in this process, which the reader of its outputs steps, or a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any

import torch

from pdserve.common.errors import Cancelled, InvalidRequest, PdServeError, WorkerLost, from_code
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, StreamingUpdate
from pdserve.engine.clients.loaded_engine import LoadedEngine
from pdserve.engine.clients.output_queue import OutputQueue, OutputSink
from pdserve.engine.clients.utilities import call_utility
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_thread import ENGINE_FAILED, EngineThread
from pdserve.engine.output_stream import refused_outputs

GRAMMAR_POLL_S = 0.05
"""While only grammars are awaited: how often to look at their deadlines."""


class InprocClient:
    """An `EngineCoreClient`. `get_output` steps the engine in the caller's thread; `get_output_async` starts a thread for it."""

    def __init__(self, engine: LoadedEngine, sink: OutputSink | None = None) -> None:
        """sink: takes the outputs in place of `get_output` and `get_output_async`, once `start` was called."""
        self._engine = engine
        self.info = engine.info
        self.core = engine.make_core()
        """For tests and for the engine's own thread."""
        self._outputs = OutputQueue()
        self._sink = sink or self._outputs
        self._thread: EngineThread | None = None
        self._calls: set[Future[Any]] = set()
        """Unanswered utility calls."""
        self._ended_with: PdServeError | None = None

    def start(self) -> None:
        """Run the engine in a thread of its own."""
        self._thread = EngineThread(
            self.core,
            lambda callback: callback(),
            self._put,
            lambda error: self._end(WorkerLost(failure_text(error))),
            self._engine.num_threads,
            cpu_core=None,
            failure_text=failure_text,
        )
        self._thread.start()

    def add_request(self, request: EngineCoreRequest) -> None:
        self._require_running()
        try:
            self.core.verify(request)
        except InvalidRequest as error:
            self._put(refused_outputs(request.request_id, error))
            return
        self._do(lambda core: core.add_request(request))

    def resume_request(self, update: StreamingUpdate) -> None:
        self._require_running()
        try:
            self.core.verify_update(update)
        except InvalidRequest as error:
            refusal = error
            self._do(lambda core: core.fail_request(update.request_id, refusal))
            return
        self._do(lambda core: core.resume_request(update))

    def finish_session(self, request_id: str) -> None:
        self._do(lambda core: core.finish_session(request_id))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        def abort(core: EngineCore) -> None:
            for request_id in request_ids:
                core.abort_request(request_id)

        self._do(abort)

    def end_sequence(self, request_id: str, index: int) -> None:
        self._do(lambda core: core.end_sequence(request_id, index))

    def get_output(self) -> EngineCoreOutputs:
        """The results of the next step that has any, or empty ones when no step can have any."""
        if self._thread is not None or not self._outputs.is_empty:
            return self._outputs.get()
        self._require_running()
        try:
            with self._sound(), _torch_threads(self._engine.num_threads):
                while True:
                    self.core.wait_for_grammar(GRAMMAR_POLL_S)
                    outputs = self.core.step()
                    if outputs.has_results or not self.core.has_work:
                        return outputs
        except Exception as error:
            raise WorkerLost(failure_text(error)) from error

    async def get_output_async(self) -> EngineCoreOutputs:
        if self._thread is None and self._ended_with is None:
            self.start()
        return await self._outputs.get_async()

    def utility(self, name: str, *args: Any) -> Any:
        return self.call(name, args).result()

    async def utility_async(self, name: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self.call(name, args))

    def call(self, name: str, args: Sequence[Any]) -> Future[Any]:
        """`utility`, as a future."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # no caller can cancel it
        self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)

        def run(core: EngineCore) -> None:
            try:
                answer.set_result(call_utility(core, name, args))
            except PdServeError as error:
                answer.set_exception(error)

        # `_end` sets the cause before it looks for calls
        self._require_running()
        self._do(run)
        return answer

    def close(self) -> None:
        ended_with = self._ended_with = self._ended_with or Cancelled("the engine was shut down")
        if self._thread is not None:
            self._thread.post(lambda core: core.fail_all(ended_with))
            self._thread.stop()
        self._engine.close()
        self._end(ended_with)

    def _put(self, outputs: EngineCoreOutputs) -> None:
        if outputs.has_results:
            self._sink.put(outputs)

    def _end(self, cause: PdServeError) -> None:
        self._ended_with = self._ended_with or cause
        for answer in list(self._calls):
            with suppress(InvalidStateError):  # the engine's thread has answered it just now
                answer.set_exception(self._ended_with)
        self._sink.put(self._ended_with)

    def _require_running(self) -> None:
        if (cause := self._ended_with) is not None:
            raise from_code(cause.code, cause.message)

    def _do(self, command: Callable[[EngineCore], None]) -> None:
        if self._thread is not None:
            self._thread.post(command)
        else:
            with self._sound():
                command(self.core)

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """A sound engine after an error, Ctrl-C included: it may have stopped anywhere, so a new one takes over the pool."""
        try:
            yield
        except BaseException:
            self.core = self._engine.make_core()
            raise


def failure_text(error: BaseException) -> str:
    """The message about an error that ended an engine, for its own front end alone."""
    return f"{ENGINE_FAILED}: {type(error).__name__}: {error}"[:1000]


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    """torch's setting is the caller's own: it is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
