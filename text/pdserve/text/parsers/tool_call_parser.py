"""`ToolCallParser`: finds calls of tools in a model's streamed text, in one of the forms of `TOOL_FORMATS`.

Text that is not a call remains text, between tags as well. The tags themselves are never text, wherever the answer ends, and
neither is the beginning of a call after a tag that the answer's end cuts off.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pdserve.text.parsers.deltas import Delta, TextDelta, ToolCallDelta, joined, tag_begun
from pdserve.text.parsers.json_call import JsonCall
from pdserve.text.parsers.named_call import NamedCall
from pdserve.text.parsers.python_call import PythonCall

BEGIN = "<tool_call>"
END = "</tool_call>"


class ToolCallReader(Protocol):
    """Reads one call character by character, and gives its arguments' JSON as they arrive."""

    @property
    def name(self) -> str | None: ...
    @property
    def failed(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    @property
    def has_begun(self) -> bool: ...
    def take_arguments(self) -> str: ...
    def read(self, text: str) -> int: ...


@dataclass(frozen=True)
class ForcedCalls:
    """Texts around forced calls, which a grammar writes."""

    begin: str
    """Before a call's arguments, with `%s` for the name."""
    end: str
    """After them."""
    separator: str
    """Between calls."""
    opener: str = ""
    """Before the first call; it begins calls at the start of the answer."""
    closer: str = ""
    """After the last one."""


HERMES_CALLS = ForcedCalls(f'{BEGIN}\n{{"name": "%s", "arguments": ', f"}}\n{END}", "\n")


@dataclass(frozen=True)
class ToolFormat:
    """The form in which a family of models writes calls."""

    reader: Callable[[], ToolCallReader]
    tags: tuple[str, ...]
    """Texts of which each begins a call, anywhere in the answer."""
    closers: tuple[str, ...] = ()
    """Texts after a call that belong to it, longest first."""
    separators: tuple[str, ...] = ()
    """Texts after a call that begin the next one."""
    other_tags: tuple[str, ...] = ()
    """Further texts that are never part of the answer's."""
    opener: str = ""
    """A character that begins a call at the start of the answer, and after a call; it is part of the call."""
    markers: tuple[str, ...] = ()
    """Texts without which calls cannot be found; they must reach the parser even where they are special tokens."""
    forced: ForcedCalls | None = None
    """None: no grammar can write these calls."""


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        JsonCall,
        (BEGIN,),
        (END,),
        other_tags=(END,),
        markers=(BEGIN, END),
        forced=HERMES_CALLS,
    ),
    "llama3_json": ToolFormat(
        partial(JsonCall, needs_arguments=True),
        ("<|python_tag|>", "<|python_start|>"),
        ("<|python_end|>", ";"),
        other_tags=("<|python_end|>",),
        opener="{",
        forced=ForcedCalls('{"name": "%s", "parameters": ', "}", "; "),
    ),
    "mistral": ToolFormat(
        NamedCall,
        ("[TOOL_CALLS]",),
        ("]",),
        (",",),
        other_tags=("[CALL_ID]", "[ARGS]"),
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        # without the tag, a special token, which no grammar has
        forced=ForcedCalls('{"name": "%s", "arguments": ', "}", ", ", "[", "]"),
    ),
    "pythonic": ToolFormat(
        PythonCall,
        ("<|python_start|>",),
        ("]<|python_end|>", "]"),
        (",",),
        other_tags=("<|python_end|>",),
        opener="[",
    ),
}
"""Forms of calls by vLLM's names."""


_PART_CHARS = 1024
"""Characters that are parsed at once: the rest of a part is copied with each call in it."""


class _State(enum.Enum):
    TEXT = enum.auto()
    CALL = enum.auto()
    AFTER_CALL = enum.auto()
    """The call is complete; what closes or separates it, or text in its place, is next."""


