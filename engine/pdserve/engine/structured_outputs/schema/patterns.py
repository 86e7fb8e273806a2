"""Regular expressions within strings of JSON, as grammars.

xgrammar's own form of them (`Regex(...)` in 0.2.8) takes `(ab+)?` for `a?b*`, and cannot write a character that JSON escapes.
"""

from __future__ import annotations

import json
import re
import warnings
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as expressions  # type: ignore[attr-defined]
from typing import Any

from pdserve.engine.structured_outputs.schema.ebnf import group, literal

Ranges = list[tuple[int, int]]
"""Code points, first and last of each range."""
_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
_LINE_ENDS = "\n\r\u2028\u2029"
_ESCAPED = '"\\\b\f\n\r\t'
"""Characters that JSON writes with a short escape. Other control characters are left out."""
_CLASSES = {
    kinds.CATEGORY_DIGIT: "0-9",
    kinds.CATEGORY_WORD: "0-9A-Z__a-z",
    kinds.CATEGORY_SPACE: "\t-\n\f-\r  ",
}
"""Readers differ about characters beyond ASCII, so a class and its opposite have only ASCII."""
_OPPOSITES = {
    kinds.CATEGORY_NOT_DIGIT: kinds.CATEGORY_DIGIT,
    kinds.CATEGORY_NOT_WORD: kinds.CATEGORY_WORD,
    kinds.CATEGORY_NOT_SPACE: kinds.CATEGORY_SPACE,
}


class NotSupported(Exception):
    """An expression that cannot be enforced. Its argument says why."""


class Pattern:
    """A regular expression that holds for a whole string."""

    def __init__(self, pattern: str) -> None:
        """Raises: NotSupported."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = expressions.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise NotSupported(f"is no regular expression ({error})") from error
        if parsed.state.flags & ~re.UNICODE:
            raise NotSupported("with flags is not supported")
        nodes = list(parsed)
        self._is_anchored = bool(nodes) and nodes[0] == (kinds.AT, kinds.AT_BEGINNING)
        nodes = nodes[self._is_anchored :]
        self._nodes = nodes[:-1] if nodes and nodes[-1] == (kinds.AT, kinds.AT_END) else nodes
        self.expression = _sequence(self._nodes) or '""'
        """The text between the quotation marks."""

    @property
    def start(self) -> str:
        """The text that every string begins with in which the expression is found; "" if there is none."""
        text = ""
        for kind, value in self._nodes if self._is_anchored else ():
            if kind != kinds.LITERAL:
                break
            text += chr(value)
        return text


def _sequence(nodes: Any) -> str:
    return " ".join(part for part in map(_node, nodes) if part)


def _node(node: tuple[Any, Any]) -> str:
    kind, value = node
    if kind == kinds.LITERAL:
        return _any_char([(value, value)])
    if kind == kinds.NOT_LITERAL:
        return _any_char(_without([(0, _LAST)], [(value, value)]))
    if kind == kinds.ANY:
        return _any_char(_without([(0, _LAST)], [(ord(char), ord(char)) for char in _LINE_ENDS]))
    if kind == kinds.IN:
        return _any_char(_ranges(value))
    if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT):
        least, most, inner = value
        repeated = _sequence(inner)
        if not repeated or most == 0:
            return ""
        return f"({repeated}){{{least},{'' if most == kinds.MAXREPEAT else most}}}"
    if kind == kinds.SUBPATTERN:
        _, added, removed, inner = value
        if added or removed:
            raise NotSupported("with flags is not supported")
        return f"({_sequence(inner) or EMPTY})"
    if kind == kinds.BRANCH:
        return group(_sequence(inner) or EMPTY for inner in value[1])
    if kind in (kinds.ASSERT, kinds.ASSERT_NOT):
        raise NotSupported("with look-around is not supported")
    if kind == kinds.AT:
        raise NotSupported("with an anchor or a boundary within is not supported")
    raise NotSupported("with a reference, a condition or an atomic group is not supported")


EMPTY = '""'


def _ranges(items: list[tuple[Any, Any]]) -> Ranges:
    is_negated = items[0][0] == kinds.NEGATE
    ranges: Ranges = []
    whole: Ranges = [(0, _LAST)]
    for kind, value in items[is_negated:]:
        if kind == kinds.LITERAL:
            ranges.append((value, value))
        elif kind == kinds.RANGE:
            ranges.append(value)
        else:
            of_class = _OPPOSITES.get(value, value)
            text = _CLASSES[of_class]
            members = [(ord(first), ord(last)) for first, last in re.findall("(.)-?(.)", text, re.DOTALL)]
            ranges += members if value == of_class else _without([(0, 0x7F)], members)
            whole = [(0, 0x7F)]
    return _without(whole, ranges) if is_negated else ranges


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    for first, last in others:
        parts = [((begin, min(end, first - 1)), (max(begin, last + 1), end)) for begin, end in ranges]
        ranges = [part for pair in parts for part in pair if part[0] <= part[1]]
    return ranges


def _any_char(ranges: Ranges) -> str:
    """An expression for one of these characters, as JSON writes it. Raises: NotSupported if it writes none."""
    short = [char for char in _ESCAPED if any(first <= ord(char) <= last for first, last in ranges)]
    plain = _without(ranges, [(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\")), _SURROGATES])
    ways = [literal(json.dumps(char)[1:-1]) for char in short]
    if len(plain) == 1 and plain[0][0] == plain[0][1]:
        ways.insert(0, literal(chr(plain[0][0])))
    elif plain:
        ways.insert(0, f"[{''.join(f'{_in_class(first)}-{_in_class(last)}' for first, last in plain)}]")
    if not ways:
        raise NotSupported("with a control character is not supported")
    return group(ways)


def _in_class(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\U{code:08x}"
