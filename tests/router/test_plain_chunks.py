"""Chunks that have nothing but text: the same objects as where more is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.common.timeline import Timeline
from pdserve.router.openai.chat_choice_writer import ChatChoiceWriter
from pdserve.router.openai.response_writer import CompletionResponseWriter
from pdserve.router.requests.preparation import ClientRequest
from pdserve.router.requests.usage import Usage
from pdserve.text.outputs.request_output import CompletionOutput
from pdserve.text.parsers.answer_parsers import AnswerParsers
from pdserve.text.prompt import ChatInput, TextInput
from tests.router.test_tools import BytesAsTokens


def asked(chat: bool, **fields: Any) -> ClientRequest:
    return ClientRequest(prompt=ChatInput([]) if chat else TextInput("x"), field="prompt", **fields)


def events(written: bytes) -> list[dict[str, Any]]:
    assert written.endswith(b"\n\n")
    return [json.loads(event.removeprefix(b"data: ")) for event in written.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_logprobs": 1}, {"tokens_as_ids": True}, {"parsed": True}])
@pytest.mark.parametrize("chat", [True, False])
def test_fields_without_a_value_are_null_in_every_chunk(
    chat: bool, options: dict[str, Any], include_usage: bool
) -> None:
    """As in vLLM's streams, whichever way a chunk is written."""
    if options.get("parsed"):
        tokenizer: Any = BytesAsTokens()
        options = {"parsed": ChatChoiceWriter(AnswerParsers(None, None, tokenizer)) if chat else None}
    writer = CompletionResponseWriter(
        request_id="r", request=asked(chat), model="m", include_usage=include_usage, include_timeline=False, **options
    )
    written: list[dict[str, Any]] = []
    for index in (0, 1, 0):
        written += events(writer.chunk(CompletionOutput(index=index, text="a", token_ids=[], logprobs=[]), Usage()))
    openings = [event for event in written if "role" in event["choices"][0].get("delta", {})]
    others = [event for event in written if event not in openings]
    assert (len(openings), len(others)) == (2 if chat else 0, 3)
    assert all(event["prompt_token_ids"] is None for event in openings)
    absent = ("token_ids",) if chat else ("token_ids", "prompt_token_ids", "stop_reason", "finish_reason")
    for event in others:
        assert [event["choices"][0][name] for name in absent] == [None] * len(absent)
    for event in written:
        # OpenAI's streams have it null where the last chunk has it, vLLM's completions always
        assert event.get("usage", "absent") == ("absent" if chat and not include_usage else None)


@pytest.mark.parametrize("chat", [True, False])
def test_fields_without_a_value_are_null_in_a_whole_answer(chat: bool) -> None:
    writer = CompletionResponseWriter(
        request_id="r", request=asked(chat), model="m", include_usage=False, include_timeline=False
    )
    output = CompletionOutput(index=0, text="a", token_ids=[7], finish_reason="stop")
    answer = json.loads(writer.whole([output], Usage(), Timeline()))
    [choice] = answer["choices"]
    nulls = {"service_tier", "system_fingerprint", "kv_transfer_params"}
    of_prompt = {"prompt_logprobs", "prompt_token_ids"}
    assert {name for name, value in answer.items() if value is None} == nulls | (of_prompt if chat else set())
    of_choice = {"logprobs", "stop_reason", "token_ids"}
    assert {name for name, value in choice.items() if value is None} == of_choice | (set() if chat else of_prompt)
    if chat:
        absent = {"refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content"}
        assert {name for name, value in choice["message"].items() if value is None} == absent


@pytest.mark.parametrize("chat", [True, False])
def test_a_plain_chunk_has_the_fields_of_one_with_token_ids(chat: bool) -> None:
    def writer(*, ids: bool) -> CompletionResponseWriter:
        return CompletionResponseWriter(
            request_id="r",
            request=asked(chat, returns_token_ids=ids),
            model="m",
            include_usage=False,
            include_timeline=False,
        )

    plain, full = writer(ids=False), writer(ids=True)
    for index, text in ((0, "a"), (1, 'b"\n'), (0, ""), (1, "\u00e9\U0001f600"), (0, "z")):
        output = CompletionOutput(index=index, text=text, token_ids=[7])
        seen, told = events(plain.chunk(output, Usage())), events(full.chunk(output, Usage()))
        for event in told:
            for part in (event, *event["choices"]):
                part.update((name, None) for name in ("token_ids", "prompt_token_ids") if name in part)
            event["created"] = seen[0]["created"]
        assert seen == told
    assert (
        events(plain.chunk(CompletionOutput(index=1, text="", token_ids=[], finish_reason="stop"), Usage()))[0][
            "choices"
        ][0]["finish_reason"]
        == "stop"
    )
