"""Events of a worker's calls as plain values, checked against what was requested."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import msgspec
from google.protobuf.message import Message

from pdserve.common.errors import PeerError
from pdserve.common.request.cached_tokens import NOTHING_CACHED, CachedTokens
from pdserve.common.request.engine_types import FinishReason, LogprobsLists
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.wire.messages import (
    cached_tokens_from_wire,
    finish_reason_from_wire,
    logprobs_from_wire,
    moments_from_wire,
)
from pdserve.common.security.peer_message import parsed
from pdserve.router.attempts.worker_errors import believed
from pdserve.router.workers.call_failure import CallFailed
from pdserve.v1 import decode_pb2, prefill_pb2, request_pb2

_ANY_VOCABULARY = 1 << 32
_MOST_LOGPROB = 0.01
"""Upper limit: the logarithm of 1, which rounding may exceed."""
Moments = dict[str, int]
"""name -> wall-clock nanoseconds"""
_NO_MOMENTS: Moments = {}
_ENDS = {number: name.lower() for name, number in prefill_pb2.Ended.How.items()}
"""Number -> name of the end of a transfer; a newer worker may send other numbers."""


class Admitted(msgspec.Struct, gc=False):
    moments: Moments


class Outputs(msgspec.Struct, gc=False):
    """New tokens of one sequence."""

    index: int
    first_position: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: CachedTokens = NOTHING_CACHED
    moments: Moments = _NO_MOMENTS
    logprobs: LogprobsLists | None = None


class Computed(msgspec.Struct):
    """The prefill worker has computed the prompt's KV and the first token."""

    num_tokens: int
    request_digest: bytes
    first_outputs: list[Outputs]
    moments: Moments


class PromptLogprobs(msgspec.Struct):
    """Log-probabilities of consecutive prompt tokens."""

    first_position: int
    """Position in the prompt."""
    logprobs: LogprobsLists


class Ended(msgspec.Struct, gc=False):
    """The transfer has ended at its source."""

    released: bool
    """True if the receiver has all blocks; otherwise the source gave up, or its lease expired."""
    cause: str
    moments: Moments


class Migrating(msgspec.Struct, gc=False):
    """A sequence has ended at the decode worker, for another one to continue."""

    index: int
    computed: Computed
    """Its first output is the sequence's last token."""
    without_draft_head: bool


class Migrated(msgspec.Struct, gc=False):
    """The transfer of such a sequence has ended at its source."""

    index: int
    ended: Ended


class NeedsPrefillEvent(msgspec.Struct, gc=False):
    uncached_tokens: int


class PrefillingLocally(msgspec.Struct, gc=False):
    pass


class ReceivingEvent(msgspec.Struct, gc=False):
    """A transfer takes long. Without blocks to wait for, or after them, nothing of it is sent."""

    awaits_source: bool
    """True if the decode worker has asked for blocks that the source has not published."""


class LandedEvent(msgspec.Struct, gc=False):
    num_blocks: int
    transfer_bytes: int
    connector: str
    moments: Moments


class UnknownEvent(msgspec.Struct, gc=False):
    """An event of a newer worker, unknown to this router."""


PrefillCallEvent = Admitted | PromptLogprobs | Computed | Ended | UnknownEvent
DecodeCallEvent = (
    Admitted
    | NeedsPrefillEvent
    | PrefillingLocally
    | ReceivingEvent
    | LandedEvent
    | PromptLogprobs
    | Outputs
    | Migrating
    | Migrated
    | UnknownEvent
)
E = TypeVar("E")
M = TypeVar("M", bound=Message)


