"""`StateBackend` and `StatePlan`: the states of a step's sequences in the cache.

A block of a state group holds the state of one sequence after the last token that the block's place covers. A step reads the state
before its first token from the block at that token's predecessor, and writes the one after its last token to the block at that
token; the two may be the same block, or the first may belong to other sequences too, and to the prefix cache.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.state.state_spec import StateSpec


class StatePlan:
    """One step's batch, for all layers of one spec. Valid until the next step's `plan`."""

    def __init__(self, batch: AttentionBatch, states: Tensor, block_size: int) -> None:
        self.num_decodes = batch.num_decodes
        """Sequences `0..num_decodes - 1` have one token each."""
        starts: list[int] = batch.query_start_loc_cpu.tolist()
        self.chunks = list(pairwise(starts))[batch.num_decodes :]
        """(first row, row after the last) of each further sequence."""
        self._states = states
        lens = torch.diff(batch.query_start_loc)
        seq_lens = batch.seq_lens
        context = seq_lens - lens
        self.has_context = context > 0
        """`[B]`: the sequence has tokens before this step's."""
        tables = batch.block_tables
        before = (context - 1).clamp_(min=0) // block_size
        after = (seq_lens - 1).clamp_(min=0) // block_size
        self._before = tables.gather(1, before.unsqueeze(1)).squeeze(1)
        self._after = tables.gather(1, after.unsqueeze(1)).squeeze(1)
        self._is_there = seq_lens > 0

    def read(self, layer: int) -> Tensor:
        """The states before the step `[B, H, N]`, zeros for sequences without context."""
        found = self._states[self._before, :, layer]
        # what an earlier owner left may not be finite
        return torch.where(self.has_context.view(-1, 1, 1), found, found.new_zeros(()))

    def write(self, layer: int, states: Tensor) -> None:
        """Store the states after the step `[B, H, N]`; padding writes nothing."""
        if self._is_padded:
            self._states[self._after[self._is_there], :, layer] = states[self._is_there]
        else:
            self._states[self._after, :, layer] = states

    @cached_property
    def _is_padded(self) -> bool:
        return not bool(self._is_there.all())


class StateBackend:
    """The states of one KV cache group; in place of an `AttentionBackend`."""

    is_capturable = False

    def __init__(self, kv_cache: Tensor, block_size: int) -> None:
        """kv_cache: `[num_blocks, H, L, 1, 1, N]` float32. block_size: tokens of a place in block tables."""
        self._states = kv_cache.flatten(3)
        self._block_size = block_size

    def plan(self, batch: AttentionBatch, spec: StateSpec) -> StatePlan:
        """Prepare a step. Raises: ValueError for an inconsistent batch, or a spec that does not fit the cache."""
        batch.verify(self._block_size)
        if (spec.num_heads, spec.head_size) != (self._states.shape[1], self._states.shape[3]):
            raise ValueError(f"states {tuple(self._states.shape)} do not fit {spec}")
        return StatePlan(batch, self._states, self._block_size)
