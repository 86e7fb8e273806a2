"""`InPlacePlan`: what plans have in common that change states in the pool."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.state.causal_conv import CausalConv
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.recurrence import Recurrence
from pdserve.kernels.state.selective_scan import SELECTIVE_SCAN
from pdserve.kernels.state.state_backend import StatePlan

_DECAYS = 3
"""Index of decays, or of the rates that make them, among the tokens of each rule that such plans know."""


def num_decays(tokens: Sequence[Tensor]) -> int:
    """Decays of a matrix. tokens: of a rule that such plans know."""
    return tokens[_DECAYS].shape[2:].numel()


def _sizes(recurrence: Recurrence, has_one_decay: bool, rows: int, columns: int) -> list[tuple[int, ...]]:
    """What each tensor of tokens has of a matrix."""
    if recurrence == DELTA_RULE:
        return [(rows,), (rows,), (columns,), (1,) if has_one_decay else (rows,), ()]
    rates, steps = ((1, 1), (1,)) if has_one_decay else ((rows, columns), (rows,))
    return [(rows,), (columns,), (columns,), rates, steps]


def _is_dense(tokens: Tensor, size: tuple[int, ...]) -> bool:
    """What tokens have of a matrix, numbers of `size`, is adjacent."""
    return tokens.stride()[2:] == (*size[1:], 1)[: len(size)]


class InPlacePlan(StatePlan, abc.ABC):
    """A `StatePlan` whose decode rows, and after them chunks, go through kernels of their own."""

    def __init__(self, batch: AttentionBatch, states: Tensor, block_size: int) -> None:
        super().__init__(batch, states, block_size)
        self._num_tokens = len(batch.slot_mapping)
        is_written = torch.ones_like(self.has_context)
        if self._written is not None:
            is_written = torch.zeros_like(is_written).index_fill_(0, self._written, True)
        self._is_used = torch.stack((self.has_context, is_written))
        """`[2, B]`: the sequence has a state before the step, and the step writes the one after it."""
        self._blocks = torch.stack((self._before, self._after)).masked_fill_(~self._is_used, -1)
        """`[2, B]` int64: blocks of the states before and after the step; -1: none before, or none is written."""

    @abc.abstractmethod
    def _can_convolve(self, conv: CausalConv, columns: Tensor) -> bool:
        """Whether kernels read these numbers; else torch operations convolve."""

    def _can_recur(self, recurrence: Recurrence, tokens: Sequence[Tensor]) -> bool:
        """Whether kernels know the rule, and read these tokens; else torch operations follow it."""
        return recurrence in (DELTA_RULE, SELECTIVE_SCAN)

    @abc.abstractmethod
    def _convolve(self, layer: int, conv: CausalConv, columns: Tensor, out: Tensor) -> None:
        """`convolve`, into out. Numbers of a row are adjacent in both."""

    @abc.abstractmethod
    def _recur(
        self,
        layer: int,
        recurrence: Recurrence,
        tokens: Sequence[Tensor],
        first: int,
        shape: tuple[int, int],
        out: Tensor,
    ) -> None:
        """`recur`, into out, contiguous. What tokens have of a matrix is adjacent."""

    def convolve(self, layer: int, conv: CausalConv, columns: Tensor) -> Tensor:
        if not self._can_convolve(conv, columns):
            return super().convolve(layer, conv, columns)
        self._check(layer, columns)
        if columns.shape[1] != conv.weight.shape[0]:
            raise ValueError(f"columns {tuple(columns.shape)} in a convolution of {conv.weight.shape[0]} channels")
        columns = columns if columns.stride(1) == 1 else columns.contiguous()
        out = torch.empty(columns.shape, dtype=columns.dtype, device=columns.device)
        self._convolve(layer, conv, columns, out)
        return out

    def recur(
        self, layer: int, recurrence: Recurrence, tokens: Sequence[Tensor], first: int, shape: tuple[int, int]
    ) -> Tensor:
        if not self._can_recur(recurrence, tokens):
            return super().recur(layer, recurrence, tokens, first, shape)
        like = tokens[recurrence.like]
        self._check(layer, like)
        per_head, left = divmod(like.shape[1], self._states.shape[1])
        if left or first + per_head * shape[0] * shape[1] > self._states.shape[3]:
            raise ValueError(
                f"{like.shape[1]} matrices {shape} do not fit states {tuple(self._states.shape)} from {first} on"
            )
        sizes = _sizes(recurrence, num_decays(tokens) == 1, *shape)
        if any(
            each.shape != (*like.shape[:2], *size) or each.dtype is not torch.float32
            for each, size in zip(tokens, sizes, strict=True)
        ):
            raise ValueError(f"tokens {[(tuple(each.shape), each.dtype) for each in tokens]} for matrices {shape}")
        tokens = [
            each if _is_dense(each, size) else each.contiguous() for each, size in zip(tokens, sizes, strict=True)
        ]
        out = torch.empty(like.shape, device=like.device)
        self._recur(layer, recurrence, tokens, first, shape, out)
        return out

    def _check(self, layer: int, tokens: Tensor) -> None:
        """Raises: IndexError, ValueError."""
        if not 0 <= layer < self._states.shape[2]:
            raise IndexError(f"layer {layer} of {self._states.shape[2]}")
        if len(tokens) != self._num_tokens:
            raise ValueError(f"tokens of {len(tokens)} rows in a step of {self._num_tokens}")
