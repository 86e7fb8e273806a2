"""`InprocClient`: an engine in this process, which the reader of its outputs steps, or a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pdserve.common.errors import Cancelled, WorkerLost
from pdserve.common.processes.stacks import dump_stacks
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.client.engine_side import CallSoon, EngineSide, EngineTransfers, MakeThread, at_once
from pdserve.engine.client.loaded_engine import EngineSource
from pdserve.engine.client.messages import ToEngine
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_thread import ENGINE_FAILED, EngineThread

GRAMMAR_POLL_S = 0.05
"""While only grammars are awaited: how often to look at their deadlines."""


def failure_text(error: BaseException) -> str:
    """The message about an error that ended an engine, for its own front end only."""
    return f"{ENGINE_FAILED}: {type(error).__name__}: {error}"[:1000]


class InprocClient(EngineCoreClient):
    """`get_output` steps the engine in the caller's thread, unless `start` was called; `get_output_async` calls it."""

    def __init__(
        self,
        engine: EngineSource,
        call_soon: CallSoon = at_once,
        transfers: EngineTransfers | None = None,
        failure_text: Callable[[Exception], str] = failure_text,
        make_thread: MakeThread = EngineThread,
    ) -> None:
        """call_soon: where a subscriber is called; default: in the engine's thread. failure_text: the message about an error
        that ends the engine. make_thread: as of `EngineSide`."""
        super().__init__()
        self._engine = engine
        self.info = engine.info
        self._failure_text = failure_text
        self.side = EngineSide(
            engine.make_core(),
            self._on_message,
            call_soon,
            transfers,
            num_threads=engine.num_threads,
            cpu_core=engine.cpu_core,
            failure_text=failure_text,
            make_thread=make_thread,
        )
        self.stats = self.side.stats
        self.transfers = None if transfers is None else transfers.properties
        self.verifier = self.core.verifier

    @property
    def core(self) -> EngineCore:
        """For tests and for the engine's own thread."""
        return self.side.core

    @property
    def tick(self) -> int:
        return self.core.heartbeat.tick

    @property
    def ticked_at(self) -> float:
        return self.core.heartbeat.ticked_at

    @property
    def transfer_state(self) -> object:
        return None if self.side.transfers is None else self.side.transfers.state

    def get_output(self) -> EngineCoreOutputs:
        """As of `EngineCoreClient`; empty ones when no step can have any."""
        if self.side.thread is not None or not self._outputs.is_empty:
            return super().get_output()
        self._require_running()
        try:
            with self._sound(), _torch_threads(self._engine.num_threads):
                while True:
                    self.core.wait_for_grammar(GRAMMAR_POLL_S)
                    outputs = self.core.step()
                    if outputs.has_results or not self.core.has_work:
                        return self.recorded(outputs)
        except Exception as error:
            raise WorkerLost(self._failure_text(error)) from error

    async def get_output_async(self) -> EngineCoreOutputs:
        if self.side.thread is None and self._ended_with is None:
            self.start(warm_up=False)
        return await super().get_output_async()

    def close(self) -> None:
        cause = Cancelled("the engine was shut down")
        self.side.stop(self._ended_with or cause)
        self._close(cause)

    async def shutdown(self) -> None:
        if self.side.transfers is not None:
            await self.side.transfers.close()
        await asyncio.to_thread(self.side.stop)
        await asyncio.to_thread(self._close, Cancelled("the engine was shut down"))

    def _close(self, cause: Cancelled) -> None:
        self._engine.close()
        self._end(cause)
        self._log_stats()

    def kill(self) -> None:
        dump_stacks()

    def _add_request(self, request: EngineCoreRequest, transfer: object) -> None:
        if self.side.thread is not None:
            self.side.add_request(request, transfer)
            return
        with self._sound():
            self.side.add_request(request, transfer)

    def _send(self, message: ToEngine) -> None:
        if self.side.thread is not None:
            self.side.handle(message)
            return
        with self._sound():
            self.side.handle(message)

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """A sound engine after an error, Ctrl-C included: it may have stopped anywhere, so a new one takes over the pool."""
        try:
            yield
        except BaseException:
            self.side.core = self._engine.make_core()
            self.verifier = self.core.verifier
            raise


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    """torch's setting is the caller's own: it is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
