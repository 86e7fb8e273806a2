"""LoRA for linear layers: `y = x W^T + x A^T B`, with the adapter of each token.

Adapters are in slots: a layer has the matrices of all slots in two tensors, and a step names a slot per token. `LoraOps` computes
the products: in torch operations (`torch_lora.py`, the reference), in C++ on a CPU (`native/native_lora.py`) or in Triton
kernels (`triton/lora_ops.py`). `make_lora_ops.py` chooses. `tests/kernels/lora_contract.py` is the contract suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear

NO_ADAPTER = -1
"""Slot of a row without an adapter."""


def tokens_by_slot(
    slots: NDArray[np.int64], counts: NDArray[np.int64], end: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of the rows that have an adapter and fewer than `end` tokens, sorted by slot.

    slots, counts: see `LoraOps.set_rows` -> the G different slots, ascending; `[G + 1]`: where the tokens of each begin, and their
    number; `[K]` tokens.
    """
    of_token = np.repeat(np.where(counts < end, slots, NO_ADAPTER), counts)
    tokens = np.flatnonzero(of_token >= 0)
    tokens = tokens[np.argsort(of_token[tokens], kind="stable")]
    used, firsts = np.unique(of_token[tokens], return_index=True)
    return used, np.append(firsts, len(tokens)), tokens


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """One adapter's part of a product: `x A^T B` is added to its output."""

    a: Tensor
    """`[r, in]`."""
    b: Tensor
    """`[r, out]`, with the adapter's scale."""


class LoraStack:
    """The matrices of all slots for one layer, whose output is that of P products side by side."""

    def __init__(
        self,
        in_size: int,
        out_sizes: Sequence[int],
        *,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """out_sizes: of the products. max_loras: slots. max_rank: largest r."""
        self.max_rank = max_rank
        self.a = torch.zeros((max_loras, len(out_sizes) * max_rank, in_size), dtype=dtype, device=device)
        """`[slots, P * max_rank, in]`: the products' matrices one below the other."""
        self.b = torch.zeros((max_loras, max_rank, sum(out_sizes)), dtype=dtype, device=device)
        """`[slots, max_rank, out]`: the products' matrices side by side."""
        self.ends: tuple[int, ...] = tuple(np.cumsum(out_sizes).tolist())
        """Per product: the end of its columns in `b` and in the output."""
        self.columns = [slice(end - size, end) for size, end in zip(out_sizes, self.ends, strict=True)]
        self.ranks = np.zeros((max_loras, len(out_sizes)), np.int64)
        """`[slots, P]`: rank of the slot's adapter, 0 where it has no matrices; the rows after it are 0."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.a.nbytes + self.b.nbytes

    def put(self, slot: int, products: Mapping[int, LoraMatrices]) -> None:
        """Replace a slot's adapter. products: index of a product -> its matrices; others add nothing.

        On a device this is ordered after the steps that were queued before.
        """
        self.a[slot].zero_()
        self.b[slot].zero_()
        self.ranks[slot] = 0
        for index, matrices in products.items():
            rank, start = len(matrices.a), index * self.max_rank
            self.a[slot, start : start + rank].copy_(matrices.a, non_blocking=True)
            self.b[slot, :rank, self.columns[index]].copy_(matrices.b, non_blocking=True)
            self.ranks[slot, index] = rank


class LoraLayer(Protocol):
    """The products of one layer with the adapters of the step."""

    def add(self, y: Tensor, x: Tensor) -> None:
        """`y[t] += x[t] A^T B` with the matrices of token t's slot; y `[T, out]`, x `[T, in]`, of the stack's dtype.

        Tokens without an adapter keep their bits. A decode row has the same bits whatever the other rows' adapters are, if it
        shares its own with as many rows. Called only in steps for which `set_rows` returned True.
        """


class LoraOps(Protocol):
    """Computes the products of one model on one device; shared by its layers."""

    @property
    def has_adapters(self) -> bool:
        """True if a row of the step has an adapter, and during captures."""

    def set_rows(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        """Prepare a step and return `has_adapters`.

        slots `[S]`: of each row, or `NO_ADAPTER`; counts `[S]`: tokens of each row, single ones first.
        """

    def set_any_rows(self) -> bool:
        """Prepare captures: `add` launches the products of whatever rows a later `set_rows` names. False if that is not possible.

        Until the next `set_rows` no row has an adapter.
        """

    def layer(self, stack: LoraStack) -> LoraLayer:
        """The products of one layer."""


class LoraLinear:
    """A `Linear` whose output is that of several products side by side, each with adapters."""

    def __init__(self, inner: Linear, ops: LoraOps, stack: LoraStack) -> None:
        """ops: shared by all layers of the model."""
        self.stack = stack
        self._inner = inner
        self._ops = ops
        self._layer = ops.layer(stack)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._inner(x)
        if self._ops.has_adapters:
            self._layer.add(y, x)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        y = self._inner.add_to(residual, x)
        if self._ops.has_adapters:
            self._layer.add(y, x)
        return y
