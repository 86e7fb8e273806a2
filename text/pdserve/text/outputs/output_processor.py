"""`OutputProcessor`: turns engine outputs, named by position, into one client's stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.common.errors import InternalError
from pdserve.common.request.engine_types import FinishReason, LogprobsLists
from pdserve.common.request.lora_request import LoRARequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.telemetry.request_metrics import RequestMetrics
from pdserve.text.outputs.detokenizer import IncrementalDetokenizer, NoDetokenizer
from pdserve.text.outputs.logprobs_accumulator import LogprobsAccumulator, PromptLogprobsLedger
from pdserve.text.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from pdserve.text.outputs.stop_strings import StopAutomaton, StopStringMatcher
from pdserve.text.tokenization.tokenizer import Tokenizer


class PositionConflict(InternalError):
    """An engine's output contradicts the output that the client already has: another token at a sent position, an end before the
    last sent token, or an unknown sequence. The attempt has failed; the next one resumes after the client's last token."""

    code = "position_conflict"
    retryable = True


class PositionGap(InternalError):
    """An output begins after the next position, so a token is missing. The attempt has failed; the next one resumes."""

    code = "position_gap"
    retryable = True


@dataclass(eq=False, slots=True)
class RequestState:
    """State of one sequence: its output tokens, its text, its finish reason."""

    index: int
    _detokenizer: IncrementalDetokenizer
    _matcher: StopStringMatcher | None
    _min_tokens: int
    _stop_ids_without_text: frozenset[int]
    """Tokens that add no text if they end the sequence; they still count as tokens."""
    _ledger: LogprobsAccumulator | None = None
    """Collects log-probabilities, if they were requested."""
    output_token_ids: list[int] = field(default_factory=list, init=False)
    """Tokens sent to the client; a resumed attempt continues after them."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    _texts: list[str] = field(default_factory=list, init=False)
    _num_chars: int = field(default=0, init=False)
    """Characters of the text so far; counted only for `_offsets`."""
    _offsets: list[int] = field(default_factory=list, init=False)
    """Character offsets of the tokens of the current output."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_prefilling(self) -> bool:
        """True until the first output token."""
        return not self.output_token_ids

    @property
    def next_position(self) -> int:
        return len(self.output_token_ids)

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._texts)

    def process(
        self,
        first_position: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: LogprobsLists | None = None,
    ) -> CompletionOutput | None:
        """See `OutputProcessor.process`."""
        if self.finish_reason is not None:
            return None
        ledger = self.output_token_ids
        if (
            finish_reason is None
            and self._matcher is None
            and self._ledger is None
            and first_position == len(ledger)
            and token_ids
        ):
            # only new tokens, as in most outputs
            if text := self._detokenizer.add(token_ids):
                self._texts.append(text)
            ledger.extend(token_ids)
            return CompletionOutput(index=self.index, text=text, token_ids=list(token_ids))
        num_given = len(token_ids)
        token_ids = self._unseen(first_position, token_ids, finish_reason)
        if not token_ids and finish_reason is None:
            return None
        if self._ledger is not None and num_given != (0 if logprobs is None else len(logprobs)):
            raise InternalError(f"the engine did not send the log-probabilities of its {num_given} tokens")
        num_new = len(token_ids)
        self._offsets = []
        num_spoken = len(token_ids)
        if finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._stop_ids_without_text:
            num_spoken -= 1
        if self._matcher is None:
            spoken = token_ids[:num_spoken]
            text = self._detokenizer.add(spoken) if self._ledger is None else "".join(map(self._add, spoken))
            if finish_reason is not None:
                text += self._detokenizer.flush()
        else:
            text, num_matched = self._until_stop(self._matcher, token_ids[:num_spoken], finish_reason is not None)
            if self._matcher.matched is not None:
                token_ids = token_ids[:num_matched]
                finish_reason, stop_reason = FinishReason.STOP, self._matcher.matched
        if logprobs is not None:
            logprobs = logprobs.part(num_given - num_new, num_given - num_new + len(token_ids))
        return self._commit(text, token_ids, finish_reason, stop_reason, logprobs)

    def _add(self, token_id: int) -> str:
        text = self._detokenizer.add((token_id,))
        self._offsets.append(self._num_chars)
        self._num_chars += len(text)
        return text

    def _unseen(
        self, first_position: int, token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> Sequence[int]:
        """The tokens after those in `output_token_ids`. Raises: PositionGap, PositionConflict."""
        ledger = self.output_token_ids
        num_seen = len(ledger) - first_position
        if num_seen == 0 or not token_ids:
            if num_seen < 0:
                raise PositionGap(f"sequence {self.index} ends at {first_position}, but {len(ledger)} is next")
            return token_ids
        if num_seen < 0:
            raise PositionGap(f"sequence {self.index} goes on at {first_position}, but {len(ledger)} is next")
        if first_position < 0:
            raise PositionConflict(f"sequence {self.index} has no position {first_position}")
        for position, (known, given) in enumerate(
            zip(ledger[first_position:], token_ids, strict=False), first_position
        ):
            if known != given:
                raise PositionConflict(f"sequence {self.index} has token {known} at {position}, then came {given}")
        if num_seen > len(token_ids) and finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            end = first_position + len(token_ids)
            raise PositionConflict(f"sequence {self.index} ends after {end} tokens, but has {len(ledger)}")
        return token_ids[num_seen:]

    def _until_stop(self, matcher: StopStringMatcher, token_ids: Sequence[int], last: bool) -> tuple[str, int]:
        """(released text, tokens up to and including the one that completed a stop string).

        Feeds one token at a time, because the output ends with that token.
        """
        released = []
        num_before = len(self.output_token_ids)
        for count, token_id in enumerate(token_ids, 1):
            text = self._add(token_id)
            released.append(matcher.feed(text, suppressed=num_before + count <= self._min_tokens))
            if matcher.matched is not None:
                return "".join(released), count
        if last:
            released.append(matcher.feed(self._detokenizer.flush()))
            released.append(matcher.flush())
        return "".join(released), len(token_ids)

    def _commit(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: LogprobsLists | None,
    ) -> CompletionOutput:
        self.output_token_ids.extend(token_ids)
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        if text:
            self._texts.append(text)
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(token_ids),
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=stop_reason,
        )
        if self._ledger is not None:
            silent = [self._num_chars] * (len(token_ids) - len(self._offsets))
            self._ledger.add(output, logprobs, self._offsets + silent)
        return output

    @property
    def whole(self) -> CompletionOutput:
        """The sequence's whole output so far."""
        output = CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.output_token_ids),
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )
        if self._ledger is not None:
            self._ledger.fill(output)
        return output


