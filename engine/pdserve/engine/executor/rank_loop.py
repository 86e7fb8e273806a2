"""`RankLoop`: a rank above 0, which repeats the calls of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pdserve.common.errors import PeerError
from pdserve.engine.executor.tensor_parallel_executor import take_ended_at_all_ranks
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
)
from pdserve.engine.runner.model_runner import ModelRunner, PendingOutput
from pdserve.engine.runner.pool.host_blocks import HostBlocks
from pdserve.engine.scheduler_output import CopyEnd, GrammarOutput, SchedulerOutput
from pdserve.kernels.rank_group import RankGroup


class RankLoop:
    """Reads the tokens of a step when rank 0 does, so that both queue the same work on their devices."""

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        group: RankGroup,
        make_host_blocks: Callable[[StoreOptions | None], HostBlocks] | None = None,
    ) -> None:
        """make_runner: a runner with an empty batch over the rank's pool. group: this rank's. make_host_blocks: the rank's part of
        the tiers; None without any."""
        self._make_runner = make_runner
        self._group = group
        self._make_host_blocks = make_host_blocks
        self.runner = make_runner()
        self._host_blocks: HostBlocks | None = None
        self._ended_copies: dict[int, CopyEnd] = {}
        """By copy id, those that have ended here and not yet at all ranks."""
        self._unread: PendingOutput | None = None

    def serve(self, message: ToRank) -> None:
        """Raises: the error of a step, after which rank 0 cannot go on."""
        match message:
            case ExecuteModel(scheduled, reads_first):
                if reads_first:
                    self._read()
                self.runner.execute_model(scheduled)
            case SampleTokens(late_req_ids):
                self._read()
                grammar = None if late_req_ids is None else GrammarOutput(late_req_ids=late_req_ids)
                self._unread = self.runner.sample_tokens(grammar)
            case ReadRuns(num_tokens, drafts, writes_states):
                self._read(num_tokens, drafts=drafts)
                if writes_states:
                    self._group.minimum(0)
            case CopyBlocks():
                self._copy(message.scheduled())
            case EndCopies(copy_ids):
                self._end_copies(copy_ids)
            case WarmUp():
                self._read()
                self.runner.capture_graphs()
            case NewEngine(store):
                self._unread = None
                self.runner = self._make_runner()
                if self._make_host_blocks is not None:
                    self.close()
                    self._ended_copies.clear()
                    self._host_blocks = self._make_host_blocks(store)
            case _:
                raise PeerError(f"{type(message).__name__} is no message to a rank that has started")

    def close(self) -> None:
        """End the threads of copies."""
        if self._host_blocks is not None:
            self._host_blocks.close()

    @property
    def _tier(self) -> HostBlocks:
        if self._host_blocks is None:
            raise PeerError("copies to a host-memory tier, and there is none")
        return self._host_blocks

    def _copy(self, scheduled: SchedulerOutput) -> None:
        copied = self._tier.copy(scheduled)
        if scheduled.kv_stores:
            if copied is not None:
                copied.synchronize()
            self._group.minimum(0)

    def _end_copies(self, copy_ids: Sequence[int]) -> None:
        ends = self._tier.finished(0.0)
        self._ended_copies |= {end.copy_id: end for end in ends if isinstance(end, CopyEnd)}
        take_ended_at_all_ranks(self._group, copy_ids, self._ended_copies)

    def _read(self, num_tokens: Mapping[str, int] | None = None, *, drafts: bool = False) -> None:
        """Arguments: as of `ReadRuns`."""
        unread, self._unread = self._unread, None
        if unread is not None:
            unread.result(num_tokens, drafts=drafts)
