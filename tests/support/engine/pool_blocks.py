"""Blocks in the pools of engines under test."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from pdserve.engine.kv_cache.block_pool import PinnedBlocks
from tests.support.engine.engine_harness import Harness

RUBBISH = 999_999_937
"""What an abandoned read writes."""


def places_of(hold: PinnedBlocks) -> list[tuple[int, int]]:
    """(shape, row) of each block."""
    return list(zip(hold.shapes, hold.rows, strict=True))


def copy_blocks(
    source: Harness, origins: PinnedBlocks, target: Harness, room: PinnedBlocks, count: int | None = None
) -> int:
    """Copy published blocks into reserved ones. count: of them; None: all. Returns how many."""
    pairs = list(zip(places_of(origins), places_of(room), strict=True))[:count]
    for origin, to in pairs:
        copy_block(source, origin, target, to)
    return len(pairs)


def copy_block(source: Harness, origin: tuple[int, int], target: Harness, to: tuple[int, int]) -> None:
    """As a read does. The places are those of `places_of`."""
    block_at(target, to).copy_(block_at(source, origin))


def num_without_gap(numbers: Set[int], first: int) -> int:
    """How many numbers from `first` on are there before the first that is not."""
    count = 0
    while first + count in numbers:
        count += 1
    return count


def block_at(engine: Harness, place: tuple[int, int]) -> Any:
    """The content of a block."""
    shape, row = place
    return engine.pools[shape][row]
