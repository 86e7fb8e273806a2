"""An engine under virtual time: the product's `EngineCore`, with an executor that computes nothing and takes a profile's times."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NamedTuple

from pdserve.common.block_hash import BlockHasher
from pdserve.common.device_event import DeviceEvent
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.engine_core import LOAD_WAIT_S, EngineCore
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.heartbeat import Heartbeat
from pdserve.engine.runner.loading.loaded_model import LoadedModel
from pdserve.engine.runner.pool.block_store import BlockStore, SealedStore
from pdserve.engine.runner.pool.host_blocks import HostBlocks
from pdserve.engine.scheduler.kv_messages import KvOutbox
from pdserve.engine.scheduler_output import CopyEnd, GrammarOutput, LookupEnd, ModelRunnerOutput, SchedulerOutput
from pdserve.simulator.step_times import Chunk, StepTimes
from pdserve.simulator.virtual_drafts import VirtualDrafting, VirtualSequence
from pdserve.simulator.virtual_tiers import NoDigest, VirtualDevice, VirtualQueues, VirtualTierMemory
from pdserve.simulator.virtual_time import VirtualTime
from pdserve.simulator.virtual_transfer import Link

ALIVE_S = 1.0
"""Seconds between two turns of an idle engine; its tick moves with each."""


class _Pending(NamedTuple):
    """A `StepResult`."""

    executor: VirtualExecutor
    ends_at: float
    """`clock.monotonic()` seconds."""
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.executor.read(self)


class VirtualExecutor:
    """An `Executor` of one device, on which one step follows the other. Of several ranks it is one: all do the same at the same
    time."""

    kv_written: DeviceEvent | None = None

    def __init__(
        self,
        time: VirtualTime,
        times: StepTimes,
        vocab_size: int,
        hidden_size: int,
        drafting: VirtualDrafting,
        device: VirtualDevice,
        host_blocks: HostBlocks | None,
        queues: VirtualQueues,
    ) -> None:
        """host_blocks: None without tiers. queues: theirs."""
        self._time = time
        self._device = device
        self._host_blocks = host_blocks
        self.queues = queues
        self._times = times
        self._vocab_size = vocab_size
        self.hidden_size = hidden_size
        self._drafting = drafting
        self._sequences: dict[str, VirtualSequence] = {}
        self._unsampled: _Pending | None = None
        """The step that `execute_model` began."""

    def check_health(self) -> None:
        """No effect."""

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.finished_req_ids:
            self._sequences.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._sequences[new.req_id] = VirtualSequence.of(new)
        chunks, output = [], ModelRunnerOutput()
        for request_id, count in scheduled.num_scheduled_tokens.items():
            sequence = self._sequences[request_id]
            if drafts := scheduled.scheduled_spec_decode_tokens.get(request_id):
                chunks.append(Chunk(count, sequence.num_computed, count))
                output.req_ids.append(request_id)
                output.sampled_token_ids.append(sequence.accept(drafts, self._vocab_size))
                sequence.num_computed = sequence.num_known - 1
                continue
            is_last = sequence.num_computed + count == sequence.num_known
            chunks.append(Chunk(count, sequence.num_computed, sequence.num_sequences if is_last else 0))
            sequence.num_computed += count
            if is_last:
                for number in range(sequence.num_sequences):
                    output.req_ids.append(request_id)
                    token_id = sequence.token(sequence.num_known, self._vocab_size, number)
                    output.sampled_token_ids.append([token_id])
                sequence.num_known += 1
                sequence.num_sequences = 1
        output.compute_s = self._times.step_s(chunks)
        self._unsampled = _Pending(self, self._device.queue(output.compute_s), output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> _Pending:
        assert self._unsampled is not None
        pending, self._unsampled = self._unsampled, None
        return pending

    def read(self, pending: _Pending) -> ModelRunnerOutput:
        """Wait for a step. As in a `ModelRunner`, nothing is drafted if the next one has begun."""
        self._time.spend_until(pending.ends_at)
        if self._unsampled is None:
            self._drafting.add(self._sequences, pending.output)
        return pending.output

    def copy_blocks(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        assert self._host_blocks is not None
        return self._host_blocks.copy(scheduled)

    def finished_copies(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        return [] if self._host_blocks is None else self._host_blocks.finished(timeout_s)

    def warm_up(self) -> None:
        """No effect."""

    def close(self) -> None:
        if self._host_blocks is not None:
            self._host_blocks.close()


class VirtualEngine:
    """An `EngineSource`."""

    num_threads, cpu_core = 1, None

    def __init__(
        self,
        outline: LoadedModel,
        settings: WorkerSettings,
        key: DeploymentKey,
        time: VirtualTime,
        times: StepTimes,
        outbox: KvOutbox,
        host: Link,
        store: BlockStore | None,
        draft_acceptance: float,
    ) -> None:
        """outline: as `load_outline` makes it. host: between device and host memory. store: below that; None without one.
        draft_acceptance: as of `VirtualDrafting`."""
        self._outline = outline
        self._settings = settings
        self._hasher = BlockHasher(key, settings.block_size)
        self._time = time
        self._times = times
        self._outbox = outbox
        self._host = host
        self._store = store
        self._draft_acceptance = draft_acceptance
        self._executor: VirtualExecutor | None = None
        self.info = outline.engine_info(settings)

    def make_core(self) -> EngineCore:
        self.close()
        config = self._outline.engine_config(self._settings)
        device, queues, host_blocks = VirtualDevice(), VirtualQueues(self._time), None
        if config.num_host_blocks:
            block_bytes = [shape.block_bytes for shape in self._outline.layout.shapes]
            memory = VirtualTierMemory(self._time, device, block_bytes, self._host)
            store = None if self._store is None else SealedStore(self._store, NoDigest())
            host_blocks = HostBlocks(memory, store, lambda _: queues)
        vocab_size = self.info.vocab_size
        drafting = VirtualDrafting(config, vocab_size, self._draft_acceptance)
        self._executor = VirtualExecutor(
            self._time, self._times, vocab_size, self.info.hidden_size, drafting, device, host_blocks, queues
        )
        return EngineCore(config, self._executor, Heartbeat(), self._hasher, vocab_size, self._outbox)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()


class VirtualEngineThread(EngineThread):
    """The turns of an engine as callbacks of the event loop: a turn begins when the steps of the one before have ended."""

    def __init__(self, time: VirtualTime, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._time = time
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run_turns(), name="engine")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def post(self, command: Any) -> None:
        self._inbox.put(command)
        self._has_news.set()

    async def _run_turns(self) -> None:
        while True:
            self._has_news.clear()
            with self._time.apart() as spent:
                num_commands = self._run_commands(None)
                goes_on = num_commands is not None and self._turn(num_commands)
            if not goes_on:
                return
            if spent():
                await asyncio.sleep(spent())
            elif self.core.is_loading:
                # the time that `EngineCore.step` waits for copies
                await self._queues.until_ended(LOAD_WAIT_S)
            elif self._wait_s is None:
                await asyncio.sleep(0)
            elif self._inbox.empty():
                await self._news(self._wait_s if self.core.has_work else ALIVE_S)

    @property
    def _queues(self) -> VirtualQueues:
        executor = self.core.executor
        assert isinstance(executor, VirtualExecutor)
        return executor.queues

    async def _news(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._has_news.wait()
        except TimeoutError:
            self._has_news.clear()


def engine_thread_of(time: VirtualTime) -> partial[VirtualEngineThread]:
    """Takes the arguments of `EngineThread`."""
    return partial(VirtualEngineThread, time)
