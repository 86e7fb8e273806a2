"""`SamplingParams`: what a client may ask of the sampler, with vLLM's names and defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pdserve.common.errors import InvalidRequest

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature the most likely token is taken."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_MAX_TOKENS = 2**32 - 1
"""These three are what the wire can carry."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """How output tokens are chosen and where they end.

    Source: the names, meanings and defaults are those of vLLM's `SamplingParams`, so far as a field is here.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Only this many most likely tokens; 0 or -1 is all."""
    min_p: float = 0.0
    """Only tokens at least this likely relative to the most likely; in [0, 1]."""
    seed: int | None = None
    """Noise is a function of (seed, sequence index, output position)."""
    max_tokens: int = 16
    """Output tokens at most; at least 1."""
    min_tokens: int = 0
    """EOS and stop token ids are not sampled before this many output tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; applied where text is made, in the router."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    def verify(self, vocab_size: int | None = None) -> None:
        """Raise `InvalidRequest` naming the field, its value and its limit.

        vocab_size: when known, token ids are held against it.
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
        _require(
            1 <= self.max_tokens <= MAX_MAX_TOKENS,
            "max_tokens",
            self.max_tokens,
            f"at least 1 and at most {MAX_MAX_TOKENS}",
        )
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(
            self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
        )
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            _require(
                0 < len(text) <= MAX_STOP_STRING_CHARS, "stop", text[:40], f"1 to {MAX_STOP_STRING_CHARS} characters"
            )
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            len(self.stop_token_ids),
            f"at most {MAX_STOP_TOKEN_IDS} ids",
        )
        if vocab_size is not None:
            verify_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)


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
