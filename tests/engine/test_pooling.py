"""Embeddings of one engine, by `transformers`' last hidden states in float32: chunked, batched, cached, preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.pooling_params import PoolingParams
from tests.support.engine.engine_harness import Harness
from tests.support.models.oracle import Oracle

HIDDEN_SIZE = 64
PROMPTS = [[3 + (7 * place + start) % 290 for place in range(length)] for start, length in enumerate((1, 16, 45, 97))]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints(request.param)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def expected(oracle: Oracle, prompt: Sequence[int], params: PoolingParams) -> torch.Tensor:
    states = oracle.hidden_states(prompt)
    vector = states[-1] if params.pooling_type == "last" else states.mean(0)
    vector = vector[: params.dimensions]
    return vector / vector.norm() if params.normalize else vector


def check(engine: Harness, oracle: Oracle, request_id: str, prompt: Sequence[int], params: PoolingParams) -> None:
    answer = engine.answers[request_id]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids == []
    assert answer.num_outputs == 1
    assert answer.pooling_output is not None
    difference = torch.tensor(answer.pooling_output) - expected(oracle, prompt, params)
    assert float(difference.abs().max()) < 1e-4, params


@pytest.mark.diagonal
@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_equal_to_transformers(
    make_real_engine: Any, folder: Path, oracle: Oracle, pooling_type: Any, chunk: int
) -> None:
    engine = make_real_engine(folder, max_num_batched_tokens=chunk)
    for prompt in PROMPTS:
        for params in (
            PoolingParams(pooling_type=pooling_type, normalize=False),
            PoolingParams(pooling_type=pooling_type),
            PoolingParams(pooling_type=pooling_type, dimensions=5),
        ):
            request_id = engine.add(prompt, pooling_params=params)
            engine.run()
            check(engine, oracle, request_id, prompt, params)


def test_beside_sequences_that_are_sampled(make_real_engine: Any, folder: Path, oracle: Oracle) -> None:
    engine = make_real_engine(folder, max_num_batched_tokens=24, num_blocks=64)
    text = [5 + place % 200 for place in range(30)]
    generated = engine.add(text, params={"max_tokens": 12, "logprobs": 1})
    engine.step()
    asked = []
    for prompt in PROMPTS:
        for pooling_type in ("last", "mean"):
            params = PoolingParams(pooling_type=pooling_type, normalize=False)
            asked.append((engine.add(prompt, pooling_params=params), prompt, params))
    engine.run()
    for request_id, prompt, params in asked:
        check(engine, oracle, request_id, prompt, params)
    oracle.check(text, engine.answers[generated].token_ids)
    assert engine.answers[generated].pooling_output is None


def test_only_last_reads_the_prefix_cache_and_both_fill_it(make_real_engine: Any, folder: Path, oracle: Oracle) -> None:
    engine = make_real_engine(folder)
    prompt = PROMPTS[3]
    last, mean = PoolingParams(), PoolingParams(pooling_type="mean")
    cached = []
    for params in (mean, last, mean, last):
        request_id = engine.add(prompt, pooling_params=params)
        engine.run()
        check(engine, oracle, request_id, prompt, params)
        cached.append(engine.answers[request_id].num_cached_tokens)
    assert cached == [0, 96, 0, 96]
    # a prompt that is cached to its last token still needs that token's hidden state
    request_id = engine.add(prompt[:96], pooling_params=last)
    engine.run()
    check(engine, oracle, request_id, prompt[:96], last)
    assert engine.answers[request_id].num_cached_tokens == 80
    answer = engine.ask(prompt)
    assert answer.num_cached_tokens == 96
    oracle.check(prompt, answer.token_ids)


@pytest.mark.few(1)
def test_after_a_preemption(make_real_engine: Any, folder: Path, oracle: Oracle) -> None:
    """Sequences that decode take the room of prompts that are half computed, means among them."""
    engine = make_real_engine(
        folder, block_size=4, num_blocks=28, max_model_len=112, max_num_batched_tokens=4, reserve_whole_prompt=False
    )
    texts = [[9 + start + place for place in range(9)] for start in range(3)]
    generated = [engine.add(text, params={"max_tokens": 40}) for text in texts]
    while len(engine.answers) < len(generated):
        engine.step()
    asked = []
    for pooling_type in ("mean", "last", "mean"):
        params = PoolingParams(pooling_type=pooling_type, normalize=False)
        asked.append((engine.add(PROMPTS[2], pooling_params=params), PROMPTS[2], params))
    lost = set()
    while engine.core.has_work:
        before = {request_id for request_id, *_ in asked if request_id in engine.scheduler.running}
        engine.step()
        lost |= {
            request_id
            for request_id in before
            if (request := engine.scheduler.requests.get(request_id)) is not None and request.num_preemptions
        }
    engine.collect()
    assert lost & {asked[0][0], asked[2][0]}, "no mean was preempted"
    for request_id, prompt, params in asked:
        check(engine, oracle, request_id, prompt, params)
    for request_id, text in zip(generated, texts, strict=True):
        oracle.check(text, engine.answers[request_id].token_ids)


def test_aborted_half_way(make_real_engine: Any, folder: Path, oracle: Oracle) -> None:
    engine = make_real_engine(folder, max_num_batched_tokens=16)
    params = PoolingParams(pooling_type="mean")
    request_id = engine.add(PROMPTS[3], pooling_params=params)
    engine.step()
    engine.core.abort_request(request_id)
    # the next one has the same row of the batch
    other = engine.add(PROMPTS[2], pooling_params=params)
    engine.run()
    assert engine.answers[request_id].finish_reason is FinishReason.ABORT
    assert engine.answers[request_id].pooling_output is None
    check(engine, oracle, other, PROMPTS[2], params)


def test_limits(make_real_engine: Any, folder: Path, oracle: Oracle) -> None:
    engine = make_real_engine(folder, max_model_len=64)
    whole = [3 + place for place in range(64)]
    params = PoolingParams(dimensions=HIDDEN_SIZE)
    # no token follows: a prompt may have the model's whole length
    request_id = engine.add(whole, pooling_params=params)
    engine.run()
    check(engine, oracle, request_id, whole, params)
    for prompt, wrong, message in (
        ([*whole, 3], PoolingParams(), "the model's length is 64"),
        ([], PoolingParams(), "at least 1 token"),
        ([400], PoolingParams(), "outside the vocabulary"),
        ([3], PoolingParams(dimensions=0), "dimensions must be from 1 to 64"),
        ([3], PoolingParams(dimensions=65), "dimensions must be from 1 to 64, the model's hidden size, not 65"),
        ([3], PoolingParams(pooling_type="max"), "pooling_type must be 'last' or 'mean', not 'max'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.request(prompt, pooling_params=wrong)
