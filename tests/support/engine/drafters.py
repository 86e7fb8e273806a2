"""Drafters of tests: right, wrong, and sometimes right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.engine.runner.drafts.drafting import Drafting
from pdserve.engine.runner.drafts.head_drafter import HeadDrafter
from pdserve.engine.speculation.drafter import DraftRows
from tests.support.engine.engine_harness import Harness
from tests.support.engine.hash_model import VOCAB_SIZE, Window, draft_entries, greedy_answer

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
    """As `drafter_of`, and as `greedy_drafter` for other texts. The list may grow. window: of the model."""
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


class HashHeadDrafter(HeadDrafter):
    """The draft head of an engine over the hash model: reads what it has of each drafted sequence, writes entries of drafts, and
    then drafts as `drafter`."""

    def __init__(self, engine: Harness, drafter: ScriptedDrafter, *, drafts: bool) -> None:
        runner = engine.runner
        specs: Any = engine.model.attention_specs[-1]
        super().__init__(engine.model, runner._attention[-1], specs, runner._ops, None, drafts=drafts)
        self._engine = engine
        self._drafter = drafter
        self.num_read = 0
        """Entries."""

    def propose(self, wanted: DraftRows) -> Sequence[Sequence[int]]:
        for row in wanted.rows.tolist():
            self._check(row, wanted.token_ids[row, : wanted.num_tokens[row]].tolist())
        drafts = super().propose(wanted)
        return [other[: len(own)] for own, other in zip(drafts, self._drafter.propose(wanted), strict=True)]

    def _check(self, row: int, known: list[int]) -> None:
        """All entries but those before unknown tokens are there, and those within blocks belong to the tokens after them."""
        engine = self._engine
        size, batch = engine.config.block_size, engine.runner.batch
        request = engine.scheduler.requests[batch.req_ids[row]]
        # a sequence that has moved may have shared its prompt with others
        ends = {request.num_given_tokens, request.num_prompt_tokens}
        slots = batch.block_tables[-1].slot_mapping(np.full(len(known) - 1, row), np.arange(len(known) - 1))
        found = engine.kv_caches[-1].reshape(-1).numpy()[slots]
        for position, (entry, expected) in enumerate(
            zip(found, draft_entries(known, engine.model.window), strict=True)
        ):
            is_own = (position + 1) % size and position + 1 not in ends  # others may go on otherwise
            assert entry == expected if is_own else -VOCAB_SIZE < entry - expected < VOCAB_SIZE, f"entry {position}"
        self.num_read += len(found)


def use_head(engine: Harness, drafter: ScriptedDrafter) -> HashHeadDrafter:
    """Make the draft head of an engine whose last KV cache group is one's; it drafts where `speculative_config` is set."""
    runner, setting = engine.runner, engine.config.speculative_config
    head = HashHeadDrafter(engine, drafter, drafts=setting is not None)
    runner._draft_head = head
    if setting is not None:
        runner.drafting = Drafting(head, setting.disable_by_batch_size)
    return head


def speculation(num_tokens: int = 4, **fields: Any) -> SpeculativeConfig:
    """Without a limit of the batch, unless `fields` has one."""
    return SpeculativeConfig(num_speculative_tokens=num_tokens, **{"disable_by_batch_size": None} | fields)
