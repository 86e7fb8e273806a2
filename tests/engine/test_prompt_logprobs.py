"""Log-probabilities of prompts: by `transformers`, whatever the chunks, the cache, the batch and the side that computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.runner.results.prompt_logprobs import SLICE, PromptLogprobsTable
from tests.support.engine.engine_harness import Answer, Harness
from tests.support.engine.engine_pair import Pair
from tests.support.models.oracle import Oracle

PROMPTS = [
    [3 + (place * place + length) % 290 for place in range(length)] for length in (2, 16, 17, 33, 100, SLICE + 9)
]
NUM_TOP = 4
LIMITS = {"num_blocks": 120, "max_model_len": 600}


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def check(oracle: Oracle, prompt: list[int], found: LogprobsLists | None, num_top: int = NUM_TOP) -> None:
    """Every token but the first: its own log-probability and rank, then the most likely."""
    assert found is not None
    assert len(found) == len(prompt) - 1
    expected = torch.log_softmax(oracle.logits(prompt), -1)[:-1]
    for place, token_id in enumerate(prompt[1:]):
        token_ids, values = found.logprob_token_ids[place], found.logprobs[place]
        assert token_ids[0] == token_id
        assert len(token_ids) == num_top + 1
        assert values == pytest.approx(expected[place, token_ids].tolist(), abs=1e-4)
        assert values[1:] == pytest.approx(expected[place].topk(num_top).values.tolist(), abs=1e-4)
        rank = int((expected[place] >= expected[place, token_id] - 1e-4).sum())
        assert found.sampled_token_ranks[place] <= rank


def test_a_large_vocabulary_shows_progress_between_few_positions() -> None:
    """Else a worker would be taken for stuck: a chunk's logits take seconds on a CPU."""
    vocab_size, size = 262_144, 64
    table, seen = PromptLogprobsTable(), list[str]()
    table.add(0, 1)

    def logits(hidden: Tensor) -> Tensor:
        seen.append(str(len(hidden)))
        return torch.zeros(len(hidden), vocab_size)

    counts = np.array([130])
    found = table.of_step(
        torch.zeros(130, 4), np.array([0]), counts, counts, np.zeros((1, 140), np.int64), np.array([140]), logits, vocab_size,
        lambda: seen.append("progress"),
    )  # fmt: skip
    assert len(found[0]) == 130
    assert seen == ["progress", str(size), "progress", str(size), "progress", "2"]


def _asking(**params: Any) -> dict[str, Any]:
    return {"params": {"max_tokens": 3, "prompt_logprobs": NUM_TOP} | params}


@pytest.mark.few(2)
@pytest.mark.parametrize("budget", [7, 64, 1024])
def test_chunks_change_nothing_and_neither_does_the_batch(
    make_real_engine: Callable[..., Harness], folder: Path, oracle: Oracle, budget: int
) -> None:
    engine = make_real_engine(folder, max_num_batched_tokens=budget, **LIMITS)
    ids = [engine.add(prompt, **_asking()) for prompt in PROMPTS]
    plain = engine.add(PROMPTS[3], params={"max_tokens": 3})
    answers = engine.run()
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        check(oracle, prompt, answers[request_id].prompt_logprobs)
    assert answers[plain].prompt_logprobs is None
    assert answers[plain].token_ids == answers[ids[3]].token_ids


def test_a_cached_prompt_is_computed_again_and_its_rest_is_not(
    make_real_engine: Callable[..., Harness], folder: Path, oracle: Oracle
) -> None:
    engine = make_real_engine(folder, **LIMITS)
    engine.ask(PROMPTS[4])
    answer = engine.ask(PROMPTS[4], **_asking(prompt_logprobs=0))
    check(oracle, PROMPTS[4], answer.prompt_logprobs, num_top=0)
    assert answer.num_cached_tokens == 0
    assert engine.ask(PROMPTS[4]).num_cached_tokens == 96


def test_a_prompt_of_one_token_has_none_and_n_sequences_share_them(
    make_real_engine: Callable[..., Harness], folder: Path, oracle: Oracle
) -> None:
    engine = make_real_engine(folder, **LIMITS)
    assert engine.ask([5], **_asking()).prompt_logprobs is None
    request_id = engine.add(PROMPTS[2], n=3, **_asking())
    answers = engine.run()
    check(oracle, PROMPTS[2], answers[f"{request_id}/0"].prompt_logprobs)
    assert answers[f"{request_id}/1"].prompt_logprobs is None


def test_preemption_in_the_middle_of_a_prompt_begins_anew(
    make_real_engine: Callable[..., Harness], folder: Path, oracle: Oracle
) -> None:
    engine = make_real_engine(folder, max_num_batched_tokens=16, num_blocks=16, max_model_len=250)
    request_id = engine.add(PROMPTS[4], **_asking())
    for _ in range(3):
        engine.step()
    request = engine.scheduler.requests[request_id]
    assert 0 < request.num_computed_tokens < len(PROMPTS[4])
    engine.scheduler.running.leave(request)
    engine.scheduler.preemption.lose_blocks(request)
    engine.run()
    check(oracle, PROMPTS[4], engine.answers[request_id].prompt_logprobs)


def test_prefill_tells_them_and_decode_does_not(
    make_real_engine: Callable[..., Harness], folder: Path, oracle: Oracle
) -> None:
    pair = Pair(make_real_engine(folder, max_num_batched_tokens=20, **LIMITS), make_real_engine(folder, **LIMITS))
    pair.add(PROMPTS[4], "r", **_asking())
    pair.run()
    check(oracle, PROMPTS[4], pair.p.answers["r"].prompt_logprobs)
    decode: Answer = pair.d.answers["r"]
    assert decode.prompt_logprobs is None
    assert len(decode.token_ids) == 2


def test_decode_with_the_prompt_in_its_cache_does_not_do_without_its_source(
    make_real_engine: Callable[..., Harness], folder: Path, oracle: Oracle
) -> None:
    pair = Pair(make_real_engine(folder, **LIMITS), make_real_engine(folder, **LIMITS))
    pair.d.ask(PROMPTS[4])
    pair.add(PROMPTS[4], "r", local_prefill_tokens=1000, **_asking())
    pair.run()
    check(oracle, PROMPTS[4], pair.p.answers["r"].prompt_logprobs)


def test_a_resumed_sequence_has_none(make_real_engine: Callable[..., Harness], folder: Path) -> None:
    engine = make_real_engine(folder, **LIMITS)
    whole = engine.ask(PROMPTS[2], **_asking(max_tokens=6))
    resumed = engine.ask(PROMPTS[2], output=whole.token_ids[:2], **_asking(max_tokens=6))
    assert resumed.prompt_logprobs is None
    assert resumed.token_ids == whole.token_ids[2:]


@pytest.mark.parametrize("asked", [-1, 99_999])
def test_what_cannot_be_asked_is_refused(make_real_engine: Callable[..., Harness], folder: Path, asked: int) -> None:
    engine = make_real_engine(folder, **LIMITS)
    with pytest.raises(InvalidRequest, match=f"prompt_logprobs must be from 0 to .*, not {asked}"):
        engine.ask(PROMPTS[0], params={"prompt_logprobs": asked})