class CallReader(abc.ABC, Generic[M, E]):
    """Reads the events of one call."""

    kind: ClassVar[type[Message]]
    """Of the events."""

    def __init__(
        self,
        request: GenerationRequest,
        vocab_size: int = _ANY_VOCABULARY,
        *,
        is_source: bool = False,
        is_session: bool = False,
    ) -> None:
        """vocab_size: of the worker, in tokens. is_source: the call only computes the prompt's KV for another worker.

        is_session: the call has several turns.
        """
        self._request = request
        self._vocab_size = vocab_size
        self._is_source = is_source
        self._is_session = is_session
        self._sampling = request.sampling_params
        """Parameters of the request, or of a session's last turn; the size of events is checked against them."""
        self._num_sequences = request.n
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._max_tokens = request.sampling_params.output_limit

    def go_on(self, request: GenerationRequest) -> None:
        """Read a session's next turn."""
        self._request = request
        self._num_prompt_tokens += self._max_tokens + len(request.prompt_token_ids)
        self._sampling = request.sampling_params
        self._max_tokens = request.sampling_params.output_limit

    def read_bytes(self, message: bytes, peer: str) -> E:
        """As `read`, for a serialized event. Raises: PeerError, also if it cannot be decoded."""
        return self.read(parsed(f"a {self.kind.DESCRIPTOR.name} from {peer}", self.kind.FromString, message))

    @abc.abstractmethod
    def read(self, message: M) -> E:
        """The event as a plain value; `UnknownEvent` for an unknown one. Raises: PeerError if it has more than was requested."""

    def tokens(self, index: int, first_position: int, token_ids: list[int]) -> Outputs:
        """Outputs with only tokens. Raises: PeerError."""
        self._verify_tokens(first_position, token_ids)
        if token_ids and self._sampling.logprobs is not None:
            raise PeerError(f"a worker sent log-probabilities of 0 tokens for {len(token_ids)} tokens")
        return Outputs(index, first_position, token_ids)

    def believed(self, failure: CallFailed) -> CallFailed:
        """See `worker_errors.believed`."""
        return believed(failure, self._request, is_source=self._is_source, is_session=self._is_session)

    def _verify_tokens(self, first_position: int, token_ids: Sequence[int]) -> None:
        """Raises: PeerError for tokens beyond the last position or the vocabulary."""
        self._verify_end(first_position, len(token_ids))
        if token_ids and (largest := max(token_ids)) >= self._vocab_size:
            raise PeerError(f"a worker sent token {largest}, and its vocabulary has {self._vocab_size}")

    def _verify_end(self, first_position: int, num_tokens: int) -> None:
        if first_position + num_tokens > self._max_tokens:
            raise PeerError(
                f"a worker sent {num_tokens} tokens from position {first_position} on, where max_tokens is "
                f"{self._max_tokens}"
            )

    def _prompt_logprobs(self, message: request_pb2.PromptLogprobs) -> PromptLogprobs:
        count, limit = len(message.logprobs.sampled_ranks), self._num_prompt_tokens
        if count > limit or message.first_position > limit:
            raise PeerError(
                f"a worker sent log-probabilities of {count} prompt tokens from position {message.first_position} on, "
                f"where the prompt has {limit}"
            )
        self._verify_width(message.logprobs, self._sampling.prompt_logprobs)
        prompt: Sequence[int] = self._request.prompt_token_ids
        # of a session's later turns the tokens before are not known here
        known = prompt[message.first_position :] if len(prompt) == limit else ()
        return PromptLogprobs(message.first_position, self._logprobs(message.logprobs, known))

    def _outputs(self, message: request_pb2.Outputs) -> Outputs:
        num_tokens = len(message.token_ids)
        self._verify_tokens(message.first_position, message.token_ids)
        if message.stop_token_id >= self._vocab_size:
            raise PeerError(
                f"a worker sent stop token {message.stop_token_id}, and its vocabulary has {self._vocab_size}"
            )
        count = len(message.logprobs.sampled_ranks)
        if count > num_tokens or (count < num_tokens and self._sampling.logprobs is not None):
            raise PeerError(f"a worker sent log-probabilities of {count} tokens for {num_tokens} tokens")
        self._verify_width(message.logprobs, self._sampling.logprobs)
        return Outputs(
            message.index,
            message.first_position,
            list(message.token_ids),
            finish_reason_from_wire(message.finish_reason),
            message.stop_token_id if message.HasField("stop_token_id") else None,
            cached_tokens_from_wire(message.cached_tokens) if message.HasField("cached_tokens") else NOTHING_CACHED,
            moments_from_wire(message.moments) if message.moments else _NO_MOMENTS,
            self._logprobs(message.logprobs, message.token_ids) if message.HasField("logprobs") else None,
        )

    def _logprobs(self, message: request_pb2.Logprobs, token_ids: Sequence[int]) -> LogprobsLists:
        """token_ids: each comes first among the candidates at its place. Raises: PeerError for what no model computes."""
        for what, numbers in (("token", message.token_ids), ("rank", message.sampled_ranks)):
            # ranks count from 1
            if numbers and (largest := max(numbers)) >= self._vocab_size + (what == "rank"):
                raise PeerError(
                    f"a worker sent log-probabilities of {what} {largest}, and its vocabulary has {self._vocab_size}"
                )
        if any(value != value or value > _MOST_LOGPROB for value in message.logprobs):
            raise PeerError("a worker sent a log-probability that is none")
        logprobs = logprobs_from_wire(message)
        for token_id, candidates in zip(token_ids, logprobs.logprob_token_ids, strict=False):
            if candidates[0] != token_id:
                raise PeerError(f"a worker sent log-probabilities of token {candidates[0]} for token {token_id}")
        return logprobs

    @staticmethod
    def _verify_width(logprobs: request_pb2.Logprobs, asked: int | None) -> None:
        if logprobs.width > 1 + (asked or 0):
            raise PeerError(f"a worker sent {logprobs.width} log-probabilities per token, where {asked} were requested")


