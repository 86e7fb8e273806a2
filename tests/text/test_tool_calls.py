"""Calls of tools in a model's text: found, streamed, and never mistaken, wherever the text is cut."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.tool_calls import BEGIN, END, TextDelta, ToolCallDelta, ToolCallParser


def parsed(pieces: list[str], max_calls: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """(text, calls with name and arguments) of a text that comes in these pieces."""
    parser = ToolCallParser(max_calls)
    text, calls = "", list[list[str]]()
    for deltas in (*map(parser.feed, pieces), parser.flush()):
        for delta in deltas:
            if isinstance(delta, TextDelta):
                assert delta.text
                text += delta.text
            elif delta.name is not None:
                assert delta.index == len(calls)
                calls.append([delta.name, delta.arguments])
            else:
                assert delta.index == len(calls) - 1
                assert delta.arguments
                calls[-1][1] += delta.arguments
    return text, [(name, arguments) for name, arguments in calls]


def call(name: str, arguments: Any, space: str = "\n") -> str:
    return f"{BEGIN}{space}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{space}{END}"


PLAIN: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call at all", "no call at all", []),
    (call("f", {}), "", [("f", "{}")]),
    (f"Let me see.\n\n{call('f', {'a': 1})}", "Let me see.", [("f", '{"a": 1}')]),
    (f"{call('f', {})}\n{call('g', {'b': [1, {'c': '}'}]})}\n", "", [("f", "{}"), ("g", '{"b": [1, {"c": "}"}]}')]),
    (f"one {call('f', {})} two", "one two", [("f", "{}")]),
    ("a < b, a <tool, <tool_call", "a < b, a <tool, <tool_call", []),
    (f"{BEGIN}{{'name': 1}}{END} x", f"{BEGIN}{{'name': 1}}{END} x", []),
    (f'{BEGIN}{{"name": 7, "arguments": {{}}}}{END}', f'{BEGIN}{{"name": 7, "arguments": {{}}}}{END}', []),
    (f"{BEGIN}{BEGIN}{json.dumps({'name': 'f'})}{END}", BEGIN, [("f", "{}")]),
    (f'{BEGIN}{{"arguments": {{"a": 2}}, "name": "f"}}{END}', "", [("f", '{"a": 2}')]),
    (f'{BEGIN}{{"name": "f", "arguments": "{{\\"a\\": 2}}"}}{END}', "", [("f", '{"a": 2}')]),
    (f'{BEGIN}{{"id": {{"x": []}}, "name": "f", "arguments": {{}}, "more": "}}"}}{END}', "", [("f", "{}")]),
    (
        f'{BEGIN}{{"name": "f", "arguments": {{"a": "\\"}}</tool_call>"}}}}{END}',
        "",
        [("f", '{"a": "\\"}</tool_call>"}')],
    ),
    (f'{BEGIN}{{"name": "f", "arguments": {{"a": 1', "", [("f", '{"a": 1')]),
    (f'{BEGIN}{{"name": "f", "argum', f'{BEGIN}{{"name": "f", "argum', []),
    (f'{BEGIN}{{"name": "f"}} and so on', "and so on", [("f", "{}")]),
    (f'{BEGIN}{{"name": "f"}}{call("g", {})}', "", [("f", "{}"), ("g", "{}")]),
    (f"{BEGIN}{{}}{END}", f"{BEGIN}{{}}{END}", []),
    (f'{BEGIN}{{"name": "f",}}{END}', f'{BEGIN}{{"name": "f",}}{END}', []),
    ("  white space stays  ", "  white space stays  ", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), PLAIN)
def test_what_is_a_call_and_what_is_text(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed([text]) == (content, calls)
    assert parsed(list(text)) == (content, calls)


def test_further_calls_than_are_wanted_are_dropped() -> None:
    text = f"{call('f', {'a': 1})}\n{call('g', {'b': 2})}"
    assert parsed(list(text), max_calls=1) == ("", [("f", '{"a": 1}')])


def test_arguments_stream_as_they_come() -> None:
    parser = ToolCallParser()
    assert parser.feed('well <tool_call>{"name": "weather", "argum') == [TextDelta("well")]
    assert parser.feed('ents": {') == [ToolCallDelta(0, "weather", "{")]
    assert parser.feed('"city"') == [ToolCallDelta(0, None, '"city"')]
    assert parser.feed(': "Lima"}}\n</tool') == [ToolCallDelta(0, None, ': "Lima"}')]
    assert parser.feed("_call>\n") == []
    assert parser.flush() == []
    assert parser.num_calls == 1


FRAGMENTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [BEGIN, END, "<", "<tool", "</tool_call", "{", "}", '"', "\\", " ", "\n", '{"name": ', '"arguments": ']
    ),
    st.builds(
        call,
        st.text(min_size=1, max_size=5),
        st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.lists(st.booleans(), max_size=2)),
        st.sampled_from(["", "\n", "  "]),
    ),
)
TEXTS = st.lists(FRAGMENTS, max_size=8).map("".join)


@given(TEXTS, st.data())
@settings(max_examples=300)
def test_where_the_text_is_cut_changes_nothing(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces) == parsed([text]) == parsed(list(text))


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=5), st.dictionaries(st.text(max_size=4), st.floats() | st.text())))
)
@settings(max_examples=300)
def test_every_call_is_found_whole(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text, found = parsed(list("\n".join(call(name, arguments) for name, arguments in calls)))
    assert text == ""
    assert found == [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]


@given(TEXTS, st.data())
@settings(max_examples=150)
def test_no_part_of_a_tag_is_given_out_that_may_become_one(text: str, data: st.DataObject) -> None:
    """Whatever follows: a tag that the rest of the text completes was not told as text."""
    cut = data.draw(st.integers(1, len(BEGIN) - 1))
    parser = ToolCallParser()
    told = [delta for delta in parser.feed(text.replace("<", "") + BEGIN[:cut]) if isinstance(delta, TextDelta)]
    assert not any("<" in delta.text for delta in told)
    assert parser.feed(BEGIN[cut:]) == []


def test_long_answers_cost_no_more_than_their_length() -> None:
    long = "x" * 500_000
    started = time.thread_time()
    for arguments in ({"a": long}, json.dumps({"a": long})):
        text, [(name, given)] = parsed([call("f", arguments)])
        assert (text, name, json.loads(given)) == ("", "f", {"a": long})
    spaces = [" \n  "] * 100_000
    assert parsed(spaces) == ("".join(spaces), [])
    assert parsed([*spaces, *call("f", {})]) == ("", [("f", "{}")])
    # it took more than twice as long when the time grew with the square
    assert time.thread_time() - started < 30
