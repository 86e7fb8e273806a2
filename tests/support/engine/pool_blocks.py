"""Blocks in the pools of engines under test."""

from __future__ import annotations

from typing import Any

from pdserve.engine.kv_cache.block_pool import PinnedBlocks
from tests.support.engine.engine_harness import Harness

RUBBISH = 999_999_937
"""What an abandoned read writes."""


def places_of(hold: PinnedBlocks) -> list[tuple[int, int]]:
    """(shape, row) of each block."""
    return list(zip(hold.shapes, hold.rows, strict=True))


def block_at(engine: Harness, place: tuple[int, int]) -> Any:
    """The content of a block."""
    shape, row = place
    return engine.pools[shape][row]
