"""Stop strings: the automaton against a search that sees the whole text at once."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.text.outputs.stop_strings import StopAutomaton, StopStringMatcher


def reference(stops: list[str], text: str, include: bool, suppressed: int = 0) -> tuple[str, str | None]:
    """First end wins, then the order of the list; ends within the first `suppressed` characters do not count."""
    for end in range(suppressed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = found[0]
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, lengths: list[int]) -> list[str]:
    pieces, at = [], 0
    for length in lengths:
        pieces.append(text[at : at + length])
        at += length
    return [*pieces, text[at:]]


LETTERS = st.sampled_from("ab🙂")
TEXT = st.text(LETTERS, max_size=40)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=5)
CUTS = st.lists(st.integers(0, 5), max_size=30)


@given(STOPS, TEXT, CUTS, st.booleans())
@example(["abcd", "bc"], "abcd", [1, 1, 1], False)
@example(["bc", "abc"], "xabcx", [2, 1], False)
@example(["abc", "bc"], "xabcx", [2, 1], False)
def test_any_cut_gives_what_the_whole_text_gives(
    stops: list[str], text: str, lengths: list[int], include: bool
) -> None:
    matcher = StopStringMatcher(stops, include)
    released = "".join([matcher.feed(piece) for piece in cut(text, lengths)]) + matcher.flush()
    assert (released, matcher.matched) == reference(stops, text, include)


@given(STOPS, TEXT, CUTS, st.booleans(), TEXT)
def test_a_match_may_begin_but_not_end_in_suppressed_text(
    stops: list[str], text: str, lengths: list[int], include: bool, head: str
) -> None:
    matcher = StopStringMatcher(stops, include)
    released = "".join([matcher.feed(piece, suppressed=True) for piece in cut(head, lengths)])
    released += "".join([matcher.feed(piece) for piece in cut(text, lengths)]) + matcher.flush()
    assert (released, matcher.matched) == reference(stops, head + text, include, suppressed=len(head))


@given(STOPS, TEXT, st.booleans())
def test_holds_back_no_more_than_could_begin_a_stop_string(stops: list[str], text: str, suppressed: bool) -> None:
    matcher = StopStringMatcher(stops)
    released = ""
    for end in range(1, len(text) + 1):
        released += matcher.feed(text[end - 1], suppressed=suppressed)
        if matcher.matched is not None:
            return
        beginnings = (stop[:length] for stop in stops for length in range(1, len(stop)))
        longest = max((len(part) for part in beginnings if text[:end].endswith(part)), default=0)
        assert end - len(released) == longest


def test_nothing_is_released_after_a_match():
    matcher = StopStringMatcher(["END"])
    assert matcher.feed("one EN") == "one "
    assert matcher.feed("D two") == ""
    assert matcher.matched == "END"
    assert (matcher.feed("three"), matcher.flush()) == ("", "")


def test_held_text_comes_with_the_flush_once():
    matcher = StopStringMatcher(["</answer>"])
    assert matcher.feed("42</ans") == "42"
    assert (matcher.flush(), matcher.flush()) == ("</ans", "")


def test_one_automaton_serves_many_matchers():
    automaton = StopAutomaton(("ab",))
    first, second = StopStringMatcher(automaton), StopStringMatcher(automaton)
    assert (first.feed("a"), second.feed("xb"), first.feed("b"), second.feed("ab")) == ("", "xb", "", "")
    assert (first.matched, second.matched) == ("ab", "ab")


def test_without_stop_strings_everything_passes():
    matcher = StopStringMatcher([""])
    assert matcher.feed("anything") == "anything"
    assert matcher.matched is None
