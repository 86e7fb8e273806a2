"""The part of the batch that lives on the device: block tables and newest tokens, changed by what is new in a step."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceBlockTable:
    """The block ids of all rows of the batch in one KV cache group, `[num_rows, max_blocks]` int64."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._block_ids = torch.zeros((num_rows, max_blocks), dtype=torch.int64, device=device)
        self._starts = torch.arange(max_blocks, device=device) * block_size
        self._nothing = torch.zeros((), dtype=torch.int64, device=device)

    def put(self, places: Tensor, block_ids: Tensor) -> None:
        """Write blocks to places `row * max_blocks + column`; both `[n]` int64."""
        if len(places):
            self._block_ids.view(-1).index_copy_(0, places, block_ids)

    def of_step(self, rows: Tensor, seq_lens: Tensor, longest: int) -> Tensor:
        """`[B, N]`: the blocks of sequences of `seq_lens` tokens in `rows`, both `[B]`, padded with 0.

        longest: largest of `seq_lens`, known on the host.
        """
        width = -(-longest // self._block_size)
        tables = self._block_ids[:, :width].index_select(0, rows)
        return torch.where(self._starts[:width] < seq_lens.unsqueeze(-1), tables, self._nothing)


class NewestTokens:
    """The token that each row of the batch sampled last: the next step may begin before the host has read it."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def put(self, rows: Tensor, token_ids: Tensor) -> None:
        """Both `[N]` int64."""
        self._token_ids.index_copy_(0, rows, token_ids)

    def fill(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """`[T]` int64 with the newest token of its row in place of each negative id; both arguments `[T]`."""
        return torch.where(token_ids < 0, self._token_ids.index_select(0, rows), token_ids)
