"""Chats over gRPC: tools, parts and variables of the template give the worker what they give it over HTTP."""

from __future__ import annotations

import json
from typing import Any

import grpc
import msgspec
import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.body_thread import ON_LOOP_BYTES
from pdserve.router.grpc_front.request_fields import chat_input, verify_chat_counts
from pdserve.router.openai.protocol import ChatBody
from pdserve.router.requests.fields.output_constraint import OutputConstraint
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.text.parsers.tool_call_parser import HERMES_CALLS
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import ADMITTED, EOS, decode_outputs

USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SUM = {"type": "function", "function": {"name": "sum", "description": "adds", "parameters": SCHEMA}}
PLAIN = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}


def over_http(**body: Any) -> ClientRequest:
    return msgspec.convert(body, ChatBody).requests({}, CallFields(1.0, {}, ""))[0]


def message(told: dict[str, Any]) -> inference_pb2.ChatMessage:
    """The message for what HTTP clients send."""
    fields = dict(told)
    if isinstance(fields["content"], list):
        parts = [inference_pb2.ContentPart(text=part["text"]) for part in fields.pop("content")]
        fields["parts"] = parts
    fields["tool_calls"] = [
        inference_pb2.ToolCall(id=call["id"], function=inference_pb2.FunctionCall(**call["function"]))
        for call in fields.get("tool_calls", ())
    ]
    return inference_pb2.ChatMessage(**fields)


def tool(told: dict[str, Any]) -> inference_pb2.Tool:
    function = dict(told["function"])
    if "parameters" in function:
        function["parameters"] = json.dumps(function["parameters"])
    return inference_pb2.Tool(function=inference_pb2.FunctionDefinition(**function))


def chat_prompt(**body: Any) -> inference_pb2.ChatPrompt:
    """The message for a body of an HTTP client."""
    fields = dict(body, messages=[message(told) for told in body["messages"]])
    fields["tools"] = [tool(told) for told in body.get("tools", ())]
    match body.get("tool_choice"):
        case str(mode):
            fields["tool_choice"] = inference_pb2.ToolChoice(mode=mode)
        case {"function": {"name": name}}:
            fields["tool_choice"] = inference_pb2.ToolChoice(function=name)
    for name in {"chat_template_kwargs", "documents"} & body.keys():
        fields[name] = json.dumps(body[name])
    return inference_pb2.ChatPrompt(**fields)


EQUAL: list[dict[str, Any]] = [
    {},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                  {"role": "tool", "content": "2", "tool_call_id": "1", "name": "sum"}]},
    {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "why"}, USER]},
    {"tools": [SUM, PLAIN]},
    {"tools": [SUM, PLAIN], "parallel_tool_calls": False},
    {"tools": [SUM, PLAIN], "tool_choice": "none"},
    {"tools": [SUM, PLAIN], "tool_choice": "required"},
    {"tools": [SUM, PLAIN], "tool_choice": PLAIN},
    {"chat_template_kwargs": {"enable_thinking": False, "a": [1]}, "documents": [{"text": "t"}], "reasoning_effort": "low"},
    {"add_generation_prompt": False, "add_special_tokens": True},
    {"continue_final_message": True},
]  # fmt: skip


@pytest.mark.parametrize("body", EQUAL)
def test_a_chat_means_what_it_means_over_http(body: dict[str, Any]) -> None:
    body = {"messages": [USER]} | body
    expected = over_http(**body)
    prompt, form, max_calls = chat_input(chat_prompt(**body), OutputConstraint(), HERMES_CALLS)
    assert prompt == expected.prompt
    assert (form.params, max_calls) == (expected.sampling_params.structured_outputs, expected.max_tool_calls)
    assert form.field == expected.constraint_field or form.params is None


async def test_both_front_ends_send_the_worker_the_same(cluster: Any) -> None:
    await cluster.worker("decode", max_model_len=2048).start()
    await cluster.start(prefill=0, decode=0)
    body = {
        "messages": [USER | {"content": [{"type": "text", "text": "a"}]}],
        "tools": [SUM],
        "tool_choice": "required",
    }
    sampling = request_pb2.SamplingParams(max_tokens=2, seed=1)
    request = inference_pb2.GenerateRequest(chat=chat_prompt(**body), sampling=sampling)
    assert [response.text async for response in cluster.grpc.Generate(request)] == ["ab"]
    assert (
        await cluster.http.post("/v1/chat/completions", json=body | {"max_tokens": 2, "seed": 1})
    ).status_code == 200
    first, second = (call.request for call in cluster.of("decode").calls)
    assert list(first.prompt_token_ids) == list(second.prompt_token_ids)
    assert first.sampling_params == second.sampling_params
    assert first.sampling_params.structured_outputs.structural_tag


def with_tools(*functions: dict[str, Any], **fields: Any) -> inference_pb2.ChatPrompt:
    tools = [inference_pb2.Tool(function=inference_pb2.FunctionDefinition(**function)) for function in functions]
    return inference_pb2.ChatPrompt(
        messages=[inference_pb2.ChatMessage(role="user", content="x")], tools=tools, **fields
    )


def with_message(**fields: Any) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", **fields)])


