"""States on a CPU in C++ (`state_rows.h`): a decode row's convolution, delta rule and scan change its state in the pool.

A state is read once or twice, and written once, where it is. Chunks are torch operations. A row has the same bits whatever is next
to it, with any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.native.native_library import NATIVE_DTYPES, ConvCall, NativeLibrary, RuleCall, StatePool
from pdserve.kernels.state.causal_conv import CausalConv
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.recurrence import Recurrence
from pdserve.kernels.state.selective_scan import SELECTIVE_SCAN
from pdserve.kernels.state.state_backend import StateBackend, StatePlan

_RULES = {DELTA_RULE: (0, (0, 0, 1)), SELECTIVE_SCAN: (1, (0, 1, 1))}
"""Recurrence -> its number in a call, and which dimension of matrices its tokens' vectors have; decays and further tokens are
numbers, or decays those of each row."""
_DECAY = 3
"""Index of the decays."""
_MAX_TAPS, _MAX_DECAYS = 16, 512
"""As of `state_rows.h`."""


def unsupported_states(kv_cache: Tensor) -> str | None:
    """Say why C++ cannot change states in this cache; None if it can."""
    if kv_cache.device.type != "cpu":
        return f"it needs states in main memory; the device is {str(kv_cache.device)!r}"
    if kv_cache.dtype is not torch.float32:
        return f"it supports states in float32, not {str(kv_cache.dtype).removeprefix('torch.')}"
    return None


class NativeStateBackend(StateBackend):
    """A `StateBackend` whose plans change states in C++."""

    def __init__(self, kv_cache: Tensor, block_size: int, library: NativeLibrary, level: str | None = None) -> None:
        """level: one of `library.levels`; default: the fastest. Raises: ValueError for a cache that C++ cannot read."""
        if reason := unsupported_states(kv_cache):
            raise ValueError(f"native states: {reason}")
        super().__init__(kv_cache, block_size)
        self._native_library = library
        self._level = 0 if level is None else library.levels.index(level)
        self._runs: dict[CausalConv, NDArray[np.int64]] = {}

    def _plan(self, batch: AttentionBatch) -> StatePlan:
        return NativeStatePlan(batch, self._states, self._block_size, self)

    def convolve(self, call: ConvCall) -> None:
        """Write `call.out` and the columns after the step."""
        self._native_library.convolve_states(byref(call), self._level)

    def change(self, call: RuleCall, rule: int) -> None:
        """Write `call.out` and the matrices after the step."""
        self._native_library.change_states(byref(call), rule, self._level)

    def runs_of(self, conv: CausalConv) -> NDArray[np.int64]:
        """`ConvRun` of each head and part, `[n, 5]`, contiguous."""
        if conv not in self._runs:
            self._runs[conv] = _runs_of(conv, self._states.shape[1])
        return self._runs[conv]

    def pool_of(self, blocks: NDArray[np.int64]) -> StatePool:
        """The pool without its layer. blocks: `[2, rows]` before and after the step, -1 for none; held by the caller."""
        _, num_heads, num_layers, head_size = self._states.shape
        return StatePool(
            states=self._states.data_ptr(), num_heads=num_heads, num_layers=num_layers, head_size=head_size,
            before=blocks[0].ctypes.data, after=blocks[1].ctypes.data, num_rows=blocks.shape[1],
            num_threads=torch.get_num_threads(), parallel=self._native_library.parallel,
        )  # fmt: skip


class NativeStatePlan(StatePlan):
    """A `StatePlan` of decode rows in C++, and of chunks, which come after them, in torch operations."""

    def __init__(self, batch: AttentionBatch, states: Tensor, block_size: int, backend: NativeStateBackend) -> None:
        """Raises: ValueError for a block number outside the cache."""
        super().__init__(batch, states, block_size)
        self._backend = backend
        self._num_layers, self._num_tokens = states.shape[2], len(batch.slot_mapping)
        self._chunk_plan = StatePlan(batch, states, block_size, self.num_decodes) if self.chunks else None
        num = self.num_decodes
        # held here, since calls have only addresses
        self._blocks = torch.stack((self._before[:num], self._after[:num])).numpy()
        is_there = self._is_there[:num].numpy()
        used = self._blocks[:, is_there]
        if used.size and not 0 <= used.min() <= used.max() < len(states):
            raise ValueError(f"block_tables names a block outside the cache of {len(states)} blocks")
        self._blocks[0, ~self.has_context[:num].numpy()] = -1
        self._blocks[1, ~is_there] = -1
        self._pool = backend.pool_of(self._blocks)

    def convolve(self, layer: int, conv: CausalConv, columns: Tensor) -> Tensor:
        num, weight, bias = self.num_decodes, conv.weight, conv.bias
        is_readable = (
            columns.dtype in NATIVE_DTYPES
            and weight.dtype is columns.dtype
            and weight.is_contiguous()
            and weight.shape[1] <= _MAX_TAPS
            and (bias is None or (bias.dtype is columns.dtype and bias.is_contiguous()))
        )
        if not num or not is_readable:
            return super().convolve(layer, conv, columns)
        self._check_rows(columns)
        if columns.shape[1] != weight.shape[0]:
            raise ValueError(f"columns {tuple(columns.shape)} in a convolution of {weight.shape[0]} channels")
        columns = columns if columns.stride(1) == 1 else columns.contiguous()
        out = torch.empty(columns.shape, dtype=columns.dtype)
        runs = self._backend.runs_of(conv)
        call = ConvCall(
            pool=self._layer_pool(layer), columns=columns.data_ptr(), columns_stride=columns.stride(0), out=out.data_ptr(),
            out_stride=out.stride(0), weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            dtype=NATIVE_DTYPES[columns.dtype], taps=weight.shape[1], num_channels=weight.shape[0], has_silu=conv.has_silu,
            runs=runs.ctypes.data, num_runs=len(runs),
        )  # fmt: skip
        self._backend.convolve(call)
        if self._chunk_plan is not None:
            out[num:] = self._chunk_plan.convolve(layer, conv, columns[num:])
        return out

    def recur(
        self, layer: int, recurrence: Recurrence, tokens: Sequence[Tensor], first: int, shape: tuple[int, int]
    ) -> Tensor:
        num = self.num_decodes
        if not num or recurrence not in _RULES or tokens[_DECAY].shape[2:].numel() > _MAX_DECAYS:
            return super().recur(layer, recurrence, tokens, first, shape)
        rule, axes = _RULES[recurrence]
        num_heads = self._states.shape[1]
        like = tokens[recurrence.like]
        self._check_rows(like)
        per_head, left = divmod(like.shape[1], num_heads)
        if left or first + per_head * shape[0] * shape[1] > self._states.shape[3]:
            raise ValueError(
                f"{like.shape[1]} matrices {shape} do not fit states {tuple(self._states.shape)} from {first} on"
            )
        sizes = [(*like.shape[:2], shape[axis]) for axis in axes] + [like.shape[:2]] * (len(tokens) - len(axes))
        if recurrence is DELTA_RULE:
            sizes[_DECAY] = (*like.shape[:2], 1 if tokens[_DECAY].shape[-1] == 1 else shape[0])
        if any(each.shape != size or each.dtype is not torch.float32 for each, size in zip(tokens, sizes, strict=True)):
            raise ValueError(f"tokens {[(tuple(each.shape), each.dtype) for each in tokens]} for matrices {shape}")
        held = [each if each.dim() == 2 or each.stride(2) == 1 else each.contiguous() for each in tokens]
        out = torch.empty(like.shape)
        inputs = zip(*((each.data_ptr(), each.stride(0), each.stride(1)) for each in held), strict=True)
        pointers, row_strides, strides = inputs
        call = RuleCall(
            pool=self._layer_pool(layer), first=first, per_head=per_head, matrix_rows=shape[0], matrix_columns=shape[1],
            num_decays=tokens[_DECAY].shape[2:].numel(), inputs=(c_void_p * 5)(*pointers),
            row_strides=(c_int64 * 5)(*row_strides), strides=(c_int64 * 5)(*strides), out=out.data_ptr(),
        )  # fmt: skip
        self._backend.change(call, rule)
        if self._chunk_plan is not None:
            rest = [each[num:] for each in held]
            out[num:] = self._chunk_plan.recur(layer, recurrence, rest, first, shape)
        return out

    def _check_rows(self, tokens: Tensor) -> None:
        if len(tokens) != self._num_tokens:
            raise ValueError(f"tokens of {len(tokens)} rows in a step of {self._num_tokens}")

    def _layer_pool(self, layer: int) -> StatePool:
        """Raises: IndexError."""
        if not 0 <= layer < self._num_layers:
            raise IndexError(f"layer {layer} of {self._num_layers}")
        self._pool.layer = layer
        return self._pool


def _runs_of(conv: CausalConv, num_heads: int) -> NDArray[np.int64]:
    runs, place, first = [], 0, 0
    for part in conv.parts:
        groups = list(range(num_heads)) if part.groups is None else part.groups.tolist()
        for head, group in enumerate(groups):
            is_first = groups.index(group) == head
            runs.append((head, place, first + group * part.num_channels, part.num_channels, is_first))
        place += part.num_channels * (conv.weight.shape[1] - 1)
        first += part.num_channels * (max(groups) + 1)
    return np.array(runs, np.int64)
