"""Reasoning in a model's text: separated from the answer, wherever the text is cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.parsers.deltas import ReasoningDelta
from pdserve.text.parsers.reasoning_parser import REASONING_TAGS, ReasoningParser, ReasoningTags, ReasoningTokenCounter

TAGS = REASONING_TAGS["deepseek_r1"]


def parsed(pieces: list[str], *, is_open: bool = False, tags: ReasoningTags = TAGS) -> tuple[str, str, bool]:
    """(reasoning, answer, whether there was any reasoning) of a text that comes in these pieces."""
    parser = ReasoningParser(tags, is_open=is_open)
    told = {ReasoningDelta: "", None: ""}
    for deltas in (*map(parser.feed, pieces), parser.flush()):
        for delta in deltas:
            assert delta.text
            told[ReasoningDelta if isinstance(delta, ReasoningDelta) else None] += delta.text
    return told[ReasoningDelta], told[None], parser.has_reasoning


CASES: list[tuple[str, bool, str, str, bool]] = [
    ("Hi", False, "", "Hi", False),
    ("<think>a b\n</think>\n\nHi ", False, "a b", "Hi ", True),
    (" \n<think>\na\n\nb</think>Hi", False, "a\n\nb", "Hi", True),
    ("a\n</think>\nHi", True, "a", "Hi", True),
    ("\n<think>a</think>Hi", True, "a", "Hi", True),
    ("</think>Hi", True, "", "Hi", True),
    ("<think></think>", False, "", "", True),
    ("a < b </thin", True, "a < b </thin", "", True),
    ("  ", True, "", "", True),
    ("<thi", False, "", "<thi", False),
    ("<thi", True, "<thi", "", True),
    ("  <b>Hi", False, "", "  <b>Hi", False),
    ("Hi <think>a</think>", False, "", "Hi <think>a</think>", False),
    ("a</think>Hi", False, "", "a</think>Hi", False),
    ("<think>a</think>b</think><think>c", False, "a", "b</think><think>c", True),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer", "found"), CASES)
def test_what_is_reasoning(text: str, is_open: bool, reasoning: str, answer: str, found: bool) -> None:
    assert parsed([text], is_open=is_open) == (reasoning, answer, found)
    assert parsed(list(text), is_open=is_open) == (reasoning, answer, found)


FRAGMENTS = st.text(max_size=6) | st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "<", "</", " ", "\n"])


@given(st.lists(FRAGMENTS, max_size=8).map("".join), st.booleans(), st.sampled_from(["qwen3", "mistral"]), st.data())
@settings(max_examples=200)
def test_where_the_text_is_cut_changes_nothing(text: str, is_open: bool, family: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    tags = REASONING_TAGS[family]
    whole = parsed([text], is_open=is_open, tags=tags)
    assert parsed(pieces, is_open=is_open, tags=tags) == whole == parsed(list(text), is_open=is_open, tags=tags)


@given(st.lists(st.binary(max_size=5), max_size=6), st.lists(st.binary(max_size=5), max_size=3))
def test_tokens_are_counted_up_to_the_one_that_completes_the_tag(before: list[bytes], after: list[bytes]) -> None:
    before = [piece.replace(b">", b"") for piece in before]
    pieces = [*before, b"x</th", b"ink", b">\n", *after]
    counter = ReasoningTokenCounter(TAGS)
    counter.add(pieces)
    one_by_one = ReasoningTokenCounter(TAGS)
    for piece in pieces:
        one_by_one.add([piece])
    assert counter.num_tokens == one_by_one.num_tokens == len(before) + 3
    assert counter.has_ended


@pytest.mark.parametrize("text", ["<" * 30_000, "</think" * 5_000, " " * 30_000], ids=["<", "tag", "space"])
def test_hostile_reasoning_costs_no_more_than_its_length(text: str) -> None:
    def seconds(size: int) -> float:
        started = time.thread_time()
        parser = ReasoningParser(TAGS, is_open=True)
        for start in range(0, size, 3):
            parser.feed(text[start : start + 3])
        parser.flush()
        return time.thread_time() - started

    # a cost that grew with the square would be nine times as much
    assert seconds(len(text)) < 6 * max(seconds(len(text) // 3), 0.02)
