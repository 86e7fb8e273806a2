"""`JsonCall`: reads one call of a tool that is written as a JSON object, `{"name": "f", "arguments": {...}}`."""

from __future__ import annotations

import enum
import json
import re

ARGUMENTS = ("arguments", "parameters")
"""Keys of a call's arguments, which differ between families; the first that has a value other than null counts."""
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_IN_WORD = re.compile(r"[\w.+-]*")
_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null|NaN|-?Infinity")
"""A value without marks around it; Python's JSON writes the last two."""


class _Expect(enum.Enum):
    """The token expected next at the top level of a call's object."""

    OBJECT = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class JsonCall:
    """Reads one call's object, and returns the arguments as they arrive.

    Any object with a name is a call, whatever its other values are. Without arguments, and with null or an empty string in their
    place, it has `{}`.
    """

    def __init__(self, *, needs_arguments: bool = False) -> None:
        """needs_arguments: an object without a key for arguments is not a call."""
        self._needs_arguments = needs_arguments
        self.name: str | None = None
        self.failed = False
        """True if the object is not a call; its text is then text, unless the call has begun."""
        self.complete = False
        self._expect = _Expect.OBJECT
        self._may_end = False
        """True if `}` is allowed instead of a key, as in an empty object."""
        self._key = ""
        self._value: list[str] = []
        """Pieces of the key, string or word that is being read, or the first character of any other value. A list, because a string
        would be copied with each piece."""
        self._depth = 0
        self._is_word = False
        """True within a number, true, false or null."""
        self._gives = False
        """True while the value that is read gives the arguments."""
        self._has_arguments = False
        """A key for arguments has been read."""
        self._in_string = False
        self._escaped = False
        self._is_key = False
        self._is_bare = False
        """True if the text is only the arguments, and the call ends with it."""
        self._arguments: list[str] | None = None
        """Pieces that have not been taken; None before the arguments begin."""

    @classmethod
    def of_arguments(cls, name: str) -> JsonCall:
        """A reader of the arguments of a call whose name is known; the text begins with their brace."""
        call = cls()
        call.name, call._key, call._expect, call._is_bare = name, ARGUMENTS[0], _Expect.VALUE, True
        return call

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
        end = 0
        while end < len(text) and not self.complete:
            if self._is_word:
                end = self._in_word(text, end)
                if self.failed:
                    return end
            elif self._in_string or self._depth:
                end = self._in_value(text, end)
            else:
                self.failed = not self._between(text[end])
                end += 1
            if self.failed:
                return end - 1
        return end

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
            case _Expect.VALUE, _ if char == "-" or char.isalnum():
                self._value, self._is_word = [char], True
                # a name is a string
                return self._key != "name" or self.name is not None
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
        if self._is_key:
            return
        self.failed = self._key == "name" and char != '"' and self.name is None
        if self._key in ARGUMENTS and self._arguments is None and char != '"':
            self._arguments, self._gives = [char], True

    def _in_word(self, text: str, start: int) -> int:
        """Read a number, true, false or null up to its end; returns where that is."""
        found = _IN_WORD.match(text, start)
        end = start if found is None else found.end()
        self._value.append(text[start:end])
        if end < len(text):
            self._is_word = False
            self._finish()
        return end

    def _in_value(self, text: str, start: int) -> int:
        """Read the value up to its next mark; returns where that ends, which is the end of the text if there is none."""
        found = (_IN_STRING if self._in_string else _OUTSIDE_STRINGS).search(text, start)
        end = start + 1 if self._escaped else found.end() if found else len(text)
        if self._value[0] == '"':
            self._value.append(text[start:end])
        elif self._gives and self._arguments is not None:
            self._arguments.append(text[start:end])
        if self._escaped:
            self._escaped = False
            return end
        match found[0] if found else "":
            case '"':
                self._in_string = not self._in_string
            case "\\":
                self._escaped = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
        if not (self._in_string or self._depth):
            self._finish()
        return end

    def _finish(self) -> None:
        """Complete the current key or value."""
        value, self._value, self._gives = "".join(self._value), [], False
        if value[0] == '"':
            self._finish_string(value)
            return
        self._expect, self.complete = _Expect.COMMA, self._is_bare
        if value not in ("{", "["):
            self.failed = _WORD.fullmatch(value) is None
        if self._key in ARGUMENTS and not self.failed:
            self._take_whole(value)

    def _finish_string(self, written: str) -> None:
        counts = self._is_key or self._key == "name" or self._key in ARGUMENTS
        try:
            value: str = json.loads(written)
            if counts:
                value.encode()
        except ValueError:  # not JSON, or a lone surrogate, which no response can contain
            self.failed = True
            return
        if self._is_key:
            self._key, self._is_key, self._expect = value, False, _Expect.COLON
            return
        self._expect = _Expect.COMMA
        if self._key == "name" and self.name is None:
            self.failed, self.name = not value, value or None
        elif self._key in ARGUMENTS:
            self._take_whole(value)  # the model wrote the arguments as a string that contains JSON

    def _take_whole(self, value: str) -> None:
        """Take arguments that come at once, or note that they have come."""
        self._has_arguments = True
        if self._arguments is None and value.strip() not in ("", "null"):
            self._arguments = [value]

    def _end(self) -> bool:
        if self.name is None or (self._needs_arguments and not self._has_arguments):
            return False
        if self._arguments is None:
            self._arguments = ["{}"]
        self.complete = True
        return True
