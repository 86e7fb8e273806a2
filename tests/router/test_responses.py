"""`/v1/responses` over HTTP: what is refused, what workers are sent, and what clients get."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.ignored_fields import IgnoredFields
from pdserve.router.openai.no_op_fields import RESPONSES_IGNORED, RESPONSES_NO_OP
from pdserve.router.responses.input_items import as_items, as_messages
from pdserve.router.responses.responses_body import ResponsesBody
from pdserve.v1 import prefill_pb2
from tests.router.fake_worker import ADMITTED, EOS, decode_outputs, play, said

SUM: dict[str, Any] = {"type": "function", "name": "sum", "parameters": {"type": "object", "properties": {"a": {}}}}


def message(text: str, role: str = "user", kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def call(call_id: str = "c", arguments: str = '{"a": 1}') -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "sum", "arguments": arguments}


def result(call_id: str = "c", output: Any = "2") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def called(*call_ids: str) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": "sum", "arguments": {"a": 1}}} for call_id in call_ids
    ]


REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CONVERSATIONS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "a string": ("hi", [{"role": "user", "content": "hi"}]),
    "without types": ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
    "parts": (
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
        [{"role": "user", "content": "a\nb"}],
    ),
    "system messages at the beginning are one": (
        [message("a", "system"), message("b", "developer"), message("c"), message("d", "developer")],
        [
            {"role": "system", "content": "a\n\nb"},
            {"role": "user", "content": "c"},
            {"role": "system", "content": "d"},
        ],
    ),
    "calls belong to the message before them": (
        [message("a", "assistant", "output_text"), call("c"), call("d"), result("d"), result("c", [])],
        [
            {"role": "assistant", "content": "a", "tool_calls": called("c", "d")},
            {"role": "tool", "tool_call_id": "d", "content": "2"},
            {"role": "tool", "tool_call_id": "c", "content": ""},
        ],
    ),
    "calls alone": (
        [message("x"), call(), result(output=[{"type": "input_text", "text": "2"}]), call("d")],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": called("c")},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
            {"role": "assistant", "content": "", "tool_calls": called("d")},
        ],
    ),
    "reasoning belongs to the message after it": (
        [
            message("x"),
            REASONING,
            message("a", "assistant", "output_text"),
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "s"}]},
            REASONING,
            call(),
            REASONING,
        ],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "a", "reasoning_content": "Hm."},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": called("c")},
        ],
    ),
    "a refusal is text": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [{"role": "assistant", "content": "No."}],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_messages_of_a_conversation(name: str) -> None:
    given, messages = CONVERSATIONS[name]
    assert as_messages(as_items(given)) == messages


def test_instructions_come_first_and_join_system_messages() -> None:
    assert as_messages(as_items("hi"), "Be brief.")[0] == {"role": "system", "content": "Be brief."}
    [first, _] = as_messages([message("b", "developer"), message("c")], "a")
    assert first == {"role": "system", "content": "a\n\nb"}


ITEM_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"type": "web_search_call", "id": "x"},
        "input",
        'input[1].type is "web_search_call", one of message, function_call',
    ),
    ({"type": "item_reference", "id": "x"}, "input", 'input[1].type is "item_reference"'),
    ({"type": 7}, "input", "input[1].type is 7"),
    ({}, "input[1].role", "input[1].role is missing"),
    (
        {"role": "critic", "content": "x"},
        "input",
        'input[1].role is "critic", one of user, assistant, system, developer',
    ),
    ({"role": "user"}, "input[1].content", "is missing"),
    ({"role": "user", "content": 7}, "input", "input[1].content: expected `str | array`"),
    ({"role": "user", "content": [7]}, "input", "input[1].content[0]: expected `object`"),
    ({"role": "user", "content": "x", "name": "y"}, "input[1].name", "input[1].name is not a known field"),
    (
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        "input",
        'input[1].content[0].type is "input_image"; this model takes only text',
    ),
    ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text", "is missing"),
    (
        {"role": "user", "content": [{"type": "input_text", "text": 1}]},
        "input",
        "input[1].content[0].text: expected `str`",
    ),
    ({"type": "function_call", "name": "f", "arguments": ""}, "input[1].call_id", "is missing"),
    (call(arguments="[" * 70_000), "input", "input[1].arguments has with those before it more than 65536 objects"),
    (result("x"), "input", 'input[1].call_id is "x", but no function_call before it has this call_id'),
    (result("x", 7), "input", "input[1].output: expected `str | array`"),
    ({"type": "reasoning", "content": [{"type": "reasoning_text"}]}, "input[1].content[0].text", "is missing"),
]


@pytest.mark.parametrize(("item", "field", "told"), ITEM_REFUSALS)
def test_items_that_are_refused(item: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        as_messages([message("x"), item])
    assert told in caught.value.message
    assert caught.value.field == field
    assert len(caught.value.message) < 500


def test_unknown_fields_of_items_are_ignored_where_the_router_ignores_them(caplog: pytest.LogCaptureFixture) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "x", "tone": 1}], "mood": 2}]
    assert as_messages(items, ignored=IgnoredFields()) == [{"role": "user", "content": "x"}]
    assert "'mood'" in caplog.text
    assert "'tone'" in caplog.text
    with pytest.raises(InvalidRequest, match="role is missing"):
        as_messages([{"content": "x", "mood": 2}], ignored=IgnoredFields())


ALLOWED: dict[str, Any] = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
REFUSALS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": ""}, "input", "input is empty"),
    ({"input": []}, "input", "input is empty"),
    ({"input": None}, "input", "expected `str | array`"),
    ({"input": [{"role": "user", "content": "x"}] * 4097}, "input", "input has 4097 entries, at most 4096"),
    ({"input": "x" * 300}, "input", "input has 302 tokens; the model's length is 256"),
    ({"model": "other"}, "model", "model 'other' is not served here"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1, not 0"),
    ({"max_output_tokens": 999}, "max_output_tokens", "max_output_tokens is 999 and input has"),
    ({"temperature": -1}, "temperature", "temperature must be"),
    ({"top_p": 2}, "top_p", "top_p must be"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "metadata has 17 entries, at most 16"),
    (
        {"background": True},
        "background",
        "background is true, but only false is supported; a response is generated while",
    ),
    ({"truncation": "auto"}, "truncation", 'truncation is "auto", but only "disabled" is supported; a conversation'),
    ({"conversation": "c"}, "conversation", "it is not supported; previous_response_id continues"),
    ({"prompt": {"id": "p"}}, "prompt", "it is not supported; no prompts are stored"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", 'text.verbosity is "low", but only "medium"'),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", 'reasoning.summary is "detailed"'),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", 'reasoning.effort is "much", one of none'),
    ({"include": ["web_search_call.results"]}, "include", 'include has "web_search_call.results", only'),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "from 0 to 20, not 21"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "needs stream to be true"),
    ({"messages": []}, "messages", "messages is not a known field"),
    ({"tools": [{"type": "web_search", "filters": {}}]}, "tools", "tools[0].type is \"web_search\", only 'function'"),
    ({"tools": [{"type": "mcp"}]}, "tools", 'tools[0].type is "mcp"'),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name is 'a b', 1 to 64 letters"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
    ({"tools": [SUM, SUM]}, "tools", "tools[1].name is 'sum' again"),
    ({"tools": [SUM | {"defer_loading": True}]}, "tools[0].defer_loading", "is not a known field"),
    ({"tools": [SUM] * 129}, "tools", "tools has 129 entries, at most 128"),
    ({"tools": [SUM], "tool_choice": {"type": "file_search"}}, "tool_choice", 'tool_choice.type is "file_search"'),
    ({"tools": [SUM], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "names the function 'f'"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [SUM], "tool_choice": ALLOWED | {"mode": "any"}}, "tool_choice", 'tool_choice.mode is "any"'),
    ({"tools": [SUM], "tool_choice": ALLOWED | {"tools": []}}, "tool_choice", "tool_choice.tools has 0 entries"),
    (
        {"tools": [SUM], "tool_choice": ALLOWED},
        "tool_choice",
        'tool_choice.tools[0] names the function "f", which is not',
    ),
    ({"tool_choice": ALLOWED}, "tool_choice", "which is not among the tools"),
    ({"tools": [SUM], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode", "is missing"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"logit_bias": {"x": 1}}, "logit_bias", 'logit_bias has the key "x"'),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "text.format", "both ask"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", 'text.format.type is "xml", one of text, json_object'),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "is missing"),
    ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format", "name is 'a b'"),
    (
        {"tools": [SUM], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
        "tool_choice",
        "no other form",
    ),
]


async def test_refusals(cluster: Any) -> None:
    await cluster.start(prefill=0, decode=1)
    for body, field, told in REFUSALS:
        response = await cluster.http.post("/v1/responses", json={"input": "hi", **body})
        assert response.status_code == (404 if "model" in body else 400), (body, response.text)
        error = response.json()["error"]
        assert told in error["message"], (body, error)
        assert error["param"] == field, (body, error)
        assert len(error["message"]) < 500
    assert not cluster.of("decode").calls


async def test_values_without_effect_are_accepted(cluster: Any) -> None:
    await cluster.start(prefill=0, decode=1)
    plain = await sent(cluster)
    fields: dict[str, Any] = dict.fromkeys(RESPONSES_IGNORED, "x") | {"max_tool_calls": 1}
    for name, values in RESPONSES_NO_OP.items():
        outer, _, inner = name.partition(".")
        if values:
            fields[outer] = {inner: values[0]} | (fields.get(outer) or {}) if inner else values[0]
        else:
            fields[outer] = None
    assert list((await sent(cluster, **fields)).prompt_token_ids) == list(plain.prompt_token_ids)


async def long_worker(cluster: Any) -> None:
    """With room for a prompt that tells of tools, a token a byte."""
    await cluster.worker("decode", max_model_len=2048).start()
    await cluster.start(prefill=0, decode=0, scheduling_policy="priority")


async def sent(cluster: Any, **body: Any) -> Any:
    """The request that the worker got for this body."""
    response = await cluster.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2, **body})
    assert response.status_code == 200, response.text
    return cluster.of("decode").calls[-1].request


async def test_what_workers_are_sent(cluster: Any) -> None:
    await long_worker(cluster)
    chat = await cluster.http.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
            "max_tokens": 3,
            "temperature": 0.5,
            "seed": 1,
        },
    )
    assert chat.status_code == 200
    as_chat = cluster.of("decode").calls[-1].request
    given = await sent(
        cluster, instructions="s", max_output_tokens=3, temperature=0.5, seed=1, cache_salt="a", priority=3
    )
    assert (given.sampling_params.seed, given.priority) == (1, 3)
    assert list(given.prompt_token_ids) == list(as_chat.prompt_token_ids)
    assert (given.sampling_params.max_tokens, given.sampling_params.temperature) == (3, 0.5)
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "null"}, "strict": True}}
    assert json.loads((await sent(cluster, text=form)).sampling_params.structured_outputs.json_schema) == {
        "type": "null"
    }
    assert (
        await sent(cluster, text={"format": {"type": "json_object"}})
    ).sampling_params.structured_outputs.json_object
    assert not (await sent(cluster, text={"format": {"type": "text"}})).sampling_params.structured_outputs
    plain = await sent(cluster)
    free = await sent(cluster, tools=[SUM])
    assert len(free.prompt_token_ids) > len(plain.prompt_token_ids)
    forced = await sent(cluster, tools=[SUM], tool_choice={"type": "function", "name": "sum"})
    [tag] = json.loads(forced.sampling_params.structured_outputs.structural_tag)["format"]["tags"]
    assert tag["content"]["json_schema"] == SUM["parameters"]


@pytest.fixture
async def client(cluster: Any) -> Any:
    await long_worker(cluster)
    made = openai.AsyncOpenAI(base_url=f"http://{cluster.addresses[0]}/v1", api_key="none", max_retries=0)
    yield made
    await made.close()


async def test_the_client_gets_a_response(client: Any) -> None:
    response = await client.responses.create(input="hi", max_output_tokens=5, metadata={"a": "b"})
    assert isinstance(response, Response)
    assert (response.output_text, response.status) == (said(5), "incomplete")
    assert response.usage is not None
    assert response.usage.output_tokens == 5
    assert response.metadata == {"a": "b"}


async def test_the_client_gets_a_stream(client: Any) -> None:
    async with client.responses.stream(model="fake-model", input="hi", max_output_tokens=5) as stream:
        events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said(5)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == said(5)
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_an_answer_that_ends_by_itself_is_complete(cluster: Any, client: Any) -> None:
    cluster.of("decode").scripts = [play(ADMITTED, decode_outputs(0, "ab"), decode_outputs(2, "", "stop", [EOS]))]
    response = await client.responses.create(input="hi")
    assert (response.output_text, response.status) == ("ab", "completed")
    assert response.completed_at


async def test_a_call_of_a_function(cluster: Any, client: Any) -> None:
    text = '<tool_call>{"name":"sum","arguments":{"a":1}}</tool_call>'
    answer = play(ADMITTED, decode_outputs(0, text), decode_outputs(len(text), "", "stop", [EOS]))
    cluster.of("decode").scripts = [answer]
    [item] = (await client.responses.create(input="hi", tools=[SUM])).output
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "sum", {"a": 1})


OWN_ANSWERS = (
    "Well.",
    '<tool_call>{"name":"sum","arguments":{"a":1}}</tool_call>',
    '<tool_call>{"name":"sum","arguments":{"a":1',
    '<tool_call>{"name":"sum","arguments":null}</tool_call><tool_call>{"index":0,"name":"a;b","arguments":[1]}',
    '<tool_call>{"name":"sum","argu',
)


@pytest.mark.diagonal
@pytest.mark.parametrize("text", OWN_ANSWERS)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_an_answer_had_can_be_sent_back(cluster: Any, client: Any, text: str, stream: bool) -> None:
    """As the client library writes it, with null for each field that it knows."""
    scripts = [play(ADMITTED, decode_outputs(0, text, "length")) for _ in range(2)]
    cluster.of("decode").scripts = scripts
    if stream:
        asked_for: dict[str, Any] = {"input": "hi", "tools": [SUM], "max_output_tokens": len(text)}
        async with client.responses.stream(model="fake-model", **asked_for) as events:
            output = [event async for event in events][-1].response.output
    else:
        output = (await client.responses.create(input="hi", tools=[SUM], max_output_tokens=len(text))).output
    history = [item.model_dump() for item in output]
    await client.responses.create(input=[message("hi"), *history, message("x")], tools=[SUM], max_output_tokens=1)
    asked: dict[str, Any] = {"model": "fake-model", "tools": [{"type": "function", "function": {"name": "sum"}}]}
    chat = await client.chat.completions.create(
        messages=[{"role": "user", "content": "hi"}], max_tokens=len(text), **asked
    )
    told = [{"role": "user", "content": "hi"}, chat.choices[0].message.model_dump(), {"role": "user", "content": "x"}]
    await client.chat.completions.create(messages=told, max_tokens=1, **asked)


async def test_a_stream_that_breaks_ends_with_an_error(cluster: Any, client: Any) -> None:
    broken = play(ADMITTED, decode_outputs(0, "ab"), prefill_pb2.PrefillEvent())
    cluster.of("decode").scripts = [broken] * 3
    events = []
    async with await client.responses.create(input="hi", stream=True) as stream:
        async for event in stream:
            events.append(event)
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1].response.error.code == "server_error"


def test_every_field_has_a_value_without_effect_or_a_meaning() -> None:
    fields = {*ResponsesBody.__struct_fields__}
    assert {*RESPONSES_IGNORED, *(name.partition(".")[0] for name in RESPONSES_NO_OP)} <= fields
