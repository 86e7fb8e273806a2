"""Which parsers a chat template asks for, and that tools are looked for after reasoning alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.text.parsers.answer_parsers import AnswerParser, AnswerParsers
from pdserve.text.parsers.deltas import ReasoningDelta, TextDelta, ToolCallDelta
from pdserve.text.parsers.reasoning_parser import REASONING_TAGS, ReasoningParser
from pdserve.text.parsers.tool_call_parser import TOOL_FORMATS, ToolCallParser

TEMPLATES = [
    ("", "hermes", None),
    ("{{ messages }} {{ tools }}", "hermes", None),
    ("<tool_call> {{ m.split('</think>') }}", "hermes", "qwen3"),
    ("[TOOL_CALLS] [THINK][/THINK]", "mistral", "mistral"),
    ('{"name": function name, "parameters": dictionary} <|python_tag|>', "llama3_json", None),
    ("[func_name1(params_name1=params_value1)] ", "pythonic", None),
    ("<|python_start|>", "pythonic", None),
    ("</seed:think>", "hermes", "seed_oss"),
]


def tokenizer(template: str, special: tuple[str, ...] = (), prompt: str = "") -> Any:
    """A tokenizer whose prompt's end is `prompt`."""
    return SimpleNamespace(
        chat_template_source=template,
        tool_template_source=template,
        is_special=special.__contains__,
        decode=lambda token_ids, skip_special_tokens: prompt,
    )


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_auto_goes_by_the_chat_template(template: str, tools: str, reasoning: str | None) -> None:
    parsers = AnswerParsers.of(tokenizer(template), "auto", "auto")
    assert parsers.tool_format is TOOL_FORMATS[tools]
    assert parsers.reasoning_tags == (None if reasoning is None else REASONING_TAGS[reasoning])
    named = AnswerParsers.of(tokenizer(template), "none", "<a>")
    assert (named.tool_format, named.reasoning_tags) == (None, ("<a>", "</a>"))


def test_unknown_parsers_are_refused() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser is 'x', one of auto, none, hermes"):
        AnswerParsers.of(tokenizer(""), "x", "none")
    with pytest.raises(ConfigError, match="reasoning_parser is 'x', one of auto, none, deepseek_r1"):
        AnswerParsers.of(tokenizer(""), "none", "x")
    RouterSettings(reasoning_parser="[a]").verify()
    for name in ("", "<a", "< a>", f"<{'a' * 65}>"):
        with pytest.raises(ConfigError, match="reasoning_parser is"):
            RouterSettings(reasoning_parser=name).verify()


def test_special_tokens_among_the_markers_are_known() -> None:
    parsers = AnswerParsers.of(tokenizer("[TOOL_CALLS][/THINK]", ("[TOOL_CALLS]", "[THINK]")), "auto", "auto")
    assert parsers.has_special_markers(parsers.tool_format, None)
    assert parsers.has_special_markers(None, parsers.reasoning_tags)
    assert not parsers.has_special_markers(TOOL_FORMATS["hermes"], REASONING_TAGS["qwen3"])
    assert not parsers.has_special_markers(None, None)


@pytest.mark.parametrize(
    ("prompt", "is_open"), [("x<think>\n", True), ("<think></think>\n\n", False), ("<think>x", False)]
)
def test_a_prompt_may_open_the_reasoning(prompt: str, is_open: bool) -> None:
    parsers = AnswerParsers.of(tokenizer("", prompt=prompt), "none", "qwen3")
    assert parsers.opens_reasoning([1]) is is_open
    assert not parsers.opens_reasoning(None)


def test_calls_are_found_after_reasoning_alone() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    parser = AnswerParser(
        ReasoningParser(REASONING_TAGS["qwen3"], is_open=True), ToolCallParser(TOOL_FORMATS["hermes"])
    )
    assert parser.feed(f"a {call}", is_last=False) == [ReasoningDelta(f"a {call}")]
    assert not parser.ends_with_calls
    assert parser.feed(f"</think>\nb {call} <", is_last=False) == [TextDelta("b"), ToolCallDelta(0, "f", "{}")]
    assert parser.feed("", is_last=True) == [TextDelta(" <")]
    assert parser.ends_with_calls
