"""Tools through the openai package: choices of tools, streams of arguments, results that go back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

QUESTION: Any = [{"role": "user", "content": "What is 7 plus 5?"}]


def function(name: str) -> dict[str, Any]:
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "description": "of two numbers", "parameters": parameters}}


TOOLS: Any = [function("add"), function("multiply")]
FORMS: Any = {"required": "required", "named": {"type": "function", "function": {"name": "multiply"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 5}}\n</tool_call>'


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, messages: Any = QUESTION, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, temperature=0, tools=TOOLS, **fields)


def check(name: str, arguments: str, choice: str) -> None:
    """A call is one of the tools', with arguments of its schema."""
    assert name == "multiply" if choice == "named" else name in {"add", "multiply"}
    read = json.loads(arguments)
    assert set(read) == {"a", "b"}
    assert all(isinstance(value, int) and 0 <= value <= 99 for value in read.values())


@pytest.mark.parametrize("choice", FORMS)
def test_a_call_that_must_come(client: OpenAI, choice: str) -> None:
    [answer] = ask(client, tool_choice=FORMS[choice], parallel_tool_calls=False).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    [call] = answer.message.tool_calls
    assert (call.type, call.id[:5]) == ("function", "call_")
    check(call.function.name, call.function.arguments, choice)


@pytest.mark.parametrize("choice", FORMS)
def test_a_streamed_call_is_the_same(client: OpenAI, choice: str) -> None:
    chunks = list(ask(client, tool_choice=FORMS[choice], parallel_tool_calls=False, stream=True))
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {call.index for call in deltas} == {0}
    assert [bool(call.id and call.function.name) for call in deltas[:2]] == [True, False]
    arguments = "".join(call.function.arguments or "" for call in deltas)
    check(deltas[0].function.name, arguments, choice)
    [whole] = ask(client, tool_choice=FORMS[choice], parallel_tool_calls=False).choices[0].message.tool_calls
    assert (deltas[0].function.name, arguments) == (whole.function.name, whole.function.arguments)


def test_auto_lets_the_model_answer(client: OpenAI) -> None:
    [answer] = ask(client, tool_choice="auto").choices
    assert (answer.message.content, answer.message.tool_calls) == ("7 plus 5 is 12.", None)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_auto_finds_the_call_that_the_model_writes(client: OpenAI, stream: bool) -> None:
    # the bundled model writes no call by itself
    written = {"structured_outputs": {"choice": [CALL]}}
    if stream:
        with client.chat.completions.stream(
            model="demo", messages=QUESTION, temperature=0, tools=TOOLS, extra_body=written
        ) as events:
            answer: Any = events.get_final_completion().choices[0]
    else:
        answer = ask(client, extra_body=written).choices[0]
    [call] = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 7, "b": 5})
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content


def test_none_makes_no_call(client: OpenAI) -> None:
    done = ask(client, tool_choice="none")
    assert done.choices[0].message.tool_calls is None
    assert done.usage.prompt_tokens < ask(client).usage.prompt_tokens


def test_a_result_goes_back(client: OpenAI) -> None:
    called = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    [call] = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "12"}
    followed = ask(client, [*QUESTION, called, result])
    assert followed.choices[0].message.role == "assistant"
    assert followed.choices[0].finish_reason in {"stop", "length"}
    assert followed.usage.prompt_tokens > ask(client).usage.prompt_tokens


class Sum(BaseModel):
    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


def test_parse_of_a_call(client: OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Sum)]
    done = client.chat.completions.parse(
        model="demo", messages=QUESTION, temperature=0, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    [call] = done.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Sum)
