"""New output of a chat's answer: `TextDelta`, `ReasoningDelta`, `ToolCallDelta`."""

from __future__ import annotations

from itertools import groupby

import msgspec


class TextDelta(msgspec.Struct, frozen=True):
    """Text outside calls and reasoning."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """A piece of the text between the tags of reasoning."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """New output of one call."""

    index: int
    """Index of the call in the answer, from 0."""
    name: str | None
    """Set in the call's first delta only."""
    arguments: str
    """A piece of the arguments' JSON."""


Delta = TextDelta | ReasoningDelta | ToolCallDelta


def joined(deltas: list[Delta]) -> list[Delta]:
    """Deltas of which adjacent ones of the same kind and call are one."""
    if len(deltas) < 2:
        return deltas
    return [_one(list(parts)) for _, parts in groupby(deltas, lambda each: (type(each), getattr(each, "index", None)))]


def _one(parts: list[Delta]) -> Delta:
    first = parts[0]
    if isinstance(first, ToolCallDelta):
        arguments = "".join(part.arguments for part in parts if isinstance(part, ToolCallDelta))
        return ToolCallDelta(first.index, first.name, arguments)
    return type(first)("".join(part.text for part in parts if not isinstance(part, ToolCallDelta)))


def tag_begun(text: str, tags: tuple[str, ...]) -> int:
    """Number of characters at the end of `text` that may be the beginning of one of `tags`; the most, if several fit."""
    most = min(len(text), max(map(len, tags), default=1) - 1)
    if not any(tag[0] in text[-most:] for tag in tags):
        return 0
    for size in range(most, 0, -1):
        tail = text[-size:]
        if any(len(tag) > size and tag.startswith(tail) for tag in tags):
            return size
    return 0
