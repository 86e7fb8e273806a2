"""`LocalRequest` and `LocalPooling`: requests of the Python API, which make answers of their engine's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.common.errors import InternalError
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.lora_request import LoRARequest
from pdserve.common.request.sampling_params import RequestOutputKind, SamplingParams
from pdserve.common.telemetry.request_metrics import RequestMetrics
from pdserve.llm.pooling_output import PoolingOutput, PoolingRequestOutput
from pdserve.llm.requests.logits_callables import LogitsCallable
from pdserve.text.best_of import best
from pdserve.text.outputs.output_processor import OutputProcessor
from pdserve.text.outputs.request_output import CompletionOutput, RequestOutput


class ValidRequest(NamedTuple):
    """A validated request without its name and, if the caller gave none, its seed."""

    request: GenerationRequest
    text: str | None
    """The prompt's text, if it is one."""
    functions: tuple[LogitsCallable, ...] = ()
    """The caller's functions among `logits_processors`; they are known as long as these are referenced."""
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """A request, with the processor that makes text of its outputs."""

    core: EngineCoreRequest
    processor: OutputProcessor
    metrics: RequestMetrics | None
    """Also in every answer of `processor`; None without statistics."""
    params: SamplingParams
    """As the caller gave them."""
    functions: tuple[LogitsCallable, ...] = ()
    """See `ValidRequest.functions`."""

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.processor.request_id

    @property
    def core_params(self) -> SamplingParams:
        """The engine's parameters of the first turn, if it is a session."""
        return self.core.sampling_params

    @property
    def finished(self) -> bool:
        return self.processor.finished

    def process(self, output: EngineCoreOutput) -> CompletionOutput | None:
        """New output for the caller; None without any."""
        self.processor.num_cached_tokens = output.num_cached_tokens
        if self.metrics is not None:
            self.metrics.see(output)
        if output.prompt_logprobs is not None:
            self.processor.add_prompt_logprobs(output.first_prompt_position, output.prompt_logprobs)
        new = self.processor.process(
            output.index,
            output.first_position,
            output.new_token_ids,
            output.finish_reason,
            output.stop_reason,
            output.new_logprobs,
        )
        if self.metrics is not None and self.processor.finished:
            self.metrics.end()
        return new

    def ended_here(self, output: EngineCoreOutput) -> bool:
        """True if a stop string has ended the output's sequence; the engine does not report that."""
        return output.finish_reason is None and self.processor.states[output.index].finished

    @property
    def is_open(self) -> bool:
        """True if it is not known yet which of its sequences the caller gets."""
        return self.is_best_of and not self.processor.finished

    @property
    def is_best_of(self) -> bool:
        """True if more sequences are made than the caller gets."""
        return self.params.num_sequences > self.params.n

    def output_of(self, new: Sequence[CompletionOutput]) -> RequestOutput | None:
        """The item of the caller's stream after `process` returned `new`, by the request's `output_kind`; None for none."""
        kind = self.params.output_kind
        if not new or self.is_open or (kind is RequestOutputKind.FINAL_ONLY and not self.finished):
            return None
        if kind is RequestOutputKind.DELTA and not self.is_best_of:
            return self.processor.request_output(new)
        return self.answer

    @property
    def answer(self) -> RequestOutput:
        """The caller's output so far."""
        answer = self.processor.request_output()
        if self.is_best_of:
            answer.outputs = best(answer.outputs, self.params)
        return answer


@dataclass(slots=True)
class LocalPooling:
    """A request that generates no text, with its result."""

    request_id: str
    prompt: str | None
    core: EngineCoreRequest
    output: PoolingRequestOutput[PoolingOutput] | None = None

    @property
    def finished(self) -> bool:
        return self.output is not None

    def ended_here(self, output: EngineCoreOutput) -> bool:
        return False

    def process(self, output: EngineCoreOutput) -> PoolingRequestOutput[PoolingOutput]:
        """The answer. Raises: InternalError for an end without one."""
        if output.pooling_output is None:
            raise InternalError(f"the engine ended a pooling request without a vector: {output.finish_reason}")
        self.output = PoolingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.core.prompt_token_ids,
            outputs=PoolingOutput(data=output.pooling_output),
            num_cached_tokens=output.num_cached_tokens,
        )
        return self.output
