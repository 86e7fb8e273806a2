"""Texts drawn from the grammar of a JSON schema, as a model with nearly equal probabilities would write them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar_matcher import GrammarMatcher, Vocabulary, compile_grammar

TEMPERATURE = 1.6


def allowed_tokens(matcher: GrammarMatcher) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little"))


def sampled(
    vocabulary: Vocabulary, params: StructuredOutputsParams, num_texts: int, max_tokens: int = 400, seed: int = 0
) -> Iterator[bytes | None]:
    """Texts of sequences; None for one that has not ended within `max_tokens`."""
    compiled = compile_grammar(vocabulary, params)
    draw = random.Random(seed)
    logits = np.random.default_rng(seed).normal(size=vocabulary.size)
    for _ in range(num_texts):
        matcher = GrammarMatcher(compiled, (), vocabulary.size)
        text = b""
        for _ in range(max_tokens):
            if matcher.has_ended:
                break
            allowed = allowed_tokens(matcher)
            assert len(allowed), f"no token is allowed behind {text!r}"
            token = draw.choices(allowed.tolist(), np.exp(logits[allowed] / TEMPERATURE).tolist())[0]
            assert matcher.accept(token)
            text += vocabulary.token(token)
        yield text if matcher.has_ended else None


def greedy(
    vocabulary: Vocabulary, params: StructuredOutputsParams, favourites: Sequence[int], max_tokens: int
) -> bytes | None:
    """The text of a model that always wants the first of its favourites that is allowed; None if it does not end."""
    matcher = GrammarMatcher(compile_grammar(vocabulary, params), (), vocabulary.size)
    text = b""
    for _ in range(max_tokens):
        if matcher.has_ended:
            return text
        allowed = set(allowed_tokens(matcher).tolist())
        token = next((token for token in favourites if token in allowed), min(allowed))
        assert matcher.accept(token)
        text += vocabulary.token(token)
    return text if matcher.has_ended else None