class PrefillReader(CallReader[prefill_pb2.PrefillEvent, PrefillCallEvent]):
    kind = prefill_pb2.PrefillEvent

    def tokens(self, index: int, first_position: int, token_ids: list[int]) -> Outputs:
        """Raises: PeerError: a prefill worker sends its first tokens with `Computed`."""
        raise PeerError("a prefill worker sent tokens alone")

    def read(self, message: prefill_pb2.PrefillEvent) -> PrefillCallEvent:
        match message.WhichOneof("event"):
            case "admitted":
                return Admitted(moments_from_wire(message.admitted.moments))
            case "computed":
                computed = message.computed
                self._verify_first(computed.first_outputs)
                return Computed(
                    num_tokens=computed.num_tokens,
                    request_digest=computed.request_digest,
                    first_outputs=[self._outputs(outputs) for outputs in computed.first_outputs],
                    moments=moments_from_wire(computed.moments),
                )
            case "prompt_logprobs":
                return self._prompt_logprobs(message.prompt_logprobs)
            case "ended":
                return _ended(message.ended)
            case _:
                return UnknownEvent()

    def _verify_first(self, outputs: Sequence[request_pb2.Outputs]) -> None:
        """Raises: PeerError for other than one token of each sequence, at the position that is next."""
        if (num := len(outputs)) != self._num_sequences:
            raise PeerError(f"a worker sent outputs of {num} sequences, {self._num_sequences} were requested")
        position = len(self._request.output_token_ids)
        for place, output in enumerate(outputs):
            index = self._request.index if self._request.is_resumed else place
            if (output.index, output.first_position, len(output.token_ids)) != (index, position, 1):
                raise PeerError(
                    f"a worker computed {len(output.token_ids)} tokens of sequence {output.index} from position "
                    f"{output.first_position} on, in place of one of sequence {index} at {position}"
                )


class DecodeReader(CallReader[decode_pb2.DecodeEvent, DecodeCallEvent]):
    kind = decode_pb2.DecodeEvent

    def read(self, message: decode_pb2.DecodeEvent) -> DecodeCallEvent:
        match message.WhichOneof("event"):
            case "outputs":
                return self._outputs(message.outputs)
            case "prompt_logprobs":
                return self._prompt_logprobs(message.prompt_logprobs)
            case "admitted":
                return Admitted(moments_from_wire(message.admitted.moments))
            case "needs_prefill":
                return NeedsPrefillEvent(message.needs_prefill.uncached_tokens)
            case "prefilling_locally":
                return PrefillingLocally()
            case "receiving":
                return ReceivingEvent(message.receiving.awaits_source)
            case "landed":
                landed = message.landed
                return LandedEvent(
                    landed.num_blocks, landed.transfer_bytes, landed.connector, moments_from_wire(landed.moments)
                )
            case "migrating":
                return self._migrating(message.migrating)
            case "migrated":
                return Migrated(message.migrated.index, _ended(message.migrated.ended))
            case _:
                return UnknownEvent()

    def _migrating(self, message: decode_pb2.Migrating) -> Migrating:
        """Raises: PeerError for other than one token of that sequence."""
        outputs = message.computed.first_outputs
        if len(outputs) != 1 or outputs[0].index != message.index or len(outputs[0].token_ids) != 1:
            raise PeerError(f"a worker let sequence {message.index} migrate without its one last token")
        # its log-probabilities have come with it
        self._verify_tokens(outputs[0].first_position, outputs[0].token_ids)
        last = Outputs(message.index, outputs[0].first_position, list(outputs[0].token_ids))
        computed = Computed(message.computed.num_tokens, message.computed.request_digest, [last], {})
        return Migrating(message.index, computed, message.without_draft_head)


def _ended(message: prefill_pb2.Ended) -> Ended:
    how = _ENDS.get(message.how, "ended")
    cause = f"{how}: {message.cause}" if message.cause else how
    return Ended(message.how == prefill_pb2.Ended.RELEASED, cause, moments_from_wire(message.moments))
