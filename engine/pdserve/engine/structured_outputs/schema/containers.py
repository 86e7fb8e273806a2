"""Grammars for JSON arrays and objects, with limits on the number of entries and the length of white space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.structured_outputs.schema.ebnf import Rules, group, one_of

MAX_ENTRIES = 1024
"""Maximum number of items, and of properties that a schema does not name, if the schema sets no maximum."""


@dataclass(frozen=True)
class Layout:
    """Expressions for JSON's white space and separators; `gap` may be empty."""

    gap: str
    """White space around punctuation."""
    comma: str
    colon: str

    @classmethod
    def of(cls, whitespace_chars: int | None) -> Layout:
        """whitespace_chars: as in `grammar_of_schema`."""
        if whitespace_chars is None:
            return cls("", '", "', '": "')
        gap = f"[ \\n\\r\\t]{{0,{whitespace_chars}}}" if whitespace_chars else "[ \\n\\r\\t]*"
        return cls(gap, f'{gap} "," {gap}', f'{gap} ":" {gap}')


def array(
    rules: Rules, layout: Layout, first: Sequence[str], rest: str | None, least: int, most: int | None
) -> str | None:
    """An array of `least` to `most` items: `first`, in order, then any number of `rest`.

    None if there is none. Raises: TooLarge.
    """
    place = len(first)
    end = f'{layout.gap} "]"'
    ways = [end] if place >= least else []
    limit = max(MAX_ENTRIES, least) if most is None else most
    if rest is not None and limit > place:
        lead = f"{layout.comma if place else layout.gap} {rest}"
        more = f"({layout.comma} {rest}){{{max(least - place - 1, 0)},{limit - place - 1}}}"
        ways.append(f"{lead} {more} {end}" if limit - place > 1 else f"{lead} {end}")
    tail = rules.add(one_of(ways)) if ways and place <= limit else None
    for place in reversed(range(len(first))):
        ways = [end] if place >= least else []
        if tail is not None and place < limit:
            ways.append(f"{layout.comma if place else layout.gap} {first[place]} {tail}")
        tail = rules.add(one_of(ways)) if ways else None
    return None if tail is None else rules.add(f'"[" {tail}')


def object_of(
    rules: Rules,
    layout: Layout,
    named: Sequence[tuple[str, str, bool]],
    others: Sequence[tuple[str, str]],
    least: int,
    most: int | None,
) -> str | None:
    """An object with `least` to `most` properties: those that are named, in order, then others. None if there is none.

    named: (quoted name, value, whether it is required). others: (name, value). The names of others may repeat, so all of them
    together count as one property towards `least`. Raises: TooLarge.
    """
    end = f'{layout.gap} "}}"'
    other = group(f"{name} {layout.colon} {value}" for name, value in others) if others else None
    # the largest number of preceding properties that must be told apart
    highest = min(max(least, 1) if most is None else most, len(named))
    tails: list[str | None] = []
    for count in range(highest + 1):
        ways = [end] if count >= least else []
        room = MAX_ENTRIES if most is None else most - count
        if other is not None and room > 0 and least - count <= 1:
            more = f" ({layout.comma} {other}){{0,{room - 1}}}" if room > 1 else ""
            ways.append(f"{layout.comma if count else layout.gap} {other}{more} {end}")
        tails.append(rules.add(one_of(ways)) if ways else None)
    for name, value, is_required in reversed(named):
        before: list[str | None] = []
        for count, tail in enumerate(tails):
            following = tails[min(count + 1, highest)] if most is None or count < most else None
            ways = []
            if following is not None:
                ways.append(f"{layout.comma if count else layout.gap} {name} {layout.colon} {value} {following}")
            if tail is not None and not is_required:
                ways.append(tail)
            before.append(rules.add(one_of(ways)) if ways else None)
        tails = before
    return None if tails[0] is None else rules.add(f'"{{" {tails[0]}')
