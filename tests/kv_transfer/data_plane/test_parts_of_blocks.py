"""Reads of equal parts of blocks, between pools whose blocks have other numbers of parts, over every connector."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable

import pytest

from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import BlockToRead, ReadOrder, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool

from .contract_link import Link, LinkContract, Setup
from .recorded_read import BLOCK_BYTES, NUM_BLOCKS, RecordedRead, make_pool
from .tcp_link import TcpLink
from .test_local_connector import LocalLink
from .test_ring_connector import RingEnds

NUM_READ = 40


def pools_of(setup: Setup, source_parts: int, parts: int) -> tuple[HostPool, HostPool]:
    return setup.source_pool.divided(source_parts), setup.receiver_pool.divided(parts)


class PartsContract(LinkContract):
    @pytest.mark.parametrize(("source_parts", "parts"), [(2, 2), (4, 2), (1, 4), (2, 1)])
    def test_a_part_of_each_block_lands_and_nothing_beside_it(
        self, make_setup: Callable[..., Setup], source_parts: int, parts: int
    ) -> None:
        setup = make_setup(source_pool=make_pool(seed=7, block_bytes=BLOCK_BYTES // parts * source_parts))
        there, here = pools_of(setup, source_parts, parts)
        numbers = [
            block * source_parts + source_parts - 1 for block in random.Random(5).sample(range(NUM_BLOCKS), NUM_READ)
        ]
        token = secrets.token_bytes(16)
        setup.link.source.grant(token, source_parts).publish(0, numbers)
        blocks = [
            BlockToRead(index, XXH3.of(there.block(number), index), index * parts, number)
            for index, number in enumerate(numbers)
        ]
        read = RecordedRead(NUM_READ)
        metadata = setup.link.source.metadata
        order = ReadOrder(metadata, token, blocks, parts=parts, source_parts=source_parts)
        read.read = setup.link.receiver.read(order, read)
        assert read.wait_ended() is ReadOutcome.DONE
        assert read.landed_blocks == set(range(NUM_READ))
        for index, number in enumerate(numbers):
            assert here.block(index * parts) == there.block(number)
        rest = set(range(here.num_blocks)) - {index * parts for index in range(NUM_READ)}
        assert not any(any(here.block(number)) for number in rest)

    def test_parts_of_another_size_are_refused(self, make_setup: Callable[..., Setup]) -> None:
        setup = make_setup()
        there, _ = pools_of(setup, 2, 4)
        token = secrets.token_bytes(16)
        setup.link.source.grant(token, 2).publish(0, [0])
        read = RecordedRead(1)
        blocks = [BlockToRead(0, XXH3.of(there.block(0), 0), 0, 0)]
        order = ReadOrder(setup.link.source.metadata, token, blocks, parts=4, source_parts=2)
        read.read = setup.link.receiver.read(order, read)
        assert "size" in read.wait_failed()
        assert not any(setup.snapshot())


class TestTcp(PartsContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return TcpLink(source_pool, receiver_pool, read_stall_s)


class TestNixl(PartsContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        nixl_link = pytest.importorskip("tests.kv_transfer.data_plane.nixl_link", exc_type=ImportError)
        return nixl_link.NixlLink(source_pool, receiver_pool, read_stall_s)


class TestLocal(PartsContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return LocalLink(source_pool, receiver_pool, read_stall_s)


class TestRingOverLocal(PartsContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return RingEnds(LocalLink, source_pool, receiver_pool, read_stall_s)
