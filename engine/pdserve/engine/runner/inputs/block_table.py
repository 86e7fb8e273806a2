"""`BlockTable`: the block ids of the running sequences in one KV cache group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdserve.engine.arrays import IntArray

NO_SLOT = -1
"""Slot of a padded row: its keys and values are written nowhere."""


class BlockTable:
    """One row per sequence, as in `InputBatch`."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int) -> None:
        """max_blocks: of a sequence. block_size: tokens."""
        self._block_size = block_size
        self._block_ids = np.zeros((num_rows, max_blocks), dtype=np.int64)
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)
        self._changes: list[tuple[int, Sequence[int]]] | None = None
        """First place and block ids of each change, if they are kept."""

    def clear(self, row: int) -> None:
        self._num_blocks[row] = 0

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        first = int(self._num_blocks[row])
        self._block_ids[row, first : first + len(block_ids)] = block_ids
        self._num_blocks[row] += len(block_ids)
        if self._changes is not None:
            self._changes.append((row * self._block_ids.shape[1] + first, block_ids))

    def truncate(self, row: int, num_tokens: int) -> None:
        """Drop the blocks after those of a row's first `num_tokens` tokens."""
        self._num_blocks[row] = min(self._num_blocks[row], -(-num_tokens // self._block_size))

    def num_slots(self, rows: IntArray) -> IntArray:
        """`[R]`: tokens for which the sequences in `rows` `[R]` have blocks."""
        return self._num_blocks[rows] * self._block_size

    def keep_changes(self) -> None:
        """From now on, keep what is appended for `take_changes`."""
        self._changes = []

    def take_changes(self) -> tuple[IntArray, IntArray]:
        """Places `row * max_blocks + column` and block ids, `[n]` each, appended since the last call."""
        changes, self._changes = self._changes or [], []
        places = [np.arange(first, first + len(block_ids)) for first, block_ids in changes]
        block_ids = [np.asarray(block_ids, np.int64) for _, block_ids in changes]
        nothing = np.zeros(0, np.int64)
        return np.concatenate([nothing, *places]), np.concatenate([nothing, *block_ids])

    def slot_mapping(self, rows: IntArray, positions: IntArray) -> IntArray:
        """`[T]`: places of tokens at `positions` `[T]` of the sequences in `rows` `[T]`, see `AttentionBatch.slot_mapping`."""
        block_size = self._block_size
        return self._block_ids[rows, positions // block_size] * block_size + positions % block_size

    def part(self, rows: IntArray, first_blocks: IntArray, seq_lens: IntArray) -> IntArray:
        """`[B, N]`: as `of_step`, of the tokens from the first of block `first_blocks` `[B]` on, which count as `seq_lens`."""
        num_blocks = -(-seq_lens // self._block_size)
        columns = np.arange(int(num_blocks.max()))
        places = np.minimum(first_blocks[:, None] + columns, self._block_ids.shape[1] - 1)
        return np.where(columns < num_blocks[:, None], self._block_ids[rows[:, None], places], 0)

    def of_step(self, rows: IntArray, seq_lens: IntArray) -> IntArray:
        """`[B, N]`: the blocks of sequences of `seq_lens` tokens in `rows`, both `[B]`, padded with 0."""
        tables = self._block_ids[rows, : -(-int(seq_lens.max()) // self._block_size)]
        # entries past a sequence's end may be an earlier row's: 0 is what attention expects there
        return np.where(np.arange(tables.shape[1]) * self._block_size < seq_lens[:, None], tables, 0)
