"""Random lives of engines with int8 weights, or with a KV cache of eight bits, whose pools are too small for their requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.engine_harness import Harness
from tests.support.models.checkpoints import VOCAB_SIZE
from tests.support.models.oracle import Oracle
from tests.support.models.rounded_keys import rounded_keys

pytestmark = pytest.mark.slow

TOLERANCE = 0.03
"""As that of `tests/llm/test_kv_cache_dtype.py`."""
KINDS: list[dict[str, Any]] = [
    {"params": {"max_tokens": 20}},
    {"params": {"max_tokens": 12, "temperature": 1.0, "seed": 3}, "n": 2},
    {"params": {"max_tokens": 16, "temperature": 0.7, "seed": 1, "top_p": 0.9}},
]


def live(draw: random.Random, engine: Harness) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Requests that come and are aborted at random; returns those that were not aborted."""
    asked: dict[str, tuple[list[int], dict[str, Any]]] = {}
    stem = [draw.randrange(VOCAB_SIZE) for _ in range(24)]
    for number in range(40):
        if draw.random() < 0.4:
            prompt = stem[: draw.randrange(25)] + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 16))]
            kind = draw.choice(KINDS)
            fields = kind | {"params": kind["params"] | {"ignore_eos": True, "logprobs": 0}}
            asked[engine.add(prompt, f"r{number}", **fields)] = prompt, fields
        if asked and draw.random() < 0.1:
            engine.core.abort_request(name := draw.choice(list(asked)))
            del asked[name]
        engine.step()
    engine.run()
    assert engine.scheduler.num_preemptions > 0, "too roomy to show anything"
    return asked


def small(seed: int) -> dict[str, Any]:
    return {
        "block_size": 4, "num_blocks": 20, "max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 6,
        "async_scheduling": bool(seed % 2),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_i5_int8_weights_give_each_text_alone_and_in_any_schedule(
    seed: int, tiny_checkpoints: Callable[..., Path], make_real_engine: Callable[..., Harness]
) -> None:
    folder = tiny_checkpoints("llama")
    engine = make_real_engine(folder, quantization="int8", **small(seed))
    asked = live(random.Random(seed), engine)
    alone = make_real_engine(folder, quantization="int8", block_size=4, num_blocks=200, max_model_len=64)
    for name, (prompt, fields) in asked.items():
        alone.add(prompt, name, **fields)
        alone.run()
    assert len(asked) > 5
    for key, answer in alone.answers.items():
        assert engine.answers[key].token_ids == answer.token_ids, key


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("seed", range(2))
def test_i5_probabilities_over_eight_bits_are_those_of_any_schedule(
    seed: int, stored: str, tiny_checkpoints: Callable[..., Path], make_real_engine: Callable[..., Harness]
) -> None:
    folder = tiny_checkpoints("llama")
    engine, oracle = make_real_engine(folder, cache_dtype=stored, **small(seed)), Oracle(folder)
    asked = live(random.Random(seed), engine)
    assert len(asked) > 5
    for name, (prompt, fields) in asked.items():
        for index in range(fields.get("n", 1)):
            answer = engine.answers[engine.key(name, index)]
            assert answer.logprobs is not None
            with rounded_keys(stored):
                expected = oracle.logits([*prompt, *answer.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
            for place, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs.logprobs, strict=True)):
                assert found[0] == pytest.approx(float(expected[place, token]), abs=TOLERANCE), (name, index, place)
