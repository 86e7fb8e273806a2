"""States in Triton kernels: decode rows and chunks change their states in the pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.state.causal_conv import CausalConv
from pdserve.kernels.state.column_runs import column_runs
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.in_place_plan import InPlacePlan, num_decays
from pdserve.kernels.state.recurrence import Recurrence
from pdserve.kernels.state.state_backend import StateBackend, StatePlan
from pdserve.kernels.triton.launch_configs import LaunchConfigs, launch_configs
from pdserve.kernels.triton.pooled_states import PooledMatrices, PooledStates
from pdserve.kernels.triton.state_chunks import delta_chunks, scan_chunks
from pdserve.kernels.triton.state_columns import convolve
from pdserve.kernels.triton.state_steps import delta_rows, scan_rows


class TritonStateBackend(StateBackend):
    """A `StateBackend` whose plans launch kernels. In Triton's interpreter also for CPUs, for tests."""

    def __init__(self, kv_cache: Tensor, block_size: int, configs: LaunchConfigs | None = None) -> None:
        """configs: default: the device's row of the table."""
        super().__init__(kv_cache, block_size)
        self.configs = configs or launch_configs(kv_cache.device)
        self._runs: dict[CausalConv, Tensor] = {}

    def _plan(self, batch: AttentionBatch) -> StatePlan:
        return TritonStatePlan(batch, self._states, self._block_size, self)

    def runs_of(self, conv: CausalConv) -> Tensor:
        """`column_runs` on the device."""
        if conv not in self._runs:
            self._runs[conv] = torch.from_numpy(column_runs(conv, self._states.shape[1])).to(self._states.device)
        return self._runs[conv]


class TritonStatePlan(InPlacePlan):
    """Launches of its own for decode rows and for chunks."""

    def __init__(self, batch: AttentionBatch, states: Tensor, block_size: int, backend: TritonStateBackend) -> None:
        super().__init__(batch, states, block_size)
        self._backend = backend

    def _of(self, batch: AttentionBatch) -> StatePlan:
        return TritonStatePlan(batch, self._states, self._block_size, self._backend)

    def _pooled(self, layer: int) -> PooledStates:
        starts, longest = self._batch.query_start_loc, self._batch.max_query_len
        return PooledStates(self._states, self._blocks, starts, self.num_decodes, longest, layer)

    def _can_convolve(self, conv: CausalConv, columns: Tensor) -> bool:
        return conv.weight.is_contiguous()

    def _convolve(self, layer: int, conv: CausalConv, columns: Tensor, out: Tensor) -> None:
        convolve(self._pooled(layer), conv, self._backend.runs_of(conv), columns, out, self._backend.configs)

    def _can_recur(self, recurrence: Recurrence, tokens: Sequence[Tensor]) -> bool:
        # for chunks the scan has one decay per matrix
        has_kernels = recurrence == DELTA_RULE or not self.chunks or num_decays(tokens) == 1
        return has_kernels and super()._can_recur(recurrence, tokens)

    def _recur(
        self,
        layer: int,
        recurrence: Recurrence,
        tokens: Sequence[Tensor],
        first: int,
        shape: tuple[int, int],
        out: Tensor,
    ) -> None:
        of_rows, of_chunks = (delta_rows, delta_chunks) if recurrence == DELTA_RULE else (scan_rows, scan_chunks)
        matrices = PooledMatrices(self._pooled(layer), first, shape)
        if self.num_decodes:
            of_rows(matrices, tokens, out, self._backend.configs)
        if self.chunks:
            of_chunks(matrices, tokens, out, self._backend.configs)
