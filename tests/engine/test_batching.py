"""Continuous batching, chunked prefill and the order of work within a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.common.request.engine_types import FinishReason
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer
from tests.support.models.checkpoints import ARCHITECTURES, VOCAB_SIZE

PROMPTS = [[(7 * i + n) % 60 for i in range(n)] for n in (1, 3, 4, 5, 17, 30, 64)]


def test_one_sequence_gives_the_reference_answer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for prompt in PROMPTS:
        answer = engine.ask(prompt, params={"max_tokens": 9})
        assert answer.token_ids == greedy_answer(prompt, 9)
        assert answer.finish_reason is FinishReason.LENGTH


def test_sequences_that_come_and_go_do_not_change_each_other(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=3)
    ids = []
    for number, prompt in enumerate(PROMPTS):
        ids.append(engine.add(prompt, params={"max_tokens": 3 + number}))
        engine.step()
    answers = engine.run()
    for number, (request_id, prompt) in enumerate(zip(ids, PROMPTS, strict=True)):
        assert answers[request_id].token_ids == greedy_answer(prompt, 3 + number)


def test_one_step_computes_sequences_together(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for prompt in PROMPTS[:4]:
        engine.add(prompt)
    engine.run()
    assert (4, 0) in engine.model.batches


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 16, 64])
def test_a_chunked_prefill_gives_the_tokens_of_an_unchunked_one(make_engine: MakeEngine, budget: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    ids = [engine.add(prompt) for prompt in PROMPTS]
    answers = engine.run()
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        assert answers[request_id].token_ids == greedy_answer(prompt, 4)
    assert max(sum(batch) for batch in engine.model.batches) <= budget


def test_decoding_sequences_are_never_delayed_by_a_long_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    first = engine.add([1, 2, 3], params={"max_tokens": 20})
    engine.step()
    engine.add(PROMPTS[-1])
    for count in range(2, 12):
        engine.step()
        assert len(engine.answers[first].token_ids) == count
    engine.run()


def test_never_more_sequences_than_max_num_seqs(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    for _ in range(6):
        engine.add([1, 2, 3])
    while engine.core.has_work:
        engine.step()
        assert len(engine.running()) <= 2
    assert all(answer.token_ids == greedy_answer([1, 2, 3], 4) for answer in engine.answers.values())


@pytest.mark.parametrize("threshold", [1, 5, 40])
def test_a_long_prompt_takes_no_more_of_a_step_than_the_threshold(make_engine: MakeEngine, threshold: int) -> None:
    engine = make_engine(max_num_batched_tokens=24, long_prefill_token_threshold=threshold)
    prompts = [[n] * length for n, length in enumerate((30, 3, 12))]
    ids = [engine.add(prompt) for prompt in prompts]
    engine.step()
    first = engine.scheduler.requests[ids[0]]
    assert first.num_computed_tokens == min(threshold, 24)
    assert (ids[1] in engine.answers) is (threshold == 5), "a short prompt does not wait for a long one"
    while engine.core.has_work:
        before = {request.request_id: request.num_computed_tokens for request in engine.scheduler.running.values()}
        engine.step()
        for request in engine.scheduler.running.values():
            assert request.num_computed_tokens - before.get(request.request_id, 0) <= min(threshold, 24)
    assert [engine.answers[name].token_ids for name in ids] == [greedy_answer(prompt, 4) for prompt in prompts]


def test_the_longest_possible_sequence_ends_at_max_model_len(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=4, max_model_len=16)
    for length in (1, 12, 15):
        prompt = list(range(length))
        answer = engine.ask(prompt, params={"max_tokens": 100})
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.token_ids == greedy_answer(prompt, 16 - length)


def test_a_second_request_of_the_same_id_is_dropped_and_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add([1, 2], "same")
    engine.add([3, 4], "same")
    assert engine.run()["same"].token_ids == greedy_answer([1, 2], 4)
    assert engine.scheduler.num_dropped_events == 1


def test_warming_up_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16, max_model_len=64)
    engine.core.warm_up()
    stats = engine.core.stats()
    assert (stats.num_blocks_cached, stats.num_blocks_in_use, stats.num_computed_prompt_tokens) == (0, 0, 0)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)
    assert engine.ask([5, 6, 7]).token_ids == greedy_answer([5, 6, 7], 4)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_warming_up_ends_in_the_smallest_pool(make_engine: MakeEngine, num_blocks: int) -> None:
    engine = make_engine(num_blocks=num_blocks)
    engine.core.warm_up()
    assert not engine.core.has_work


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_i1_greedy_output_equals_transformers_however_it_is_chunked(
    architecture: str,
    tiny_checkpoints: Callable[..., Path],
    make_real_engine: Callable[..., Harness],
) -> None:
    folder = tiny_checkpoints(architecture)
    oracle = ARCHITECTURES[architecture][1].from_pretrained(folder, dtype="float32").eval()
    prompts = [[(31 * i + 7 * n) % VOCAB_SIZE for i in range(n)] for n in (1, 15, 16, 33, 60)]
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            output = oracle.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
        expected.append(output[0, len(prompt) :].tolist())
    for budget, num_blocks in ((1024, 32), (13, 32), (32, 8)):
        engine = make_real_engine(
            folder, max_num_batched_tokens=budget, num_blocks=num_blocks, max_model_len=min(256, num_blocks * 16)
        )
        ids = [engine.add(prompt, params={"max_tokens": 12}) for prompt in prompts]
        answers = engine.run()
        assert [answers[request_id].token_ids for request_id in ids] == expected
