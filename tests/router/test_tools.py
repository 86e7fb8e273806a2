"""Tools and forms over HTTP: what is refused, what workers are sent, and how calls are told."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.common.timeline import Timeline
from pdserve.router.openai.chat_choice_writer import ChatChoiceWriter, plain_answer
from pdserve.router.openai.response_writer import CompletionResponseWriter
from pdserve.router.requests.preparation import ClientRequest
from pdserve.router.requests.usage import Usage
from pdserve.text.outputs.request_output import CompletionOutput, Logprob
from pdserve.text.parsers.answer_parsers import AnswerParsers
from pdserve.text.parsers.reasoning_parser import REASONING_TAGS, ReasoningTags
from pdserve.text.parsers.tool_call_parser import TOOL_FORMATS
from pdserve.text.prompt import ChatInput
from pdserve.v1 import inference_pb2
from tests.router.fake_worker import ADMITTED, decode_outputs

MESSAGES = [{"role": "user", "content": "x"}]
SUM: dict[str, Any] = {
    "type": "function",
    "function": {"name": "sum", "parameters": {"type": "object", "properties": {"a": {}}}},
}
NAMED = {"type": "function", "function": {"name": "sum"}}

LOGPROB = Logprob(logprob=-1.0, rank=1, decoded_token="x", decoded_bytes=b"x")


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
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "choice[1] must have at least one"),
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


async def sent(cluster: Any, path: str = "chat/completions", **body: Any) -> Any:
    """The `GenerationRequest` that the worker got for this body."""
    prompt = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": "x"}
    response = await cluster.http.post(f"/v1/{path}", json={**prompt, "max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    return cluster.of("decode").calls[-1].request


async def test_forms_reach_the_worker(cluster: Any) -> None:
    await cluster.start(prefill=0, decode=1)
    plain = await sent(cluster)
    assert not plain.sampling_params.structured_outputs
    for none in ({"type": "text"}, None):
        assert not (await sent(cluster, response_format=none)).sampling_params.structured_outputs
    for path in ("chat/completions", "completions"):
        form = {"choice": ["a", "b"], "disable_any_whitespace": True}
        given = (await sent(cluster, path, structured_outputs=form)).sampling_params.structured_outputs
        assert given == StructuredOutputsParams(choice=["a", "b"], disable_any_whitespace=True)
        given = (await sent(cluster, path, response_format={"type": "json_object"})).sampling_params.structured_outputs
        assert given == StructuredOutputsParams(json_object=True)
        compact = {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}}
        given = (await sent(cluster, path, **compact)).sampling_params.structured_outputs
        assert given == StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
        strict = await sent(cluster, path, response_format=schema(name="a", schema={"type": "null"}, strict=True))
        assert json.loads(strict.sampling_params.structured_outputs.json_schema) == {"type": "null"}
    call = inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text="x"))
    call.sampling.structured_outputs.regex = "a+"
    async for _ in cluster.grpc.Generate(call):
        pass
    assert cluster.of("decode").calls[-1].request.sampling_params.structured_outputs.regex == "a+"


async def test_what_tools_come_to(cluster: Any) -> None:
    await long_worker(cluster)
    plain = await sent(cluster)
    silent = await sent(cluster, tools=[SUM], tool_choice="none")
    assert list(silent.prompt_token_ids) == list(plain.prompt_token_ids)
    free = await sent(cluster, tools=[SUM])
    assert len(free.prompt_token_ids) > len(plain.prompt_token_ids)
    assert not free.sampling_params.structured_outputs
    for choice, names, only_one in (("required", ["sum", "f"], False), (NAMED, ["sum"], True)):
        forced = await sent(cluster, tools=[SUM, tool("f")], tool_choice=choice)
        assert list(forced.prompt_token_ids) != list(free.prompt_token_ids)
        calls = json.loads(forced.sampling_params.structured_outputs.structural_tag)["format"]
        assert [tag["begin"].split('"')[3] for tag in calls["tags"]] == names
        assert calls["tags"][0]["content"]["json_schema"] == SUM["function"]["parameters"]
        assert (calls["at_least_one"], calls["stop_after_first"]) == (True, only_one)
        assert not forced.sampling_params.structured_outputs.disable_any_whitespace
        options: dict[str, Any] = {"structured_outputs": {"disable_any_whitespace": True}}
        body = {"tools": [SUM, tool("f")], "tool_choice": choice} | options
        compact = await sent(cluster, **body)
        assert compact.sampling_params.structured_outputs.disable_any_whitespace
    single = await sent(cluster, tools=[SUM, tool("f")], tool_choice="required", parallel_tool_calls=False)
    assert json.loads(single.sampling_params.structured_outputs.structural_tag)["format"]["stop_after_first"]


SAID = 'Well.\n<tool_call>{"name": "sum", "arguments": {"a": [1]}}</tool_call>\n<tool_call>{"name": "f"}</tool_call>'


class BytesAsTokens:
    """Token ids are bytes."""

    def token_piece(self, token_id: int) -> bytes:
        return bytes([token_id])

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode()


def answer(
    max_calls: int | None = None,
    tags: ReasoningTags | None = None,
    *,
    include_reasoning: bool = True,
    returns_token_ids: bool = False,
    **options: Any,
) -> CompletionResponseWriter:
    tokenizer: Any = BytesAsTokens()
    parsed = ChatChoiceWriter(
        AnswerParsers(None, tags, tokenizer),
        tool_format=TOOL_FORMATS["hermes"],
        max_calls=max_calls,
        tags=tags,
        include_reasoning=include_reasoning,
    )
    return CompletionResponseWriter(
        request_id="r",
        request=ClientRequest(prompt=ChatInput([]), field="messages", returns_token_ids=returns_token_ids),
        model="m",
        include_usage=True,
        include_timeline=False,
        parsed=parsed,
        **options,
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
        choice
        for event in events.decode().split("\n\n")
        if event and event != "data: [DONE]"
        for choice in json.loads(event.removeprefix("data: "))["choices"]
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
    assert (choice["message"], choice["finish_reason"]) == (plain_answer("Well. <"), "stop")
    cut = json.loads(answer().whole([output(SAID, "length")], Usage(), Timeline()))["choices"][0]
    assert cut["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("text", "max_calls", "reason"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "', None, "stop"),
        ('<tool_call>{"name": "f"}', None, "tool_calls"),
        (SAID[:-1] + '<tool_call>{"name": "g", "arguments": {', None, "stop"),
        (SAID + '<tool_call>{"name": "g", "arguments": {', 2, "tool_calls"),
    ],
)
def test_an_answer_that_stops_within_a_call_does_not_end_with_calls(
    text: str, max_calls: int | None, reason: str
) -> None:
    """As a stop string does: the call is what it is so far."""
    whole = json.loads(answer(max_calls).whole([output(text, "stop")], Usage(), Timeline()))
    assert whole["choices"][0]["finish_reason"] == reason
    assert whole["choices"][0]["message"]["tool_calls"]
    events = answer(max_calls).last_chunk(output(text, "stop"), Usage(), Timeline()).decode()
    reasons = [
        choice["finish_reason"]
        for event in events.split("\n\n")
        if event and not event.endswith("[DONE]")
        for choice in json.loads(event[6:])["choices"]
    ]
    assert reasons == [None, reason]


def thinking(text: str, finish_reason: str | None = None, prompt: str = "") -> CompletionOutput:
    """An output with one token per byte."""
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=list(text.encode()),
        finish_reason=finish_reason,
        prompt_token_ids=list(prompt.encode()),
    )


def streamed(writer: CompletionResponseWriter, text: str, prompt: str, size: int) -> list[dict[str, Any]]:
    """Chunks of a stream of pieces of this size."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    events = b"".join(
        writer.chunk(thinking(piece, prompt="" if place else prompt), Usage()) for place, piece in enumerate(pieces)
    )
    events += writer.last_chunk(thinking("", "stop"), Usage(), Timeline())
    return [json.loads(event[6:]) for event in events.decode().split("\n\n") if event and not event.endswith("[DONE]")]


