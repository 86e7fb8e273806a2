"""`TensorParallelExecutor`: rank 0 of a model that several processes share; the others repeat its calls."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Protocol, TypeVar

import msgspec

from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import PdServeError
from pdserve.engine.executor.executor import StepResult
from pdserve.engine.ranks.rank_messages import (
    CopyBlocks,
    EndCopies,
    ExecuteModel,
    NewEngine,
    ReadRuns,
    SampleTokens,
    StoreOptions,
    ToRank,
    WarmUp,
    without_sampling,
)
from pdserve.engine.runner.model_runner import ModelRunner, PendingOutput
from pdserve.engine.runner.pool.host_blocks import HostBlocks
from pdserve.engine.scheduler_output import CopyEnd, GrammarOutput, LookupEnd, ModelRunnerOutput, SchedulerOutput
from pdserve.kernels.rank_group import RankGroup

T = TypeVar("T")
OTHER_RANKS_S = 0.001
"""Seconds between two looks at a copy that has ended at rank 0 and not yet at another rank."""
_RUNNING, _NOT_WHOLE, _WHOLE = range(3)


class OtherRanks(Protocol):
    """The ranks above 0: `RankProcesses`, or threads in tests."""

    @property
    def group(self) -> RankGroup: ...

    def send(self, message: ToRank) -> None:
        """Send a message to each of them. Raises: WorkerLost."""

    def require_all(self) -> None:
        """Raises: the error with which one of them ended."""

    def attempt(self, work: Callable[[], T]) -> T:
        """Run operations in which all ranks take part. Raises: as `work`; WorkerLost when a rank has ended. None is possible
        afterwards."""


class TensorParallelExecutor:
    """Implements `Executor`: sends each call to the other ranks, then computes rank 0's part in the calling thread."""

    def __init__(
        self,
        runner: ModelRunner,
        ranks: OtherRanks,
        host_blocks: HostBlocks | None = None,
        store: StoreOptions | None = None,
    ) -> None:
        """A new engine over the ranks' pools. host_blocks: rank 0's part of the tiers, if there are any. store: for the other
        ranks' parts."""
        self.runner = runner
        self._host_blocks = host_blocks
        self._ranks = ranks
        self._is_unread = False
        """True if the result of the last sampled step was not waited for."""
        self._has_drafts = False
        """True if the last step that `execute_model` began has drafts."""
        self._has_tentative = False
        """True if it has states that are written when it is read."""
        self._ended_copies: dict[int, CopyEnd] = {}
        """By copy id, those that have ended at rank 0 and not yet at all ranks."""
        with suppress(PdServeError):  # `check_health` raises it
            ranks.send(NewEngine(store))

    @property
    def hidden_size(self) -> int:
        return self.runner.hidden_size

    @property
    def kv_written(self) -> DeviceEvent | None:
        """The event of rank 0. Blocks of other ranks are moved by these ranks."""
        return self.runner.kv_written

    def check_health(self) -> None:
        self._ranks.require_all()

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        sent = without_sampling(scheduled)
        if scheduled.lora_loads and self.runner.lora is not None:
            sent = msgspec.structs.replace(sent, lora_loads=self.runner.lora.with_folders(scheduled.lora_loads))
        if scheduled.has_copies:  # `CopyBlocks` has had them
            sent = msgspec.structs.replace(sent, kv_stores=[], kv_loads={}, kv_reads={}, kv_writes={}, kv_clear=False)
        self._has_drafts = bool(scheduled.scheduled_spec_decode_tokens)
        self._has_tentative = bool(scheduled.tentative_req_ids)
        message = ExecuteModel(sent, reads_first=not self._is_unread)
        self._together(message, lambda: self.runner.execute_model(scheduled))

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        message = SampleTokens(None if grammar is None else grammar.late_req_ids)
        pending = self._together(message, lambda: self.runner.sample_tokens(grammar))
        self._is_unread = True
        return _RankZeroResult(self, pending, self._has_drafts, self._has_tentative)

    def read(self, pending: PendingOutput, *, has_drafts: bool, has_tentative: bool) -> ModelRunnerOutput:
        """Wait for a step. Which of its drafts stand depends on rules and errors that only this rank has.

        With tentative states it returns when all ranks have written them, since their blocks may then have another owner.
        """

        def send_runs(output: ModelRunnerOutput) -> None:
            if has_drafts or has_tentative or self.runner.ranks_draft:
                added = zip(output.req_ids, output.sampled_token_ids, strict=True)
                runs = {req_id: len(token_ids) for req_id, token_ids in added}
                self._ranks.send(ReadRuns(runs, self.runner.ranks_draft, has_tentative))

        with _without_interrupts():
            output = self._ranks.attempt(lambda: pending.result(on_read=send_runs))
            self._is_unread = False
            if has_tentative:
                self._ranks.attempt(lambda: self._ranks.group.minimum(0))
        return output

    def copy_blocks(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        """As of `Executor`. Returns after the stores of all ranks, whose transfers may then write the blocks."""
        if self._host_blocks is None:
            raise RuntimeError("copies to a host-memory tier, and there is none")
        host_blocks = self._host_blocks

        def copy() -> DeviceEvent | None:
            copied = host_blocks.copy(scheduled)
            if scheduled.kv_stores:
                self._ranks.group.minimum(0)
            return copied

        return self._together(CopyBlocks.of(scheduled), copy)

    def finished_copies(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        """As of `Executor`: the copies that have ended at all ranks, which then serve the blocks to peers. Rank 0 looks up for all
        ranks; if another one lacks its part of a block, the load fails."""
        if self._host_blocks is None:
            return []
        wait_s = min(timeout_s, OTHER_RANKS_S) if self._ended_copies else timeout_s
        lookups: list[CopyEnd | LookupEnd] = []
        for end in self._host_blocks.finished(wait_s):
            if isinstance(end, LookupEnd):
                lookups.append(end)
            else:
                self._ended_copies[end.copy_id] = end
        if not self._ended_copies:
            return lookups
        copy_ids = list(self._ended_copies)
        agree = partial(take_ended_at_all_ranks, self._ranks.group, copy_ids, self._ended_copies)
        return [*lookups, *self._together(EndCopies(copy_ids), agree)]

    def warm_up(self) -> None:
        self._together(WarmUp(), self.runner.capture_graphs)

    def close(self) -> None:
        """End the thread of loads. The ranks end with the model, of which later engines may take over the pools."""
        if self._host_blocks is not None:
            self._host_blocks.close()

    def _together(self, message: ToRank, work: Callable[[], T]) -> T:
        with _without_interrupts():
            self._ranks.send(message)
            return self._ranks.attempt(work)


class _RankZeroResult:
    def __init__(
        self, executor: TensorParallelExecutor, pending: PendingOutput, has_drafts: bool, has_tentative: bool
    ) -> None:
        self._executor = executor
        self._pending = pending
        self._has_drafts = has_drafts
        self._has_tentative = has_tentative

    def result(self) -> ModelRunnerOutput:
        return self._executor.read(self._pending, has_drafts=self._has_drafts, has_tentative=self._has_tentative)


def take_ended_at_all_ranks(group: RankGroup, copy_ids: Sequence[int], ended: dict[int, CopyEnd]) -> list[CopyEnd]:
    """Remove from `ended` the copies that have ended at all ranks, and return them; whole are those that all ranks have. Each rank
    calls it with the same ids, and with what has ended there."""

    def state(copy_id: int) -> int:
        end = ended.get(copy_id)
        return _RUNNING if end is None else _WHOLE if end.is_whole else _NOT_WHOLE

    if group.minimum(min(map(state, copy_ids))) == _WHOLE:
        return [ended.pop(copy_id) for copy_id in copy_ids]
    states = {copy_id: group.minimum(state(copy_id)) for copy_id in copy_ids}
    return [
        ended.pop(copy_id)._replace(is_whole=agreed == _WHOLE)
        for copy_id, agreed in states.items()
        if agreed != _RUNNING
    ]


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C takes effect after the block: in the middle of a step it would leave the other ranks waiting for this one."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
