"""`ToolCallParser`: finds tool calls in a model's streamed text.

The format is that of Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of times, with text
around it. Text between the tags that is not a call remains text.
"""

from __future__ import annotations

import enum
import json

import msgspec

BEGIN = "<tool_call>"
END = "</tool_call>"


class ToolCallDelta(msgspec.Struct, frozen=True):
    """New output of one call."""

    index: int
    """Index of the call in the answer, from 0."""
    name: str | None
    """Set in the call's first delta only."""
    arguments: str
    """A piece of the arguments' JSON."""


class TextDelta(msgspec.Struct, frozen=True):
    """Text outside calls."""

    text: str


Delta = TextDelta | ToolCallDelta


class _State(enum.Enum):
    TEXT = enum.auto()
    CALL = enum.auto()
    AFTER_OBJECT = enum.auto()
    """The call is complete; its closing tag, or text in its place, is next."""


class ToolCallParser:
    """Parses the text of one answer; the joined deltas do not depend on how the text is cut into pieces.

    Text that may be the beginning of a tag is held back, and so is white space before, between and after calls.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        """max_calls: further calls are dropped."""
        self._max_calls = max_calls
        self._state = _State.TEXT
        self._held = ""
        """Text that is held back: a possible beginning of a tag, white space before a tag, or a call so far."""
        self._call = _CallScanner()
        self._has_told_text = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Delta]:
        """New output from the next piece of text."""
        deltas: list[Delta] = []
        while text:
            match self._state:
                case _State.TEXT:
                    text = self._in_text(text, deltas)
                case _State.CALL:
                    text = self._in_call(text, deltas)
                case _State.AFTER_OBJECT:
                    text = self._after_object(text)
        return _joined(deltas)

    def flush(self) -> list[Delta]:
        """End the text: held-back text is returned as text, unless it belongs to a call that has begun."""
        held, self._held = self._held, ""
        lost = self._state is _State.AFTER_OBJECT or (self._state is _State.CALL and self._call.has_begun)
        lost |= self.num_calls > 0 and held.isspace()
        return [] if lost or not held else [TextDelta(held)]

    def _in_text(self, text: str, deltas: list[Delta]) -> str:
        """Process text outside calls; returns the text after a tag, empty if there is no tag."""
        if self._held[-1:].isspace() and text.isspace():
            # a run of white space, which is not scanned again with each piece of it
            self._held += text
            return ""
        text, self._held = self._held + text, ""
        before, tag, after = text.partition(BEGIN)
        if not tag:
            end = len(text) - _tag_begun(text, BEGIN)
            end = len(text[:end].rstrip())
            before, self._held = text[:end], text[end:]
        else:
            before, self._state, self._held, self._call = before.rstrip(), _State.CALL, BEGIN, _CallScanner()
        if self.num_calls and not self._has_told_text:
            before = before.lstrip()
        if before:
            self._tell(before, deltas)
        return after

    def _tell(self, text: str, deltas: list[Delta]) -> None:
        self._has_told_text = True
        deltas.append(TextDelta(text))

    def _in_call(self, text: str, deltas: list[Delta]) -> str:
        began = self._call.has_begun
        num_read = self._call.read(text)
        read, rest = text[:num_read], text[num_read:]
        if self._call.has_begun:
            name = None if began else self._call.name
            arguments = self._call.take_arguments()
            if not began:
                self.num_calls += 1
                self._held = ""
            if (name is not None or arguments) and not self._is_surplus:
                deltas.append(ToolCallDelta(self.num_calls - 1, name, arguments))
        else:
            self._held += read
        if self._call.failed:
            self._state = _State.TEXT
            if not self._call.has_begun:
                self._tell(self._held, deltas)
            self._held = ""
        elif self._call.complete:
            self._state = _State.AFTER_OBJECT
            self._held = ""
        return rest

    @property
    def _is_surplus(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _after_object(self, text: str) -> str:
        text, self._held = (self._held + text).lstrip(), ""
        if text.startswith(END):
            self._state = _State.TEXT
            return text[len(END) :]
        if END.startswith(text):
            self._held = text
            return ""
        self._state = _State.TEXT
        return text


def _tag_begun(text: str, tag: str) -> int:
    """Number of characters at the end of `text` that may be the beginning of `tag`."""
    start = text.rfind("<", max(0, len(text) - len(tag) + 1))
    return len(text) - start if start >= 0 and tag.startswith(text[start:]) else 0


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Joins adjacent deltas of the same kind and call."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            joined[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ToolCallDelta) and isinstance(last, ToolCallDelta) and delta.index == last.index:
            joined[-1] = ToolCallDelta(last.index, last.name, last.arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined


class _Expect(enum.Enum):
    """The token expected next at the top level of a call's object."""

    OBJECT = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class _CallScanner:
    """Reads one call's object character by character, and returns the arguments as they arrive."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.failed = False
        """True if the object is not a call; its text is then text, unless the call has begun."""
        self.complete = False
        self._expect = _Expect.OBJECT
        self._may_end = False
        """True if `}` is allowed instead of a key, as in an empty object."""
        self._key = ""
        self._value: list[str] = []
        """Characters of the key or string that is being read, or the first character of any other value. A list, because a string
        would be copied with each character."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_key = False
        self._arguments: list[str] | None = None
        """Pieces that have not been taken; None before the arguments begin."""

    @property
    def has_begun(self) -> bool:
        """True if the name is known, and the arguments have begun or the call has none."""
        return self.name is not None and (self._arguments is not None)

    def take_arguments(self) -> str:
        """The arguments' text since the last call."""
        taken, self._arguments = self._arguments or [], []
        return "".join(taken)

    def read(self, text: str) -> int:
        """Read text; returns the number of characters read, which is smaller if the object is complete or has failed."""
        for place, char in enumerate(text):
            if self._in_string or self._depth:
                self._in_value(char)
            elif not self._between(char):
                self.failed = True
            if self.failed:
                return place
            if self.complete:
                return place + 1
        return len(text)

    def _between(self, char: str) -> bool:
        """Read a character outside keys and values; returns True if it is allowed there."""
        if char in " \t\r\n":
            return True
        match self._expect, char:
            case _Expect.OBJECT, "{":
                self._expect, self._may_end = _Expect.KEY, True
            case _Expect.KEY, '"':
                self._is_key = True
                self._begin(char)
            case _Expect.COLON, ":":
                self._expect = _Expect.VALUE
            case _Expect.VALUE, '"' | "{" | "[":
                self._begin(char)
                return not self.failed
            case _Expect.VALUE, _:
                return False
            case _Expect.COMMA, ",":
                self._expect, self._may_end = _Expect.KEY, False
            case _Expect.COMMA, "}":
                return self._end()
            case _Expect.KEY, "}" if self._may_end:
                return self._end()
            case _:
                return False
        return True

    def _begin(self, char: str) -> None:
        """Begin a key or value with its first character."""
        self._value = [char]
        self._in_string, self._depth = char == '"', int(char != '"')
        if not self._is_key:
            of_arguments = self._key == "arguments"
            self.failed = (self._key == "name") != (char == '"') if self._key == "name" else False
            self.failed |= of_arguments and (char == "[" or self._arguments is not None)
            if of_arguments and char == "{" and not self.failed:
                self._arguments = [char]

    def _in_value(self, char: str) -> None:
        if self._value[0] == '"':
            self._value.append(char)
        elif self._key == "arguments" and self._arguments is not None:
            self._arguments.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if not (self._in_string or self._depth):
            self._finish()

    def _finish(self) -> None:
        """Complete the current key or value."""
        value, self._value = "".join(self._value), []
        if self._is_key or value[0] == '"':
            try:
                value = json.loads(value)
            except ValueError:
                self.failed = True
                return
        if self._is_key:
            self._key, self._is_key, self._expect = value, False, _Expect.COLON
            return
        self._expect = _Expect.COMMA
        if self._key == "name":
            self.failed = self.name is not None or not value
            self.name = self.name or value
        elif self._key == "arguments" and self._arguments is None:
            self._arguments = [value]  # the model wrote the arguments as a string that contains JSON

    def _end(self) -> bool:
        if self.name is None:
            return False
        if self._arguments is None:
            self._arguments = ["{}"]
        self.complete = True
        return True
