"""`bad_words`: texts that must not be generated, as the token sequences that spell them."""

from __future__ import annotations

import functools

from pdserve.common.errors import InvalidRequest
from pdserve.text.tokenization.tokenizer import Tokenizer


@functools.lru_cache(maxsize=32)
def bad_words_token_ids(tokenizer: Tokenizer, bad_words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each text without leading spaces, and with one.

    Safe from any thread. Recent results are cached, since all prompts of a request have the same words.
    Engines compare texts, too (`BadTexts`): the token ids matter for words that special tokens spell.
    Raises: InvalidRequest naming `bad_words`.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(bad_words):
        bare = word.lstrip() or word
        sequences |= dict.fromkeys(_encode(tokenizer, text, place) for text in (bare, " " + bare))
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
