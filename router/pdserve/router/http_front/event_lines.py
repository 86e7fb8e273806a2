"""`one_line_each`: events whose fields are one line for every client.

The standard of server-sent events knows CR and LF. Clients that split a decoded text with Python's `str.splitlines`, such as
httpx's `iter_lines`, also end a line at U+000B, U+000C, U+001C to U+001E, U+0085, U+2028 and U+2029. JSON's encoder escapes those
below U+0020; the others it writes as they are.
"""

from __future__ import annotations

_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


def one_line_each(events: bytes) -> bytes:
    """events: of ASCII and JSON, whose strings may have other characters. They mean the same afterwards."""
    if events.isascii():
        return events
    for end, escape in _LINE_ENDS:
        events = events.replace(end, escape)
    return events
