"""Log-probabilities: of the raw logits, whatever is done to them, in one engine, through P and D, and preempted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.output_stream import OutputStream
from pdserve.engine.sampling.logprobs import LogprobsRows, RawLogprobs
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from tests.support.engine.engine_harness import Answer, Harness, MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import next_logits

PROMPT = [5, 9, 5, 31, 40, 2, 17, 5, 22, 60, 31, 8, 1]
CHANGED = {
    "presence_penalty": 1.0,
    "repetition_penalty": 1.4,
    "logit_bias": {7: 5.0, 9: 4.0},
    "bad_words_token_ids": ((1,), (7, 9)),
    "temperature": 0.9,
    "seed": 3,
    "top_k": 40,
}


def check(answer: Answer, prompt: list[int], num_top: int) -> None:
    """Each token's entries are the log-softmax of the model's own logits."""
    lists = answer.logprobs
    assert lists is not None
    assert len(lists) == len(answer.token_ids)
    for place, token_id in enumerate(answer.token_ids):
        expected = torch.log_softmax(torch.from_numpy(next_logits([*prompt, *answer.token_ids[:place]])), -1)
        token_ids, values = lists.logprob_token_ids[place], lists.logprobs[place]
        assert token_ids[0] == token_id
        assert token_ids[1:] == expected.topk(num_top).indices.tolist()
        np.testing.assert_allclose(values, expected[token_ids].tolist(), atol=1e-6)
        assert lists.sampled_token_ranks[place] == int((expected >= expected[token_id]).sum())


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("changed", [{}, CHANGED], ids=["greedy", "changed"])
def test_one_engine(make_engine: MakeEngine, num_top: int, changed: dict[str, Any]) -> None:
    engine = make_engine(max_num_batched_tokens=5)
    ids = [engine.add(PROMPT, params=changed | {"max_tokens": 12, "logprobs": asked}) for asked in (num_top, None, 3)]
    engine.run()
    check(engine.answers[ids[0]], PROMPT, num_top)
    check(engine.answers[ids[2]], PROMPT, 3)
    assert engine.answers[ids[1]].logprobs is None
    assert engine.answers[ids[1]].token_ids == engine.answers[ids[0]].token_ids


def test_through_p_and_d(make_engine: MakeEngine) -> None:
    pair = Pair(make_engine(max_num_batched_tokens=7), make_engine())
    pair.add(PROMPT, "r", params=CHANGED | {"max_tokens": 12, "logprobs": 4})
    pair.run()
    first, rest = pair.p.answers["r"], pair.d.answers["r"]
    assert (len(first.token_ids), len(rest.token_ids)) == (1, 11)
    assert first.logprobs is not None
    assert rest.logprobs is not None
    together = Answer(token_ids=first.token_ids + rest.token_ids, logprobs=first.logprobs.followed_by(rest.logprobs))
    check(together, PROMPT, 4)
    alone = make_engine()
    answer = alone.ask(PROMPT, params=CHANGED | {"max_tokens": 12, "logprobs": 4})
    assert (together.token_ids, together.logprobs) == (answer.token_ids, answer.logprobs)


def test_i5_under_preemption(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=14, max_model_len=56, max_num_batched_tokens=20)
    ids = [engine.add(PROMPT, params=CHANGED | {"max_tokens": 24, "logprobs": 4, "seed": seed}) for seed in range(4)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for request_id in ids:
        check(engine.answers[request_id], PROMPT, 4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_real_model_is_within_1e_4_of_transformers(
    make_real_engine: Callable[..., Harness], tiny_checkpoints: Callable[..., Path], architecture: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        oracle = AutoModelForCausalLM.from_pretrained(tiny_checkpoints(architecture), dtype=torch.float32).eval()
    prompt = [3 + place * place % 290 for place in range(40)]
    params = {"temperature": 0.8, "seed": 9, "max_tokens": 16, "logprobs": 5, "frequency_penalty": 0.5}
    engine = make_real_engine(tiny_checkpoints(architecture), max_num_batched_tokens=17)
    answer = engine.ask(prompt, params=params)
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    assert answer.logprobs is not None
    ids = torch.tensor(answer.logprobs.logprob_token_ids)
    assert ids[:, 0].tolist() == answer.token_ids
    ours = torch.tensor(answer.logprobs.logprobs)
    assert float((ours - expected.gather(1, ids)).abs().max()) < 1e-4
    assert float((ours[:, 1:] - expected.topk(5).values).abs().max()) < 1e-4


def test_ranks_count_every_token_that_is_as_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [4.0, 3.0, 2.0, 1.0]])
    rows = LogprobsRows.of(np.array([9, -1, 1]))
    assert rows is not None
    raw = RawLogprobs.of(logits, rows, PlacedArrays().copy_to(rows.arrays(), logits.device))
    lists = raw.of_tokens(torch.tensor([3, 0, 3])).lists()
    assert sorted(lists) == [0, 2]
    assert [lists[row].sampled_token_ranks for row in (0, 2)] == [[3], [4]]
    assert sorted(lists[0].logprob_token_ids[0][1:3]) == [1, 2]
    assert lists[0].logprob_token_ids[0][3:] == [3, 0]
    assert lists[2].logprob_token_ids == [[3, 0]]
    assert LogprobsRows.of(np.array([-1, -1, -1])) is None


def test_runs_are_cut_and_joined() -> None:
    whole = LogprobsLists([[n, 0] for n in range(5)], [[-n, -0.5] for n in range(5)], list(range(5)))
    assert whole.part(0, 2).followed_by(whole.part(2)) == whole
    assert len(whole.part(4, 4)) == 0
    assert whole.part(0, 0).followed_by(whole.part(0)) == whole


async def test_outputs_that_a_slow_reader_gets_as_one_keep_all(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.core.add_request(engine.request(PROMPT, "r", params={"max_tokens": 6, "logprobs": 2}))
    stream, answer = OutputStream("r"), Answer()
    while engine.core.has_work:
        for output in engine.core.step().outputs:
            stream.put(output)
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    answer.add(outputs[0])
    check(answer, PROMPT, 2)