@pytest.mark.parametrize(
    ("prompt", "begin"), [("<user>Hi<assistant>", "<think>\n"), ("<user>Hi<assistant><think>\n", "")]
)
@pytest.mark.parametrize("include", [True, False])
def test_reasoning_comes_before_calls_and_is_counted(prompt: str, begin: str, include: bool) -> None:
    """Calls within the reasoning are part of it."""
    reasoning = f"Shall I? {SAID} No.\n</think>"
    text = f"{begin}{reasoning}\n\n{SAID}"
    tags = REASONING_TAGS["qwen3"]
    whole = json.loads(
        answer(tags=tags, include_reasoning=include).whole([thinking(text, "stop", prompt)], Usage(), Timeline())
    )
    message = whole["choices"][0]["message"]
    told = f"Shall I? {SAID} No." if include else None
    assert message.get("reasoning") == message.get("reasoning_content") == told
    assert message["content"] == "Well."
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["sum", "f"]
    details = {"reasoning_tokens": len(begin + reasoning)}
    assert whole["usage"]["completion_tokens_details"] == details
    for size in (1, 5, 1000):
        chunks = streamed(answer(tags=tags, include_reasoning=include), text, prompt, size)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        for field in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(field, "") for delta in deltas) == (told or "")
        assert "".join(delta.get("content") or "" for delta in deltas) == "Well."
        assert chunks[-1]["usage"]["completion_tokens_details"] == details


