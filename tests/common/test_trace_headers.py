"""W3C trace context from strangers: what is valid goes on, anything else is as if it were not there."""

from __future__ import annotations

import pytest

from pdserve.common.request.trace_headers import valid_trace_headers

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("incoming", "kept"),
    [
        ({"traceparent": PARENT}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a=b"}, {"traceparent": PARENT, "tracestate": "a=b"}),
        ({"traceparent": PARENT, "baggage": "a=b"}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "x" * 513}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a=\u00e9"}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a=b\r\nx: y"}, {"traceparent": PARENT}),
        ({"traceparent": PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)}, {}),
        ({"traceparent": PARENT.replace("b7ad6b7169203331", "0" * 16)}, {}),
        ({"traceparent": PARENT.upper()}, {}),
        ({"traceparent": "ff" + PARENT[2:]}, {}),
        ({"traceparent": PARENT + "\r\nx: y"}, {}),
        ({"traceparent": PARENT + "-" + "x" * 200}, {}),
        ({"tracestate": "a=b"}, {}),
        ({}, {}),
    ],
)
def test_only_a_valid_context_is_kept(incoming: dict[str, str], kept: dict[str, str]) -> None:
    assert valid_trace_headers(incoming) == kept
