"""Rotary position embedding, as a product of complex numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rotary_phases(positions: Tensor, inverse_frequencies: Tensor, magnitude: Tensor) -> Tensor:
    """`phases[t, 0, j] = magnitude[j] * exp(i * positions[t] * inverse_frequencies[j])`.

    positions `[T]` int64, inverse_frequencies `[D / 2]` float32, magnitude `[D / 2]` or `[]` float32 -> `[T, 1, D / 2]` complex64.
    """
    return torch.polar(magnitude, positions.view(-1, 1, 1) * inverse_frequencies)


def mrope_phases(positions: Tensor, axes: Tensor, inverse_frequencies: Tensor, magnitude: Tensor) -> Tensor:
    """`phases[t, 0, j] = magnitude[j] * exp(i * positions[axes[j], t] * inverse_frequencies[j])`.

    positions `[3, T]` int64, axes `[D / 2]` int64, the others as in `rotary_phases` -> `[T, 1, D / 2]` complex64.
    """
    of_pairs = positions.index_select(0, axes).T.unsqueeze(1)
    return torch.polar(magnitude.expand_as(of_pairs), of_pairs * inverse_frequencies)


def rotate_heads(x: Tensor, phases: Tensor) -> None:
    """`x[t, h, 2j] + i x[t, h, 2j + 1] *= phases[t, 0, j]`, in place and in float32.

    x `[T, heads, D]` (a head's numbers adjacent), phases `[T, 1, D / 2]`. Pairs are neighbours: see `pair_neighbours`.
    """
    if x.dtype is torch.float32:
        torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(phases)
        return
    wide = x.to(torch.float32, memory_format=torch.contiguous_format)
    torch.view_as_complex(wide.view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(phases)
    x.copy_(wide)


def pair_neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows `[heads * D, ...]` of a projection so that a head's numbers j and j + D/2 become 2j and 2j + 1.

    Checkpoints rotate number j with number j + D/2. Queries and keys may be reordered alike without changing any
    score, and neighbours can be rotated as one complex number, in one operation instead of five.
    """
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Order of the numbers of a head in a checkpoint, by the pairs that are rotated together."""

    head_dim: int
    """D"""
    rotary_dim: int
    """The first numbers of a head, which are rotated; the others are not."""
    is_paired: bool = False
    """True: the numbers 2j and 2j + 1, as here; False: j and j + rotary_dim / 2."""

    def paired(self, rows: Tensor) -> Tensor:
        """`pair_neighbours` of the rotated rows of each head; rows `[heads * D, ...]`."""
        if self.is_paired:
            return rows
        if self.rotary_dim == self.head_dim:
            return pair_neighbours(rows, self.head_dim)
        heads = rows.view(-1, self.head_dim, *rows.shape[1:])
        rotated = heads[:, : self.rotary_dim].reshape(-1, *rows.shape[1:])
        rotated = pair_neighbours(rotated, self.rotary_dim).view(-1, self.rotary_dim, *rows.shape[1:])
        return torch.cat((rotated, heads[:, self.rotary_dim :]), 1).view(rows.shape)
