"""Workers' reports about their blocks reach the index, and nothing that contradicts itself stays there."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.common import kv_events
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.router.placement.prefix_index import PrefixIndex
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.worker_watcher import CompatibilityCheck
from tests.router.fake_worker import FakeWorker
from tests.support.run.waiting import HANG_S

A, B, C = (letter * 8 for letter in (b"a", b"b", b"c"))


@pytest.fixture
async def fleet(fingerprint):
    """(worker, index): one decode worker under watch."""
    worker = await FakeWorker("decode", fingerprint).start()
    index = PrefixIndex()
    expected = CompatibilityCheck(key=DEVELOPMENT_KEY, tokenizer_fingerprint=fingerprint)
    async with Fleet([], [worker.address], expected, index):
        yield worker, index
    await worker.kill()


async def become(index, worker, hashes):
    """Returns when the index says that the worker holds exactly these."""
    key = (worker.worker_id, worker.epoch)
    async with asyncio.timeout(HANG_S):
        while True:
            found = {block for block in hashes if index.match([block], [key], 0.0)[key]}
            if found == set(hashes) and index.num_blocks(key) == len(hashes):
                return
            await asyncio.sleep(0.01)


async def test_changes_reach_the_index(fleet):
    worker, index = fleet
    worker.tell_blocks(1, cleared=True)
    worker.tell_blocks(2, stored=A + B)
    await become(index, worker, [A, B])
    worker.tell_blocks(3, stored=C, removed=A)
    await become(index, worker, [B, C])
    worker.tell_blocks(4, stored=A, cleared=True)
    await become(index, worker, [A])


@pytest.mark.parametrize(
    ("sequence", "stored"), [pytest.param(9, C, id="gap"), pytest.param(2, C[:-1], id="half a hash")]
)
async def test_after_a_gap_or_nonsense_everything_is_told_anew(fleet, sequence, stored):
    worker, index = fleet
    worker.tell_blocks(1, stored=A + B)
    await become(index, worker, [A, B])
    worker.tell_blocks(sequence, stored=stored)
    await become(index, worker, [])
    worker.tell_blocks(1, stored=B, cleared=True)
    await become(index, worker, [B])


async def test_a_worker_cannot_fill_the_index(fleet, monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_BLOCKS", 2)
    worker, index = fleet
    worker.tell_blocks(1, stored=A)
    worker.tell_blocks(2, stored=B)
    await become(index, worker, [A, B])
    worker.tell_blocks(3, stored=C)
    await become(index, worker, [])
    worker.tell_blocks(1, stored=C, cleared=True)
    worker.tell_blocks(2, stored=A + B, removed=C)
    await become(index, worker, [A, B])


async def test_a_dead_workers_blocks_are_forgotten(fleet):
    worker, index = fleet
    worker.tell_blocks(1, stored=A)
    await become(index, worker, [A])
    await worker.kill()
    await become(index, worker, [])
    assert len(index) == 0
