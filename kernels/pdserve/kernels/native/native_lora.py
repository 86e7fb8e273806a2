"""LoRA products on a CPU: those of decode rows and short chunks in C++ (`lora_rows.h`), long chunks in torch operations.

A and B of each adapter are read once per step, and in place. The sums of a token are float32, in an order that depends only on the
layer and the adapter's rank: a token has the same bits whatever is next to it, with any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, pointer

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.lora.lora_linear import LoraStack, tokens_by_slot
from pdserve.kernels.lora.torch_lora import LoraChunk, add_chunk, chunks_of
from pdserve.kernels.native.native_library import NATIVE_DTYPES, LoraCall, LoraTokens, NativeLibrary

_MAX_RANK = 512
LONG_CHUNK = 64
"""Tokens of a chunk from which on a matrix product in torch takes less time (docs/performance.md)."""


def unsupported_lora(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why C++ cannot compute the products; None if it can."""
    if device.type != "cpu":
        return f"it needs weights in main memory; the device is {str(device)!r}"
    if dtype not in NATIVE_DTYPES:
        return f"it supports float32 and bfloat16; the model is served in {str(dtype).removeprefix('torch.')}"
    return None


class NativeLoraOps:
    """Implements `LoraOps`."""

    def __init__(self, library: NativeLibrary, level: str | None = None) -> None:
        """level: one of `library.levels`; default: the fastest."""
        self._native_library = library
        self._level = 0 if level is None else library.levels.index(level)
        self._long_chunks: Sequence[LoraChunk] = ()
        self._held: tuple[NDArray[np.int64], ...] = ()
        """Memory to which `_tokens` points."""
        self._tokens = LoraTokens()
        self._num_tokens = 0
        self._num_grouped = 0
        self._shrunk = torch.empty(0)

    @property
    def has_adapters(self) -> bool:
        return self._num_grouped > 0 or bool(self._long_chunks)

    def set_rows(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        self._long_chunks = chunks_of(slots, counts, LONG_CHUNK)
        self._num_tokens = int(counts.sum())
        used, starts, tokens = self._held = tokens_by_slot(slots, counts, LONG_CHUNK)
        self._num_grouped = len(tokens)
        self._tokens = LoraTokens(len(used), used.ctypes.data, starts.ctypes.data, tokens.ctypes.data)
        return self.has_adapters

    def set_any_rows(self) -> bool:
        return False

    def layer(self, stack: LoraStack) -> NativeLoraLayer:
        """Raises: ValueError for weights that C++ cannot read."""
        return NativeLoraLayer(self, stack)

    def add(self, stack: LoraStack, call: LoraCall, y: Tensor, x: Tensor) -> None:
        """See `LoraLayer.add`. call: of the stack."""
        if len(x) != self._num_tokens or len(y) != self._num_tokens:
            raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} in a step of {self._num_tokens} tokens")
        if self._num_grouped:
            if x.stride(1) != 1 or y.stride(1) != 1 or not x.dtype is y.dtype is stack.a.dtype:
                raise ValueError(f"x {x.dtype} {x.stride()}, y {y.dtype} {y.stride()} with weights of {stack.a.dtype}")
            size = self._num_grouped * stack.a.shape[1]
            if self._shrunk.numel() < size:
                self._shrunk = torch.empty(size)
            call.x, call.x_stride, call.y, call.y_stride = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
            call.shrunk, call.tokens, call.num_threads = (
                self._shrunk.data_ptr(),
                pointer(self._tokens),
                torch.get_num_threads(),
            )
            call.parallel = self._native_library.parallel
            self._native_library.add_lora(byref(call), self._level)
        for chunk in self._long_chunks:
            add_chunk(stack, y, x, chunk)


class NativeLoraLayer:
    """Implements `LoraLayer`."""

    def __init__(self, ops: NativeLoraOps, stack: LoraStack) -> None:
        """Raises: ValueError for weights that C++ cannot read."""
        if reason := unsupported_lora(stack.a.dtype, stack.a.device):
            raise ValueError(f"LoRA in C++: {reason}")
        if stack.max_rank > _MAX_RANK:
            raise ValueError(f"LoRA in C++: max_rank is {stack.max_rank}, at most {_MAX_RANK}")
        self._ops = ops
        self._stack = stack
        self._ends = np.array(stack.ends, np.int64)
        self._call = LoraCall(
            a=stack.a.data_ptr(), b=stack.b.data_ptr(), dtype=NATIVE_DTYPES[stack.a.dtype], in_size=stack.a.shape[2],
            out_size=stack.b.shape[2], num_products=len(stack.ends), max_rank=stack.max_rank,
            column_ends=self._ends.ctypes.data, ranks=stack.ranks.ctypes.data,
        )  # fmt: skip

    def add(self, y: Tensor, x: Tensor) -> None:
        self._ops.add(self._stack, self._call, y, x)
