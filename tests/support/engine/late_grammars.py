"""Grammars over the hash model's 64 tokens: compiled by xgrammar, delivered when a test says so, known without either."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import xgrammar

from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.common.request.structured_outputs import FIELD, StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar import GrammarJob
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.grammar_matcher import GrammarMatcher
from tests.support.engine.hash_model import VOCAB_SIZE, Window, next_logits, sampled_token

EOS = VOCAB_SIZE - 1
_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Token i is the i-th of these; those after them have no text."""
IMPOSSIBLE = StructuredOutputsParams(regex="no compiler takes this")


@dataclass(frozen=True)
class Form:
    """Pairs of a token of `first` and one of `second`, at least `low` and at most `high` pairs."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    low: int
    high: int

    @property
    def params(self) -> StructuredOutputsParams:
        one, other = ("".join(_CHARACTERS[token] for token in tokens) for tokens in (self.first, self.second))
        return StructuredOutputsParams(regex=f"([{one}][{other}]){{{self.low},{self.high}}}")

    def allowed(self, place: int) -> list[int]:
        """Tokens that may stand at this place of an output: the reference, without any grammar."""
        if place % 2:
            return list(self.second)
        pairs = place // 2
        return [*(self.first if pairs < self.high else ()), *([EOS] if pairs >= self.low else ())]

    def fits(self, output: Sequence[int]) -> bool:
        """True for a whole output, EOS included, and for the beginning of one."""
        return all(token in self.allowed(place) for place, token in enumerate(output))

    def answer(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        temperature: float,
        seed: int = 0,
        index: int = 0,
        window: Window = None,
    ) -> list[int]:
        """The reference: at most `count` tokens, EOS the last if it comes; one at a time, in no batch, without a cache."""
        tokens = list(prompt)
        for place in range(count):
            logits, allowed = next_logits(tokens, window), self.allowed(place)
            masked = np.full_like(logits, -np.inf)
            masked[allowed] = logits[allowed]
            tokens.append(sampled_token(masked, place, temperature=temperature, seed=seed, index=index))
            if tokens[-1] == EOS:
                break
        return tokens[len(prompt) :]


def random_form(draw: random.Random) -> Form:
    first, second = (tuple(sorted(draw.sample(range(len(_CHARACTERS)), draw.randint(1, 20)))) for _ in range(2))
    low = draw.randint(1, 8)
    return Form(first, second, low, low + draw.randint(0, 6))


@cache
def _compiler() -> xgrammar.GrammarCompiler:
    tokens = [char.encode() for char in _CHARACTERS.ljust(VOCAB_SIZE, "\0")]
    tokens[len(_CHARACTERS) :] = [b""] * (VOCAB_SIZE - len(_CHARACTERS))
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[])
    return xgrammar.GrammarCompiler(info, max_threads=1)


class LateCompiler(GrammarCompiler):
    """Compiles and delivers in the caller's thread, what it is told to, in any order. `IMPOSSIBLE` fails."""

    def __init__(self) -> None:
        super().__init__(Path(), VOCAB_SIZE)
        self.jobs: list[GrammarJob] = []

    def submit(self, job: GrammarJob) -> None:
        self.jobs.append(job)

    def release(self, place: int = 0, *, wanted: bool | None = None) -> None:
        """Do one job. wanted: what was found when its turn came, which may have been before its request ended."""
        job = self.jobs.pop(place)
        if job.is_wanted() if wanted is None else wanted:
            job.deliver(self.result(job))

    def fail(self, place: int, error: PdServeError) -> None:
        """One job ends with this, wanted or not."""
        self.jobs.pop(place).deliver(error)

    @staticmethod
    def result(job: GrammarJob) -> GrammarMatcher | PdServeError:
        if job.params == IMPOSSIBLE:
            return InvalidRequest(f"{FIELD} cannot be compiled", FIELD)
        assert job.params.regex is not None
        try:
            compiled = _compiler().compile_regex(job.params.regex)
            return GrammarMatcher(compiled, job.eos_token_ids, VOCAB_SIZE, job.output_token_ids)
        except PdServeError as error:
            return error


class InstantCompiler(LateCompiler):
    """Delivers what it is given at once."""

    def submit(self, job: GrammarJob) -> None:
        job.deliver(self.result(job))
