"""TCP over a network that refuses, resets in the middle of a block, or crawls. Silence and wrong bits: the contract."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pdserve.kv_transfer.connector import ReadOutcome
from tests.support.run.waiting import HANG_S

from .contract_link import WINDOW_BLOCKS, Setup
from .fault_link import FaultLink
from .recorded_read import BLOCK_BYTES, NUM_BLOCKS, make_pool
from .tcp_link import TcpLink

STALL_S = 1.0
"""Limit of silence in the test of a slow link; no other test is about it."""


@pytest.fixture
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    source_pool, receiver_pool = make_pool(seed=7), make_pool()
    link = TcpLink(source_pool, receiver_pool, getattr(request, "param", HANG_S))
    yield Setup(link, source_pool, receiver_pool)
    link.close()


def faults_of(setup: Setup) -> FaultLink:
    assert isinstance(setup.link, TcpLink)
    return setup.link.faults


def _reads_everything(setup: Setup) -> None:
    transfer = setup.transfer()
    blocks = transfer.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS))
    read = setup.read(transfer, blocks, faulty=True)
    assert read.wait_ended() is ReadOutcome.DONE
    assert setup.has_bytes(transfer, read, blocks)


def test_connections_that_are_refused_fail_the_read_and_are_tried_again_by_the_next(setup: Setup) -> None:
    faults_of(setup).refuse()
    transfer = setup.transfer()
    read = setup.read(transfer, transfer.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS)), faulty=True)
    assert read.wait_failed()
    assert read.num_landed == 0
    faults_of(setup).refuse(False)
    _reads_everything(setup)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_bytes", [1, 3 * WINDOW_BLOCKS * BLOCK_BYTES + 1500, 100 * BLOCK_BYTES + 7])
def test_i3_reset_in_the_middle_of_a_block(setup: Setup, num_bytes: int) -> None:
    faults_of(setup).reset_after(num_bytes)
    transfer = setup.transfer()
    blocks = transfer.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS))
    read = setup.read(transfer, blocks, faulty=True)
    assert read.wait_failed()
    assert read.num_landed < NUM_BLOCKS
    assert setup.has_bytes(transfer, read, blocks), "what landed before the reset is not right"
    _reads_everything(setup)


@pytest.mark.parametrize("setup", [STALL_S], indirect=True)
def test_a_slow_link_is_not_dead(setup: Setup) -> None:
    """A read stalls when nothing comes for a while, however long the whole takes."""
    began = time.monotonic()
    faults_of(setup).slow_to(NUM_BLOCKS * BLOCK_BYTES / (2 * STALL_S))
    _reads_everything(setup)
    assert time.monotonic() - began > STALL_S