MODE = inference_pb2.ToolChoice(mode="required")
REFUSALS = [
    (with_tools({"name": "a b"}), "chat.tools[0].function.name is 'a b', 1 to 64 letters"),
    (with_tools({}), "chat.tools[0].function.name is '', 1 to 64"),
    (with_tools({"name": "f"}, {"name": "f"}), "chat.tools[1].function.name is 'f' again"),
    (with_tools({"name": "f", "parameters": "{"}), "chat.tools[0].function.parameters is not of the right form"),
    (with_tools({"name": "f", "parameters": "[]"}), "chat.tools[0].function.parameters is not of the right form"),
    (with_tools({"name": "f", "parameters": '{"a":' * 5000}), "chat.tools[0].function.parameters is not of the right"),
    (with_tools(*({"name": f"f{n}"} for n in range(129))), "chat.tools must be at most 128 tools, not 129"),
    (with_tools({"name": "f"}, tool_choice=inference_pb2.ToolChoice(mode="any")), "chat.tool_choice is 'any', one of"),
    (with_tools({"name": "f"}, tool_choice=inference_pb2.ToolChoice(function="g")), "chat.tool_choice names the function"),
    (with_tools(tool_choice=MODE), "chat.tool_choice asks for a call, but there are no tools"),
    (with_tools(chat_template_kwargs="[1]"), "chat.chat_template_kwargs is not of the right form"),
    (with_tools(documents="{}"), "chat.documents is not of the right form"),
    (with_tools(reasoning_effort="much"), 'chat.reasoning_effort is "much", one of none'),
    (with_tools(continue_final_message=True, add_generation_prompt=True), "chat.continue_final_message and"),
    (with_message(content="x", parts=[inference_pb2.ContentPart(text="y")]), "chat.messages[0] has content and parts"),
    (with_message(parts=[inference_pb2.ContentPart()]), "chat.messages[0].parts[0] is empty, text or image_url is needed"),
    (with_tools(chat_template_kwargs='{"raise_exception": 1}'), "chat_template_kwargs has 'raise_exception'"),
]  # fmt: skip


async def test_refusals(cluster: Any) -> None:
    await cluster.start(prefill=0, decode=1)
    for chat, told in REFUSALS:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.grpc.Generate(inference_pb2.GenerateRequest(chat=chat)).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = refused.value.details() or ""
        assert told in details
        assert len(details) < 500
    form = request_pb2.SamplingParams(structured_outputs=request_pb2.StructuredOutputs(regex="a"))
    chat = with_tools({"name": "f"}, tool_choice=MODE)
    with pytest.raises(grpc.aio.AioRpcError, match=r"chat\.tool_choice forces a call"):
        await cluster.grpc.Generate(inference_pb2.GenerateRequest(chat=chat, sampling=form)).read()
    assert not cluster.of("decode").calls


def test_values_in_json_are_counted_over_all_fields_before_they_are_built() -> None:
    half = '{"a": [' + "{}," * 20_000 + "{}]}"
    assert len(half) > ON_LOOP_BYTES
    verify_chat_counts(with_tools({"name": "f", "parameters": half}), 0)
    many = with_tools(*({"name": f"f{n}", "parameters": half} for n in range(4)))
    with pytest.raises(InvalidRequest, match="at most 65536 objects and arrays"):
        verify_chat_counts(many, 0)


THOUGHT = "<think>So.</think>Well.\n"
SAID = THOUGHT + '<tool_call>{"name":"sum","arguments":{"a":[1]}}</tool_call>\n<tool_call>{"name":"f"}</tool_call>'


async def speak(worker: Any, call: Any) -> Any:
    yield ADMITTED
    for place, char in enumerate(SAID):
        yield decode_outputs(place, {" ": "Ġ", "\n": "Ċ"}.get(char, char))
    yield decode_outputs(len(SAID), "", "stop", token_ids=[EOS])


def parts_of(answers: list[inference_pb2.GenerateResponse]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Text, reasoning, and (id, name, arguments) of each call."""
    calls: dict[int, tuple[str, str, str]] = {}
    for delta in (delta for answer in answers for delta in answer.tool_calls):
        known = calls.get(delta.index, ("", "", ""))
        assert not (known[1] and delta.name), "named once"
        calls[delta.index] = (known[0] + delta.id, known[1] + delta.name, known[2] + delta.arguments)
    text, reasoning = ("".join(getattr(answer, name) for answer in answers) for name in ("text", "reasoning"))
    return text, reasoning, [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize(
    ("stream", "kind"),
    [(False, 0), (True, request_pb2.OUTPUT_KIND_DELTA), (True, request_pb2.OUTPUT_KIND_CUMULATIVE)],
)
async def test_the_parts_of_an_answer(cluster: Any, stream: bool, kind: Any) -> None:
    await cluster.worker("decode", max_model_len=2048).start()
    await cluster.start(prefill=0, decode=0, reasoning_parser="<think>")
    cluster.of("decode").script = speak
    chat = chat_prompt(messages=[USER], tools=[SUM, PLAIN])
    sampling = request_pb2.SamplingParams(max_tokens=300, output_kind=kind)
    request = inference_pb2.GenerateRequest(chat=chat, sampling=sampling, stream=stream)
    raw = [answer async for answer in cluster.grpc.Generate(request)]
    last = raw[-1:] if kind == request_pb2.OUTPUT_KIND_CUMULATIVE else raw
    assert parts_of(last) == (SAID, "", [])
    request.chat.parse_answer = True
    answers = [answer async for answer in cluster.grpc.Generate(request)]
    last = answers[-1:] if kind == request_pb2.OUTPUT_KIND_CUMULATIVE else answers
    text, reasoning, calls = parts_of(last)
    assert (text, reasoning) == ("Well.", "So.")
    assert [call[1:] for call in calls] == [("sum", '{"a":[1]}'), ("f", "{}")]
    assert len({call[0] for call in calls}) == 2
    assert all("<" not in answer.text + answer.reasoning for answer in answers)
    assert sum(len(answer.token_ids) for answer in last) == len(SAID) + 1
    assert answers[-1].finish_reason == request_pb2.FINISH_REASON_STOP
