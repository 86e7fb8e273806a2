"""Calls of tools in a model's text: found, streamed, and never mistaken, wherever the text is cut."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.parsers.deltas import TextDelta, ToolCallDelta
from pdserve.text.parsers.tool_call_parser import BEGIN, END, TOOL_FORMATS, ToolCallParser


def parsed(pieces: list[str], max_calls: int | None = None, form: str = "hermes") -> tuple[str, list[tuple[str, str]]]:
    """(text, calls with name and arguments) of a text that comes in these pieces."""
    parser = ToolCallParser(TOOL_FORMATS[form], max_calls)
    text, calls = "", list[list[str]]()
    for deltas in (*map(parser.feed, pieces), parser.flush()):
        for delta in deltas:
            if isinstance(delta, TextDelta):
                assert delta.text
                text += delta.text
                continue
            assert isinstance(delta, ToolCallDelta)
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append([delta.name, delta.arguments])
            else:
                assert delta.index == len(calls) - 1
                assert delta.arguments
                delta.arguments.encode()
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
    ("a < b, a <tool, <tool_call", "a < b, a <tool,", []),
    ("a <", "a <", []),
    (f"{BEGIN}{{'name': 1}}{END} x", "{'name': 1} x", []),
    (f'{BEGIN}{{"name": 7, "arguments": {{}}}}{END}', '{"name": 7, "arguments": {}}', []),
    (f"{BEGIN}{BEGIN}{json.dumps({'name': 'f'})}{END}", "", [("f", "{}")]),
    (f'{BEGIN}{{"arguments": {{"a": 2}}, "name": "f"}}{END}', "", [("f", '{"a": 2}')]),
    (f'{BEGIN}{{"name": "f", "arguments": "{{\\"a\\": 2}}"}}{END}', "", [("f", '{"a": 2}')]),
    (f'{BEGIN}{{"id": {{"x": []}}, "name": "f", "arguments": {{}}, "more": "}}"}}{END}', "", [("f", "{}")]),
    (
        f'{BEGIN}{{"name": "f", "arguments": {{"a": "\\"}}</tool_call>"}}}}{END}',
        "",
        [("f", '{"a": "\\"}</tool_call>"}')],
    ),
    (f'{BEGIN}{{"name": "f", "arguments": {{"a": 1', "", [("f", '{"a": 1')]),
    (f'{BEGIN}{{"name": "f", "argum', "", []),
    (f'{BEGIN}{{"name": "f"}} and so on', "and so on", [("f", "{}")]),
    (f'{BEGIN}{{"name": "f"}}{call("g", {})}', "", [("f", "{}"), ("g", "{}")]),
    (f"{BEGIN}{{}}{END}", "{}", []),
    (f'{BEGIN}{{"name": "f",}}{END}', '{"name": "f",}', []),
    ("  white space stays  ", "  white space stays  ", []),
    (f"a {BEGIN} b", "a  b", []),
    (f"a {END}{END} b", "a  b", []),
    (f"{BEGIN}\n{END}", "", []),
    (f'{BEGIN}{{"name": "f", "arguments": null}}{END}', "", [("f", "{}")]),
    (f'{BEGIN}{{"name": "f", "arguments": null, "parameters": {{"a": 1}}}}{END}', "", [("f", '{"a": 1}')]),
    (f'{BEGIN}{{"name": "f", "arguments": {{"a": 1}}, "parameters": null, "name": 5}}{END}', "", [("f", '{"a": 1}')]),
    (f'{BEGIN}{{"index": 0, "name": "f", "arguments": {{"a": 1}}, "strict":true}}{END}', "", [("f", '{"a": 1}')]),
    (f'{BEGIN}{{"name": "f", "arguments": ""}}{END}', "", [("f", "{}")]),
    (f'{BEGIN}{{"name": "f", "arguments": [1]}}{END}', "", [("f", "[1]")]),
    (f'{BEGIN}{{"name": "f", "arguments": -1.5e3}}{END}', "", [("f", "-1.5e3")]),
    (f'{BEGIN}{{"name": "f", "arguments": 01}}{END}', '{"name": "f", "arguments": 01}', []),
    (f'{BEGIN}{{"name": null, "arguments": {{}}}}{END}', '{"name": null, "arguments": {}}', []),
    (f'{BEGIN}{{"id": "\\ud800", "name": "f"}}{END}', "", [("f", "{}")]),
    (f'{BEGIN}{{"name": "\\ud800"}}{END}', '{"name": "\\ud800"}', []),
]

NO_ARGUMENTS = [("f", "{}"), ("g", "{}")]
F = '{"name": "f", "parameters": {"a": 1}}'
OTHERS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("llama3_json", F, "", [("f", '{"a": 1}')]),
    ("llama3_json", f"\n<|python_tag|>{F}", "", [("f", '{"a": 1}')]),
    ("llama3_json", f"{F}; {F}\n{F}", "", [("f", '{"a": 1}')] * 3),
    ("llama3_json", f"I call <|python_tag|>{F}", "I call", [("f", '{"a": 1}')]),
    ("llama3_json", f"Say {F}", f"Say {F}", []),
    ("llama3_json", '{"name": "Ann", "type": "person"}', '{"name": "Ann", "type": "person"}', []),
    ("llama3_json", " {see below} x", " {see below} x", []),
    ("llama3_json", "<|python_tag|>print(1)", "print(1)", []),
    ("llama3_json", '{"name": "f", "parameters": null}', "", [("f", "{}")]),
    ("llama3_json", '<|python_tag|>{"id": 7, "name": "f", "parameters": {}}<|python_end|> x', "x", [("f", "{}")]),
    ("llama3_json", "a<|python_end|>", "a", []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g"}]',
        "",
        [("f", '{"a": "]"}'), ("g", "{}")],
    ),
    ("mistral", 'Well. [TOOL_CALLS] [ {"arguments": {}, "name": "f"} ] ', "Well.", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g-2[ARGS]{"b": {}}', "", [("f", '{"a": 1}'), ("g-2", '{"b": {}}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]9rA4zz012[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS]what is this? {}", "what is this? {}", []),
    ("mistral", "[TOOL_CALLS]what is[ARGS] this? {}", "what is this? {}", []),
    ("mistral", f"[TOOL_CALLS]{'x' * 300}{{}}", f"{'x' * 300}{{}}", []),
    ("mistral", f"[TOOL_CALLS]{'x' * 254}[ARGS]{{}}", f"{'x' * 254}{{}}", []),
    ("mistral", "[TOOL_CALLS]f[ARGS] null[TOOL_CALLS]g[CALL_ID]a[ARGS]null", "", [("f", "{}"), ("g", "{}")]),
    (
        "mistral",
        '[TOOL_CALLS][{"id": 0, "name": "f", "arguments": null}, {"name": "g", "arguments": {}, "x": false}]',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f"a"{}', 'f"a"{}', []),
    ("mistral", "see [1], [TOOL_", "see [1],", []),
    ("pythonic", "[f(a=1, b='x')]", "", [("f", '{"a": 1, "b": "x"}')]),
    (
        "pythonic",
        '\n[ f() , g.h(a=[True, None, {"k": -1.5e3,},], )]\n',
        "",
        [("f", "{}"), ("g.h", '{"a": [true, null, {"k": -1.5e3}]}')],
    ),
    ("pythonic", "<|python_start|>[f(a=(1, 2))]<|python_end|>", "", [("f", '{"a": [1, 2]}')]),
    (
        "pythonic",
        r"""[f(a='it\'s "x"\n\x41\u00e9\U0001f600\ud800\d')]""",
        "",
        [("f", r'{"a": "it' + r"""'s \"x\"\nA\u00e9\ud83d\ude00\ud800\\d"}""")],
    ),
    ("pythonic", r"[f(a='\U00110000')] x", "0')] x", [("f", '{"a": "')]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[see](the note)", "[see](the note)", []),
    ("pythonic", "[f(x)]", "[f(x)]", []),
    ("pythonic", "I say [f(a=1)]", "I say [f(a=1)]", []),
    ("pythonic", "[f(a=1), f(x)]", ", f(x)]", [("f", '{"a": 1}')]),
    ("pythonic", "[f(a={'b': })] x", "})] x", [("f", '{"a": {"b"')]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), OTHERS)
