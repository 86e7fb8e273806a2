"""W3C trace context: a caller's headers are passed on, and a request without them gets new ones."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
_MAX_TRACESTATE_CHARS = 512
_VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_headers(incoming: Mapping[str, str]) -> dict[str, str]:
    """The headers to send on with a request. incoming: the client's, names in lower case."""
    parent = incoming.get(TRACEPARENT, "")
    if len(parent) > 128 or not _VALID.fullmatch(parent):
        return {TRACEPARENT: f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}
    state = incoming.get(TRACESTATE, "")
    return {TRACEPARENT: parent} | ({TRACESTATE: state} if 0 < len(state) <= _MAX_TRACESTATE_CHARS else {})
