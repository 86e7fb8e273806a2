"""Two connectors with a way between them that can be made to fail: what the contract suite works on."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from pdserve.kv_transfer.connector import BlockConnector, BlockToRead
from pdserve.kv_transfer.memory.pool_memory import HostPool
from tests.support.run.waiting import HANG_S

from .recorded_read import NUM_BLOCKS, RecordedRead, Transfer, make_pool, same_bytes, start_read

WINDOW_BLOCKS = 8
"""Links are made with windows of so many blocks, and at most two of them at once."""


class Link(Protocol):
    """Two connectors, and a way from source to receiver that can be made to fail."""

    @property
    def source(self) -> BlockConnector: ...

    @property
    def receiver(self) -> BlockConnector: ...

    @property
    def faulty_metadata(self) -> bytes:
        """The source's metadata, by which a read meets the faults below."""

    @property
    def num_reread(self) -> int:
        """Blocks that the receiver read a second time."""

    def serve_only(self, num_blocks: int) -> None:
        """The source gets about so many more blocks out, never more, then falls silent as if it were stopped."""

    def resume(self) -> None:
        """The source goes on, with what it had begun, too."""

    def flip_one_bit(self) -> None:
        """One bit of the next block is wrong on its way."""

    def close(self) -> None:
        """Close both connectors."""


class Setup:
    """A link with its pools, and the usual steps."""

    def __init__(self, link: Link, source_pool: HostPool, receiver_pool: HostPool) -> None:
        self.link = link
        self.source_pool = source_pool
        self.receiver_pool = receiver_pool

    def transfer(self, num_blocks: int = NUM_BLOCKS, seed: int = 1, publish: bool = True) -> Transfer:
        """A grant of so many blocks from all over the source's pool."""
        source_blocks = random.Random(seed).sample(range(self.source_pool.num_blocks), num_blocks)
        return Transfer(self.link.source, self.source_pool, source_blocks, publish)

    def read(self, transfer: Transfer, blocks: list[BlockToRead], faulty: bool = False) -> RecordedRead:
        metadata = self.link.faulty_metadata if faulty else self.link.source.metadata
        return start_read(self.link.receiver, metadata, transfer.token, blocks)

    def snapshot(self) -> bytes:
        return bytes(self.receiver_pool.view)

    def has_bytes(self, transfer: Transfer, read: RecordedRead, blocks: list[BlockToRead]) -> bool:
        """True if all that landed is right."""
        return same_bytes(transfer, self.receiver_pool, blocks, sorted(read.landed_blocks))


class LinkContract(abc.ABC):
    """The fixtures; a connector's test class says how its links are made."""

    @abc.abstractmethod
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        """Two connectors that can reach each other, over these pools."""

    @pytest.fixture
    def make_setup(self) -> Iterator[Callable[..., Setup]]:
        links: list[Link] = []

        def make(read_stall_s: float = HANG_S, source_pool: HostPool | None = None) -> Setup:
            source_pool = source_pool or make_pool(seed=7)
            receiver_pool = make_pool()
            links.append(self.make_link(source_pool, receiver_pool, read_stall_s))
            return Setup(links[-1], source_pool, receiver_pool)

        yield make
        for link in links:
            link.close()

    @pytest.fixture
    def setup(self, make_setup: Callable[..., Setup]) -> Setup:
        return make_setup()
