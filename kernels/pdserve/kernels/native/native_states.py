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
from pdserve.kernels.state.column_runs import column_runs
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.in_place_plan import InPlacePlan, num_decays
from pdserve.kernels.state.recurrence import Recurrence
from pdserve.kernels.state.selective_scan import SELECTIVE_SCAN
from pdserve.kernels.state.state_backend import StateBackend, StatePlan

_RULES = {DELTA_RULE: 0, SELECTIVE_SCAN: 1}
"""Recurrence -> its number in a call."""
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
        """`ConvRun` of each head and part, contiguous."""
        if conv not in self._runs:
            self._runs[conv] = column_runs(conv, self._states.shape[1])
        return self._runs[conv]

    def pool_of(self, blocks: Tensor) -> StatePool:
        """The pool without its layer. blocks: `[2, rows]` before and after the step, -1 for none; held by the caller."""
        _, num_heads, num_layers, head_size = self._states.shape
        return StatePool(
            states=self._states.data_ptr(), num_heads=num_heads, num_layers=num_layers, head_size=head_size,
            before=blocks[0].data_ptr(), after=blocks[1].data_ptr(), num_rows=blocks.shape[1],
            num_threads=torch.get_num_threads(), parallel=self._native_library.parallel,
        )  # fmt: skip


class NativeStatePlan(InPlacePlan):
    """Decode rows in C++, and chunks in torch operations; steps without decode rows are torch operations."""

    def __init__(self, batch: AttentionBatch, states: Tensor, block_size: int, backend: NativeStateBackend) -> None:
        """Raises: ValueError for a block number outside the cache."""
        super().__init__(batch, states, block_size)
        is_inside = (self._blocks >= 0) & (self._blocks < len(states))
        if not torch.equal(is_inside, self._is_used):
            raise ValueError(f"block_tables names a block outside the cache of {len(states)} blocks")
        self._backend = backend
        num = self.num_decodes
        self._pool = backend.pool_of(self._blocks[:, :num])
        self._chunk_plan = StatePlan(batch, states, block_size, num) if num and self.chunks else None

    def _of(self, batch: AttentionBatch) -> StatePlan:
        return NativeStatePlan(batch, self._states, self._block_size, self._backend)

    def _can_convolve(self, conv: CausalConv, columns: Tensor) -> bool:
        weight, bias = conv.weight, conv.bias
        return (
            self.num_decodes > 0
            and columns.dtype in NATIVE_DTYPES
            and weight.dtype is columns.dtype
            and weight.is_contiguous()
            and weight.shape[1] <= _MAX_TAPS
            and (bias is None or (bias.dtype is columns.dtype and bias.is_contiguous()))
        )

    def _convolve(self, layer: int, conv: CausalConv, columns: Tensor, out: Tensor) -> None:
        weight, runs = conv.weight, self._backend.runs_of(conv)
        self._pool.layer = layer
        call = ConvCall(
            pool=self._pool, columns=columns.data_ptr(), columns_stride=columns.stride(0), out=out.data_ptr(),
            out_stride=out.stride(0), weight=weight.data_ptr(), bias=None if conv.bias is None else conv.bias.data_ptr(),
            dtype=NATIVE_DTYPES[columns.dtype], taps=weight.shape[1], num_channels=weight.shape[0], has_silu=conv.has_silu,
            runs=runs.ctypes.data, num_runs=len(runs),
        )  # fmt: skip
        self._backend.convolve(call)
        if self._chunk_plan is not None:
            num = self.num_decodes
            out[num:] = self._chunk_plan.convolve(layer, conv, columns[num:])

    def _can_recur(self, recurrence: Recurrence, tokens: Sequence[Tensor]) -> bool:
        if not self.num_decodes or not super()._can_recur(recurrence, tokens):
            return False
        return recurrence == SELECTIVE_SCAN or num_decays(tokens) <= _MAX_DECAYS

    def _recur(
        self,
        layer: int,
        recurrence: Recurrence,
        tokens: Sequence[Tensor],
        first: int,
        shape: tuple[int, int],
        out: Tensor,
    ) -> None:
        self._pool.layer = layer
        call = RuleCall(
            pool=self._pool, first=first, per_head=out.shape[1] // self._states.shape[1], matrix_rows=shape[0],
            matrix_columns=shape[1], num_decays=num_decays(tokens), inputs=(c_void_p * 5)(*(each.data_ptr() for each in tokens)),
            row_strides=(c_int64 * 5)(*(each.stride(0) for each in tokens)),
            strides=(c_int64 * 5)(*(each.stride(1) for each in tokens)), out=out.data_ptr(),
        )  # fmt: skip
        self._backend.change(call, _RULES[recurrence])
        if self._chunk_plan is not None:
            num = self.num_decodes
            rest = [each[num:] for each in tokens]
            out[num:] = self._chunk_plan.recur(layer, recurrence, rest, first, shape)
