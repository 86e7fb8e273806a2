"""`bad_words`: texts that are not to be generated, as the token sequences that a sampler can refuse."""

from __future__ import annotations

import functools

from pdserve.common.errors import InvalidRequest
from pdserve.text.tokenizer import Tokenizer


@functools.lru_cache(maxsize=32)
def bad_words_token_ids(tokenizer: Tokenizer, bad_words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Each text as it is spelled at the beginning of a text and, where that is another token, after a space.

    Safe from any thread. The last answers are kept: the prompts of one request ask for the same words each.
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
