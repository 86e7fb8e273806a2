"""`PythonCall`: reads one call of a tool that is written in Python, `f(a=1, b="x")`, and gives its arguments as JSON."""

from __future__ import annotations

import enum
import json
import re
import sys

_MAX_DEPTH = 64
_MAX_WORD_CHARS = 128
_SPACE = " \t\r\n"
_NAME = re.compile(r"[a-zA-Z_][\w.-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
"""Digits of an escape, by the letter after its backslash."""
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", "'": "'", '"': '\\"', "\n": ""}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


class _Expect(enum.Enum):
    """Text expected next."""

    NAME = enum.auto()
    """The call's name, up to its parenthesis."""
    KEYWORD = enum.auto()
    """An argument's name, up to its `=`, or the call's end."""
    VALUE = enum.auto()
    """A value, or the end of a list or dict that is empty or ends with a comma."""
    KEY = enum.auto()
    """As VALUE, for the key of a dict: a string."""
    COLON = enum.auto()
    COMMA = enum.auto()
    """A comma, or the end of the value around."""


class PythonCall:
    """Translates character by character; keeps the open brackets and one word, both of which are bounded."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.failed = False
        """True if the text is not a call; it is then text, unless the call has begun."""
        self.complete = False
        self._expect = _Expect.NAME
        self._is_in_list = False
        """The bracket that begins a list of calls has been read."""
        self._word = ""
        """The name, number or constant that is being read."""
        self._quote = ""
        """The quotation mark of the string that is being read."""
        self._escape: str | None = None
        """Characters after a backslash, if an escape is being read."""
        self._open = ""
        """Brackets around the next value, without the call's."""
        self._keywords: set[str] = set()
        self._separator = "{"
        """JSON before the next value."""
        self._arguments: list[str] | None = None
        """Pieces that have not been taken; None before the arguments begin."""

    @property
    def has_begun(self) -> bool:
        """True if the first argument's name is known, or the call has none."""
        return self._arguments is not None

    def take_arguments(self) -> str:
        """The arguments' JSON since the last call."""
        taken, self._arguments = self._arguments or [], []
        return "".join(taken)

    def read(self, text: str) -> int:
        """Read text; returns the number of characters read, which is smaller if the call is complete or has failed."""
        for place, char in enumerate(text):
            if self._quote:
                taken = self._in_string(char)
            elif self._expect in (_Expect.NAME, _Expect.KEYWORD):
                taken = self._in_name(char)
            else:
                taken = self._in_value(char)
            if not taken:
                self.failed = True
                return place
            if self.complete:
                return place + 1
        return len(text)

    def _emit(self, text: str) -> None:
        self._arguments = self._arguments or []
        self._arguments.append(text)

    def _in_name(self, char: str) -> bool:
        """Read a character of the call's or an argument's name; returns True if it is allowed there."""
        end = "(" if self._expect is _Expect.NAME else "="
        if char == ")" and end == "=" and not self._word:
            return self._end()
        if char in _SPACE and not self._word:
            return True
        if char == "[" and end == "(" and not (self._word or self._is_in_list):
            self._is_in_list = True
            return True
        if char == end:
            word, self._word = self._word.rstrip(), ""
            if not _NAME.fullmatch(word):
                return False
            if end == "(":
                self.name, self._expect = word, _Expect.KEYWORD
                return True
            if word in self._keywords:
                return False
            self._keywords.add(word)
            self._emit(f'{self._separator}"{word}": ')
            self._separator, self._expect = "", _Expect.VALUE
            return True
        self._word += char
        return len(self._word) <= _MAX_WORD_CHARS and (char in _SPACE or bool(_NAME.fullmatch(self._word.rstrip())))

    def _in_value(self, char: str) -> bool:
        """Read a character of a value outside strings; returns True if it is allowed there."""
        if self._word:
            if char.isalnum() or char in "_.+-":
                self._word += char
                return len(self._word) <= _MAX_WORD_CHARS
            word, self._word = self._word, ""
            constant = _CONSTANTS.get(word) or (word if _NUMBER.fullmatch(word) else None)
            if constant is None:
                return False
            self._give(constant)
        if char in _SPACE:
            return True
        if self._expect in (_Expect.COLON, _Expect.COMMA):
            return self._between(char)
        if self._open and char == _CLOSERS[self._open[-1]] and self._separator != ": ":
            return self._close(char)
        if char in "'\"":
            self._quote = char
            self._give('"')
            return True
        if self._expect is _Expect.KEY:
            return False
        if char in _CLOSERS:
            return self._begin(char)
        self._word = char
        return char.isalnum() or char == "-"

    def _give(self, text: str) -> None:
        """Give a value, or the beginning of a string; a colon or comma is next."""
        self._emit(self._separator + text)
        self._separator = ""
        self._expect = _Expect.COLON if self._expect is _Expect.KEY else _Expect.COMMA

    def _begin(self, char: str) -> bool:
        if len(self._open) >= _MAX_DEPTH:
            return False
        self._emit(self._separator + ("{" if char == "{" else "["))
        self._separator, self._open = "", self._open + char
        self._expect = _Expect.KEY if char == "{" else _Expect.VALUE
        return True

    def _close(self, char: str) -> bool:
        self._emit("}" if char == "}" else "]")
        # a comma before the bracket is allowed only in Python
        self._separator, self._open, self._expect = "", self._open[:-1], _Expect.COMMA
        return True

    def _between(self, char: str) -> bool:
        if self._expect is _Expect.COLON:
            self._expect, self._separator = _Expect.VALUE, ": "
            return char == ":"
        if char == ",":
            self._separator = ", "
            inside = _Expect.KEY if self._open[-1:] == "{" else _Expect.VALUE
            self._expect = inside if self._open else _Expect.KEYWORD
            return True
        if self._open:
            return char == _CLOSERS[self._open[-1]] and self._close(char)
        return char == ")" and self._end()

    def _end(self) -> bool:
        self._emit("{}" if self._arguments is None else "}")
        self.complete = True
        return True

    def _in_string(self, char: str) -> bool:
        """Read a character of a string; returns True if it is allowed there."""
        if self._escape is not None:
            return self._in_escape(char)
        if char == "\\":
            self._escape = ""
        elif char == self._quote:
            self._quote = ""
            self._emit('"')
        else:
            self._emit(_in_json(char))
        return True

    def _in_escape(self, char: str) -> bool:
        read = (self._escape or "") + char
        if (num_digits := _HEX_DIGITS.get(read[0])) is not None:
            if len(read) > 1 and char not in "0123456789abcdefABCDEF":
                return False
            self._escape = read
            if len(read) > num_digits:
                if (code := int(read[1:], 16)) > sys.maxunicode:
                    return False
                self._emit(json.dumps(chr(code))[1:-1])
                self._escape = None
            return True
        self._emit(_ESCAPES[char] if char in _ESCAPES else "\\\\" + _in_json(char))
        self._escape = None
        return True


def _in_json(char: str) -> str:
    """A character within a string of JSON."""
    if char in '"\\':
        return "\\" + char
    return f"\\u{ord(char):04x}" if char < " " else char
