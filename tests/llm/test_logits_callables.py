"""Functions as logits processors: those of the caller's process, under names that requests carry."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.common.errors import InvalidRequest, LogitsProcessorFailed
from pdserve.llm import LLM, NamedLogitsProcessor
from tests.support.engine.llm_requests import core_of, greedy, prompts_of
from tests.support.run.waiting import HANG_S


def only(token_id: int) -> Callable[[list[int], Tensor], Tensor]:
    """The token is taken, except at position 1."""

    def change(output: list[int], logits: Tensor) -> Tensor:
        if len(output) != 1:
            logits = torch.full_like(logits, -torch.inf)
            logits[token_id] = 0.0
        return logits

    return change


def test_a_function_sees_its_sequence_and_changes_it_alone(llm: LLM) -> None:
    prompts = prompts_of([5, 8, 3])
    seen: list[tuple[list[int], list[int], torch.Size]] = []

    def watch(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt, output, logits.shape))
        return logits

    expected = llm.generate(prompts, greedy(max_tokens=4), use_tqdm=False)
    params = [greedy(max_tokens=4, logits_processors=each) for each in ([only(7)], [watch], ())]
    answers = llm.generate(prompts, params, use_tqdm=False)
    tokens = answers[0].outputs[0].token_ids
    assert [*tokens[:1], *tokens[2:]] == [7, 7, 7]
    assert [answer.outputs for answer in answers[1:]] == [answer.outputs for answer in expected[1:]]
    whole = answers[1].outputs[0].token_ids
    assert seen == [(prompts[1], whole[:num], torch.Size([320])) for num in range(4)]


def test_every_choice_has_its_own_output(llm: LLM) -> None:
    params = greedy(n=3, max_tokens=3, logits_processors=[only(9)])
    [answer] = llm.generate([5, 6], params, use_tqdm=False)
    assert all(output.token_ids[::2] == [9, 9] for output in answer.outputs)


@pytest.mark.parametrize("how", ["raise", "shape"])
def test_a_function_that_fails_ends_its_request(llm: LLM, how: str) -> None:
    def fail(output: list[int], logits: Tensor) -> Tensor:
        if output and how == "raise":
            raise RuntimeError("no")
        return logits[:-1] if output else logits

    with pytest.raises(LogitsProcessorFailed, match=r"logits processor .fail#[0-9]+. failed"):
        llm.generate([[5], [6]], [greedy(logits_processors=[fail]), greedy()], use_tqdm=False)
    core_of(llm).scheduler.check(idle=True)
    assert len(llm.generate([5], greedy(), use_tqdm=False)) == 1


def test_a_function_lives_as_long_as_its_request(llm: LLM) -> None:
    function = only(7)
    [answer] = llm.generate([5], greedy(logits_processors=[function]), use_tqdm=False)
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None
    assert answer.outputs[0].token_ids[0] == 7


async def test_a_stream_that_is_left_does_not_miss_its_function(running: Callable[..., Any]) -> None:
    async with running() as llm, asyncio.timeout(HANG_S):
        for _ in range(5):
            stream = llm.generate([5], greedy(max_tokens=200, logits_processors=[only(7)]))
            async for _ in stream:
                break
            await stream.aclose()
            del stream
        async for answer in llm.generate([5], greedy(logits_processors=[only(8)])):
            last = answer
        assert last.outputs[0].token_ids[2:] == [8] * 10
        await llm.idle()


def test_names_of_functions_are_not_for_other_requests(llm: LLM) -> None:
    named = NamedLogitsProcessor(name="only#0")
    with pytest.raises(InvalidRequest, match=r"name is 'only#0', which is not known; none is loaded here"):
        llm.generate([5], greedy(logits_processors=[named, only(7)]), use_tqdm=False)
    with pytest.raises(InvalidRequest, match=r"logits_processors must be at most 8, not 9"):
        llm.generate([5], greedy(logits_processors=[only(7)] * 9), use_tqdm=False)


def test_functions_count_in_the_place_of_a_wrong_name(llm: LLM) -> None:
    params = greedy(logits_processors=[only(5), NamedLogitsProcessor(name="absent")])
    with pytest.raises(InvalidRequest, match=r"logits_processors\[1\].name is 'absent', which is not known"):
        llm.generate([5, 6], params, use_tqdm=False)


def test_an_engine_in_another_process_takes_no_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.engine.client import process_client
    from tests.llm.conftest import TINY
    from tests.support.engine.forked_engine import start_forked

    monkeypatch.setattr(process_client, "start_program", start_forked)
    with LLM(folder, engine_process=True, **TINY) as llm:
        with pytest.raises(
            InvalidRequest, match=r"logits_processors\[1\] is a function, which an engine in a process"
        ) as caught:
            llm.generate([5], greedy(logits_processors=[NamedLogitsProcessor(name="a"), only(7)]), use_tqdm=False)
        assert caught.value.field == "logits_processors"
