"""`OutputCollector`: collects the outputs of a step until the engine takes them."""

from __future__ import annotations

from pdserve.common.errors import NeedsPrefill, PdServeError
from pdserve.common.request.engine_types import EngineCoreOutput, LogprobsLists, Migration
from pdserve.engine.request import FINISH_REASONS, Request, RequestStatus


class OutputCollector:
    """Outputs of the engine. Each method adds one output per event of a sequence; `take` empties the list."""

    def __init__(self) -> None:
        self._outputs: list[EngineCoreOutput] = []

    def take(self) -> list[EngineCoreOutput]:
        """Outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def prefills_locally(self, request: Request) -> None:
        """Report that the prompt is prefilled here, so that the router can cancel the prefill call."""
        self._outputs.append(
            EngineCoreOutput(
                request_id=request.core.request_id,
                index=request.index,
                # a busy reader gets this output merged with the first token, and reads the position from this one
                first_position=request.num_output_tokens,
                prefills_locally=True,
            )
        )

    def next_tokens(
        self, request: Request, new_token_ids: list[int], new_logprobs: LogprobsLists | None
    ) -> EngineCoreOutput:
        """Further tokens of a sequence that goes on; returns the output, which may be completed."""
        output = EngineCoreOutput(
            request_id=request.core.request_id,
            index=request.index,
            new_token_ids=new_token_ids,
            first_position=request.num_output_tokens - len(new_token_ids),
            num_cached_tokens=request.num_cached_prompt_tokens,
            new_logprobs=new_logprobs,
            first_prompt_position=max(1, request.num_tokens_before),
            num_preemptions=request.num_preemptions,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            events=request.take_events() if request.events else [],
        )
        self._outputs.append(output)
        return output

    def tokens(
        self,
        request: Request,
        new_token_ids: list[int],
        status: RequestStatus | None,
        new_logprobs: LogprobsLists | None = None,
        cause: PdServeError | None = None,
        awaits_input: bool = False,
        pooling_output: list[float] | None = None,
        migration: Migration | None = None,
    ) -> None:
        """New tokens of a sequence, its end, or both. status: final status of the sequence or its turn; None while it continues,
        here or, with a migration, at another worker."""
        if status is not None:
            request.mark("finished")
        output = self.next_tokens(request, new_token_ids, new_logprobs)
        if status is not None or not request.has_emitted:
            output.moments = dict(request.moments)
            output.prefill_chunks = request.prefill_chunks
        if not request.has_emitted:
            output.cached_tokens = request.cached_prompt_tokens
        request.has_emitted = True
        output.finish_reason = None if status is None else FINISH_REASONS[status]
        output.awaits_input = awaits_input
        output.stop_reason = request.stop_reason
        output.transfer_unwanted = request.is_unwanted_source
        output.migration = migration
        output.prompt_logprobs = request.take_prompt_logprobs() if new_token_ids else None
        output.pooling_output = pooling_output
        if cause is not None:
            output.error_code, output.error_message, output.error_field = cause.code, cause.message, cause.field or ""
        if isinstance(cause, NeedsPrefill):
            output.uncached_tokens = cause.uncached_tokens
