"""Who is let in: counts, poisoned prompts, keys, and trace headers that come with a request."""

from __future__ import annotations

import pytest

from pdserve.common.errors import Draining, Overloaded, Unauthenticated, WorkerLost
from pdserve.router import poison
from pdserve.router.admission import Admission
from pdserve.router.api_keys import ApiKeys
from pdserve.router.poison import PoisonList
from pdserve.router.trace_context import trace_headers


async def test_admission_counts_requests_and_closes():
    admission, expelled = Admission(3), []
    admission.enter(2, expelled.append)
    with pytest.raises(Overloaded, match="2 requests are in the router and 2 more came; its limit is 3"):
        admission.enter(2, expelled.append)
    admission.leave(2, expelled.append)
    await admission.emptied()
    admission.enter(3, lambda: expelled.append("left"))
    admission.close()
    with pytest.raises(Draining):
        admission.enter(1, expelled.append)
    admission.expel()
    assert expelled == ["left"]


def test_poison_wears_off_and_is_bounded(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(poison.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(poison, "_MAX_ENTRIES", 2)
    refused = PoisonList()
    refused.check(b"a")
    for digest in (b"a", b"b", b"c"):
        refused.add(digest)
    refused.check(b"a")
    now[0] += 59
    with pytest.raises(WorkerLost, match="another 1 s"):
        refused.check(b"c")
    now[0] += 2
    refused.check(b"c")


@pytest.mark.parametrize(
    ("keys", "header", "ok"),
    [
        ((), None, True),
        (("k1", "k2"), "Bearer k2", True),
        (("k1",), "bearer k1", True),
        (("k1",), None, False),
        (("k1",), "Bearer", False),
        (("k1",), "Bearer k1x", False),
        (("k1",), "k1", False),
        (("schlüssel",), "Bearer schlüssel", True),
    ],
)
def test_api_keys(keys, header, ok):
    if ok:
        ApiKeys(keys).check(header)
    else:
        with pytest.raises(Unauthenticated):
            ApiKeys(keys).check(header)


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("incoming", "kept"),
    [
        ({"traceparent": PARENT}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a=b"}, {"traceparent": PARENT, "tracestate": "a=b"}),
        ({"traceparent": PARENT, "tracestate": "x" * 513}, {"traceparent": PARENT}),
        ({"traceparent": PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)}, None),
        ({"traceparent": PARENT.upper()}, None),
        ({"traceparent": "ff" + PARENT[2:]}, None),
        ({"traceparent": PARENT + "\r\nx: y"}, None),
        ({"tracestate": "a=b"}, None),
        ({}, None),
    ],
)
def test_trace_headers(incoming, kept):
    headers = trace_headers(incoming)
    if kept is not None:
        assert headers == kept
    else:
        assert set(headers) == {"traceparent"}
        assert len(headers["traceparent"]) == 55
        assert headers["traceparent"] != trace_headers(incoming)["traceparent"]
