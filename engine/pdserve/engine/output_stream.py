"""`OutputStream`: the outputs of one request, from the engine's thread to its reader in the asyncio thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from pdserve.common.errors import NeedsPrefill, PdServeError, from_code
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreOutputs, FinishReason, LogprobsLists

_MERGED_ENTRIES = 1 << 17
"""Entries of log-probabilities above which outputs are merged no more: about 1 MiB of a message, which may have 16."""


class OutputStream:
    """The outputs of one request, until the last of its last sequence."""

    def __init__(
        self,
        request_id: str,
        observer: Callable[[EngineCoreOutput], None] | None = None,
        *,
        num_sequences: int = 1,
        interval: int = 1,
        on_output: Callable[[EngineCoreOutput], None] | None = None,
    ) -> None:
        """observer: called with each output when it arrives, read or not. num_sequences: number of sequences of the request.

        interval: tokens of a sequence per output; its first token and its end are not delayed. on_output: gets the outputs, errors
        included, in place of a reader; must not raise.
        """
        self._on_output = on_output
        self.request_id = request_id
        self._num_sequences = num_sequences
        self._num_open = num_sequences
        self._num_living = num_sequences
        self._observer = observer
        self._interval = interval
        self._begun: set[int] = set()
        """Sequences whose first token has arrived."""
        self._held: dict[int, EngineCoreOutput] = {}
        """Sequence -> output that is held until it has `interval` tokens."""
        self._outputs: asyncio.Queue[EngineCoreOutput] = asyncio.Queue()

    @property
    def has_ended(self) -> bool:
        """True if the last output of every sequence has been read."""
        return self._num_open <= 0

    @property
    def awaits_more(self) -> bool:
        """True if a sequence has not ended yet in the engine, read or not."""
        return self._num_living > 0

    def put(self, output: EngineCoreOutput) -> None:
        self._num_living -= output.finish_reason is not None and not output.awaits_input
        if self._observer is not None:
            self._observer(output)
        if self._interval > 1:
            if (held := self._held.pop(output.index, None)) is not None:
                output = _merged(held, output)
            if self._waits(output):
                self._held[output.index] = output
                return
        if self._on_output is not None:
            self._on_output(output)
        else:
            self._outputs.put_nowait(output)

    def _waits(self, output: EngineCoreOutput) -> bool:
        """True if the output may be delayed until more tokens of the sequence arrive."""
        if output.finish_reason is not None or output.error_code or output.migration is not None:
            self._begun.discard(output.index)  # a session's next turn has a first token of its own
            return False
        if output.index not in self._begun:
            if output.new_token_ids:
                self._begun.add(output.index)
            return False
        return len(output.new_token_ids) < self._interval and not _is_large(output)

    async def get(self) -> EngineCoreOutput:
        """The next output. Raises: the `PdServeError` with which the engine ended the request."""
        output = await self._outputs.get()
        if output.error_code:
            raise engine_error(output)
        return output

    async def __aiter__(self) -> AsyncIterator[EngineCoreOutput]:
        """Outputs until the last one, or until the last of a session's turn.

        Outputs of a sequence that arrived while the reader was busy are merged, up to `_MERGED_ENTRIES` log-probabilities.
        """
        self._num_open = self._num_sequences
        while self._num_open > 0:
            output = more = await self.get()
            unread = {output.index: output}
            large: list[EngineCoreOutput] = []
            while not self._outputs.empty() and not more.awaits_input:
                more = self._outputs.get_nowait()
                if more.error_code:
                    raise engine_error(more)
                before = unread.get(more.index)
                if before is not None and _is_large(before):
                    large.append(before)
                    before = None
                unread[more.index] = more if before is None else _merged(before, more)
            for output in (*large, *unread.values()):
                self._num_open -= output.finish_reason is not None
                yield output


def _is_large(output: EngineCoreOutput) -> bool:
    """True if its message would have about 1 MiB."""
    if output.new_logprobs is None or not output.new_logprobs.logprobs:
        return False
    entries = output.new_logprobs.logprobs
    return len(entries) * len(entries[0]) >= _MERGED_ENTRIES


def _merged(first: EngineCoreOutput, then: EngineCoreOutput) -> EngineCoreOutput:
    """Two outputs of one sequence, one after the other, as one."""
    return msgspec.structs.replace(
        then,
        new_token_ids=first.new_token_ids + then.new_token_ids,
        first_position=first.first_position,
        prefills_locally=first.prefills_locally,
        moments=first.moments | then.moments,
        prefill_chunks=first.prefill_chunks or then.prefill_chunks,
        cached_tokens=first.cached_tokens or then.cached_tokens,
        events=first.events + then.events,
        new_logprobs=_joined(first.new_logprobs, then.new_logprobs),
        prompt_logprobs=first.prompt_logprobs,
    )


def _joined(first: LogprobsLists | None, then: LogprobsLists | None) -> LogprobsLists | None:
    return first.followed_by(then) if first is not None and then is not None else first or then


def engine_error(output: EngineCoreOutput) -> PdServeError:
    """The error that ended an output's request."""
    error = from_code(output.error_code, output.error_message, output.error_field)
    if isinstance(error, NeedsPrefill):
        error.uncached_tokens = output.uncached_tokens
    return error


def refused_outputs(request_id: str, error: PdServeError) -> EngineCoreOutputs:
    """The results of a request that an engine did not take, or cannot report: `failed_output`."""
    return EngineCoreOutputs(outputs=[failed_output(request_id, error)], finished_req_ids=[request_id])


def failed_output(request_id: str, error: PdServeError) -> EngineCoreOutput:
    """The output that ends a request with an error: `engine_error` gives it back."""
    return EngineCoreOutput(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        error_code=error.code,
        error_message=error.message,
        error_field=error.field or "",
    )