def test_calls_of_other_families(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed([text], form=form) == (content, calls)
    assert parsed(list(text), form=form) == (content, calls)


@pytest.mark.parametrize(("text", "content", "calls"), PLAIN)
def test_what_is_a_call_and_what_is_text(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed([text]) == (content, calls)
    assert parsed(list(text)) == (content, calls)


def test_further_calls_than_are_wanted_are_dropped() -> None:
    text = f"{call('f', {'a': 1})}\n{call('g', {'b': 2})}"
    assert parsed(list(text), max_calls=1) == ("", [("f", '{"a": 1}')])


def test_arguments_stream_as_they_come() -> None:
    parser = ToolCallParser(TOOL_FORMATS["hermes"])
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
        [
            BEGIN,
            END,
            "<",
            "<tool",
            "</tool_call",
            "{",
            "}",
            '"',
            "\\",
            " ",
            "\n",
            '{"name": ',
            '"arguments": ',
            F,
            f"<|python_tag|>{F}",
            ";",
            ",",
            "[TOOL_CALLS]",
            "[TOOL",
            "[",
            "]",
            "[ARGS]",
            "f(",
            "a=",
            "b='",
            "'",
            ")",
            "[f(a=1)",
            "]<|python_end|>",
        ]
    ),
    st.builds(
        call,
        st.text(min_size=1, max_size=5),
        st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.lists(st.booleans(), max_size=2)),
        st.sampled_from(["", "\n", "  "]),
    ),
)
TEXTS = st.lists(FRAGMENTS, max_size=8).map("".join)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", TOOL_FORMATS)
@given(TEXTS, st.data())
@settings(max_examples=100)
def test_where_the_text_is_cut_changes_nothing(form: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces, form=form) == parsed([text], form=form) == parsed(list(text), form=form)


