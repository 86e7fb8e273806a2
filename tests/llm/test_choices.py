"""Several sequences of one prompt, and the best of several, without services."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.llm import LLM
from tests.llm.conftest import CheckedAsyncLLM
from tests.support.engine.llm_requests import TEXT, greedy, prompts_of, sampled
from tests.support.models.oracle import Oracle

Running = Callable[..., AbstractAsyncContextManager[CheckedAsyncLLM]]


def test_greedy_sequences_are_all_the_oracles_own(llm: LLM, oracle: Oracle) -> None:
    prompts = prompts_of([5, 16, 17])
    for prompt, answer in zip(prompts, llm.generate(prompts, greedy(n=3), use_tqdm=False), strict=True):
        assert [sequence.index for sequence in answer.outputs] == [0, 1, 2]
        for sequence in answer.outputs:
            oracle.check(prompt, sequence.token_ids)


def test_i5_seeded_sequences_differ_and_the_first_is_what_one_is(make_llm: Callable[..., LLM]) -> None:
    [answer] = make_llm().generate(TEXT, sampled(seed=5, n=4), use_tqdm=False)
    tokens = [tuple(sequence.token_ids) for sequence in answer.outputs]
    assert len({*tokens}) == 4
    [single] = make_llm(num_blocks=64, max_num_batched_tokens=7).generate(TEXT, sampled(seed=5), use_tqdm=False)
    assert tuple(single.outputs[0].token_ids) == tokens[0]
    [small] = make_llm(num_blocks=16, max_model_len=64).generate(TEXT, sampled(seed=5, n=4), use_tqdm=False)
    assert [tuple(sequence.token_ids) for sequence in small.outputs] == tokens


def test_best_of_answers_the_likeliest(llm: LLM) -> None:
    [whole] = llm.generate(TEXT, sampled(seed=5, n=6, logprobs=1), use_tqdm=False)
    likelihoods = [sequence.cumulative_logprob or 0.0 for sequence in whole.outputs]
    order = sorted(range(6), key=lambda index: -likelihoods[index])
    assert order[:2] != [0, 1], "the order of indexes would do"
    [best] = llm.generate(TEXT, sampled(seed=5, n=2, best_of=6), use_tqdm=False)
    assert [sequence.token_ids for sequence in best.outputs] == [whole.outputs[index].token_ids for index in order[:2]]
    assert [(s.index, s.logprobs, s.cumulative_logprob) for s in best.outputs] == [(0, None, None), (1, None, None)]
    [told] = llm.generate(TEXT, sampled(seed=5, best_of=6, logprobs=1), use_tqdm=False)
    assert told.outputs[0].cumulative_logprob == pytest.approx(likelihoods[order[0]], abs=1e-4)
    assert len(told.outputs[0].logprobs or ()) == len(told.outputs[0].token_ids)


def test_a_stop_string_ends_its_own_sequence_alone(llm: LLM) -> None:
    [whole] = llm.generate(TEXT, sampled(seed=5, n=3, max_tokens=20), use_tqdm=False)
    texts = [sequence.text for sequence in whole.outputs]
    stop = next(
        texts[1][at : at + 3] for at in range(3, 30) if not any(texts[1][at : at + 3] in texts[i] for i in (0, 2))
    )
    [answer] = llm.generate(TEXT, sampled(seed=5, n=3, max_tokens=20, stop=(stop,)), use_tqdm=False)
    assert [sequence.text for sequence in answer.outputs] == [texts[0], texts[1].partition(stop)[0], texts[2]]
    assert [sequence.finish_reason for sequence in answer.outputs] == ["length", "stop", "length"]


async def test_streams_carry_every_sequence(running: Running, llm: LLM) -> None:
    [whole] = llm.generate(TEXT, sampled(seed=5, n=3), use_tqdm=False)
    async with running() as streams:
        answers = [answer async for answer in streams.generate(TEXT, sampled(seed=5, n=3))]
        assert [s.token_ids for s in answers[-1].outputs] == [s.token_ids for s in whole.outputs]
        assert [answer.finished for answer in answers] == [False] * (len(answers) - 1) + [True]
        assert len(answers) > 3
        [only] = [answer async for answer in streams.generate(TEXT, sampled(seed=5, best_of=3))]
        assert only.finished
        assert only.outputs[0].token_ids in [sequence.token_ids for sequence in whole.outputs]


async def test_leaving_a_stream_ends_every_sequence(running: Running) -> None:
    async with running() as streams:
        answers = streams.generate(TEXT, sampled(seed=5, n=3, max_tokens=150))
        await anext(answers)
        await answers.aclose()
        await streams.idle()
        [*_, last] = [answer async for answer in streams.generate(TEXT, greedy(n=2, max_tokens=3))]
        assert last.outputs[0].token_ids == last.outputs[1].token_ids


def test_a_request_may_have_as_many_sequences_as_run_at_a_time(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=40, num_blocks=256)
    [few], [many] = (llm.generate(TEXT, sampled(seed=5, n=n, max_tokens=4), use_tqdm=False) for n in (3, 40))
    assert [output.index for output in many.outputs] == list(range(40))
    assert [output.token_ids for output in many.outputs[:3]] == [output.token_ids for output in few.outputs]
    [best] = llm.generate(TEXT, sampled(seed=5, n=1, best_of=40, max_tokens=4), use_tqdm=False)
    assert best.outputs[0].token_ids in [output.token_ids for output in many.outputs]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"n": 0}, "n", "n must be from 1 to 4, not 0"),
        ({"n": 3, "best_of": 2}, "best_of", r"at least n \(3\)"),
        ({"n": 5}, "n", "n must be from 1 to 4, not 5"),
        ({"best_of": 5}, "best_of", r"best_of must be at least n \(1\) and at most 4, not 5"),
    ],
)
def test_refusals(make_llm: Callable[..., LLM], fields: dict[str, int], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        make_llm(max_num_seqs=4).generate(TEXT, greedy(**fields), use_tqdm=False)
    assert refused.value.field == field
