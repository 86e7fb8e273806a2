"""`StreamingSession`: turns of `AsyncLLM.generate` with streaming input, on one sequence whose KV stays in the engine.

    feed      inputs --> validate --> engine's queue of turns
    process   outputs of the turns, one after the other --> `RequestOutput`

The engine begins a queued turn at once when the one before has ended. After a turn with stop strings, whose end only the reader of
its text knows, the next one is sent when the text has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import NamedTuple

from pdserve.common.errors import InternalError, InvalidRequest, PdServeError
from pdserve.common.request.engine_types import EngineCoreOutput, StreamingUpdate
from pdserve.common.request.sampling_params import RequestOutputKind, SamplingParams
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.output_stream import OutputStream, failed_output
from pdserve.llm.requests.local_request import LocalRequest, ValidRequest
from pdserve.llm.requests.prompts import PromptType
from pdserve.llm.requests.request_factory import RequestFactory
from pdserve.text.outputs.request_output import RequestOutput

MAX_QUEUED_TURNS = 64
"""Turns that may wait in the engine; further ones are not read from the caller."""


class StreamingInput(NamedTuple):
    """One turn's input, by vLLM's name."""

    prompt: PromptType
    """Follows everything that the session has so far."""
    sampling_params: SamplingParams | None = None
    """Parameters of this turn; None: those of the call."""


Validate = Callable[[StreamingInput], ValidRequest]


class StreamingSession:
    """One session: `feed` in a task, and `process` for each output of its stream."""

    def __init__(
        self, client: EngineCoreClient, requests: RequestFactory, first: LocalRequest, stream: OutputStream
    ) -> None:
        """first: the first turn, which the engine has."""
        self._client = client
        self._requests = requests
        self._engine_id = first.core.request_id
        self._stream = stream
        self._turn = first
        """The running turn, or the last one that ran."""
        self._turn_is_over = False
        self._ends_early = False
        """True if a stop string has ended the running turn's text."""
        self._token_ids = list(first.core.prompt_token_ids)
        """Everything so far."""
        self._num_kept: int | None = None
        """Output tokens of the last turn, where the engine has more of it; else None."""
        self._queued: deque[tuple[ValidRequest, StreamingUpdate]] = deque()
        self._turn_ended = asyncio.Event()
        self.has_ended = False
        """True after the engine's last output."""
        self.input_error: BaseException | None = None
        """The error of the caller's inputs, which has ended the session."""

    async def feed(self, inputs: AsyncIterator[StreamingInput], validate: Validate) -> None:
        """Send turns until there are no more inputs. An error of an input ends the session's stream."""
        try:
            async for each in inputs:
                valid = await asyncio.to_thread(validate, each)
                while self._must_wait():
                    self._turn_ended.clear()
                    await self._turn_ended.wait()
                update = self._requests.make_turn(valid, self._engine_id)
                if self._turn_is_over and not self._queued:
                    update.num_kept_output_tokens = self._num_kept
                self._queued.append((valid, update))
                self._client.resume_request(update)
            self._client.finish_session(self._engine_id)
        except Exception as error:
            self.input_error = error
            cause = error if isinstance(error, PdServeError) else InternalError(f"the inputs ended with {error!r:.200}")
            self._stream.put(failed_output(self._engine_id, cause))

    def _must_wait(self) -> bool:
        """True if the next turn may not be sent yet."""
        if len(self._queued) >= MAX_QUEUED_TURNS:
            return True
        if self._queued:
            return bool(self._queued[-1][1].sampling_params.stop)
        return not self._turn_is_over and bool(self._turn.core_params.stop)

    def process(self, output: EngineCoreOutput) -> RequestOutput | None:
        """The item of the caller's stream for an output, by the turn's `output_kind`; None for none.

        Raises: as `LocalRequest.process`.
        """
        self.has_ended = output.finished
        if self._turn_is_over:
            if not self._queued:
                return self._last_again()  # the session's end, between two turns
            self._begin_turn()
        turn = self._turn
        new = turn.process(output)
        if turn.ended_here(output) and not self._ends_early:
            self._ends_early = True
            self._client.end_sequence(self._engine_id, 0)
        answer = None if new is None else turn.output_of([new])
        if output.finish_reason is not None:
            self._end_turn(output)
        if answer is not None:
            answer.finished = output.finished
        return answer

    def _begin_turn(self) -> None:
        valid, update = self._queued.popleft()
        num_before = len(self._token_ids)
        self._token_ids = [*self._token_ids, *update.prompt_token_ids]
        self._turn = self._requests.begin_turn(valid, update, self._turn, self._token_ids, num_before)
        self._turn_is_over = self._ends_early = False

    def _end_turn(self, output: EngineCoreOutput) -> None:
        tokens = self._turn.processor.output_token_ids(0)
        self._token_ids = [*self._token_ids, *tokens]
        num_tokens = output.first_position + len(output.new_token_ids)
        self._num_kept = len(tokens) if len(tokens) < num_tokens else None
        self._turn_is_over = True
        self._turn_ended.set()

    def _last_again(self) -> RequestOutput:
        """The last turn's answer, as the session's last item."""
        is_delta = self._turn.params.output_kind is RequestOutputKind.DELTA
        answer = self._turn.processor.request_output([]) if is_delta else self._turn.answer
        answer.finished = True
        return answer


async def first_input(inputs: AsyncIterable[StreamingInput]) -> tuple[StreamingInput, AsyncIterator[StreamingInput]]:
    """The first input, and the iterator of the others. Raises: InvalidRequest without any."""
    others = aiter(inputs)
    async for first in others:
        return first, others
    raise InvalidRequest("prompt has no input", "prompt")
