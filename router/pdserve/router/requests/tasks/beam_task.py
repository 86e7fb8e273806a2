"""`BeamPromptTask`: one prompt by beam search; each step asks workers for the next token of every live beam."""

from __future__ import annotations

import asyncio

import msgspec

from pdserve.common import timeline as moments
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.router.attempts.call_events import Outputs
from pdserve.router.requests.tasks.prompt_task import PromptTask
from pdserve.router.requests.tasks.retry_state import RetryState
from pdserve.text.beam_search import Beam, BeamSearch, BeamSearchParams, candidates_of, step_params
from pdserve.text.outputs.output_processor import OutputProcessor
from pdserve.text.outputs.request_output import CompletionOutput


class BeamPromptTask(PromptTask):
    """A beam is a sequence of the request that is resumed with its tokens, for one token more.

    So each step has attempts of its own, which survive the loss of a worker, and finds the beam's blocks where they are
    cached. Every step of every beam counts as a completion token.
    """

    _live: list[Beam]
    _candidates: dict[int, list[tuple[int, float]]]
    """Live beam -> its most likely next tokens, in this step."""
    _step: GenerationRequest

    async def attempts(self, request: GenerationRequest, processor: OutputProcessor, retry_state: RetryState) -> None:
        params, eos = self._params(request), request.eos_token_ids
        params.verify(self._services.preparation.tokenizer.vocab_size, len(eos))
        search = BeamSearch(params, eos)
        step = msgspec.structs.replace(step_params(search.num_candidates), n=params.beam_width)
        self._step = msgspec.structs.replace(request, sampling_params=step, eos_token_ids=())
        while not search.done:
            self._live, self._candidates = search.live, {}
            # hashes are kept by sequence and length, which mean other tokens in each step
            self._prepared = {key: kept for key, kept in self._prepared.items() if key[2] < 0}
            await self._take_step(request, processor)
            search.advance([self._candidates[place] for place in range(len(self._live))])
        self.timeline.mark(moments.FINISHED)
        self._record.finish_reason = search.finish_reason(search.finished[0].beam)
        for index, finished in enumerate(search.finished[: self.num_choices]):
            self._push(self._output(index, finished.beam, search.finish_reason(finished.beam)))

    def _params(self, request: GenerationRequest) -> BeamSearchParams:
        """The client's parameters with those that are known once the request is complete."""
        sampling = request.sampling_params
        return msgspec.structs.replace(
            self._request.beams or BeamSearchParams(beam_width=1),
            beam_width=self.num_sequences,
            max_tokens=sampling.output_limit,
            ignore_eos=sampling.ignore_eos,
        )

    async def _take_step(self, request: GenerationRequest, processor: OutputProcessor) -> None:
        """Compute one token for every live beam. Raises: PdServeError, the first of several."""
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(len(self._live)):
                    group.create_task(super().attempts(request, processor, RetryState(index=place)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _resumed(self, request: GenerationRequest, retry_state: RetryState) -> GenerationRequest:
        index = retry_state.index or 0
        token_ids = list(self._live[index].token_ids)
        sampling = msgspec.structs.replace(self._step.sampling_params, max_tokens=len(token_ids) + 1)
        return msgspec.structs.replace(
            self._step, sampling_params=sampling, index=index, n=1, output_token_ids=token_ids
        )

    def relay(self, outputs: Outputs) -> bool:
        if outputs.index in self._candidates:
            return True
        self._candidates[outputs.index] = candidates_of(outputs.logprobs)
        if not self.usage.completion_tokens:
            self._begin(outputs.cached_tokens)
        if self._holds is not None:
            self._holds.produced(1)
        self.usage.completion_tokens += 1
        self._record.relayed(outputs.index, 1, outputs.cached_tokens)
        return True

    def _output(self, index: int, beam: Beam, finish_reason: str) -> CompletionOutput:
        params = self._request.sampling_params
        detokenizer = self._services.preparation.tokenizer.detokenizer(
            self._processor.context_token_ids if self._processor is not None else (),
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        text = detokenizer.add(beam.token_ids) + detokenizer.flush() if params.detokenize else ""
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(beam.token_ids),
            cumulative_logprob=beam.cum_logprob,
            finish_reason=finish_reason,
        )
