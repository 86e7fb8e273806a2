"""Counts the values of a JSON text before any of them is built."""

from __future__ import annotations

import re

from pdserve.common.errors import InvalidRequest

MAX_CONTAINERS = 1 << 16
"""Objects and arrays in one body: each takes up to 0.4 µs of the interpreter's lock, and memory of 64 bytes and more."""
_MIN_VALUES = 1 << 20
_TOKEN = re.compile(rb'"[^"]*+"|[{\[,]')
_ESCAPES = ((rb"\\", b""), (rb"\"", b""))


def verify_num_values(data: bytes, num_tokens: int) -> None:
    """Raises: InvalidRequest for more objects, arrays or values than a valid request has.

    num_tokens: the model's length, which bounds a prompt given as a list of numbers. Takes three byte searches over the text
    and, only for a text with very many such characters, in strings or not, one pass of a tokenizer that stops at the limit.
    """
    max_values = _MIN_VALUES + num_tokens
    containers = data.count(b"{") + data.count(b"[")
    if containers <= MAX_CONTAINERS and containers + data.count(b",") <= max_values:
        return
    # a JSON text is valid up to some place; up to there this finds its strings as a decoder does
    for escape, nothing in _ESCAPES:
        data = data.replace(escape, nothing)
    containers = values = 0
    for token in _TOKEN.finditer(data):
        first = token.group()[:1]
        if first == b'"':
            continue
        values += 1
        containers += first != b","
        if containers > MAX_CONTAINERS or values > max_values:
            raise InvalidRequest(
                f"the body is too complex: at most {MAX_CONTAINERS} objects and arrays, and {max_values} values in all, "
                "are allowed"
            )
