"""`SamplingParams`: a client's parameters of sampling, with vLLM's names and defaults."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.structured_outputs import FIELD as STRUCTURED_OUTPUTS
from pdserve.common.request.structured_outputs import MAX_CHOICES, StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature the most likely token is taken."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
"""A bias beyond it counts as this much, as in vLLM."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_PENALTY = 2.0
MAX_LOGPROBS = 20
"""Default of the setting `max_logprobs`."""
MAX_SEQUENCES = 16
"""Default of the setting `max_n_sequences`, the largest `n` or `best_of` of one request: each sequence is a row of every step, and
has up to one block that it does not share."""
MOST_LOGPROBS = 1024
"""Largest `max_logprobs` of a service: a message of a worker has 16 MiB, and a step may add several tokens."""
MOST_SEQUENCES = 256
"""Largest `max_n_sequences`: workers exchange messages with a field per sequence."""
MAX_LOGITS_PROCESSORS = 8
MAX_LOGITS_PROCESSOR_NAME_CHARS = 128
MAX_LOGITS_PROCESSOR_ARGS_BYTES = 4096
"""As JSON."""
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_MAX_TOKENS = 2**32 - 1
"""Limits of the three fields' types in the protocol."""


MAX_BAD_WORDS_TOKEN_IDS = 2 * MAX_BAD_WORDS
"""A text is spelled with and without a space before it."""
MAX_BAD_WORD_TOKENS = 4 * MAX_BAD_WORD_CHARS + 1
"""Most tokens of one spelling: one per byte, and the space."""
MAX_ENTRIES: Mapping[str, tuple[int, str]] = {
    "stop": (MAX_STOP_STRINGS, " strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, " ids"),
    "logit_bias": (MAX_LOGIT_BIASES, " tokens"),
    "bad_words": (MAX_BAD_WORDS, " texts"),
    "bad_words_token_ids": (MAX_BAD_WORDS_TOKEN_IDS, " sequences"),
    "logits_processors": (MAX_LOGITS_PROCESSORS, ""),
}
"""Field of `SamplingParams` -> its most entries, and their unit."""


class RequestOutputKind(enum.IntEnum):
    """The content of each item of a stream."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """New output."""
    FINAL_ONLY = 2
    """One item, at the end."""

    def __str__(self) -> str:
        return self.name.lower()


class NamedLogitsProcessor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A logits processor installed at the server, with its arguments."""

    name: str
    args: dict[str, Any] = {}
    """JSON values, which the processor interprets."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Parameters for choosing output tokens and for the end of the output.

    None, given for a field whose type does not have it, is the field's default. A caller may change its own object, as in vLLM;
    a request takes a copy.
    Source: the names, meanings and defaults are those of vLLM's `SamplingParams`, for the fields that exist here.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Only this many most likely tokens; 0 or -1 is all."""
    min_p: float = 0.0
    """Only tokens at least this likely relative to the most likely; in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output; from -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output; from -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in prompt or output; above 0."""
    logit_bias: dict[int, float] = {}
    """Token id -> value added to its logit, from -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens are sampled; None is all."""
    bad_words: tuple[str, ...] = ()
    """Texts that the output does not contain, without the white space at their beginning."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """`bad_words` in tokens of the router's tokenizer: the last token of a sequence is not sampled after the others. They count as
    well as the texts, for words that special tokens spell."""
    seed: int | None = None
    """Noise is a function of (seed, sequence index, output position)."""
    max_tokens: int | None = 16
    """Output tokens at most; at least 1. None, only from callers of the offline API: what the model's length leaves."""
    min_tokens: int = 0
    """EOS and stop token ids are not sampled before this many output tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; applied where text is made, in the router."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """True if a tokenizer that inserts spaces between tokens does so between special ones, too."""
    logprobs: int | None = None
    """Per token: its log-probability and those of this number of most likely ones; None for none. At most `max_logprobs`."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first; the whole prompt is then computed, cached or not."""
    detokenize: bool = True
    """False: the output has only token ids, and stop strings are refused."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """The content of each item of a stream; no effect in an engine."""
    logits_processors: tuple[NamedLogitsProcessor, ...] = ()
    """Plug-ins of the server that change this sequence's logits, in this order."""
    n: int = 1
    """Number of sequences that continue the prompt, each with its own noise; at most `max_n_sequences`, offline `max_num_seqs`."""
    best_of: int | None = None
    """Number of sequences generated, of which the n with the highest cumulative log-probability are returned; None means n. Engines
    use only n."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have; None for any."""

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            # one stop string, as users of other engines write it
            self.stop = (stop,)
        for name, default in _DEFAULTS:
            if getattr(self, name) is None:
                setattr(self, name, default() if callable(default) else default)

    @property
    def output_limit(self) -> int:
        """`max_tokens` of a request's parameters, which are complete."""
        return MAX_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def clone(self) -> SamplingParams:
        """A copy that may be changed without this one."""
        return msgspec.structs.replace(self, logit_bias=dict(self.logit_bias))

    @property
    def bare_bad_words(self) -> tuple[str, ...]:
        """`bad_words` without the white space at their beginning; a word of only white space keeps it."""
        return tuple(word.lstrip() or word for word in self.bad_words)

    @property
    def num_sequences(self) -> int:
        """Sequences that are made."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    def verify(
        self,
        vocab_size: int | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        max_sequences: int = MAX_SEQUENCES,
        *,
        form: bool = True,
    ) -> None:
        """Raise `InvalidRequest` naming the field, its value and its limit.

        vocab_size: when known, token ids are held against it. max_logprobs, max_sequences: limits of the engine or the services.
        form: False where `structured_outputs` is known to be verified, which takes time in proportion to its size.
        """
        _require_finite("temperature", self.temperature)
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "from 0 to 100")
        _require_finite("top_p", self.top_p)
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(
            -1 <= self.top_k <= MAX_TOP_K, "top_k", self.top_k, f"-1 or 0 (all), or positive and at most {MAX_TOP_K}"
        )
        _require_finite("min_p", self.min_p)
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        if self.seed is not None:
            _require(-MAX_SEED - 1 <= self.seed <= MAX_SEED, "seed", self.seed, "a signed 64-bit integer")
        limit = self.max_tokens
        if limit is None or not 1 <= limit <= MAX_MAX_TOKENS:
            raise InvalidRequest(
                f"max_tokens must be at least 1 and at most {MAX_MAX_TOKENS}, not {limit}", "max_tokens"
            )
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(self.min_tokens <= limit, "min_tokens", self.min_tokens, f"at most max_tokens ({limit})")
        counts = {field: len(getattr(self, field) or ()) for field in (*MAX_ENTRIES, "allowed_token_ids")}
        verify_num_entries(counts, vocab_size)
        for text in self.stop:
            _require(
                0 < len(text) <= MAX_STOP_STRING_CHARS, "stop", text[:40], f"1 to {MAX_STOP_STRING_CHARS} characters"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop needs detokenize to be true: stop strings are found in text", "stop")
        self._verify_penalties()
        self._verify_token_rules()
        self._verify_logits_processors()
        self.verify_logprobs(max_logprobs)
        self.verify_sequences(max_sequences)
        if form and self.structured_outputs is not None:
            self.structured_outputs.verify()
        if vocab_size is not None:
            allowed = self.allowed_token_ids or ()
            verify_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
            verify_token_ids("allowed_token_ids", allowed, vocab_size)
            verify_token_ids("bad_words", [t for sequence in self.bad_words_token_ids for t in sequence], vocab_size)
            unknown = [token_id for token_id in self.logit_bias if not 0 <= token_id < vocab_size]
            if unknown:
                raise InvalidRequest(
                    f"logit_bias has token id {unknown[0]}, outside the vocabulary of {vocab_size} tokens "
                    f"(0 to {vocab_size - 1})",
                    "logit_bias",
                )

    def verify_logprobs(self, most: int, field: str = "logprobs") -> None:
        """Check the numbers of most likely tokens. field: the client's name of `logprobs`. Raises: InvalidRequest."""
        for name, asked in ((field, self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if asked is not None:
                _require(0 <= asked <= most, name, asked, f"from 0 to {most}")

    def verify_sequences(self, most: int = MAX_SEQUENCES) -> None:
        """Check `n` and `best_of` before anything is made for each sequence. Raises: InvalidRequest."""
        _require(1 <= self.n <= most, "n", self.n, f"from 1 to {most}")
        if self.best_of is not None:
            limit = f"at least n ({self.n}) and at most {most}"
            _require(self.n <= self.best_of <= most, "best_of", self.best_of, limit)

    def _verify_penalties(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            _require_finite(field, value)
            _require(-MAX_PENALTY <= value <= MAX_PENALTY, field, value, f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
        _require_finite("repetition_penalty", self.repetition_penalty)
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")

    def _verify_token_rules(self) -> None:
        for token_id, bias in self.logit_bias.items():
            if not abs(bias) <= MAX_LOGIT_BIAS:  # NaN too
                limit = f"from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
                raise InvalidRequest(f"logit_bias[{token_id}] must be {limit}, not {bias!r}", "logit_bias")
        if self.allowed_token_ids is not None:
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "at least one token, or absent")
        self.verify_bad_words()
        _require(all(self.bad_words_token_ids), "bad_words_token_ids", (), "sequences of at least one token")

    def _verify_logits_processors(self) -> None:
        for place, one in enumerate(self.logits_processors):
            if not 0 < len(one.name) <= MAX_LOGITS_PROCESSOR_NAME_CHARS:
                raise InvalidRequest(
                    f"logits_processors[{place}].name must be 1 to {MAX_LOGITS_PROCESSOR_NAME_CHARS} characters, "
                    f"not {one.name[:40]!r}",
                    "logits_processors",
                )
            try:
                num_bytes = len(msgspec.json.encode(one.args))
            except (TypeError, msgspec.MsgspecError, RecursionError) as error:
                raise InvalidRequest(
                    f"logits_processors[{place}].args must be JSON values: {error}", "logits_processors"
                ) from error
            if num_bytes > MAX_LOGITS_PROCESSOR_ARGS_BYTES:
                raise InvalidRequest(
                    f"logits_processors[{place}].args must be at most {MAX_LOGITS_PROCESSOR_ARGS_BYTES} bytes of JSON, "
                    f"not {num_bytes}",
                    "logits_processors",
                )

    def verify_bad_words(self) -> None:
        """Check number and lengths of `bad_words` before they are tokenized. Raises: InvalidRequest."""
        verify_num_entries({"bad_words": len(self.bad_words)})
        for word in self.bad_words:
            _require(
                0 < len(word) <= MAX_BAD_WORD_CHARS, "bad_words", word[:40], f"1 to {MAX_BAD_WORD_CHARS} characters"
            )


_DEFAULTS = tuple(
    (field.name, field.default if field.default is not msgspec.NODEFAULT else field.default_factory)
    for field in msgspec.structs.fields(SamplingParams)
    if field.default is not None and field.name != "max_tokens"
)
"""(field, default) of the fields whose type does not have None."""


def verify_num_entries(
    counts: Mapping[str, int],
    vocab_size: int | None = None,
    *,
    of_bad_words: Sequence[int] = (),
    num_choices: int = 0,
) -> None:
    """Check how many entries a client's or a peer's fields have, before anything is made of them.

    counts: by field. vocab_size: None where it is not known. of_bad_words: tokens of each of `bad_words_token_ids`.
    num_choices: of `structured_outputs`. Raises: InvalidRequest.
    """
    for field, num in counts.items():
        if field in MAX_ENTRIES and num > (limit := MAX_ENTRIES[field])[0]:
            raise InvalidRequest(f"{field} must be at most {limit[0]}{limit[1]}, not {num}", field)
    for place, num in enumerate(of_bad_words):
        if num > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words_token_ids[{place}] must be at most {MAX_BAD_WORD_TOKENS} tokens, not {num}",
                "bad_words_token_ids",
            )
    if num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"structured_outputs.choice must have 1 to {MAX_CHOICES} texts, not {num_choices}", STRUCTURED_OUTPUTS
        )
    if vocab_size is not None and (num := counts.get("allowed_token_ids", 0)) > vocab_size:
        raise InvalidRequest(f"allowed_token_ids must be at most {vocab_size} tokens, not {num}", "allowed_token_ids")


def clamped_logit_bias(logit_bias: Mapping[int, float]) -> dict[int, float]:
    """Biases clamped to the allowed range; NaN remains, for `verify` to refuse."""
    return {
        token_id: min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias)) if bias == bias else bias
        for token_id, bias in logit_bias.items()
    }


def verify_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise `InvalidRequest` naming the first id outside `[0, vocab_size)` and its place."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        place, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise InvalidRequest(
            f"{field}[{place}] is {token_id}, outside the vocabulary of {vocab_size} tokens (0 to {vocab_size - 1})",
            field,
        )


def _require(ok: bool, field: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidRequest(f"{field} must be {limit}, not {value!r}", field)


def _require_finite(field: str, value: float) -> None:
    _require(math.isfinite(value), field, value, "a finite number")
