"""Responses and their events: each is of the openai client's types, and the events add up to the response."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pdserve.common.errors import InvalidRequest, Overloaded, PdServeError, WorkerLost
from pdserve.common.timeline import Timeline
from pdserve.router.openai.chat_choice_writer import ChatChoiceWriter
from pdserve.router.requests.preparation import CallFields
from pdserve.router.requests.usage import Usage
from pdserve.router.responses.responses_body import ResponsesBody
from pdserve.router.responses.responses_writer import ResponsesWriter, fixed_fields
from pdserve.text.outputs.request_output import CompletionOutput, Logprob
from pdserve.text.parsers.answer_parsers import AnswerParsers
from pdserve.text.parsers.reasoning_parser import REASONING_TAGS
from pdserve.text.parsers.tool_call_parser import TOOL_FORMATS

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALL = CallFields(60.0, {}, "")
CALLS = '<tool_call>{"name": "sum", "arguments": {"a": [1]}}</tool_call>\n<tool_call>{"name": "f"}</tool_call>'
SUM = {"type": "function", "name": "sum", "parameters": {"type": "object"}}


class BytesAsTokens:
    """Token ids are bytes."""

    def token_piece(self, token_id: int) -> bytes:
        return bytes([token_id])

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode()


def writer(*, parses: bool = True, **fields: Any) -> ResponsesWriter:
    body = ResponsesBody(input="hi", **fields)
    body.verify()
    tags, tokenizer = REASONING_TAGS["qwen3"], BytesAsTokens()
    parsers = AnswerParsers(None, tags, tokenizer)  # type: ignore[arg-type]
    request = body.request({}, CALL, [])
    return ResponsesWriter(
        "1" * 32,
        request,
        fixed_fields(body, request, "demo"),
        parsed=ChatChoiceWriter(parsers, tool_format=TOOL_FORMATS["hermes"], tags=tags) if parses else None,
        include_timeline=False,
    )


def output(text: str, finish_reason: str | None = None, *, logprobs: bool = False) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=list(text.encode()),
        finish_reason=finish_reason,
        logprobs=[
            {byte: Logprob(logprob=-0.5, rank=1, decoded_token=chr(byte), decoded_bytes=bytes([byte]))}
            for byte in text.encode()
        ]
        if logprobs
        else None,
        text_offsets=list(range(len(text))) if logprobs else None,
    )


def whole(made: ResponsesWriter, text: str, finish_reason: str = "stop", **options: Any) -> dict[str, Any]:
    body = made.whole([output(text, finish_reason, **options)], Usage(prompt_tokens=5, cached_tokens=3), Timeline())
    response: dict[str, Any] = json.loads(body)
    Response.model_validate(response)
    return response


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each must be of the client's type for it, and in its place."""
    events: list[dict[str, Any]] = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, text = block.split("\n")
        event = json.loads(text.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        EVENT.validate_python(event)
        events.append(event)
    return events


def streamed(made: ResponsesWriter, text: str, size: int, finish_reason: str = "stop") -> bytes:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    data = b"".join(made.chunk(output(piece), Usage()) for piece in pieces)
    return data + made.last_chunk(output("", finish_reason), Usage(), Timeline())


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client builds from the deltas; every event of an end must agree with them."""
    items: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        kind = event["type"]
        if "output_index" in event:
            assert event["output_index"] == len(items) - (kind != "response.output_item.added")
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
        match kind.removeprefix("response."):
            case "output_item.added":
                assert not is_open
                is_open = True
                items.append(event["item"])
            case "content_part.added":
                items[-1]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                items[-1]["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (items[-1]["arguments"], items[-1]["name"])
            case "content_part.done":
                assert event["part"] == items[-1]["content"][0]
            case "output_item.done":
                is_open = False
                assert event["item"] == items[-1] | {"status": event["item"]["status"]}
                items[-1] = event["item"]
    assert not is_open
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


ANSWERS = {
    "text": ("Well.", ["message"]),
    "nothing": ("", ["message"]),
    "calls": (CALLS, ["function_call", "function_call"]),
    "all": (f"<think>Hm, <tool_call> no.</think>Well.\n{CALLS}", ["reasoning", "message", *["function_call"] * 2]),
    "text after calls": (f"A {CALLS} then b", ["message", *["function_call"] * 2, "message"]),
    "reasoning alone": ("<think>Hm", ["reasoning"]),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_events_add_up_to_the_response(name: str, size: int) -> None:
    text, kinds = ANSWERS[name]
    events = events_of(streamed(writer(), text, size))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event["response"]["status"] for event in events[:2]} == {"in_progress"}
    assert events[-1]["type"] == "response.completed"
    final = events[-1]["response"]
    items = added_up(events)
    assert items == final["output"]
    assert [item["type"] for item in items] == kinds
    assert {item["status"] for item in items} == {"completed"}
    assert len({item["id"] for item in items}) == len(items)
    at_once = whole(writer(), text)
    assert without_ids(at_once["output"]) == without_ids(items)
    volatile = ("created_at", "completed_at", "output", "usage")
    assert {key: at_once[key] for key in at_once if key not in volatile} == {
        key: final[key] for key in final if key not in volatile
    }


def test_a_call_has_its_name_and_arguments() -> None:
    [first, second] = whole(writer(), CALLS)["output"]
    assert (first["name"], first["arguments"]) == ("sum", '{"a": [1]}')
    assert (second["name"], second["arguments"]) == ("f", "{}")
    assert first["call_id"].startswith("call_")
    assert first["call_id"] != second["call_id"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_was_cut_is_incomplete(stream: bool) -> None:
    text = f"{CALLS} and th"
    if stream:
        last = events_of(streamed(writer(), text, 4, "length"))[-1]
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        response = whole(writer(), text, "length")
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert response["completed_at"] is None


def test_usage_counts_cached_and_reasoning_tokens() -> None:
    assert whole(writer(), "<think>Hm</think>Hi")["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": len("<think>Hm</think>")},
        "total_tokens": 5,
    }


def test_a_response_repeats_its_request() -> None:
    given: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "temperature": 0.25,
        "top_p": 0.5,
        "tools": [SUM],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "user": "u",
        "truncation": "disabled",
    }
    response = whole(writer(**given), "Hi")
    assert given == {key: response[key] for key in given} | {"tools": [SUM]}
    assert response["tools"] == [SUM | {"strict": None}]
    assert (response["id"], response["model"], response["object"]) == (f"resp_{'1' * 32}", "demo", "response")
    assert whole(writer(), "Hi")["text"]["format"] == {"type": "text"}


@pytest.mark.parametrize("parses", [True, False])
@pytest.mark.parametrize("size", [1, 1000])
def test_log_probabilities_come_with_the_text_of_their_tokens(size: int, parses: bool) -> None:
    """Deltas have them in a stream, and the message in a whole answer."""
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "parses": parses}
    text = "Hi < you"
    [message] = whole(writer(**asked), text, logprobs=True)["output"]
    entries = message["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == list(text)
    assert entries[0] == {"token": "H", "bytes": [72], "logprob": -0.5} | {"top_logprobs": entries[0]["top_logprobs"]}
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["H"]
    made = writer(**asked)
    pieces = [output(text[start : start + size], logprobs=True) for start in range(0, len(text), size)]
    # the text of the last token is not told, as that of a stop string
    pieces[-1].text, pieces[-1].finish_reason = pieces[-1].text[:-1], "stop"
    data = b"".join(made.chunk(piece, Usage()) for piece in pieces[:-1])
    events = events_of(data + made.last_chunk(pieces[-1], Usage(), Timeline()))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == entries
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == []


def test_log_probabilities_of_reasoning_and_calls_are_not_kept_until_the_next_text() -> None:
    made = writer(include=["message.output_text.logprobs"])
    pieces = ["<think>", "rea", "son", "</think>", "Hi", CALLS, "!"]
    data = b"".join(made.chunk(output(piece, logprobs=True), Usage()) for piece in pieces[:-1])
    events = events_of(data + made.last_chunk(output(pieces[-1], "stop", logprobs=True), Usage(), Timeline()))
    told = "".join(
        entry["token"]
        for event in events
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    )
    # the tag's tokens came with no output at all, as those of text that is held back
    assert told == "</think>Hi!"


def test_log_probabilities_of_a_whole_answer_are_those_of_a_stream() -> None:
    """Log-probabilities of reasoning and calls are left out, and each message has those of its own tokens."""
    text = f"<think>reason</think>Hi{CALLS}you"
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
    items = whole(writer(**asked), text, logprobs=True)["output"]
    told = [
        ("".join(part["text"] for part in item["content"]), "".join(each["token"] for each in part["logprobs"]))
        for item in items
        if item["type"] == "message"
        for part in item["content"]
    ]
    made = writer(**asked)
    pieces = [output(character, logprobs=True) for character in text]
    pieces[-1].finish_reason = "stop"
    events = events_of(
        b"".join(made.chunk(piece, Usage()) for piece in pieces[:-1]) + made.last_chunk(pieces[-1], Usage(), Timeline())
    )
    streamed_tokens: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            tokens = "".join(each["token"] for each in event["logprobs"])
            streamed_tokens[event["item_id"]] = streamed_tokens.get(event["item_id"], "") + tokens
    assert [tokens for _, tokens in told] == list(streamed_tokens.values())
    assert [shown for shown, _ in told] == ["Hi", "you"]
    assert not any("reason" in tokens or "sum" in tokens for _, tokens in told)
    assert [tokens.endswith(shown) for shown, tokens in told] == [True, True]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerLost("gone"), "server_error"),
        (Overloaded("full"), "rate_limit_exceeded"),
        (InvalidRequest("no", "input"), "invalid_prompt"),
    ],
)
def test_an_error_in_a_stream(error: PdServeError, code: str) -> None:
    made = writer()
    events = events_of(made.chunk(output(f"{CALLS} a"), Usage()) + made.failed(error))
    told, failed = events[-2:]
    assert (told["type"], told["code"], told["message"]) == ("error", error.code, error.message)
    assert told["param"] == getattr(error, "field", None)
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": error.message}
    assert [item["type"] for item in failed["response"]["output"]] == ["function_call", "function_call"]