@pytest.mark.slow
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
    parser = ToolCallParser(TOOL_FORMATS["hermes"])
    told = [delta for delta in parser.feed(text.replace("<", "") + BEGIN[:cut]) if isinstance(delta, TextDelta)]
    assert not any("<" in delta.text for delta in told)
    assert parser.feed(BEGIN[cut:]) == []


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), JSON_VALUES, max_size=3))
@settings(max_examples=150)
def test_arguments_in_python_mean_the_same_in_json(arguments: dict[str, Any]) -> None:
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    text, [(name, given)] = parsed([f"[f({written})]"], form="pythonic")
    assert (text, name) == ("", "f")
    assert json.loads(given) == arguments


HOSTILE = [
    "<",
    "[",
    "{",
    BEGIN,
    "[TOOL_CALLS]",
    "<|python_tag|>",
    f"{BEGIN}[TOOL_CALLS]<|python_tag|>[f(a=[",
    f'{BEGIN}{{"name": "f", "arguments": {{"a":[[',
    f"a{BEGIN}{{}}{END}",
    f'a{BEGIN}{{"name": "f"}}{END}',
    '[TOOL_CALLS]f{"a": "',
    "[f(a='\\",
    "[TOOL_CALLS]f ",
    f'{BEGIN}{{"id": "x',
    "\n[f(",
    "[f(),",
]


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("piece_chars", [3, 1 << 20])
@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_hostile_answers_cost_no_more_than_their_length(form: str, piece_chars: int) -> None:
    """Each text with its last character again and again in small pieces, and itself again and again in one piece."""

    def seconds(text: str) -> float:
        started = time.thread_time()
        parser = ToolCallParser(TOOL_FORMATS[form])
        for start in range(0, len(text), piece_chars):
            parser.feed(text[start : start + piece_chars])
        parser.flush()
        return time.thread_time() - started

    for text in HOSTILE:
        repeated = text + text[-1] * 40_000 if piece_chars < 1000 else text * (300_000 // len(text))
        # a cost that grew with the square would be nine times as much
        third = max(seconds(repeated[: len(repeated) // 3]), 0.02)
        # several times, since other work may disturb one
        assert any(seconds(repeated) < 6 * third for _ in range(3)), text


@pytest.mark.slow
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
