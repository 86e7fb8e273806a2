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
