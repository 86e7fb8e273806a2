"""`PinTracker`: the blocks that the transfer side holds, and those in quarantine."""

from __future__ import annotations

from collections import Counter

from pdserve.engine.kv_cache.block_pool import BlockPool, PinnedBlocks


class PinTracker:
    """Every hold leaves and returns through this tracker."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._out: Counter[int] = Counter()
        self._quarantined: Counter[int] = Counter()

    def out(self, hold: PinnedBlocks) -> PinnedBlocks:
        """Note a hold that leaves the engine."""
        self._out.update(hold.block_ids)
        return hold

    def back(self, hold: PinnedBlocks) -> None:
        """A hold, or a part of one, is back: its references end."""
        _take_one_each(self._out, hold.block_ids)
        _take_one_each(self._quarantined, hold.block_ids)
        self._pool.take_back(hold)

    def quarantine(self, block_ids: set[int]) -> None:
        """These blocks' request has ended, but an unfinished read may still write them."""
        self._quarantined.update(block_ids)

    @property
    def num_quarantined(self) -> int:
        return self._quarantined.total()

    @property
    def num_out(self) -> int:
        return self._out.total()

    def references(self) -> dict[int, int]:
        """Block id -> references by holds; for the pool check."""
        return dict(self._out)


def _take_one_each(counts: Counter[int], block_ids: tuple[int, ...]) -> None:
    for block in block_ids:
        if counts[block] > 1:
            counts[block] -= 1
        else:
            del counts[block]
