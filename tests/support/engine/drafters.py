"""Drafters of tests: right, wrong, and sometimes right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.engine.speculation.drafter import DraftRows
from tests.support.engine.engine_harness import Harness
from tests.support.engine.hash_model import VOCAB_SIZE, Window, greedy_answer

Continue = Callable[[list[int], int], list[int]]
"""(tokens of a sequence, number) -> at most so many tokens that follow."""


class ScriptedDrafter:
    """A `Drafter` that knows what follows, and says something else with probability `1 - right`."""

    def __init__(self, follows: Continue, right: float = 1.0, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> None:
        self._follows, self._right, self._vocab_size = follows, right, vocab_size
        self._draw = random.Random(seed)
        self.num_drafts = 0

    def propose(self, wanted: DraftRows) -> Sequence[Sequence[int]]:
        drafts = []
        for row, limit in zip(wanted.rows.tolist(), wanted.limits.tolist(), strict=True):
            tokens = wanted.token_ids[row, : wanted.num_tokens[row]].tolist()
            drafts.append([self._maybe(token) for token in self._follows(tokens, limit)])
            assert len(drafts[-1]) <= limit
            self.num_drafts += 1
        return drafts

    def _maybe(self, token: int) -> int:
        if self._draw.random() < self._right:
            return token
        return (token + self._draw.randrange(1, self._vocab_size)) % self._vocab_size


def greedy_drafter(right: float = 1.0, seed: int = 0, window: Window = None) -> ScriptedDrafter:
    """A drafter that predicts the hash model."""
    return ScriptedDrafter(lambda tokens, number: greedy_answer(tokens, number, window), right, seed=seed)


def drafter_of(texts: Sequence[Sequence[int]], right: float = 1.0, vocab_size: int = VOCAB_SIZE) -> ScriptedDrafter:
    """Continues as one of the texts that begins with the tokens so far does."""

    def follows(tokens: list[int], number: int) -> list[int]:
        length = len(tokens)
        for text in texts:
            if text[0] == tokens[0] and len(text) > length and list(text[:length]) == tokens:
                return list(text[length : length + number])
        return []

    return ScriptedDrafter(follows, right, vocab_size)


def text_or_greedy_drafter(
    texts: Sequence[Sequence[int]], right: float, seed: int, window: Window = None
) -> ScriptedDrafter:
    """As `drafter_of`, and as `greedy_drafter` for other texts. The list may grow."""
    known = drafter_of(texts)

    def follows(tokens: list[int], number: int) -> list[int]:
        return known._follows(tokens, number) or greedy_answer(tokens, number, window)

    return ScriptedDrafter(follows, right, seed=seed)


def use_drafter(engine: Harness, drafter: ScriptedDrafter) -> ScriptedDrafter:
    """Put it in the place of the engine's own."""
    drafting = engine.runner.drafting
    assert drafting is not None, "the engine has no speculative_config"
    drafting._drafter = drafter
    return drafter


def speculation(num_tokens: int = 4, **fields: Any) -> SpeculativeConfig:
    """Without a limit of the batch, unless `fields` has one."""
    return SpeculativeConfig(num_speculative_tokens=num_tokens, **{"disable_by_batch_size": None} | fields)
