"""`TritonLoraOps`: LoRA products of decode rows and short chunks in Triton kernels, of long chunks in torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.lora.lora_linear import LoraStack, tokens_by_slot
from pdserve.kernels.lora.torch_lora import LoraChunk, add_chunk, chunks_of
from pdserve.kernels.triton.launch_configs import LaunchConfigs, launch_configs
from pdserve.kernels.triton.lora_products import add_lora, column_tiles

LONG_CHUNK = 16
"""Tokens of a chunk from which on a matrix product in torch is taken; not measured."""


class TritonLoraOps:
    """Implements `LoraOps` for one device. In Triton's interpreter also for CPUs, for tests."""

    def __init__(
        self, device: torch.device, max_loras: int, max_tokens: int, configs: LaunchConfigs | None = None
    ) -> None:
        """max_tokens: of one step. configs: default: the device's row of the table."""
        self.configs = configs or launch_configs(device)
        self._max_loras = max_loras
        # at the same address in all steps, as a captured graph needs it
        self._lists = torch.zeros(max_loras + 1 + max_tokens, dtype=torch.int32, device=device)
        self._chunks: Sequence[LoraChunk] = ()
        self._is_launched = False

    @property
    def has_adapters(self) -> bool:
        return self._is_launched or bool(self._chunks)

    def set_rows(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        used, starts, tokens = tokens_by_slot(slots, counts, LONG_CHUNK)
        self._chunks = chunks_of(slots, counts, LONG_CHUNK)
        self._is_launched = len(tokens) > 0
        if self._is_launched:
            sizes = np.zeros(self._max_loras + 1, np.int32)
            sizes[used + 1] = np.diff(starts)
            lists = np.concatenate((np.cumsum(sizes, dtype=np.int32), tokens.astype(np.int32)))
            # nothing waits: memory that is not pinned is copied aside before the call returns
            self._lists[: len(lists)].copy_(torch.from_numpy(lists), non_blocking=True)
        return self.has_adapters

    def set_any_rows(self) -> bool:
        self._chunks, self._is_launched = (), True
        self._lists[: self._max_loras + 1].zero_()
        return True

    def layer(self, stack: LoraStack) -> TritonLoraLayer:
        return TritonLoraLayer(self, stack)

    def add(self, stack: LoraStack, tiles: Tensor, y: Tensor, x: Tensor) -> None:
        """See `LoraLayer.add`. tiles: of the stack."""
        if self._is_launched:
            starts, tokens = self._lists[: self._max_loras + 1], self._lists[self._max_loras + 1 :]
            add_lora(y, x, stack, tiles, tokens, starts, self.configs)
        for chunk in self._chunks:
            add_chunk(stack, y, x, chunk)


class TritonLoraLayer:
    """Implements `LoraLayer`."""

    def __init__(self, ops: TritonLoraOps, stack: LoraStack) -> None:
        self._ops = ops
        self._stack = stack
        self._tiles = column_tiles(stack, ops.configs)

    def add(self, y: Tensor, x: Tensor) -> None:
        self._ops.add(self._stack, self._tiles, y, x)
