"""`DraftBlocks`: the blocks of a draft model's cache, by row of the batch."""

from __future__ import annotations

import numpy as np

from pdserve.engine.arrays import IntArray
from pdserve.engine.runner.inputs.block_table import BlockTable


class DraftBlocks:
    """Blocks belong to one row each, until another row needs them that was drafted later."""

    def __init__(self, num_rows: int, max_tokens: int, num_blocks: int, block_size: int) -> None:
        """max_tokens: of a row."""
        self._block_size = block_size
        self.table = BlockTable(num_rows, -(-max_tokens // block_size), block_size)
        self._owned: dict[int, list[int]] = {}
        """row -> its blocks; rows that were drafted longest ago first."""
        self._free = list(range(num_blocks - 1, -1, -1))

    def reserve(self, row: int, num_tokens: int, keep: IntArray) -> bool:
        """Have blocks for a row's first `num_tokens` tokens; False if there are none, and nothing has changed.

        keep: rows that lose no block. A row that loses its blocks has none.
        """
        owned = self._owned.pop(row, [])
        self._owned[row] = owned
        missing = -(-num_tokens // self._block_size) - len(owned)
        kept = set(keep.tolist()) | {row}
        while missing > len(self._free):
            victim = next((other for other, blocks in self._owned.items() if blocks and other not in kept), None)
            if victim is None:
                return False
            self._free += self._owned.pop(victim)
            self.table.clear(victim)
        if missing > 0:
            new = [self._free.pop() for _ in range(missing)]
            owned += new
            self.table.append(row, new)
        return True

    def num_tokens(self, row: int) -> int:
        """Tokens that the row's blocks hold."""
        return len(self._owned.get(row, ())) * self._block_size

    def check(self) -> None:
        """Raises: RuntimeError unless each block is free or belongs to one row."""
        known = sorted([*self._free, *(block for blocks in self._owned.values() for block in blocks)])
        if not np.array_equal(known, np.arange(len(known))):
            raise RuntimeError("a block of the draft model's cache is lost, or belongs to two rows")
