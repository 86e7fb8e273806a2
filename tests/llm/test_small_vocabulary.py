"""A tokenizer with more tokens than the model has rows: such texts are refused alone, and the engine lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.llm import LLM, BeamSearchParams, PromptType, SamplingParams, TextPrompt
from tests.support.engine.llm_requests import core_of
from tests.support.models.checkpoints import VOCAB_SIZE
from tests.support.run.waiting import HANG_S

GOOD = "The miller"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 64, "max_model_len": 128}


@pytest.fixture(scope="module")
def small_folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama", vocab_size=VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def beyond(small_folder: Path) -> str:
    """The text of the token that the model lacks."""
    tokenizer = Tokenizer.from_file(str(small_folder / "tokenizer.json"))
    text: str = tokenizer.decode([VOCAB_SIZE - 1])
    assert tokenizer.encode(text).ids == [VOCAB_SIZE - 1]
    return text


def _refused(caught: pytest.ExceptionInfo[InvalidRequest], field: str) -> None:
    assert caught.value.field == field
    assert f"{field} contains" in caught.value.message
    assert f"token {VOCAB_SIZE - 1} of the tokenizer; the model has tokens 0 to {VOCAB_SIZE - 2} alone" in (
        caught.value.message
    )


def test_every_call_of_llm_names_the_text(small_folder: Path, beyond: str) -> None:
    with LLM(small_folder, **OPTIONS) as llm:
        second: list[PromptType] = [GOOD, TextPrompt(prompt=beyond)]
        calls: list[tuple[str, Callable[[], object]]] = [
            ("prompt", lambda: llm.generate(beyond, GREEDY, use_tqdm=False)),
            ("prompt", lambda: llm.generate(second, GREEDY, use_tqdm=False)),
            ("messages", lambda: llm.chat([{"role": "user", "content": beyond}], GREEDY, use_tqdm=False)),
            ("prompt", lambda: llm.embed([GOOD, beyond], use_tqdm=False)),
            ("prompt", lambda: llm.beam_search(beyond, BeamSearchParams(beam_width=2), use_tqdm=False)),
        ]
        for field, call in calls:
            with pytest.raises(InvalidRequest) as caught:
                call()
            _refused(caught, field)
        [answer] = llm.generate(GOOD, GREEDY, use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 6


async def test_one_text_does_not_end_the_engine_of_async_llm(running: Any, small_folder: Path, beyond: str) -> None:
    from pdserve.llm import AsyncLLM

    async with AsyncLLM(small_folder, **OPTIONS) as llm, asyncio.timeout(HANG_S):

        async def last(prompt: Any) -> Any:
            return [answer async for answer in llm.generate(prompt, GREEDY)][-1]

        good = [asyncio.create_task(last(GOOD)) for _ in range(3)]
        for call in (last(beyond), llm.embed(beyond)):
            with pytest.raises(InvalidRequest) as caught:
                await call
            _refused(caught, "prompt")
        assert all(answer.finished for answer in await asyncio.gather(*good))
        assert llm.is_running
        assert (await last(GOOD)).finished


async def test_ids_that_no_check_has_seen_end_their_request_alone(running: Any, monkeypatch: Any) -> None:
    """The engine holds by itself: here the checks before it are gone."""
    async with running() as llm, asyncio.timeout(HANG_S):

        async def last(prompt: Any) -> Any:
            return [answer async for answer in llm.generate(prompt, GREEDY)][-1]

        make = llm._requests.make

        def with_a_wrong_id(*given: Any) -> Any:
            request = make(*given)
            if request.core.prompt_token_ids == [5, 6]:
                core: EngineCoreRequest = msgspec.structs.replace(request.core, prompt_token_ids=[5, 10**6])
                object.__setattr__(request, "core", core)
            return request

        monkeypatch.setattr(llm._requests, "make", with_a_wrong_id)
        monkeypatch.setattr(core_of(llm), "verify", lambda request: None)
        good = asyncio.create_task(last(GOOD))
        with pytest.raises(InvalidRequest, match=r"prompt_token_ids\[1\] is 1000000, outside the vocabulary"):
            await last([5, 6])
        assert (await good).finished
        assert (await last(GOOD)).finished
        await llm.idle()
