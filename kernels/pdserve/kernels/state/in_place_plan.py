"""`InPlacePlan`: what plans have in common that change the states of decode rows in the pool."""

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
    """A `StatePlan` of decode rows in kernels, and of chunks, which come after them, in torch operations."""

    def __init__(self, batch: AttentionBatch, states: Tensor, block_size: int) -> None:
        super().__init__(batch, states, block_size)
        num = self.num_decodes
        self._num_tokens = len(batch.slot_mapping)
        self._chunk_plan = StatePlan(batch, states, block_size, num) if self.chunks else None
        self._is_used = torch.stack((self.has_context[:num], batch.seq_lens[:num] > 0))
        """`[2, num_decodes]`: the sequence has a state before the step, and after it."""
        self._blocks = torch.stack((self._before[:num], self._after[:num])).masked_fill_(~self._is_used, -1)
        """`[2, num_decodes]` int64: blocks of the states before and after the step; -1: none before, or padding."""

    @abc.abstractmethod
    def _can_convolve(self, conv: CausalConv, columns: Tensor) -> bool:
        """Whether kernels read these numbers; else torch operations convolve."""

    def _can_recur(self, recurrence: Recurrence, tokens: Sequence[Tensor]) -> bool:
        """Whether kernels know the rule, and read these tokens; else torch operations follow it."""
        return recurrence in (DELTA_RULE, SELECTIVE_SCAN)

    @abc.abstractmethod
    def _convolve_rows(self, layer: int, conv: CausalConv, columns: Tensor, out: Tensor) -> None:
        """`convolve` for the decode rows, into the first rows of out. Numbers of a row are adjacent in both."""

    @abc.abstractmethod
    def _recur_rows(
        self,
        layer: int,
        recurrence: Recurrence,
        tokens: Sequence[Tensor],
        first: int,
        shape: tuple[int, int],
        out: Tensor,
    ) -> None:
        """`recur` for the decode rows, into the first rows of out, contiguous. What tokens have of a matrix is adjacent."""

    def convolve(self, layer: int, conv: CausalConv, columns: Tensor) -> Tensor:
        num = self.num_decodes
        if not num or not self._can_convolve(conv, columns):
            return super().convolve(layer, conv, columns)
        self._check(layer, columns)
        if columns.shape[1] != conv.weight.shape[0]:
            raise ValueError(f"columns {tuple(columns.shape)} in a convolution of {conv.weight.shape[0]} channels")
        columns = columns if columns.stride(1) == 1 else columns.contiguous()
        out = torch.empty(columns.shape, dtype=columns.dtype, device=columns.device)
        self._convolve_rows(layer, conv, columns, out)
        if self._chunk_plan is not None:
            out[num:] = self._chunk_plan.convolve(layer, conv, columns[num:])
        return out

    def recur(
        self, layer: int, recurrence: Recurrence, tokens: Sequence[Tensor], first: int, shape: tuple[int, int]
    ) -> Tensor:
        num = self.num_decodes
        if not num or not self._can_recur(recurrence, tokens):
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
        self._recur_rows(layer, recurrence, tokens, first, shape, out)
        if self._chunk_plan is not None:
            rest = [each[num:] for each in tokens]
            out[num:] = self._chunk_plan.recur(layer, recurrence, rest, first, shape)
        return out

    def _check(self, layer: int, tokens: Tensor) -> None:
        """Raises: IndexError, ValueError."""
        if not 0 <= layer < self._states.shape[2]:
            raise IndexError(f"layer {layer} of {self._states.shape[2]}")
        if len(tokens) != self._num_tokens:
            raise ValueError(f"tokens of {len(tokens)} rows in a step of {self._num_tokens}")
