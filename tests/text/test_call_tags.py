"""Calls with any values in their object, and tags that are never text, wherever an answer is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.parsers.deltas import TextDelta, ToolCallDelta
from pdserve.text.parsers.tool_call_parser import HERMES_CALLS, TOOL_FORMATS, ToolCallParser
from tests.text.test_tool_calls import TEXTS, parsed

TAGS = {name: (*form.tags, *form.other_tags) for name, form in TOOL_FORMATS.items()}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
OTHER_KEYS = st.dictionaries(
    st.text(max_size=4).filter(lambda key: key not in ("name", "arguments", "parameters")),
    SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=2), SCALARS, max_size=2),
    max_size=2,
)
WRITTEN = {
    "hermes": ("<tool_call>\n%s\n</tool_call>", "arguments"),
    "llama3_json": ("<|python_tag|>%s<|python_end|>", "parameters"),
    "mistral": ("[TOOL_CALLS] [%s]", "arguments"),
}
"""Form -> the text around an object, and the key of its arguments."""


@pytest.mark.few(1)
@pytest.mark.parametrize("form", WRITTEN)
@given(
    OTHER_KEYS,
    OTHER_KEYS,
    st.none() | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2),
    st.sampled_from(["", "Well. ", "a\n"]),
    st.sampled_from(["", " So.", "\n"]),
)
@settings(max_examples=15, deadline=None)
def test_any_object_with_a_name_is_a_call_wherever_it_is_cut(
    form: str, first: dict[str, Any], last: dict[str, Any], arguments: dict[str, Any] | None, before: str, after: str
) -> None:
    around, key = WRITTEN[form]
    written = json.dumps({**first, "name": "f", key: arguments, **last})
    text = before + around % written + after
    expected = "{}" if arguments is None else json.dumps(arguments)
    content, calls = parsed([text], form=form)
    assert (content.split(), calls) == ((before + after).split(), [("f", expected)])
    for cut in range(len(text)):
        content, calls = parsed([text[:cut]], form=form)
        told, whole = "".join(content.split()), "".join((before + after).split())
        # one character may begin a tag or not
        assert whole.startswith(told) or (whole.startswith(told[:-1]) and told[-1] == TAGS[form][0][0])
        assert len(calls) <= 1
        assert all(expected.startswith(given) and name == "f" for name, given in calls)
        if cut % 7 == 0:
            assert parsed(list(text[:cut]), form=form) == (content, calls)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", TOOL_FORMATS)
@given(TEXTS)
@settings(max_examples=80, deadline=None)
def test_no_tag_is_text_whatever_is_around_it(form: str, text: str) -> None:
    told, _ = parsed([text], form=form)
    # two parts of a tag around another one are no tag that a model writes
    without = text
    for tag in TAGS[form]:
        without = without.replace(tag, "\0")
    if not any(tag in without.replace("\0", "") for tag in TAGS[form]):
        assert not any(tag in told for tag in TAGS[form])


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_the_beginning_of_a_tag_at_the_end_is_no_text(form: str) -> None:
    for tag in TAGS[form]:
        for cut in range(2, len(tag) + 1):
            assert parsed(["Well. " + tag[:cut]], form=form) == ("Well.", [])
            assert parsed([tag[:cut]], form=form) == ("", [])
        parser = ToolCallParser(TOOL_FORMATS[form])
        assert parser.feed(f"Well. {tag[0]}") == [TextDelta("Well.")]
        assert parser.flush(is_cut=True) == []


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_forced_call_has_no_text_wherever_it_is_cut(form: str) -> None:
    forced = TOOL_FORMATS[form].forced
    if forced is None:
        form, forced = "hermes", HERMES_CALLS
    opener = forced.opener or TOOL_FORMATS[form].opener
    begin = forced.opener + forced.begin % "get"
    text = begin + '{"a": 1}' + forced.end + forced.separator + forced.begin % "get" + "{}" + forced.end + forced.closer
    for cut in range(len(text) + 1):
        for pieces in ([text[:cut]], list(text[:cut])):
            parser = ToolCallParser(replace(TOOL_FORMATS[form], opener=opener), is_forced=True)
            deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.flush(is_cut=True)
            assert all(isinstance(delta, ToolCallDelta) for delta in deltas)
            assert bool(deltas) == (cut > len(begin))
            assert parser.num_calls == (cut > len(begin)) + (cut > text.rindex("{}"))
