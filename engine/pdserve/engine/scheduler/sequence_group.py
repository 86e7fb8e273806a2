"""`SequenceGroup`: forks the sequences of a request after its prompt, and tracks the unfinished ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus
from pdserve.engine.scheduler.preemption import Preemption
from pdserve.engine.scheduler.waiting.waiting_queues import WaitingQueues


@dataclass(eq=False)
class SequenceGroup:
    """`core.request_id` -> unfinished sequences, for requests with several sequences."""

    _config: EngineConfig
    _requests: dict[str, Request]
    """The scheduler's unfinished sequences; forked ones are added."""
    _kv: KVCacheManager
    _waiting: WaitingQueues
    _preemption: Preemption
    _of: dict[str, dict[int, Request]] = field(default_factory=dict, init=False)

    def fork(self, request: Request, token_ids: Sequence[int]) -> list[tuple[Request, RequestStatus | None]] | None:
        """Append a token to a sequence, or at the end of a prompt the first token to each of its sequences.

        Returns the sequences in the order of their indexes, each with its final status, None if it continues. None, with nothing
        changed, if a token does not fit the request's grammar.
        """
        sequences = [request] if request.num_sequences == 1 else [request, *request.fork()]
        ends: list[RequestStatus | None] = []
        # the original request last: if a token does not fit, it is unchanged and still represents all sequences
        for sequence, token_id in reversed(list(zip(sequences, token_ids, strict=True))):
            ends.insert(0, sequence.append_output(token_id, self._config.max_model_len))
            if ends[0] is RequestStatus.FINISHED_ERROR:
                _close_grammars(sequences[1:])
                return None
        for place, sequence in enumerate(sequences):
            if sequence.index in request.ended_elsewhere:
                ends[place] = RequestStatus.FINISHED_STOPPED
        if len(sequences) > 1 and not request.core.transfer_source:
            for sequence, ended_with in zip(sequences, ends, strict=True):
                self._requests[sequence.request_id] = sequence
                self._of.setdefault(sequence.core.request_id, {})[sequence.index] = sequence
                if sequence is not request and ended_with is None:
                    self._enter(sequence, request)
        elif len(sequences) > 1:
            _close_grammars(sequences[1:])  # the sequences continue at another worker
        return list(zip(sequences, ends, strict=True))

    def append_run(self, request: Request, token_ids: Sequence[int]) -> tuple[list[int], RequestStatus | None]:
        """Append tokens to a sequence up to the first that ends it; returns the appended ones, and the final status."""
        for count, token_id in enumerate(token_ids, 1):
            if (ended_with := request.append_output(token_id, self._config.max_model_len)) is not None:
                return list(token_ids[:count]), ended_with
        return list(token_ids), None

    @property
    def max_model_len(self) -> int:
        return self._config.max_model_len

    def _enter(self, sequence: Request, begins_as: Request) -> None:
        """Queue a forked sequence for the batch."""
        if self._kv.fork(begins_as, sequence):
            self._waiting.add_ready(sequence)
            return
        # no block is left: treat the sequence as preempted
        sequence.move_to(RequestStatus.RUNNING)
        self._preemption.lose_blocks(sequence)

    def remove(self, request: Request) -> None:
        """Remove an ended sequence; no effect if it is not tracked."""
        if (living := self._of.get(request.core.request_id)) is not None:
            living.pop(request.index, None)
            if not living:
                del self._of[request.core.request_id]

    def has(self, request_id: str) -> bool:
        """True if a sequence of the request has not ended, forked or not."""
        return request_id in self._requests or request_id in self._of

    def of(self, request_id: str) -> list[Request]:
        """Unfinished sequences of a request; empty if it is unknown, has not forked, or has ended."""
        return list(self._of.get(request_id, {}).values())


def _close_grammars(sequences: Sequence[Request]) -> None:
    for sequence in sequences:
        if sequence.grammar is not None:
            sequence.grammar.close()
