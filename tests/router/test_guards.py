"""Who is let in: poisoned prompts, keys, and trace headers that come with a request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdserve.common.errors import Unauthenticated, WorkerLost
from pdserve.common.router_settings import RouterSettings
from pdserve.router import poison
from pdserve.router.api_keys import ApiKeys
from pdserve.router.attempt_failure import AttemptFailed
from pdserve.router.poison import Casualties, PoisonList


def test_poison_wears_off_and_is_bounded(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(poison.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(poison, "_MAX_ENTRIES", 2)
    refused = PoisonList()
    refused.check(b"a")
    for digest in (b"a", b"b", b"c"):
        refused.add(digest, lambda: True)
    refused.check(b"a")
    now[0] += 59
    with pytest.raises(WorkerLost, match="another 1 s"):
        refused.check(b"c")
    now[0] += 2
    refused.check(b"c")


def test_who_came_back_may_serve_but_counts_where_its_engine_had_stood_still():
    unplugged, wedged, gone = (
        SimpleNamespace(key=(name, 1), stood_still=name == "wedged") for name in ("unplugged", "wedged", "gone")
    )
    back = [unplugged, wedged]
    casualties = Casualties(PoisonList(), SimpleNamespace(came_back=lambda worker: worker in back))
    for worker in back:
        casualties.count(AttemptFailed(WorkerLost("lost"), worker, died=True), b"a")
    assert casualties.workers == set()
    with pytest.raises(WorkerLost, match=r"^2 workers died"):
        casualties.count(AttemptFailed(WorkerLost("lost"), gone, died=True), b"a")
    assert casualties.workers == {("gone", 1)}


def test_poison_is_forgiven_when_it_turns_out_to_be_none():
    guilty = True
    refused = PoisonList()
    refused.add(b"a", lambda: guilty)
    with pytest.raises(WorkerLost):
        refused.check(b"a")
    guilty = False
    refused.check(b"a")
    guilty = True
    refused.check(b"a")


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
    ],
)
def test_api_keys(keys, header, ok):
    known = ApiKeys.from_settings(RouterSettings(api_keys=keys or None))
    if ok:
        assert bool(known.check(header).tenant) == bool(keys)
    else:
        with pytest.raises(Unauthenticated):
            known.check(header)
