"""Structured outputs in `LLM` and `AsyncLLM`: the engine is stepped by hand in one, by its own thread in the other."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.llm import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from tests.llm.conftest import TINY
from tests.support.engine.llm_requests import TEXT

Running = Callable[..., AbstractAsyncContextManager[AsyncLLM]]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 2, 3]}},
    "required": ["ok", "size"],
}


def asked(**form: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=60, structured_outputs=StructuredOutputsParams(disable_any_whitespace=True, **form)
    )


def test_llm_answers_in_the_form_asked_for(llm: LLM) -> None:
    params = [asked(json=SCHEMA), SamplingParams(max_tokens=7, ignore_eos=True), asked(choice=["yes", "no"])]
    form, free, choice = llm.generate(["one", "two", "three"], params, use_tqdm=False)
    jsonschema.validate(json.loads(form.outputs[0].text), SCHEMA)
    assert len(free.outputs[0].token_ids) == 7
    assert choice.outputs[0].text in ("yes", "no")
    assert choice.outputs[0].finish_reason == "stop"


@pytest.mark.slow
def test_llm_refuses_and_goes_on(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs cannot be compiled") as refused:
        llm.generate("one", asked(regex="(a"), use_tqdm=False)
    assert refused.value.field == "structured_outputs"
    with pytest.raises(InvalidRequest, match="has regex and choice"):
        llm.generate("one", asked(regex="a", choice=["b"]), use_tqdm=False)
    assert llm.generate("one", asked(choice=["no"]), use_tqdm=False)[0].outputs[0].text == "no"


@pytest.mark.slow
async def test_async_llm_does_so_beside_others(running: Running) -> None:
    async with running() as llm:

        async def last(params: SamplingParams) -> Any:
            return [answer async for answer in llm.generate("one", params)][-1]

        with pytest.raises(InvalidRequest, match="structured_outputs cannot be compiled"):
            await last(asked(grammar="root ::= other"))
        form, free = await asyncio.gather(last(asked(json=SCHEMA)), last(SamplingParams(max_tokens=9, ignore_eos=True)))
        jsonschema.validate(json.loads(form.outputs[0].text), SCHEMA)
        assert len(free.outputs[0].token_ids) == 9


@pytest.mark.slow
@pytest.mark.parametrize("engine_process", [False, True])
def test_an_llm_that_nobody_shuts_down_leaves_no_process(folder: Path, engine_process: bool) -> None:
    before = children()
    llm = LLM(folder, **TINY, engine_process=engine_process)
    llm.generate(TEXT, asked(choice=("yes", "no")), use_tqdm=False)
    assert llm.llm_engine.client.utility("check_pool") is True
    started = children() - before
    assert started
    del llm
    gc.collect()
    assert not started & children()


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
