"""The same prompts and seeds alone and in batches: which sequences differ, and by what margin each token had won."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdserve.llm import LLM, SamplingParams
from tests.support.kernels import sampling_reference
from tests.support.models.oracle import Oracle

MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 50},
    {"min_p": 0.02},
    {"temperature": 1.4, "top_k": 200, "top_p": 0.95},
]
"""Parameters that sequences take in turn; the seed comes beside them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which a sequence differs from the same one alone."""

    sequence: int
    position: int
    token_ids: tuple[int, int]
    """Alone, and in the batch."""
    sample: sampling_reference.Sample
    """The reference's sample, after the text that both have before it."""
    drift: float
    """How far the sums of the two tokens lie apart: what rounding had to bridge."""

    def __str__(self) -> str:
        return (
            f"sequence {self.sequence}, position {self.position}: {self.token_ids[0]} alone, {self.token_ids[1]} among others; "
            f"their sums are {self.drift:.1e} apart, the border of the kept set {self.sample.border:.1e}"
        )

    @property
    def margin(self) -> float:
        """Distance of the two values that may have changed places: the two sums, or the border."""
        return min(self.drift, self.sample.border)


def prompts(count: int, vocab_size: int, first: int = 0) -> list[list[int]]:
    """Random prompts of 8 to 24 tokens, which share no block."""
    random = [np.random.default_rng(seed) for seed in range(first, first + count)]
    return [each.integers(3, vocab_size, each.integers(8, 25)).tolist() for each in random]


def params(count: int, max_tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            **({"seed": number * 7919 - 5, "max_tokens": max_tokens, "ignore_eos": True} | MIXES[number % len(MIXES)])
        )
        for number in range(count)
    ]


def answers(
    make_llm: Callable[[], LLM], batch: int, asked: Sequence[tuple[list[int], SamplingParams]]
) -> Iterator[list[int]]:
    """Output tokens, from a new engine that serves `batch` requests at a time."""
    llm = make_llm()
    for first in range(0, len(asked), batch):
        part = asked[first : first + batch]
        found = llm.generate([prompt for prompt, _ in part], [given for _, given in part], use_tqdm=False)
        yield from (list(answer.outputs[0].token_ids) for answer in found)
    llm.shutdown()


def difference(
    oracle: Oracle, number: int, prompt: Sequence[int], given: SamplingParams, alone: list[int], among: list[int]
) -> Difference | None:
    """None where the two are equal."""
    if alone == among:
        return None
    place = next(at for at, pair in enumerate(zip(alone, among, strict=True)) if pair[0] != pair[1])
    logits = oracle.logits([*prompt, *alone[:place]])[-1].double().tolist()
    limits = sampling_reference.Params(given.temperature, given.top_k, given.top_p, given.min_p)
    sample = sampling_reference.sample(logits, limits, given.seed or 0, 0, place)
    tokens = (alone[place], among[place])
    y = sampling_reference.scaled(logits, given.temperature)
    first, second = (y[token] + sampling_reference.gumbel(given.seed or 0, 0, place, token) for token in tokens)
    return Difference(number, place, tokens, sample, abs(first - second))
