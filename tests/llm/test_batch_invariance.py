"""Sampling alone and among others: the same tokens but for near-ties, in float32 (I5)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from pdserve.llm import LLM
from pdserve.llm.engine_options import EngineOptions
from tests.support.engine.same_seeds import answers, difference, params, prompts
from tests.support.kernels import sampling_reference
from tests.support.models.checkpoints import VOCAB_SIZE
from tests.support.models.oracle import NEAR_TIE, Oracle

COUNT, MAX_TOKENS = 160, 16
OPTIONS: EngineOptions = {
    "dtype": "float32", "block_size": 4, "num_blocks": 1024, "max_model_len": 64, "max_num_seqs": 64,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("batch", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_i5_a_sampled_text_is_the_same_alone_and_among_others(oracle: Oracle, folder: Path, batch: int) -> None:
    asked = list(zip(prompts(COUNT, VOCAB_SIZE), params(COUNT, MAX_TOKENS), strict=True))
    make = partial(LLM, folder, **OPTIONS)
    alone, among = list(answers(make, 1, asked)), list(answers(make, batch, asked))
    assert len({tuple(tokens) for tokens in alone}) > COUNT * 0.9, "texts that are all alike would prove nothing"
    for number, (prompt, given) in enumerate(asked):
        one = difference(oracle, number, prompt, given, alone[number], among[number])
        if one is not None:
            print(one)
            assert one.margin < NEAR_TIE, one


def test_the_samples_are_the_references(oracle: Oracle, folder: Path) -> None:
    """Every token of a few sequences, from the oracle's logits by the formula written a second time."""
    asked = list(zip(prompts(12, VOCAB_SIZE, first=1000), params(12, 8), strict=True))
    make = partial(LLM, folder, **OPTIONS)
    for (prompt, given), tokens in zip(asked, answers(make, 12, asked), strict=True):
        limits = sampling_reference.Params(given.temperature, given.top_k, given.top_p, given.min_p)
        every = oracle.logits([*prompt, *tokens])[len(prompt) - 1 : -1].double()
        for position, (token, logits) in enumerate(zip(tokens, every.tolist(), strict=True)):
            expected = sampling_reference.sample(logits, limits, given.seed or 0, 0, position)
            assert token == expected.token_id or expected.margin < NEAR_TIE, (position, token, expected)
