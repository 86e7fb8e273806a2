"""`LatentHeads`: the matrices between latent rows and the heads of one layer, and the two forms of attention over such rows.

    row   = [c, k_rope]           c: rank numbers; k_rope: rope numbers, the same for all heads
    key_h = [W_UK_h c, k_rope]    value_h = W_UV_h c

absorbed  Scores and outputs need no keys and values: `q_h . key_h = [W_UK_h^T q_nope_h, q_rope_h] . row`, and the sum of weighted
          values is W_UV_h times the sum of weighted c. Attention is that of many heads over one head, whose values are the
          beginning of its keys: `2 rank + rope` multiplications per query, head and row.
expanded  Rows become keys and values of each head: `nope + rope + value` multiplications per query, head and row, and
          `rank (nope + value)` per head and row for the expansion, which all queries of a chunk share.

Source: DeepSeek-V2 (Liu et al. 2024), section 2.1.2 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan

_EXPANSION_COST = 1.15
"""Time of a multiplication of the expansion over that of one of attention: between 1.0 (bfloat16) and 1.25 (float32) in C++ with
AVX-512, where the forms take the same time (`benchmarks/latent_attention.py --part forms`)."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Heads of one layer."""

    key_up: Tensor
    """W_UK `[Hq, nope, rank]`, contiguous."""
    value_up: Tensor
    """W_UV transposed, `[Hq, rank, value]`, contiguous."""

    @property
    def num_heads(self) -> int:
        return self.key_up.shape[0]

    @property
    def nope_dim(self) -> int:
        return self.key_up.shape[1]

    @property
    def rank(self) -> int:
        return self.key_up.shape[2]

    @property
    def value_dim(self) -> int:
        return self.value_up.shape[2]

    def absorbed(self, queries: Tensor) -> Tensor:
        """Queries in the space of rows: `[T, Hq, nope + rope]`, rotated -> `[T, Hq, rank + rope]`."""
        nope, rank = self.nope_dim, self.rank
        wide = queries.new_empty((len(queries), self.num_heads, rank + queries.shape[2] - nope))
        wide[..., rank:] = queries[..., nope:]
        # [Hq, T, nope] x [Hq, nope, rank]
        wide[..., :rank] = torch.bmm(queries[..., :nope].transpose(0, 1), self.key_up).transpose(0, 1)
        return wide

    def results(self, found: Tensor) -> Tensor:
        """Outputs of the absorbed form, `[T, Hq * rank]` -> `[T, Hq, value]`."""
        return torch.bmm(found.view(len(found), self.num_heads, self.rank).transpose(0, 1), self.value_up).transpose(
            0, 1
        )

    def expand(self, rows: Tensor, first: int, out: Tensor) -> None:
        """Write keys and values of the heads from `first` on: rows `[S, rank + rope]`, out `[h, S, nope + rope + value]`."""
        nope, values, compressed = self.nope_dim, out.shape[2] - self.value_dim, rows[:, : self.rank]
        out[..., nope:values] = rows[:, self.rank :]
        # one product after the other: batched, torch takes up to twice as long for thousands of rows in bfloat16
        for head, both in enumerate(out.unbind(), first):
            torch.mm(compressed, self.key_up[head].t(), out=both[:, :nope])
            torch.mm(compressed, self.value_up[head], out=both[:, values:])

    def expands(self, context: int, num_tokens: int) -> bool:
        """True if a chunk of so many tokens, after a context, takes less time in the expanded form, by counts of multiplications.

        Per head both forms multiply each of the chunk's tokens with both matrices; expanded, also each of the context.
        """
        both = self.nope_dim + self.value_dim
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return pairs * (2 * self.rank - both) > _EXPANSION_COST * context * self.rank * both


def attend_latent(plan: AttentionPlan, layer: int, heads: LatentHeads, queries: Tensor, rows: Tensor) -> Tensor:
    """Attention of all T query tokens over latent rows, which `plan.store` has written, in the form that the plan has.

    queries `[T, Hq, nope + rope]`, rotated; rows `[T, 1, rank + rope]`: the keys given to `store` -> `[T, Hq * value]`. A plan
    with a method of this name chooses the form of each chunk; others compute all tokens in the absorbed form.
    """
    if (attend := getattr(plan, "attend_latent", None)) is not None:
        found: Tensor = attend(layer, heads, queries, rows)
        return found
    return attend_absorbed(plan, layer, heads, queries, rows)


def attend_absorbed(plan: AttentionPlan, layer: int, heads: LatentHeads, queries: Tensor, rows: Tensor) -> Tensor:
    """`attend_latent` of any plan, in the absorbed form only."""
    found = plan.attend(layer, heads.absorbed(queries), rows, rows[..., : heads.rank])
    return heads.results(found).flatten(1)
