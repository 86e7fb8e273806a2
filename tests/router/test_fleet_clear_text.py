"""Addresses that a directory brings are held to the rule for those in settings: nothing beyond loopback in the clear."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.worker_watcher import CompatibilityCheck
from tests.support.processes.tls_authority import Authority

EXPECTED = CompatibilityCheck(key=DEVELOPMENT_KEY, tokenizer_fingerprint="")
FAR = "10.0.0.7:50052"


def make_fleet(**options: Any) -> Fleet:
    return Fleet((), (), EXPECTED, **options)


async def test_no_address_of_a_directory_beyond_loopback_is_connected_to_in_the_clear(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with make_fleet() as fleet:
        for _ in range(3):
            fleet.register(FAR, WorkerRole.DECODE)
        assert fleet.introduced() == []
        assert fleet.counts()["decode"]["addresses"] == 0
        assert len(caplog.records) == 1
        assert f"the address {FAR}" in caplog.text
        assert "--insecure" in caplog.text
        fleet.register("127.0.0.1:9", WorkerRole.DECODE)
        assert fleet.introduced() == ["127.0.0.1:9"]


async def test_with_tls_or_insecure_it_is(authority: Authority) -> None:
    for options in ({"insecure": True}, {"tls": authority.identity().client}):
        async with make_fleet(**options) as fleet:
            fleet.register(FAR, WorkerRole.DECODE)
            assert fleet.introduced() == [FAR]
