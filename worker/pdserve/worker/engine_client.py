"""`EngineClient`: the engine as the asyncio thread sees it: submit a request, iterate over its outputs, abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from pdserve.common.engine_types import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from pdserve.common.errors import Draining, InvalidRequest, PdServeError, WorkerLost, from_code
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.remote_kv import IntoEngine
from pdserve.worker.cached_blocks import CachedBlocks
from pdserve.worker.engine_thread import EngineThread


class OutputStream:
    """The outputs of one request, until its last."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._outputs: asyncio.Queue[EngineCoreOutput] = asyncio.Queue()

    def put(self, output: EngineCoreOutput) -> None:
        self._outputs.put_nowait(output)

    async def get(self) -> EngineCoreOutput:
        """The next output. Raises: the `PdServeError` with which the engine ended the request."""
        output = await self._outputs.get()
        if output.error_code:
            raise engine_error(output)
        return output

    async def __aiter__(self) -> AsyncIterator[EngineCoreOutput]:
        """Until the last output; what came while the reader was busy comes as one."""
        while True:
            output = await self.get()
            while not self._outputs.empty():
                more = self._outputs.get_nowait()
                if more.error_code:
                    raise engine_error(more)
                output = _merged(output, more)
            yield output
            if output.finish_reason is not None:
                return


def _merged(first: EngineCoreOutput, then: EngineCoreOutput) -> EngineCoreOutput:
    """Two outputs of one sequence, one after the other, as one."""
    return msgspec.structs.replace(
        then,
        new_token_ids=first.new_token_ids + then.new_token_ids,
        first_position=first.first_position,
        moments=first.moments | then.moments,
    )


def engine_error(output: EngineCoreOutput) -> PdServeError:
    """The error an output carries."""
    return from_code(output.error_code, output.error_message)


class EngineClient:
    """Lives in the asyncio thread."""

    def __init__(self, core: EngineCore, num_threads: int = 1, cpu_core: int | None = None) -> None:
        self._core = core
        self._streams: dict[str, OutputStream] = {}
        self._thread = EngineThread(
            core, asyncio.get_running_loop(), self._dispatch, self._engine_died, num_threads, cpu_core
        )
        self.stats = SchedulerStats(num_blocks_total=core.config.num_blocks, num_blocks_free=core.config.num_blocks)
        self.prefill_tokens_per_s = 0.0
        self.died = asyncio.Event()
        self.draining = False
        self.on_unclaimed: Callable[[EngineCoreOutput], None] | None = None
        """Hears outputs of requests that have no stream: repeated prefills belong to the seam adapter."""
        self.cached_blocks = CachedBlocks()
        self._last_count: tuple[float, int] = (time.monotonic(), 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    @property
    def tick(self) -> int:
        return self._core.tick

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def core(self) -> EngineCore:
        """For what may be read from any thread: config, vocabulary, tick, `verify`."""
        return self._core

    def submit(self, request: EngineCoreRequest) -> OutputStream:
        """Queue a request. Raises: InvalidRequest, Draining, WorkerLost."""
        if self.draining:
            raise Draining("the worker is draining")
        if self.died.is_set():
            raise WorkerLost("the engine has failed")
        self._core.verify(request)
        if request.request_id in self._streams:
            raise InvalidRequest(f"request {request.request_id} is here already", "request_id")
        stream = self._streams[request.request_id] = OutputStream(request.request_id)
        self._thread.post(lambda core: core.add_request(request))
        return stream

    def submit_quietly(self, request: EngineCoreRequest) -> None:
        """Queue a verified request whose outputs go to `on_unclaimed`."""
        self._thread.post(lambda core: core.add_request(request))

    def release(self, stream: OutputStream) -> None:
        """Nobody listens any more: abort the request, unless it has ended. Harmless when called again."""
        if self._streams.pop(stream.request_id, None) is not None:
            self.abort(stream.request_id)

    def abort(self, request_id: str) -> None:
        self._thread.post(lambda core: core.abort_request(request_id))

    def apply(self, event: IntoEngine) -> None:
        """Pass an event of the transfer side on."""
        self._thread.post(lambda core: core.apply(event))

    def call(self, command: Callable[[EngineCore], object]) -> None:
        """Run something in the engine thread."""
        self._thread.post(command)

    def _dispatch(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
            if self.on_unclaimed is not None:
                self.on_unclaimed(output)
        if outputs.blocks_stored or outputs.blocks_removed:
            self.cached_blocks.apply(outputs.blocks_stored, outputs.blocks_removed)
        if outputs.scheduler_stats is not None:
            self._measure(outputs.scheduler_stats)
            self.stats = outputs.scheduler_stats

    def _measure(self, stats: SchedulerStats) -> None:
        """Prompt tokens a second, over the last stretch in which any were computed."""
        now, (since, count) = time.monotonic(), self._last_count
        if stats.num_computed_prompt_tokens > count:
            if self.stats.num_waiting_tokens or self.stats.num_running_reqs:
                self.prefill_tokens_per_s = (stats.num_computed_prompt_tokens - count) / max(1e-6, now - since)
            self._last_count = (now, stats.num_computed_prompt_tokens)
        elif not stats.num_running_reqs:
            self._last_count = (now, stats.num_computed_prompt_tokens)

    def _engine_died(self) -> None:
        self.died.set()
