"""Grammars whose masks come late, in the caller's process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.structured_outputs.grammar import GrammarJob
from pdserve.engine.structured_outputs.grammar_matcher import GrammarMatcher
from tests.support.engine.engine_harness import Harness
from tests.support.engine.late_grammars import LateCompiler


class Hesitant(GrammarMatcher):
    """A grammar whose mask comes at a later call of several for one position."""

    patience = 0
    _asked = 0

    @property
    def is_prompt(self) -> bool:  # type: ignore[override]
        return self._asked == 0 or self._asked > self.patience

    def allowed(self, until: float = 0.0, num_drafts: int = 0) -> NDArray[np.uint8] | None:
        self._asked += 1
        if self._asked <= self.patience:
            return None
        return super().allowed(until, num_drafts)

    def accept(self, token_id: int) -> bool:
        self._asked = 0
        return super().accept(token_id)


class HesitantCompiler(LateCompiler):
    patience = 0

    def submit(self, job: GrammarJob) -> None:
        grammar = self.result(job)
        assert isinstance(grammar, GrammarMatcher)
        grammar.__class__ = Hesitant
        grammar.patience = self.patience  # type: ignore[attr-defined]
        job.deliver(grammar)


def pass_time(engine: Harness) -> None:
    """Masks that have been asked for come nearer."""
    for request in engine.scheduler.requests.values():
        if isinstance(request.grammar, Hesitant) and request.grammar._asked:
            request.grammar._asked += 1