def test_choices_are_parsed_apart() -> None:
    """Two choices whose pieces alternate, one within its reasoning while the other calls; each with log-probabilities."""
    texts = (f"<think>{SAID}</think>Hi", f"<think>x</think>{SAID}")
    writer = answer(tags=REASONING_TAGS["qwen3"], num_logprobs=0)
    events = b""
    for place in range(max(map(len, texts))):
        for index, text in enumerate(texts):
            if piece := text[place : place + 1]:
                events += writer.chunk(
                    msgspec.structs.replace(thinking(piece), index=index, logprobs=[{ord(piece): LOGPROB}]), Usage()
                )
    told: list[dict[str, str]] = [{}, {}]
    num_logprobs = [0, 0]
    for event in events.decode().split("\n\n")[:-1]:
        [choice] = json.loads(event[6:])["choices"]
        num_logprobs[choice["index"]] += len((choice["logprobs"] or {"content": []})["content"])
        delta, of_choice = choice["delta"], told[choice["index"]]
        for field in ("content", "reasoning"):
            of_choice[field] = of_choice.get(field, "") + (delta.get(field) or "")
        for call in delta.get("tool_calls", ()):
            name = f"call {call['index']}"
            of_choice[name] = of_choice.get(name, "") + call["function"]["arguments"]
    assert told == [
        {"content": "Hi", "reasoning": SAID},
        {"content": "Well.", "reasoning": "x", "call 0": '{"a": [1]}', "call 1": "{}"},
    ]
    assert num_logprobs == [len(text) for text in texts]


def test_an_answer_without_reasoning_counts_none() -> None:
    whole = json.loads(answer(tags=REASONING_TAGS["qwen3"]).whole([thinking("Hi", "stop", "x")], Usage(), Timeline()))
    assert whole["choices"][0]["message"] == plain_answer("Hi")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_token_ids_are_returned_once_for_the_prompt_and_for_every_choice() -> None:
    whole = json.loads(answer(returns_token_ids=True).whole([thinking("Hi", "stop", "x")], Usage(), Timeline()))
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([120], [72, 105])
    chunks = streamed(answer(returns_token_ids=True), "Hi", "x", 1)
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [[120]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token_id for choice in choices for token_id in choice.get("token_ids") or []] == [72, 105]


@pytest.mark.parametrize("stream", [True, False])
async def test_completions_return_token_ids_too(cluster: Any, stream: bool) -> None:
    await cluster.start(prefill=0, decode=1)
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 3, "return_token_ids": True, "stream": stream}
    response = await cluster.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    events = [event[6:] for event in response.text.split("\n\n") if event.startswith("data: {")]
    choices = [choice for event in events or [response.text] for choice in json.loads(event)["choices"]]
    prompts = {choice["index"]: choice["prompt_token_ids"] for choice in choices if choice["prompt_token_ids"]}
    assert {index: len(ids) for index, ids in prompts.items()} == {0: 2, 2: 1}
    num_tokens = dict.fromkeys(range(4), 0)
    for choice in choices:
        num_tokens[choice["index"]] += len(choice["token_ids"])
    assert num_tokens == dict.fromkeys(range(4), 3)


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
