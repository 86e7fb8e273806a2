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

_VECTORS = {DELTA_RULE: (0, 0, 1), SELECTIVE_SCAN: (0, 1, 1)}
"""Rules that such plans know -> which dimension of a matrix each vector of a token has; further tensors of tokens are numbers of a
matrix, `[T, M]` or `[T, M, 1]`."""


class InPlacePlan(StatePlan, abc.ABC):
    """A `StatePlan` of decode rows in kernels, and of chunks, which come after them, in torch operations."""

    def __init__(self, batch: AttentionBatch, states: Tensor, block_size: int) -> None:
        super().__init__(batch, states, block_size)
        num = self.num_decodes
        self._num_tokens = len(batch.slot_mapping)
        self._chunk_plan = StatePlan(batch, states, block_size, num) if self.chunks else None
        self._is_used = torch.stack((self.has_context[:num], self._is_there[:num]))
        """`[2, num_decodes]`: the sequence has a state before the step, and after it."""
        self._blocks = torch.stack((self._before[:num], self._after[:num])).masked_fill_(~self._is_used, -1)
        """`[2, num_decodes]` int64: blocks of the states before and after the step; -1: none before, or padding."""

    @abc.abstractmethod
    def _can_convolve(self, conv: CausalConv, columns: Tensor) -> bool:
        """Whether kernels read these numbers; else torch operations convolve."""

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
        """`recur` for the decode rows, into the first rows of out, contiguous. Numbers of a token's vector are adjacent."""

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
        num, vectors = self.num_decodes, _VECTORS.get(recurrence)
        # a decay per channel is not one of those numbers
        if not num or vectors is None or any(each.dim() == 3 and each.shape[2] != 1 for each in tokens[len(vectors) :]):
            return super().recur(layer, recurrence, tokens, first, shape)
        like = tokens[recurrence.like]
        self._check(layer, like)
        per_head, left = divmod(like.shape[1], self._states.shape[1])
        if left or first + per_head * shape[0] * shape[1] > self._states.shape[3]:
            raise ValueError(
                f"{like.shape[1]} matrices {shape} do not fit states {tuple(self._states.shape)} from {first} on"
            )
        flat = [*tokens[: len(vectors)], *(each.flatten(1) for each in tokens[len(vectors) :])]
        sizes = [(*like.shape[:2], shape[axis]) for axis in vectors] + [like.shape[:2]] * (len(tokens) - len(vectors))
        if any(each.shape != size or each.dtype is not torch.float32 for each, size in zip(flat, sizes, strict=True)):
            raise ValueError(f"tokens {[(tuple(each.shape), each.dtype) for each in tokens]} for matrices {shape}")
        flat = [each if each.dim() == 2 or each.stride(2) == 1 else each.contiguous() for each in flat]
        out = torch.empty(like.shape, device=like.device)
        self._recur_rows(layer, recurrence, flat, first, shape, out)
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
