"""`AttentionBatch`: the sequences of one step, packed without padding between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepLengths:
    """Lengths of the B sequences of one step, on the host."""

    query_lens: NDArray[np.int64]
    """`[B]`: query tokens of each sequence."""
    seq_lens: NDArray[np.int64]
    """`[B]`: see `AttentionBatch.seq_lens`."""
    num_decodes: int
    """See `AttentionBatch.num_decodes`."""
    most_chunks: int | None = None
    """See `AttentionBatch.most_chunks`."""


@dataclass(frozen=True, slots=True)
class PlanArray:
    """One array of `AttentionBackend.plan_arrays`, on the host and on the device."""

    host: NDArray[Any]
    there: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """B sequences with T query tokens in all. Sequences with one query token come first.

    ```
    row         0 .............. num_decodes - 1 | ........... | ........... T - 1
    sequence    one row per sequence             | num_decodes | num_decodes + 1
    ```

    All tensors are int64. Lengths are known on the host: nothing reads them back from a device.
    """

    positions: Tensor
    """`[T]`, or `[3, T]` where positions have three axes."""
    slot_mapping: Tensor
    """`[T]`: block_number * bs + offset, the place of each token's K and V. A padded row has a slot of its own, in a block that no
    sequence uses, or with Triton's kernels -1: nothing is written then."""
    query_start_loc: Tensor
    """`[B + 1]`: rows `query_start_loc[i]..query_start_loc[i + 1] - 1` belong to sequence i."""
    seq_lens: Tensor
    """`[B]`: tokens including this step's. 0 marks padding, a decode row or a chunk: its output has no meaning, and its K and V
    still go to its slots."""
    block_tables: Tensor
    """`[B, N]`: block numbers, padded with 0; no key is read from the padding."""
    num_decodes: int
    """Sequences `0..num_decodes - 1` have one query token each."""
    max_query_len: int
    """Largest number of query tokens of one sequence."""
    max_seq_len: int
    """Largest of `seq_lens`."""
    query_start_loc_cpu: Tensor
    """`query_start_loc` on the host."""
    seq_lens_cpu: Tensor
    """`seq_lens` on the host."""
    new_tails: Tensor | None = None
    """`[n]` int64: decode rows whose last block no earlier decode step of their sequence ended in. Only there bytes after the last
    token may be an earlier owner's, so a back end that needs them finite overwrites them once per block. None: all decode rows."""
    most_chunks: int | None = None
    """Not None: the step is one of those with as many tokens and at most so many chunks that have the same launches, since a back
    end's lists have the same length for all of them."""
    tentative: Sequence[int] = ()
    """Ascending numbers of sequences whose tokens may turn out not to stand: `StatePlan.advance` writes their states. They are the
    last of the decode rows. For attention they are as others."""
    plan_arrays: Mapping[str, PlanArray] = field(default_factory=dict)
    """All arrays of `AttentionBackend.plan_arrays` for this batch's lengths, valid until the next step's; or none."""

    @property
    def lengths(self) -> StepLengths:
        """The batch's."""
        query_lens = np.diff(self.query_start_loc_cpu.numpy())
        return StepLengths(query_lens, self.seq_lens_cpu.numpy(), self.num_decodes, self.most_chunks)

    @classmethod
    def from_arrays(
        cls,
        *,
        positions: NDArray[np.int64],
        slot_mapping: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        block_tables: NDArray[np.int64],
        device: torch.device,
        new_tails: NDArray[np.int64] | None = None,
        most_chunks: int | None = None,
        tentative: Sequence[int] = (),
        plan_arrays: Mapping[str, PlanArray] | None = None,
    ) -> AttentionBatch:
        """Copy a step's arrays to the device; on a CPU the tensors share the arrays' memory.

        query_lens `[B]`: query tokens of each sequence. Leading sequences with one query token count as decodes.
        """
        starts = np.zeros(len(query_lens) + 1, np.int64)
        query_lens.cumsum(out=starts[1:])
        query_start_loc_cpu, seq_lens_cpu = torch.from_numpy(starts), torch.from_numpy(seq_lens)
        # lists: numpy's reductions have a fixed cost that exceeds the rest of this function for a few numbers
        counts: list[int] = query_lens.tolist()
        max_query_len = max(counts, default=0)

        def placed(tensor: Tensor) -> Tensor:
            return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

        return cls(
            positions=placed(torch.from_numpy(positions)),
            slot_mapping=placed(torch.from_numpy(slot_mapping)),
            query_start_loc=placed(query_start_loc_cpu),
            seq_lens=placed(seq_lens_cpu),
            block_tables=placed(torch.from_numpy(block_tables)),
            num_decodes=len(counts) if max_query_len <= 1 else [count > 1 for count in counts].index(True),
            max_query_len=max_query_len,
            max_seq_len=max(seq_lens.tolist(), default=0),
            query_start_loc_cpu=query_start_loc_cpu,
            seq_lens_cpu=seq_lens_cpu,
            new_tails=None if new_tails is None else placed(torch.from_numpy(new_tails)),
            most_chunks=most_chunks,
            tentative=tentative,
            plan_arrays=plan_arrays or {},
        )

    def part(self, sequences: Sequence[int]) -> tuple[AttentionBatch, Tensor]:
        """A batch of some sequences, and the `[n]` rows of this one that it has.

        sequences: ascending, with all decode rows.
        """
        return self._of(sequences, self.query_start_loc_cpu.diff()[list(sequences)])

    def beginnings(self, num_tokens: Mapping[int, int]) -> tuple[AttentionBatch, Tensor]:
        """A batch of the first tokens of some sequences, and the `[n]` rows of this one that it has.

        num_tokens: sequence -> number of its tokens, at least 1.
        """
        sequences = sorted(num_tokens, key=lambda index: num_tokens[index] > 1)
        query_lens = torch.tensor([num_tokens[index] for index in sequences], dtype=torch.int64)
        batch, rows = self._of(sequences, query_lens)
        return replace(batch, num_decodes=int((query_lens == 1).sum()), new_tails=None, tentative=()), rows

    def _of(self, sequences: Sequence[int], query_lens: Tensor) -> tuple[AttentionBatch, Tensor]:
        """A batch of the first `query_lens` `[n]` tokens of each of `sequences` in this step, and their rows."""
        starts = self.query_start_loc_cpu.tolist()
        chosen = torch.tensor(sequences, dtype=torch.int64)
        counts: list[int] = query_lens.tolist()
        rows = torch.tensor(
            [
                row
                for index, num in zip(sequences, counts, strict=True)
                for row in range(starts[index], starts[index] + num)
            ],
            dtype=torch.int64,
        )
        context = self.seq_lens_cpu[chosen] - self.query_start_loc_cpu.diff()[chosen]
        seq_lens = context + query_lens
        query_start_loc_cpu = torch.cat((query_lens.new_zeros(1), query_lens.cumsum(0)))
        device = self.slot_mapping.device
        there, rows = chosen.to(device), rows.to(device)
        batch = replace(
            self,
            positions=self.positions[..., rows],
            slot_mapping=self.slot_mapping[rows],
            query_start_loc=query_start_loc_cpu.to(device),
            seq_lens=seq_lens.to(device),
            block_tables=self.block_tables[there],
            max_query_len=max(counts, default=0),
            max_seq_len=max(seq_lens.tolist(), default=0),
            query_start_loc_cpu=query_start_loc_cpu,
            seq_lens_cpu=seq_lens,
            most_chunks=None,
            plan_arrays={},
        )
        return batch, rows

    def verify(self, block_size: int) -> None:
        """Check that the tensors agree; a back end would not notice, since a slice beyond a tensor's end is silently shorter.

        block_size: bs. Raises: ValueError naming the field.
        """
        num_tokens, num_seqs = self.positions.shape[-1], self.seq_lens_cpu.shape[0]
        if self.slot_mapping.shape[0] != num_tokens:
            raise ValueError(f"slot_mapping has {self.slot_mapping.shape[0]} entries for {num_tokens} positions")
        if self.block_tables.shape[0] != num_seqs or self.query_start_loc_cpu.shape[0] != num_seqs + 1:
            raise ValueError(
                f"block_tables has {self.block_tables.shape[0]} rows and query_start_loc {self.query_start_loc_cpu.shape[0]} "
                f"entries for {num_seqs} sequences"
            )
        starts, seq_lens = self.query_start_loc_cpu.tolist(), self.seq_lens_cpu.tolist()
        num_decodes, max_query_len = self.num_decodes, min(self.num_decodes, 1)
        if starts[0] != 0 or starts[-1] != num_tokens:
            raise ValueError(f"query_start_loc covers rows {starts[0]} to {starts[-1]} of {num_tokens}")
        if starts[: num_decodes + 1] != list(range(num_decodes + 1)):
            raise ValueError(f"{num_decodes} decodes, but query_start_loc begins with {starts[: num_decodes + 1][:8]}")
        for (start, stop), seq_len in zip(pairwise(starts[num_decodes:]), seq_lens[num_decodes:], strict=True):
            if seq_len and not start < stop <= start + seq_len:
                raise ValueError(f"rows {start}..{stop - 1} belong to a sequence of {seq_len} tokens")
            max_query_len = max(max_query_len, stop - start)
        if max(seq_lens, default=0) != self.max_seq_len or max_query_len != self.max_query_len:
            raise ValueError(
                f"max_seq_len {self.max_seq_len} and max_query_len {self.max_query_len} are not those of the sequences"
            )
        if self.block_tables.shape[1] * block_size < self.max_seq_len:
            raise ValueError(f"block_tables has {self.block_tables.shape[1]} columns for {self.max_seq_len} tokens")
