"""Tools in prompts: for templates that know tools, and for those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.text.parsers.deltas import ToolCallDelta
from pdserve.text.parsers.tool_call_parser import TOOL_FORMATS, ToolCallParser
from pdserve.text.templates.chat_template import ChatTemplate
from pdserve.text.templates.tool_prompt import MAX_ARGUMENT_CONTAINERS

TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "sum", "arguments": '{"a": [1, 2]}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
]
SIMPLE = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
KNOWS = (
    "{% if tools %}{{ tools[0].function.name }}:{% endif %}{% for m in messages %}[{{ m.role }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.name }}{{ c.function.arguments.a[1] }}{% endfor %}]{% endfor %}"
)


def render(source: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return ChatTemplate(source, {}, "test").render(messages, tools=tools)


def test_a_template_that_knows_tools_gets_them_and_arguments_as_objects() -> None:
    assert render(KNOWS, HISTORY, TOOLS) == "sum:[user|1 + 2?][assistant||sum2][tool|3]"


def test_another_one_gets_them_as_text() -> None:
    text = render(SIMPLE, HISTORY, TOOLS)
    system, user, assistant, tool = text.removeprefix("[").removesuffix("]").split("][")
    assert system.startswith("system|You may call these functions.")
    assert json.dumps(TOOLS[0]) in system
    assert user == "user|1 + 2?"
    assert ToolCallParser(TOOL_FORMATS["hermes"]).feed(assistant.removeprefix("assistant|")) == [
        ToolCallDelta(0, "sum", '{"a": [1, 2]}')
    ]
    assert tool == "user|<tool_response>\n3\n</tool_response>"


def test_a_system_message_stays_first_and_only() -> None:
    text = render(SIMPLE, [{"role": "system", "content": "Be brief."}, *HISTORY[:1]], TOOLS)
    assert text.startswith("[system|Be brief.\n\nYou may call")
    assert text.count("[system|") == 1


def test_without_tools_nothing_is_told() -> None:
    assert render(SIMPLE, HISTORY[:1]) == "[user|1 + 2?]"
    said = [{"role": "assistant", "content": "well", "tool_calls": None}]
    assert render(SIMPLE, said) == "[assistant|well]"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("x", "messages[0].tool_calls[0] must be an object with function.name"),
        ({}, "messages[0].tool_calls[0] must be an object with function.name"),
        ({"function": {"name": 7}}, "messages[0].tool_calls[0] must be an object with function.name"),
    ],
)
def test_malformed_calls_are_refused(call: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render(SIMPLE, [{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert told in refused.value.message
    with pytest.raises(InvalidRequest, match="tool_calls must be a list"):
        render(SIMPLE, [{"role": "assistant", "content": "", "tool_calls": "x"}])


ILL_FORMED = ('{"city": ', "{", "[1]", "5", '"x"', "null", "not JSON", '{"a": "\\ud800"}', "[" * 60_000, "9" * 5000)


def called(arguments: str | None) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize("arguments", ILL_FORMED, ids=range(len(ILL_FORMED)))
def test_arguments_that_are_no_object_are_an_empty_one_or_their_text(arguments: str) -> None:
    """As a model wrote them that was cut, or wrote a call badly."""
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }} {{ tools }}"
    assert render(source, called(arguments)) == "{} None"
    told = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    assert render(SIMPLE, called(arguments)) == f"[assistant|<tool_call>\n{told}\n</tool_call>]"


ANSWERS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": [1, "\\ud800"]}}</tool_call><tool_call>{"name": "g g", "parameters": 1}',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": "a text"}; {"id": 5, "name": "g", "parameters": {"a": {"b": null}}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g{"a" 5}[TOOL_CALLS][{"name": "f", "arguments": 7}]',
    "pythonic": "[f(a=[1, {'b': None}], c='x'), g(a={'b': })]",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ANSWERS)
def test_every_call_that_was_returned_is_taken_in_a_history(form: str) -> None:
    """Wherever the answer was cut."""
    source = (
        "{% for c in messages[0].tool_calls or [] %}{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "{{ k }}{{ v | tojson }}{% endfor %}{% endfor %}{{ tools }}"
    )
    for cut in range(len(ANSWERS[form]) + 1):
        parser = ToolCallParser(TOOL_FORMATS[form])
        calls: list[dict[str, Any]] = []
        for delta in parser.feed(ANSWERS[form][:cut]) + parser.flush(is_cut=True):
            if isinstance(delta, ToolCallDelta) and delta.name is not None:
                calls.append({"function": {"name": delta.name, "arguments": delta.arguments}})
            elif isinstance(delta, ToolCallDelta):
                calls[-1]["function"]["arguments"] += delta.arguments
        history: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": calls or None}]
        names = [call["function"]["name"] for call in calls]
        assert all(name in render(source, history).encode().decode() for name in names)
        assert all(name in render(SIMPLE, history).encode().decode() for name in names)
    assert len(calls) > 1


@pytest.mark.parametrize("arguments", ["", " ", "{}", None])
def test_no_arguments_are_an_empty_object(arguments: str | None) -> None:
    for source in ("{{ messages[0].tool_calls[0].function.arguments }}{{ tools }}", SIMPLE):
        assert "{}" in render(source, called(arguments))


def test_arguments_as_texts_have_a_limit_in_all() -> None:
    def history(num_lists: int) -> list[dict[str, Any]]:
        half = json.dumps({"a": [[]] * (num_lists // 2 - 2)})
        call = {"function": {"name": "f", "arguments": half}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]} for _ in range(2)]

    assert render("{{ messages | length }}", history(MAX_ARGUMENT_CONTAINERS)) == "2"
    with pytest.raises(InvalidRequest, match=f"at most {MAX_ARGUMENT_CONTAINERS} are allowed"):
        render("{{ messages | length }}", history(MAX_ARGUMENT_CONTAINERS + 2))
