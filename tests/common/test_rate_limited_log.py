"""Warnings about peers: one a minute for each, in bounded memory."""

from __future__ import annotations

import logging

import pytest

from pdserve.common.rate_limited_log import MAX_KEYS, RateLimitedLog

log = logging.getLogger("of.a.test")


def test_a_peer_is_warned_of_once_a_minute_with_the_number_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    warnings = RateLimitedLog(log, 60.0, clock=lambda: now[0])
    for number in range(5):
        warnings.warning("10.0.0.1", "call %d from %s", number, "10.0.0.1")
    warnings.warning("10.0.0.2", "call from %s", "10.0.0.2")
    now[0] += 61
    warnings.warning("10.0.0.1", "call %d from %s", 9, "10.0.0.1")
    assert [record.message for record in caplog.records] == [
        "call 0 from 10.0.0.1",
        "call from 10.0.0.2",
        "call 9 from 10.0.0.1 (4 more since the last such warning)",
    ]


def test_many_peers_use_bounded_memory() -> None:
    log.disabled = True
    warnings = RateLimitedLog(log)
    for number in range(3 * MAX_KEYS):
        warnings.warning(str(number), "x")
    assert len(warnings._warned) == MAX_KEYS
    log.disabled = False
