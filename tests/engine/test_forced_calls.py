"""Forced calls in the form of each family: the grammar allows them and nothing else, and the parser finds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar

from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar_matcher import Vocabulary, compile_grammar
from pdserve.router.requests.fields.tools import FunctionBody, NamedFunction, NamedTool, ToolBody, tool_use
from pdserve.text.parsers.answer_parsers import AnswerParsers
from pdserve.text.parsers.deltas import ToolCallDelta
from pdserve.text.parsers.tool_call_parser import HERMES_CALLS, TOOL_FORMATS, ToolCallParser

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, "]}; "]}}, "required": ["a"]}
TOOLS = [ToolBody(function=FunctionBody(name=name, parameters=SCHEMA)) for name in ("f", "g-2")]
HERMES = (
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    '\n<tool_call>\n{"name": "g-2", "arguments": {"a": "]}; "}}\n</tool_call>',
)
FORMS = {
    "hermes": HERMES,
    "pythonic": HERMES,
    "none": HERMES,
    "llama3_json": ('{"name": "f", "parameters": {"a": 1}}', '; {"name": "g-2", "parameters": {"a": "]}; "}}'),
    "mistral": ('[{"name": "f", "arguments": {"a": 1}}', ', {"name": "g-2", "arguments": {"a": "]}; "}}', "]"),
}
CALLS = [ToolCallDelta(0, "f", '{"a": 1}'), ToolCallDelta(1, "g-2", '{"a": "]}; "}')]


@pytest.fixture(scope="module")
def vocabulary(tiny_checkpoints: Callable[..., Path]) -> Vocabulary:
    return Vocabulary(tiny_checkpoints("llama"), 320)


@pytest.mark.parametrize("only_one", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_forced_calls_of_each_family(vocabulary: Vocabulary, name: str, only_one: bool) -> None:
    tokenizer: Any = SimpleNamespace()
    parsers = AnswerParsers.of(tokenizer, name, "none")
    form = tool_use(TOOLS, "required", not only_one, parsers.forced_calls).form or StructuredOutputsParams()
    grammar = compile_grammar(vocabulary, form)

    def ends_with(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[0])
        return bool(matcher.accept_string(text) and matcher.is_completed())

    first, second, end = (*FORMS[name], "")[:3]
    assert ends_with(first + end)
    assert ends_with(first + second + end) is not only_one
    assert not ends_with(f"Well. {first}{end}")
    assert not ends_with(first.replace('"a": 1', '"a": 2') + end)
    text = first + end if only_one else first + second + end
    parser = ToolCallParser(parsers.forced_format)
    assert parser.feed(text) + parser.flush() == CALLS[: 1 if only_one else 2]


def test_a_named_call_has_the_form_of_the_family_too(vocabulary: Vocabulary) -> None:
    choice = NamedTool(function=NamedFunction(name="g-2"))
    form = tool_use(TOOLS, choice, None, TOOL_FORMATS["llama3_json"].forced or HERMES_CALLS).form
    matcher = xgrammar.GrammarMatcher(
        compile_grammar(vocabulary, form or StructuredOutputsParams()), terminate_without_stop_token=True
    )
    assert not matcher.accept_string(FORMS["llama3_json"][0])
    assert matcher.accept_string(FORMS["llama3_json"][1][2:])
    assert matcher.is_terminated()
