"""W3C trace context in HTTP headers, gRPC metadata, and a request's `trace_headers`."""

from __future__ import annotations

import re
from collections.abc import Mapping

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
_MAX_TRACESTATE_CHARS = 512
_MAX_TRACEPARENT_CHARS = 128
_VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")


def valid_trace_headers(incoming: Mapping[str, str]) -> dict[str, str]:
    """The valid trace context among a peer's headers; empty without one. incoming: names in lower case."""
    parent = incoming.get(TRACEPARENT, "")
    if len(parent) > _MAX_TRACEPARENT_CHARS or not _VALID.fullmatch(parent):
        return {}
    state = incoming.get(TRACESTATE, "")
    # gRPC metadata carries printable ASCII only: anything else would fail the call that passes it on
    if 0 < len(state) <= _MAX_TRACESTATE_CHARS and state.isascii() and state.isprintable():
        return {TRACEPARENT: parent, TRACESTATE: state}
    return {TRACEPARENT: parent}