class ToolCallParser:
    """Parses the text of one answer; the joined deltas do not depend on how the text is cut into pieces.

    Text that may be the beginning of a tag is held back, and so are a call before its arguments, and white space around calls: the
    answer at most.
    """

    def __init__(self, tool_format: ToolFormat, max_calls: int | None = None, *, is_forced: bool = False) -> None:
        """max_calls: further calls are dropped. is_forced: the answer is nothing but calls, which a grammar writes."""
        self._format = tool_format
        self._max_calls = max_calls
        self._is_forced = is_forced
        self._tags = (*tool_format.tags, *tool_format.other_tags)
        self._has_met_tag = False
        self._is_tagged = False
        """True if the call that is read follows a tag or another call, and so is one."""
        self._state = _State.TEXT
        self._may_open = bool(tool_format.opener)
        """True if nothing but white space came since the start or the last call."""
        self._held: list[str] = []
        """White space that may precede a call; then the text of a call that has not begun, without its tag. A list, because a
        string would be copied with each piece."""
        self._begun = ""
        """Text at the end that may be the beginning of a tag, or of what follows a call."""
        self._call: ToolCallReader = tool_format.reader()
        self._has_told_text = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Delta]:
        """New output from the next piece of text."""
        deltas: list[Delta] = []
        for start in range(0, len(text), _PART_CHARS):
            part = text[start : start + _PART_CHARS]
            while part:
                match self._state:
                    case _State.TEXT:
                        part = self._in_text(part, deltas)
                    case _State.CALL:
                        part = self._in_call(part, deltas)
                    case _State.AFTER_CALL:
                        part = self._after_call(part)
        return self._told(deltas)

    def flush(self, *, is_cut: bool = False) -> list[Delta]:
        """End the text: held-back text is returned as text, unless it belongs to a call, or is the beginning of a tag.

        is_cut: the answer would have gone on. Without it, one character that may begin a tag is text.
        """
        begun, self._begun = self._begun, ""
        if self._state is _State.TEXT and (is_cut or len(begun) > 1) and tag_begun(begun, self._tags):
            begun, self._has_met_tag = "", True
        held, self._held = "".join(self._held) + begun, []
        lost = self._state is _State.AFTER_CALL or (
            self._state is _State.CALL and (self._is_tagged or self._call.has_begun)
        )
        lost |= (self.num_calls > 0 or self._has_met_tag) and held.isspace()
        return [] if lost or not held else self._told([TextDelta(held)])

    def _told(self, deltas: list[Delta]) -> list[Delta]:
        if self._is_forced:
            deltas = [delta for delta in deltas if not isinstance(delta, TextDelta)]
        return joined(deltas)

    def _in_text(self, text: str, deltas: list[Delta]) -> str:
        """Process text outside calls; returns the rest once a call begins or a tag has been dropped, empty before."""
        text, self._begun = self._begun + text, ""
        if self._may_open:
            rest = text.lstrip()
            if rest[:1] == self._format.opener:
                self._hold(text[: len(text) - len(rest)])
                self._expect_call(is_tagged=False)
                return rest
        places = {place: tag for tag in self._tags if (place := text.find(tag)) >= 0}
        if places:
            place = min(places)
            tag = places[place]
            self._emit(text[:place], deltas)
            self._has_met_tag = True
            if tag in self._format.tags:
                self._expect_call(is_tagged=True)
            return text[place + len(tag) :]
        end = len(text) - tag_begun(text, self._tags)
        self._begun = text[end:]
        self._emit(text[:end], deltas)
        return ""

    def _expect_call(self, *, is_tagged: bool) -> None:
        self._state, self._may_open, self._call = _State.CALL, False, self._format.reader()
        self._is_tagged = is_tagged

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)

    def _emit(self, text: str, deltas: list[Delta]) -> None:
        """Give out text but for the white space at its end, which is held back."""
        body = text.rstrip()
        if body:
            given = "".join(self._held) + body
            self._held = []
            if self.num_calls and not self._has_told_text:
                given = given.lstrip()
            self._has_told_text, self._may_open = True, False
            deltas.append(TextDelta(given))
        self._hold(text[len(body) :])

    def _in_call(self, text: str, deltas: list[Delta]) -> str:
        began = self._call.has_begun
        num_read = self._call.read(text)
        read, rest = text[:num_read], text[num_read:]
        if self._call.has_begun:
            name = None if began else self._call.name
            arguments = self._call.take_arguments()
            if not began:
                self.num_calls += 1
                self._held = []
            if (name is not None or arguments) and not self._is_surplus:
                deltas.append(ToolCallDelta(self.num_calls - 1, name, arguments))
        else:
            self._hold(read)
        if self._call.failed:
            self._state = _State.TEXT
            if not self._call.has_begun:
                held, self._held = "".join(self._held), []
                for tag in self._tags:
                    held = held.replace(tag, "")
                # not with the rest as a text in which there may be calls: each call within a call would be read again
                end = len(held) - tag_begun(held, self._tags)
                self._begun = held[end:]
                self._emit(held[:end], deltas)
        elif self._call.complete:
            self._state = _State.AFTER_CALL
        return rest

    @property
    def is_in_call(self) -> bool:
        """True if a call that counts has begun and is not complete."""
        return self._state is _State.CALL and self._call.has_begun and not self._is_surplus

    @property
    def _is_surplus(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _after_call(self, text: str) -> str:
        text, self._begun = (self._begun + text).lstrip(), ""
        for expected in (*self._format.closers, *self._format.separators):
            if text.startswith(expected):
                if expected in self._format.separators:
                    self._expect_call(is_tagged=True)
                    self._hold(expected)
                else:
                    self._state, self._may_open = _State.TEXT, bool(self._format.opener)
                return text[len(expected) :]
            if expected.startswith(text):
                self._begun = text
                return ""
        self._state, self._may_open = _State.TEXT, bool(self._format.opener)
        return text
