"""`ChunkDecays`: what is left of a chunk's tokens at later ones, with a decay per head or per channel of the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkDecays:
    """Products of the decays of a chunk's n tokens; all float32, and none above 1."""

    whole: Tensor
    """`[H, n, 1 | D]`: from the chunk's first token to each token."""
    left: Tensor
    """`[H, n, 1 | D]`: after each token up to the last."""
    _sums: Tensor
    """`[H, n, 1 | D]` float64: logarithms of `whole`."""

    @classmethod
    def of(cls, decay: Tensor) -> ChunkDecays:
        """decay (its logarithm) `[H, n, 1]` or, per channel, `[H, n, D]`."""
        # differences of long sums: in float32 they would lose what a strong decay leaves of the near tokens
        sums = decay.double().cumsum(1)
        return cls(sums.float().exp(), (sums[:, -1:] - sums).float().exp(), sums)

    def products(self, keys: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """`sum_d a_ijd rows_id keys_jd` with the products a of decays after token j up to i, zero for j > i.

        keys and each of rows `[H, n, D]` -> `[H, n, n]` for each.
        """
        if self._sums.shape[-1] > 1:
            return _products_per_channel(self._sums, keys, torch.stack(rows, 1)).unbind(1)
        sums = self._sums.squeeze(-1)
        # of pairs with j > i, where the exponent would be positive, nothing is used
        between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).float().tril().exp().tril()
        return tuple(torch.matmul(each, keys.transpose(-1, -2)) * between for each in rows)


def _products_per_channel(sums: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """See `ChunkDecays.products`; sums and keys `[H, n, D]`, rows `[H, R, n, D]` -> `[H, R, n, n]`.

    Halves of halves of the chunk: the decay from a key of the first half to a row of the second is that up to the second half's
    first token times that after it. Both are at most 1, where factors for a whole chunk would overflow.
    """
    num_heads, num_tokens, num_channels = keys.shape
    num_rows, size = rows.shape[1], 1 << (num_tokens - 1).bit_length()
    if size > num_tokens:
        sums = torch.cat((sums, sums[:, -1:].expand(-1, size - num_tokens, -1)), 1)
        keys, rows = (F.pad(each, (0, 0, 0, size - num_tokens)) for each in (keys, rows))
    keys, rows = keys.contiguous(), rows.contiguous()
    found = rows.new_zeros((num_heads, num_rows, size, size))
    found.diagonal(dim1=2, dim2=3).copy_((rows * keys.unsqueeze(1)).sum(-1))
    half = 1
    while half < size:
        halves = size // (2 * half), 2, half
        first, second = sums.view(num_heads, *halves, num_channels).unbind(2)
        middle = second[:, :, :1]
        own_keys = keys.view(num_heads, *halves, num_channels)[:, :, 0] * (middle - first).float().exp()
        own_rows = rows.view(num_heads, num_rows, *halves, num_channels)[:, :, :, 1]
        own_rows = own_rows * (second - middle).float().exp().unsqueeze(1)
        made = torch.matmul(own_rows, own_keys.transpose(-1, -2).unsqueeze(1))
        place = found.view(num_heads, num_rows, *halves, *halves)[:, :, :, 1, :, :, 0]
        place.diagonal(dim1=2, dim2=4).copy_(made.movedim(2, -1))
        half *= 2
    return found[:, :, :num_tokens, :num_tokens]
