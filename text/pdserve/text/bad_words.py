"""`bad_words`: texts that must not be generated, as token sequences that the sampler masks."""

from __future__ import annotations

import functools

from pdserve.common.errors import InvalidRequest
from pdserve.text.tokenization.tokenizer import Tokenizer


@functools.lru_cache(maxsize=32)
def bad_words_token_ids(tokenizer: Tokenizer, bad_words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each text without leading spaces; also with one, if that changes its first token but not their number.

    Safe from any thread. Recent results are cached, since all prompts of a request have the same words.
    Raises: InvalidRequest naming `bad_words`.
    Source: which spellings count follows vLLM's `SamplingParams.update_from_tokenizer`.
    """
    sequences = []
    for place, word in enumerate(bad_words):
        bare = word.lstrip() or word
        alone = _encode(tokenizer, bare, place)
        spaced = _encode(tokenizer, " " + bare, place)
        sequences.append(alone)
        if spaced[0] != alone[0] and len(spaced) == len(alone):
            sequences.append(spaced)
    return tuple(sequences)


def _encode(tokenizer: Tokenizer, text: str, place: int) -> tuple[int, ...]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"bad_words[{place}] is not valid Unicode", "bad_words") from error
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        raise InvalidRequest(f"bad_words[{place}] is no token of this model: {text!r:.60}", "bad_words")
    return tuple(token_ids)
