"""`StateBackend` and `StatePlan`: the states of a step's sequences in the cache, in torch operations.

A block of a state group holds the state of one sequence after the last token that the block's place covers. A step reads the state
before its first token from the block at that token's predecessor, and writes the one after its last token to the block at that
token; the two may be the same block, or the first may belong to other sequences too, and to the prefix cache.

Of a sequence whose tokens may turn out not to stand (`AttentionBatch.tentative`) a step writes no state. It keeps what the layers'
rules read of its tokens (`StatePlan.keep`), and when it is known how many stand, `StatePlan.advance` goes through these once more.

A back end that computes more in place is a subclass of both (`native/native_states.py`); `make_states.py` chooses.
`tests/kernels/state_contract.py` is the contract suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.state.causal_conv import CausalConv
from pdserve.kernels.state.recurrence import Recurrence
from pdserve.kernels.state.state_spec import StateSpec

Operation = Callable[..., object]
"""Called with a plan and tensors of tokens."""


class StatePlan:
    """One step's batch, for all layers of one spec. Valid until the next step's `plan`. Implements `StepRows`."""

    def __init__(self, batch: AttentionBatch, states: Tensor, block_size: int, first: int = 0) -> None:
        """states: `[num_blocks, H, L, N]`. first: sequences before it, which have one token each, are left out, and their rows."""
        self.tentative = [index - first for index in batch.tentative]
        """Sequences of which the step writes no state."""
        self.num_decodes = batch.num_decodes - first - sum(index < batch.num_decodes for index in batch.tentative)
        """Sequences `0..num_decodes - 1` have one token each, which stands."""
        starts = [start - first for start in batch.query_start_loc_cpu.tolist()[first:]]
        self.chunks = list(pairwise(starts))[self.num_decodes :]
        """(first row, row after the last) of each further sequence."""
        self._batch = batch
        self._block_size = block_size
        self._states = states
        self._kept: list[tuple[Operation, tuple[Tensor, ...]]] = []
        seq_lens, tables = batch.seq_lens[first:], batch.block_tables[first:]
        context = seq_lens - torch.diff(batch.query_start_loc[first:])
        self.has_context = context > 0
        """`[B]`: the sequence has tokens before this step's."""
        before = (context - 1).clamp_(min=0) // block_size
        after = (seq_lens - 1).clamp_(min=0) // block_size
        self._before = tables.gather(1, before.unsqueeze(1)).squeeze(1)
        self._after = tables.gather(1, after.unsqueeze(1)).squeeze(1)
        # known on the host, so that nothing waits for a device
        lens_there = batch.seq_lens_cpu[first:]
        self._is_continued = bool((lens_there > batch.query_start_loc_cpu[first:].diff()).all())
        is_written = lens_there > 0
        is_written[self.tentative] = False
        self._written = None if bool(is_written.all()) else is_written.nonzero().flatten().to(states.device)
        """`[n]`: sequences whose states the step writes; None: all."""

    def read(self, layer: int, first: int = 0, stop: int | None = None) -> Tensor:
        """The states before the step `[B, H, N]`, zeros for sequences without context; or numbers `first` to `stop` - 1 of each."""
        found = self._states[self._before, :, layer, first:stop]
        if not self._is_continued:
            # what an earlier owner left may not be finite
            found.masked_fill_(~self.has_context.view(-1, 1, 1), 0)
        return found

    def write(self, layer: int, states: Tensor, first: int = 0) -> None:
        """Store the states after the step `[B, H, N]`, or numbers of each from `first` on; padding writes nothing, nor do tentative
        sequences."""
        own = slice(first, first + states.shape[-1])
        if self._written is None:
            self._states[self._after, :, layer, own] = states
        else:
            self._states[self._after[self._written], :, layer, own] = states[self._written]

    def convolve(self, layer: int, conv: CausalConv, columns: Tensor) -> Tensor:
        """Convolve the step's columns `[T, C]` after those that states keep, and keep the last ones -> `[T, C]`."""
        made, kept = conv.apply(columns, self.read(layer, 0, conv.num_kept), self)
        self.write(layer, kept)
        return made

    def recur(
        self, layer: int, recurrence: Recurrence, tokens: Sequence[Tensor], first: int, shape: tuple[int, int]
    ) -> Tensor:
        """Change the matrices in states by the step's tokens, `[T, M, ...]` each, float32 -> results `[T, M, ...]`.

        first: the place in each head's state from which on it has its part of the M matrices of `shape`.
        """
        num_matrices = tokens[recurrence.like].shape[1]
        size = num_matrices * shape[0] * shape[1] // self._states.shape[1]
        before = self.read(layer, first, first + size)
        found, after = recurrence.over_step(tokens, before.view(len(before), num_matrices, *shape), self)
        self.write(layer, after.view(before.shape), first)
        return found

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
        plan = self._of(batch)
        for operation, tokens in kept:
            operation(plan, *(each[places] for each in tokens))

    def _of(self, batch: AttentionBatch) -> StatePlan:
        """A plan of another batch over the same states."""
        return StatePlan(batch, self._states, self._block_size)

    @cached_property
    def _tentative_rows(self) -> Tensor:
        """`[n]`: the rows of tentative sequences, ascending."""
        starts: list[int] = self._batch.query_start_loc_cpu.tolist()
        rows = [row for index in self.tentative for row in range(starts[index], starts[index + 1])]
        return torch.tensor(rows, device=self._states.device)


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
        return self._plan(batch)

    def _plan(self, batch: AttentionBatch) -> StatePlan:
        return StatePlan(batch, self._states, self._block_size)
