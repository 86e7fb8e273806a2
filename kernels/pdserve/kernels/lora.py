"""LoRA beside linear layers: `y = x W^T + x A^T B`, with the adapter of each token.

Adapters are in slots: a layer has the matrices of all slots in two tensors, and a step names a slot per token. Tokens of decode
rows are multiplied together, padded per slot to the same number of rows; a chunk of a prompt is multiplied by itself, where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.linear import Linear

NO_ADAPTER = -1
"""Slot of a row without an adapter."""


@dataclass(frozen=True, slots=True)
class LoraChunk:
    """Adjacent tokens of one sequence."""

    start: int
    end: int
    slot: int


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The tokens of a step that have an adapter."""

    slots: frozenset[int]
    chunks: tuple[LoraChunk, ...]
    first_slot: int
    num_slots: int
    """Slots from the lowest to the highest of the decode rows; 0 without such rows."""
    padded: Tensor
    """`[num_slots * n]` int64: per slot its n tokens; a place without one repeats any token."""
    places: Tensor
    """`[K]` int64: place in `padded` of each of `tokens`."""
    tokens: Tensor
    """`[K]` int64: decode rows with an adapter, ascending."""
    num_leading: int
    """K if `tokens` are the step's first K tokens, else 0: to them a product is added without an index, in a sixth of the time."""

    @classmethod
    def of_step(cls, slots: NDArray[np.int64], counts: NDArray[np.int64], device: torch.device) -> LoraRows | None:
        """slots `[S]`: of each row, or `NO_ADAPTER`; counts `[S]`: tokens of each row, single ones first. None: no row has one."""
        if not (slots >= 0).any():
            return None
        num_decodes = int(np.count_nonzero(counts == 1))
        ends = np.cumsum(counts)
        chunks = tuple(
            LoraChunk(int(ends[row] - counts[row]), int(ends[row]), int(slots[row]))
            for row in range(num_decodes, len(slots))
            if slots[row] >= 0
        )
        padded, places, tokens, first, num = _groups(slots[:num_decodes])
        used = frozenset(int(slot) for slot in np.unique(slots) if slot >= 0)
        num_leading = len(tokens) if len(tokens) == num_decodes else 0
        padded_there, places_there, tokens_there = (
            torch.from_numpy(array).to(device) for array in (padded, places, tokens)
        )
        return cls(used, chunks, first, num, padded_there, places_there, tokens_there, num_leading)


def _groups(slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int, int]:
    """Padded tokens, places and tokens of `LoraRows`, the first slot, and the number of slots. slots: of each decode row."""
    tokens = np.flatnonzero(slots >= 0)
    if not len(tokens):
        return tokens, tokens, tokens, 0, 0
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
    return padded, places[ascending], tokens[ascending], first, len(sizes)


class LoraStep:
    """The step under way, shared by the layers of a model. The runner sets `rows` before each forward pass."""

    def __init__(self) -> None:
        self.rows: LoraRows | None = None
        """None: no token has an adapter."""


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """One adapter's part of a product: `x A^T B` is added to its output."""

    a: Tensor
    """`[r, in]`."""
    b: Tensor
    """`[r, out]`, with the adapter's scale."""


class LoraLinear:
    """A `Linear` whose output is that of several products side by side, each with adapters."""

    def __init__(
        self,
        inner: Linear,
        step: LoraStep,
        in_size: int,
        out_sizes: Sequence[int],
        *,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """out_sizes: of the products. max_loras: slots. max_rank: largest r."""
        self._inner = inner
        self._step = step
        self._max_rank = max_rank
        shape = (max_loras, len(out_sizes) * max_rank, in_size)
        self._a = torch.zeros(shape, dtype=dtype, device=device)
        self._b = [torch.zeros((max_loras, max_rank, size), dtype=dtype, device=device) for size in out_sizes]
        ends = np.cumsum(out_sizes).tolist()
        self._columns = [slice(end - size, end) for size, end in zip(out_sizes, ends, strict=True)]
        self._with_weights: list[set[int]] = [set() for _ in out_sizes]
        """Per product: slots whose adapter has matrices for it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._a.nbytes + sum(b.nbytes for b in self._b)

    def put(self, slot: int, products: Mapping[int, LoraMatrices]) -> None:
        """Replace a slot's adapter. products: index of a product -> its matrices; others add nothing.

        On a device this is ordered after the steps that were queued before.
        """
        self._a[slot].zero_()
        for index, b in enumerate(self._b):
            b[slot].zero_()
            self._with_weights[index].discard(slot)
        for index, matrices in products.items():
            rank, start = len(matrices.a), index * self._max_rank
            self._a[slot, start : start + rank].copy_(matrices.a, non_blocking=True)
            self._b[index][slot, :rank].copy_(matrices.b, non_blocking=True)
            self._with_weights[index].add(slot)

    def __call__(self, x: Tensor) -> Tensor:
        return self._with_adapters(self._inner(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._with_adapters(self._inner.add_to(residual, x), x)

    def _with_adapters(self, y: Tensor, x: Tensor) -> Tensor:
        """y `[T, out]`, changed in place; x `[T, in]`."""
        rows = self._step.rows
        if rows is None:
            return y
        products = [index for index, slots in enumerate(self._with_weights) if not slots.isdisjoint(rows.slots)]
        if not products:
            return y
        if rows.num_slots:
            self._add_decodes(y, x, rows, products)
        for chunk in rows.chunks:
            self._add_chunk(y[chunk.start : chunk.end], x[chunk.start : chunk.end], chunk.slot, products)
        return y

    def _add_decodes(self, y: Tensor, x: Tensor, rows: LoraRows, products: Sequence[int]) -> None:
        padded = x.index_select(0, rows.padded).view(rows.num_slots, -1, x.shape[1])
        shrunk = torch.bmm(padded, self._a.narrow(0, rows.first_slot, rows.num_slots).transpose(1, 2))
        for index in products:
            b = self._b[index].narrow(0, rows.first_slot, rows.num_slots)
            start = index * self._max_rank
            added = torch.bmm(shrunk[:, :, start : start + self._max_rank], b).view(len(rows.padded), -1)
            added = added.index_select(0, rows.places)
            if rows.num_leading:
                y[: rows.num_leading, self._columns[index]].add_(added)
            else:
                y[:, self._columns[index]].index_add_(0, rows.tokens, added)

    def _add_chunk(self, y: Tensor, x: Tensor, slot: int, products: Sequence[int]) -> None:
        shrunk = x @ self._a[slot].t()
        for index in products:
            if slot in self._with_weights[index]:
                start = index * self._max_rank
                columns = self._columns[index]
                y[:, columns].addmm_(shrunk[:, start : start + self._max_rank], self._b[index][slot])