def _detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> IncrementalDetokenizer:
    if not params.detokenize:
        return NoDetokenizer()
    return tokenizer.detokenizer(
        prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


class OutputProcessor:
    """The output stream of one request: n sequences, each by output position. One task uses it.

    The client gets every position once, whatever the number of attempts: known positions are dropped, so two calls may report the
    same token and a resumed attempt may repeat tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        num_sequences: int = 1,
        eos_token_ids: Sequence[int] | None = None,
        num_tokens_before: int = 0,
        continues_prompt: bool = True,
    ) -> None:
        """eos_token_ids: the engines' EOS ids, if they differ from the tokenizer's.

        num_tokens_before: tokens of a session's earlier turns, with which the prompt begins. continues_prompt: False if the output
        is a text of its own, since an encoder reads the prompt.
        """
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.context_token_ids = prompt_token_ids if continues_prompt else []
        """Tokens whose text the output's goes on from."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens that needed no computing; set by the caller."""
        self.metrics: RequestMetrics | None = None
        """Set by a caller with the engine in this process."""
        self.lora_request: LoRARequest | None = None
        """Set by an offline caller."""
        params = sampling_params
        automaton = StopAutomaton(params.stop) if params.stop else None
        include = params.include_stop_str_in_output
        stop_ids = {*params.stop_token_ids, *(tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids)}
        self._prompt_logprobs: PromptLogprobsLedger[dict[int, Logprob]] | None = None
        if params.prompt_logprobs is not None:
            decode = LogprobsAccumulator(tokenizer if params.detokenize else None).decoded
            self._prompt_logprobs = PromptLogprobsLedger(len(prompt_token_ids), decode, num_tokens_before)
        self._states = tuple(
            RequestState(
                index,
                _detokenizer(tokenizer, self.context_token_ids, params),
                None if automaton is None else StopStringMatcher(automaton, include),
                params.min_tokens,
                frozenset() if include else frozenset(stop_ids),
                None if params.logprobs is None else LogprobsAccumulator(tokenizer if params.detokenize else None),
            )
            for index in range(num_sequences)
        )

    def process(
        self,
        index: int,
        first_position: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: LogprobsLists | None = None,
    ) -> CompletionOutput | None:
        """Process one engine output of sequence `index`; return the new output for the client, None if there is none.

        Text is held back while it may be an incomplete character or the beginning of a stop string; with a finish reason, given or
        found here, all text is released. A stop string ends the sequence (STOP, the string) and takes precedence over the engine's
        finish reason; tokens after the one that completed it are dropped. A stop string counts only if it is completed after the
        first `min_tokens` tokens. Outputs of a finished sequence are ignored.
        logprobs: of the given tokens, if the sampling parameters request them.
        Raises: PositionGap, PositionConflict; InternalError if requested log-probabilities are missing. The state is unchanged
        then.
        """
        if not 0 <= index < len(self._states):
            raise PositionConflict(f"there is no sequence {index} among {len(self._states)}")
        return self._states[index].process(first_position, token_ids, finish_reason, stop_reason, logprobs)

    def add_prompt_logprobs(self, first_position: int, logprobs: LogprobsLists) -> None:
        """Add log-probabilities of prompt tokens from this position on; known or unrequested ones are dropped.

        Raises: InternalError if a position before them is missing.
        """
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.add(first_position, logprobs)

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """None if they were not requested. Raises: InternalError if the engine has not sent all of them."""
        return None if self._prompt_logprobs is None else self._prompt_logprobs.whole

    @property
    def states(self) -> tuple[RequestState, ...]:
        return self._states

    @property
    def finished(self) -> bool:
        """True if every sequence has ended; the caller may then cancel both calls."""
        return all(state.finished for state in self._states)

    @property
    def unfinished_indices(self) -> list[int]:
        return [state.index for state in self._states if not state.finished]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all sequences, as counted in usage."""
        return sum(state.next_position for state in self._states)

    def output_token_ids(self, index: int) -> list[int]:
        """The output tokens of one sequence; the caller must not change the list."""
        return self._states[index].output_token_ids

    def request_output(self, deltas: Sequence[CompletionOutput] | None = None) -> RequestOutput:
        """A `RequestOutput` with these deltas; without deltas, with the whole output so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[state.whole for state in self._states] if deltas is None else list(deltas),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs if self.num_output_tokens else None,
            metrics=self.metrics,
            lora_request=self.lora_request,
        )
