"""`TorchLoraOps`: LoRA products in torch operations, for any device; the reference of other ones.

Tokens of decode rows are multiplied together, padded per slot to the same number of rows; a chunk of a prompt is multiplied by
itself, where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.lora.lora_linear import LoraStack


@dataclass(frozen=True, slots=True)
class LoraChunk:
    """Adjacent tokens of one sequence."""

    start: int
    end: int
    slot: int


def chunks_of(slots: NDArray[np.int64], counts: NDArray[np.int64], min_tokens: int) -> list[LoraChunk]:
    """The rows with an adapter and at least `min_tokens` tokens; slots, counts: see `LoraOps.set_rows`."""
    ends = np.cumsum(counts)
    return [
        LoraChunk(int(ends[row] - counts[row]), int(ends[row]), int(slots[row]))
        for row in np.flatnonzero((slots >= 0) & (counts >= min_tokens))
    ]


def add_chunk(stack: LoraStack, y: Tensor, x: Tensor, chunk: LoraChunk) -> None:
    """Add the products of the chunk's tokens; y `[T, out]`, x `[T, in]`."""
    ranks = stack.ranks[chunk.slot].tolist()
    if not any(ranks):
        return
    y, x = y[chunk.start : chunk.end], x[chunk.start : chunk.end]
    shrunk = x @ stack.a[chunk.slot].t()
    for index, (rank, columns) in enumerate(zip(ranks, stack.columns, strict=True)):
        if rank:
            start = index * stack.max_rank
            part = shrunk[:, start : start + stack.max_rank]
            y[:, columns].addmm_(part, stack.b[chunk.slot, :, columns])


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """Decode rows with an adapter, at least one."""

    slots: list[int]
    """Slots of these rows."""
    first_slot: int
    num_slots: int
    """Slots from the lowest to the highest."""
    padded: Tensor
    """`[num_slots * n]` int64: per slot its n tokens; a place without one repeats any token."""
    places: Tensor
    """`[K]` int64: place in `padded` of each of `tokens`."""
    tokens: Tensor
    """`[K]` int64: the rows, ascending."""
    num_leading: int
    """K if `tokens` are the step's first K tokens, else 0: to them a product is added without an index, in a sixth of the time."""

    @classmethod
    def of_step(cls, slots: NDArray[np.int64], device: torch.device) -> _DecodeRows | None:
        """slots: of each decode row."""
        tokens = np.flatnonzero(slots >= 0)
        if not len(tokens):
            return None
        tokens = tokens[np.argsort(slots[tokens], kind="stable")]
        first = int(slots[tokens[0]])
        of_token = slots[tokens] - first
        sizes = np.bincount(of_token)
        width = int(sizes.max())
        # the place of a token within its slot
        offsets = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        places = of_token * width + offsets
        padded = np.full(len(sizes) * width, tokens[0])
        padded[places] = tokens
        ascending = np.argsort(tokens)
        arrays = (padded, places[ascending], tokens[ascending])
        num_leading = len(tokens) if len(tokens) == len(slots) else 0
        on_device = [torch.from_numpy(array).to(device) for array in arrays]
        return cls(
            np.unique(slots[tokens]).tolist(), first, len(sizes), on_device[0], on_device[1], on_device[2], num_leading
        )


class TorchLoraOps:
    """Implements `LoraOps`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.decodes: _DecodeRows | None = None
        self.chunks: Sequence[LoraChunk] = ()

    @property
    def has_adapters(self) -> bool:
        return self.decodes is not None or bool(self.chunks)

    def set_rows(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        self.decodes = _DecodeRows.of_step(slots[counts == 1], self._device)
        self.chunks = chunks_of(slots, counts, 2)
        return self.has_adapters

    def set_any_rows(self) -> bool:
        return False

    def layer(self, stack: LoraStack) -> TorchLoraLayer:
        return TorchLoraLayer(self, stack)


class TorchLoraLayer:
    """Implements `LoraLayer`."""

    def __init__(self, ops: TorchLoraOps, stack: LoraStack) -> None:
        self._ops = ops
        self._stack = stack

    def add(self, y: Tensor, x: Tensor) -> None:
        if self._ops.decodes is not None:
            self._add_decodes(y, x, self._ops.decodes)
        for chunk in self._ops.chunks:
            add_chunk(self._stack, y, x, chunk)

    def _add_decodes(self, y: Tensor, x: Tensor, rows: _DecodeRows) -> None:
        stack = self._stack
        has_weights = [bool(ranks.any()) for ranks in stack.ranks[rows.slots].T]
        if not any(has_weights):
            return
        padded = x.index_select(0, rows.padded).view(rows.num_slots, -1, x.shape[1])
        shrunk = torch.bmm(padded, stack.a.narrow(0, rows.first_slot, rows.num_slots).transpose(1, 2))
        b = stack.b.narrow(0, rows.first_slot, rows.num_slots)
        for index, columns in enumerate(stack.columns):
            if not has_weights[index]:
                continue
            start = index * stack.max_rank
            added = torch.bmm(shrunk[:, :, start : start + stack.max_rank], b[:, :, columns]).view(len(rows.padded), -1)
            added = added.index_select(0, rows.places)
            if rows.num_leading:
                y[: rows.num_leading, columns].add_(added)
            else:
                y[:, columns].index_add_(0, rows.tokens, added)
