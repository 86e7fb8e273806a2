"""Outputs of a request for callers: `RequestOutput`, its `CompletionOutput`s, their `Logprob`s."""

from __future__ import annotations

import msgspec

from pdserve.common.request.engine_types import EngineCoreEvent
from pdserve.common.request.lora_request import LoRARequest
from pdserve.common.telemetry.request_metrics import RequestMetrics


class Logprob(msgspec.Struct, kw_only=True):
    """One candidate for one output position."""

    logprob: float
    """Log-softmax of the model's logits, before penalties, biases, temperature and masks."""
    rank: int
    """1 is the most likely."""
    decoded_token: str
    """The token's own text; U+FFFD for a part of a character."""
    decoded_bytes: bytes
    """The token's text in UTF-8, with the bytes of an incomplete character."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One sequence of a request: new output from `process`, or all output from `request_output`."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over the sequence's sampled tokens up to these; None if log-probabilities were not requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per entry of `token_ids`, token id -> candidate: the sampled token, then the most likely tokens, best first."""
    text_offsets: list[int] | None = None
    """With `logprobs`: number of characters of the sequence's text before each of `token_ids`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token, None for the first; set in a router's first output of the sequence, if requested."""
    prompt_token_ids: list[int] | None = None
    """The prompt's token ids; set in a router's first output of the sequence."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; set in the sequence's last delta."""
    stop_reason: int | str | None = None
    """The stop token id or stop string; None for EOS, length, abort and error."""

    def finished(self) -> bool:
        """True if the sequence has ended; a method, as in vLLM."""
        return self.finish_reason is not None


class RequestMetadata(msgspec.Struct, kw_only=True):
    """Facts about a request other than its text."""

    cached_tokens: int | None
    """Prompt tokens that needed no computing."""
    stats: RequestMetrics | None
    """None without statistics."""
    events: list[EngineCoreEvent]
    """Events of all sequences so far, with `clock.monotonic()` of the engine's process; empty without statistics."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request and its sequences, as offline callers and response formatters read them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token, None for the first; None if they were not requested, or have not arrived."""
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    """The adapter, as the offline caller named it."""

    @property
    def metadata(self) -> RequestMetadata:
        """`num_cached_tokens` and `metrics` by other names."""
        stats = self.metrics
        return RequestMetadata(
            cached_tokens=self.num_cached_tokens, stats=stats, events=[] if stats is None else list(stats.events)
        )

    def get_final_output(self) -> CompletionOutput | None:
        """The first sequence; None until the request has finished."""
        return self.outputs[0] if self.finished and self.outputs else None

    def is_streaming(self) -> bool:
        """True until the request has finished."""
        return not self.finished
