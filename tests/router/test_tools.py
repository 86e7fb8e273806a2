"""Tools and forms over HTTP: what is refused, what workers are sent, and how calls are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.common.timeline import Timeline
from pdserve.router.openai.response_writer import CompletionResponseWriter
from pdserve.router.openai.tool_call_writer import ToolCallWriter
from pdserve.router.requests.usage import Usage
from pdserve.text.request_output import CompletionOutput
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import ADMITTED, decode_outputs

MESSAGES = [{"role": "user", "content": "x"}]
SUM: dict[str, Any] = {
    "type": "function",
    "function": {"name": "sum", "parameters": {"type": "object", "properties": {"a": {}}}},
}
NAMED = {"type": "function", "function": {"name": "sum"}}


def tool(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def schema(**body: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": body}


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{}]}, "tools[0].function", "is missing"),
    ({"tools": "x"}, "tools", "expected `array"),
    ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools", "tools[0].type is 'web', only 'function'"),
    ({"tools": [tool("a b")]}, "tools", "tools[0].function.name is 'a b', 1 to 64 letters"),
    ({"tools": [tool("")]}, "tools", "1 to 64 letters"),
    ({"tools": [tool("a" * 65)]}, "tools", "1 to 64 letters"),
    ({"tools": [tool(7)]}, "tools", "expected `str`"),
    ({"tools": [tool("f"), SUM, tool("f")]}, "tools", "tools[2].function.name is 'f' again"),
    ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools", "tools has 129 entries, at most 128"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools", "expected `object"),
    ({"tools": [{"function": {"name": "f", "body": 1}}]}, "tools[0].function.body", "not a known field"),
    ({"tools": [SUM], "tool_choice": "any"}, "tool_choice", "tool_choice is 'any', one of none, auto, required"),
    ({"tools": [SUM], "tool_choice": tool("other")}, "tool_choice", "names the function 'other', which is not among"),
    ({"tools": [SUM], "tool_choice": NAMED | {"type": "custom"}}, "tool_choice", "only 'function' is supported"),
    ({"tools": [SUM], "tool_choice": 7}, "tool_choice", "expected `str | object"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": NAMED, "tools": []}, "tool_choice", "there are no tools"),
    ({"tools": [SUM], "parallel_tool_calls": "no"}, "parallel_tool_calls", "`bool"),
    (
        {"tools": [SUM], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "no other form",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "messages[0].tool_calls[0] must be"),
    ({"messages": [{"role": "tool", "tool_call_id": 7, "content": "x"}]}, "messages", "tool_call_id must be a string"),
    (
        {"response_format": {"type": "xml"}},
        "response_format",
        "response_format.type is 'xml', one of text, json_object",
    ),
    ({"response_format": {}}, "response_format.type", "is missing"),
    ({"response_format": "json"}, "response_format", "expected `object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format", "goes with type"),
    ({"response_format": schema(schema={})}, "response_format.json_schema.name", "is missing"),
    ({"response_format": schema(name="a b", schema={})}, "response_format", "json_schema.name is 'a b'"),
    ({"response_format": schema(name="a", schema=[])}, "response_format.json_schema.schema", "expected"),
    ({"response_format": schema(name="a", shema={})}, "response_format.json_schema.shema", "not a known field"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format", "both"),
    ({"structured_outputs": {}}, "structured_outputs", "has no constraint, exactly one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has regex and choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice must have 1 to 1024 texts, not 0"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "choice[1] must have a text of at least one"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", "expected `array"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "expected `str`"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "structured_outputs.json is not JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs", "json must be bool | dict, not list"),
    ({"structured_outputs": {"json": 7}}, "structured_outputs.json", "expected `str | object"),
    ({"structured_outputs": {"json": {"a": "x" * 70000}}}, "structured_outputs", "must have 1 to 65536 bytes"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs", "regex must have 1 to 8192 characters, not 0"),
    ({"structured_outputs": {"regex": "a" * 8193}}, "structured_outputs", "not 8193"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs", "grammar must have 1 to 65536 bytes"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is not JSON"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "has no constraint"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "`bool"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "is not supported"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "is not a known field"),
    ({"structured_outputs": {"json": '{"a":' * 40 + "1" + "}" * 40}}, "structured_outputs", "nested deeper than 32"),
]


async def test_refusals(cluster: Any) -> None:
    await cluster.start(prefill=0, decode=1)
    for body, field, told in REFUSALS:
        response = await cluster.http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert told in error["message"], (body, error)
        assert error["param"] == field, (body, error)
        assert len(error["message"]) < 500
    assert not cluster.of("decode").calls


async def long_worker(cluster: Any) -> None:
    """With room for a prompt that tells of tools, a token a byte."""
    await cluster.worker("decode", max_model_len=2048).start()
    await cluster.start(prefill=0, decode=0)


async def sent(cluster: Any, path: str = "chat/completions", **body: Any) -> request_pb2.PreparedRequest:
    """What the worker was sent for this body."""
    prompt = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": "x"}
    response = await cluster.http.post(f"/v1/{path}", json={**prompt, "max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    return cluster.of("decode").calls[-1].request.request


async def test_forms_reach_the_worker(cluster: Any) -> None:
    await cluster.start(prefill=0, decode=1)
    plain = await sent(cluster)
    assert not plain.sampling.HasField("structured_outputs")
    for none in ({"type": "text"}, None):
        assert not (await sent(cluster, response_format=none)).sampling.HasField("structured_outputs")
    for path in ("chat/completions", "completions"):
        form = {"choice": ["a", "b"], "disable_any_whitespace": True}
        given = (await sent(cluster, path, structured_outputs=form)).sampling.structured_outputs
        assert given == request_pb2.StructuredOutputs(choice=["a", "b"], disable_any_whitespace=True)
        given = (await sent(cluster, path, response_format={"type": "json_object"})).sampling.structured_outputs
        assert given == request_pb2.StructuredOutputs(json_object=True)
        compact = {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}}
        given = (await sent(cluster, path, **compact)).sampling.structured_outputs
        assert given == request_pb2.StructuredOutputs(json_object=True, disable_any_whitespace=True)
        strict = await sent(cluster, path, response_format=schema(name="a", schema={"type": "null"}, strict=True))
        assert json.loads(strict.sampling.structured_outputs.json) == {"type": "null"}
    call = inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text="x"))
    call.sampling.structured_outputs.regex = "a+"
    async for _ in cluster.grpc.Generate(call):
        pass
    assert cluster.of("decode").calls[-1].request.request.sampling.structured_outputs.regex == "a+"


async def test_what_tools_come_to(cluster: Any) -> None:
    await long_worker(cluster)
    plain = await sent(cluster)
    silent = await sent(cluster, tools=[SUM], tool_choice="none")
    assert list(silent.prompt_token_ids) == list(plain.prompt_token_ids)
    free = await sent(cluster, tools=[SUM])
    assert len(free.prompt_token_ids) > len(plain.prompt_token_ids)
    assert not free.sampling.HasField("structured_outputs")
    for choice, names, only_one in (("required", ["sum", "f"], False), (NAMED, ["sum"], True)):
        forced = await sent(cluster, tools=[SUM, tool("f")], tool_choice=choice)
        assert list(forced.prompt_token_ids) != list(free.prompt_token_ids)
        calls = json.loads(forced.sampling.structured_outputs.structural_tag)["format"]
        assert [tag["begin"].split('"')[3] for tag in calls["tags"]] == names
        assert calls["tags"][0]["content"]["json_schema"] == SUM["function"]["parameters"]
        assert (calls["at_least_one"], calls["stop_after_first"]) == (True, only_one)
        assert not forced.sampling.structured_outputs.disable_any_whitespace
        options: dict[str, Any] = {"structured_outputs": {"disable_any_whitespace": True}}
        body = {"tools": [SUM, tool("f")], "tool_choice": choice} | options
        compact = await sent(cluster, **body)
        assert compact.sampling.structured_outputs.disable_any_whitespace
    single = await sent(cluster, tools=[SUM, tool("f")], tool_choice="required", parallel_tool_calls=False)
    assert json.loads(single.sampling.structured_outputs.structural_tag)["format"]["stop_after_first"]


SAID = 'Well.\n<tool_call>{"name": "sum", "arguments": {"a": [1]}}</tool_call>\n<tool_call>{"name": "f"}</tool_call>'


def answer(max_calls: int | None = None) -> CompletionResponseWriter:
    tools = ToolCallWriter(max_calls)
    return CompletionResponseWriter(
        chat=True, request_id="r", model="m", include_usage=False, include_timeline=False, tools=tools
    )


def output(text: str, finish_reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(index=0, text=text, token_ids=[1], finish_reason=finish_reason)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_free_answer_with_calls(size: int) -> None:
    whole = json.loads(answer().whole([output(SAID, "stop")], Usage(), Timeline()))["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Well."
    assert [each["function"] for each in whole["message"]["tool_calls"]] == [
        {"name": "sum", "arguments": '{"a": [1]}'},
        {"name": "f", "arguments": "{}"},
    ]
    assert len({each["id"] for each in whole["message"]["tool_calls"]}) == 2

    writer = answer()
    pieces = [SAID[start : start + size] for start in range(0, len(SAID), size)]
    events = b"".join(writer.chunk(output(piece), Usage()) for piece in pieces)
    events += writer.last_chunk(output("", "stop"), Usage(), Timeline())
    choices = [
        json.loads(event.removeprefix("data: "))["choices"][0]
        for event in events.decode().split("\n\n")
        if event and event != "data: [DONE]"
    ]
    calls: dict[int, dict[str, str]] = {}
    for choice in choices:
        for part in choice["delta"].get("tool_calls", ()):
            if "id" in part:
                assert part["type"] == "function"
                calls[part["index"]] = dict(part["function"])
            else:
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert list(calls.values()) == [each["function"] for each in whole["message"]["tool_calls"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Well."
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


def test_only_the_first_call_where_one_is_wanted() -> None:
    whole = json.loads(answer(max_calls=1).whole([output(SAID, "stop")], Usage(), Timeline()))["choices"][0]
    assert [each["function"]["name"] for each in whole["message"]["tool_calls"]] == ["sum"]


def test_an_answer_without_calls_is_what_it_would_be_without_tools() -> None:
    choice = json.loads(answer().whole([output("Well. <", "stop")], Usage(), Timeline()))["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "Well. <"}, "stop")
    cut = json.loads(answer().whole([output(SAID, "length")], Usage(), Timeline()))["choices"][0]
    assert cut["finish_reason"] == "length"


async def test_a_free_call_streams_from_the_worker(cluster: Any) -> None:
    said = '<tool_call>{"name": "sum", "arguments": {}}</tool_call>'

    async def speak(worker: Any, call: Any) -> Any:
        yield ADMITTED
        for place, char in enumerate(said):
            yield decode_outputs(place, "Ġ" if char == " " else char)
        yield decode_outputs(len(said), "", "stop")

    await long_worker(cluster)
    cluster.of("decode").script = speak
    body = {"messages": MESSAGES, "tools": [SUM], "stream": True}
    received = (await cluster.http.post("/v1/chat/completions", json=body)).text
    assert '"finish_reason":"tool_calls"' in received
    assert "<tool" not in received
    assert received.endswith("data: [DONE]\n\n")
