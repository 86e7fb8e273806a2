"""`StateBackend` and `StatePlan`: the states of a step's sequences in the cache.

A block of a state group holds the state of one sequence after the last token that the block's place covers. A step reads the state
before its first token from the block at that token's predecessor, and writes the one after its last token to the block at that
token; the two may be the same block, or the first may belong to other sequences too, and to the prefix cache.

Of a sequence whose tokens may turn out not to stand (`AttentionBatch.tentative`) a step writes no state. It keeps what the layers'
rules read of its tokens (`StatePlan.keep`), and when it is known how many stand, `StatePlan.advance` goes through these once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.state.state_spec import StateSpec

Operation = Callable[..., object]
"""Called with a plan and tensors of tokens."""


class StatePlan:
    """One step's batch, for all layers of one spec. Valid until the next step's `plan`."""

    def __init__(self, batch: AttentionBatch, states: Tensor, block_size: int) -> None:
        self.num_decodes = batch.num_decodes - sum(index < batch.num_decodes for index in batch.tentative)
        """Sequences `0..num_decodes - 1` have one token each, which stands."""
        starts: list[int] = batch.query_start_loc_cpu.tolist()
        self.chunks = list(pairwise(starts))[self.num_decodes :]
        """(first row, row after the last) of each further sequence."""
        self.tentative = batch.tentative
        """Sequences of which the step writes no state."""
        self._batch = batch
        self._block_size = block_size
        self._states = states
        self._kept: list[tuple[Operation, tuple[Tensor, ...]]] = []
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

    def read(self, layer: int) -> Tensor:
        """The states before the step `[B, H, N]`, zeros for sequences without context."""
        found = self._states[self._before, :, layer]
        # what an earlier owner left may not be finite
        return torch.where(self.has_context.view(-1, 1, 1), found, found.new_zeros(()))

    def write(self, layer: int, states: Tensor) -> None:
        """Store the states after the step `[B, H, N]`; padding writes nothing, nor do tentative sequences."""
        if self._written is None:
            self._states[self._after, :, layer] = states
        else:
            self._states[self._after[self._written], :, layer] = states[self._written]

    def keep(self, operation: Operation, *tokens: Tensor) -> None:
        """Let `advance` call `operation(plan, *tokens)`, which reads and writes states, with the plan and the rows of what stands.

        tokens: `[T, ...]` each.
        """
        if self.tentative:
            self._kept.append((operation, tuple(each[self._tentative_rows] for each in tokens)))

    def advance(self, num_tokens: Sequence[int]) -> None:
        """Write the states of the tentative sequences after their first tokens of the step, by layer. Once, before the next step.

        num_tokens: those that stand, of each; 0: its state remains as it is.
        """
        standing = {index: num for index, num in zip(self.tentative, num_tokens, strict=True) if num}
        kept, self._kept = self._kept, []
        if not standing:
            return
        batch, rows = self._batch.beginnings(standing)
        places = torch.searchsorted(self._tentative_rows, rows)
        plan = StatePlan(batch, self._states, self._block_size)
        for operation, tokens in kept:
            operation(plan, *(each[places] for each in tokens))

    @cached_property
    def _tentative_rows(self) -> Tensor:
        """`[n]`: the rows of tentative sequences, ascending."""
        starts: list[int] = self._batch.query_start_loc_cpu.tolist()
        rows = [row for index in self.tentative for row in range(starts[index], starts[index + 1])]
        return torch.tensor(rows, device=self._states.device)

    @cached_property
    def _written(self) -> Tensor | None:
        """`[n]`: sequences whose states the step writes; None: all."""
        written = self._batch.seq_lens_cpu > 0
        written[list(self.tentative)] = False
        return None if bool(written.all()) else written.nonzero().flatten().to(self._states.device)


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
