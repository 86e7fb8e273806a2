"""What one step asks of attention: where each token stands, where its keys and values go, and what it may look at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive prompt tokens of one sequence; they see the sequence's cached context and, causally, themselves."""

    query_start: int
    """First row of this sequence in the step's batch."""
    num_tokens: int
    """Rows."""
    context_len: int
    """Tokens of this sequence whose KV is in the cache before this step."""
    block_table: Tensor
    """`[ceil((context_len + num_tokens) / bs)]` int64, block numbers."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step: `num_decodes` rows of one token each come first, the rows of the prefill chunks follow.

    ```
    row      0 ........ B-1 | B ............ | ............ T-1
             one a sequence | prefills[0]    | prefills[1]
    ```
    """

    positions: Tensor
    """`[T]` int64."""
    slot_mapping: Tensor
    """`[T]` int64: block_number * bs + offset, where each token's K and V go."""
    num_decodes: int
    """Rows `0..num_decodes-1` are one query token each."""
    block_tables: Tensor
    """`[B, N]` int64, B = num_decodes, padded with 0; what stands in the padding is never read as a key."""
    seq_lens: Tensor
    """`[B]` int64, tokens including this step's; 0 marks a padded row, whose output means nothing."""
    max_seq_len: int
    """Largest of `seq_lens`; 0 when there are none."""
    prefills: tuple[PrefillChunk, ...]
