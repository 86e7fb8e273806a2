"""`ParallelProjectionNorm`: norms over all heads of queries and of keys, where each rank has some of the heads."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.rank_group import RankGroup


class ParallelProjectionNorm:
    """`ProjectionNorm` of one rank: the ranks add up the squares of their heads, two numbers per token."""

    def __init__(
        self,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        group: RankGroup,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        """q_weight, k_weight `[heads * D]`: of this rank's heads. num_heads, num_kv_heads: of all ranks together."""
        self._weight = torch.cat((q_weight, k_weight)).view(-1, head_dim)
        self._num_own = len(q_weight) // head_dim
        self._kinds = torch.zeros(len(self._weight), dtype=torch.int64, device=q_weight.device)
        """Per head: 0 of queries, 1 of keys."""
        self._kinds[self._num_own :] = 1
        self._eps = eps
        self._group = group
        own_kv = len(k_weight) // head_dim
        # with fewer KV heads than ranks, several ranks have the same one, and add its squares
        copies = own_kv * group.size / num_kv_heads
        sizes = [num_heads * head_dim, num_kv_heads * head_dim * copies]
        self._sizes = torch.tensor(sizes, dtype=torch.float32, device=q_weight.device)

    def __call__(self, qkv: Tensor) -> None:
        """qkv `[T, heads, D]`, queries, keys and values; queries and keys are overwritten."""
        heads = qkv[:, : len(self._weight)]
        wide = heads.float()
        squares = wide.square().sum(-1)
        own = torch.stack((squares[:, : self._num_own].sum(-1), squares[:, self._num_own :].sum(-1)), -1)
        factors = (self._group.all_reduce(own) / self._sizes + self._eps).rsqrt()
        of_heads = factors.index_select(1, self._kinds).unsqueeze(-1)
        heads.copy_((wide * of_heads).to(qkv.dtype) * self._weight)
