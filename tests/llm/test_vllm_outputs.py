"""The way from sampled tokens to a user's text, by vLLM's names: stops, detokenizer, log-probabilities, streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from pdserve.common.request.engine_types import FinishReason
from pdserve.llm import LLM, RequestOutputKind, SamplingParams
from pdserve.text.outputs.output_processor import OutputProcessor
from tests.llm.conftest import CheckedAsyncLLM
from tests.support.engine.llm_requests import TEXT, greedy
from tests.support.run.waiting import HANG_S

Running = Callable[..., AbstractAsyncContextManager[CheckedAsyncLLM]]


def test_each_way_to_end(llm: LLM) -> None:
    [whole] = llm.generate(TEXT, greedy(max_tokens=10), use_tqdm=False)
    text, tokens = whole.outputs[0].text, whole.outputs[0].token_ids
    cases: list[tuple[dict[str, Any], str, Any, int | None]] = [
        ({"max_tokens": 4}, "length", None, 4),
        ({"stop_token_ids": (tokens[5],)}, "stop", tokens[5], tokens.index(tokens[5]) + 1),
        ({"stop": text[3:5]}, "stop", text[3:5], None),
        ({"stop": [text[3:5]], "include_stop_str_in_output": True}, "stop", text[3:5], None),
        ({"stop_token_ids": (tokens[0],), "min_tokens": 10, "max_tokens": 10}, "length", None, 10),
    ]
    for fields, reason, stop_reason, length in cases:
        [answer] = llm.generate(TEXT, greedy(**({"max_tokens": 10} | fields)), use_tqdm=False)
        [output] = answer.outputs
        assert (output.finish_reason, output.stop_reason) == (reason, stop_reason), fields
        assert length is None or len(output.token_ids) == length
        if "stop" in fields:
            included = fields.get("include_stop_str_in_output", False)
            end = text.index(text[3:5])
            assert output.text == text[: end + 2 if included else end]
    over = llm.generate([[5] * 250], greedy(max_tokens=None), use_tqdm=False)[0].outputs[0]
    assert (len(over.token_ids), over.finish_reason) == (6, "length")  # max_model_len


def test_an_output_processor_holds_incomplete_characters(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    token_ids = tokenizer.encode("a€b")
    processor = OutputProcessor(
        tokenizer, request_id="r", prompt=None, prompt_token_ids=[5], sampling_params=SamplingParams(max_tokens=50)
    )
    assert processor.states[0].is_prefilling
    texts = []
    for position, token_id in enumerate(token_ids):
        end = FinishReason.STOP if position == len(token_ids) - 1 else None
        new = processor.process(0, position, [token_id], end, None)
        texts.append(new.text if new is not None else "")
    assert "".join(texts) == tokenizer.decode(token_ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
    assert processor.request_output().finished


def test_logprobs_are_dicts_by_token_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=2)
    [answer] = llm.generate(TEXT, params, use_tqdm=False)
    [output] = answer.outputs
    assert output.logprobs is not None
    for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True):
        assert (candidates[token_id].rank, len(candidates)) == (1, 3)
        assert candidates[token_id].decoded_token == llm.get_tokenizer().token_piece(token_id).decode(errors="replace")
        assert sorted((one.logprob for one in candidates.values()), reverse=True) == [
            one.logprob for one in sorted(candidates.values(), key=lambda one: one.rank)
        ]
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_streams_of_each_kind(llm: LLM, running: Running, kind: RequestOutputKind) -> None:
    [expected] = llm.generate(TEXT, greedy(max_tokens=15), use_tqdm=False)
    async with running() as streams, asyncio.timeout(HANG_S):
        printed, previous = "", ""
        items = 0
        async for answer in streams.generate(TEXT, greedy(max_tokens=15, output_kind=kind), request_id="stream"):
            items += 1
            text = answer.outputs[0].text
            if kind is RequestOutputKind.DELTA:
                printed += text
            else:
                assert text.startswith(previous)
                printed += text[len(previous) :]
                previous = text
        assert answer.finished
        assert printed == expected.outputs[0].text
        assert items == 1 if kind is RequestOutputKind.FINAL_ONLY else items > 1
        await streams.idle()
