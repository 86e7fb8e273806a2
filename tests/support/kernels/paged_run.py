"""A decoder driven over a paged cache, as an engine would drive it, but with nothing kept tidy."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from pdserve.kernels.state.state_backend import StateBackend
from pdserve.models.kv_cache import StateSpec, make_kv_caches, pools_of, shapes_of
from pdserve.models.model_impl import AnyDecoder
from pdserve.models.weights.rank_shard import WHOLE, RankShard
from tests.support.kernels.attention_batches import model_inputs, packed_batch


class PagedRun:
    """Sequences in blocks of random order; all memory that no token was written to is NaN, infinite or huge."""

    def __init__(
        self,
        decoder: AnyDecoder,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        seed: int = 0,
        shard: RankShard = WHOLE,
        cache_dtype: str | None = None,
    ) -> None:
        self.decoder = decoder
        self.block_size = block_size
        groups = decoder.config.kv_cache_groups(block_size, "test", shard, cache_dtype)
        self.kv_caches = make_kv_caches(groups, [num_blocks] * len(shapes_of(groups)))
        for kv_cache in pools_of(self.kv_caches):
            if cache_dtype is None:
                huge = torch.finfo(kv_cache.dtype).max
                poison = torch.tensor([torch.nan, torch.inf, -torch.inf, huge], dtype=kv_cache.dtype)
                flat = kv_cache.view(-1)
                flat.copy_(poison.repeat(-(-len(flat) // 4))[: len(flat)])
            else:
                kv_cache.view(torch.uint8).fill_(0xFF)  # scales that are NaN
        self.attention = [
            StateBackend(kv_cache, block_size)
            if isinstance(group.spec, StateSpec)
            else TorchAttentionBackend(kv_cache, decoder.dtype)
            for group, kv_cache in zip(groups, self.kv_caches, strict=True)
        ]
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tables: dict[str, list[int]] = {}
        self.lens: dict[str, int] = {}

    def step(self, decodes: dict[str, int], prefills: dict[str, Sequence[int]]) -> dict[str, Tensor]:
        """Append a token to each of `decodes` and tokens to each of `prefills`; logits `[n, V]` of each sequence, or of
        each label for a model with a classification head."""
        rows: dict[str, Sequence[int]] = {**{name: [token] for name, token in decodes.items()}, **prefills}
        positions: list[int] = []
        slots: list[int] = []
        for name, tokens in rows.items():
            start = self.lens.get(name, 0)
            table = self.tables.setdefault(name, [])
            self.lens[name] = start + len(tokens)
            while len(table) * self.block_size < self.lens[name]:
                table.append(self.free.pop())
            for position in range(start, self.lens[name]):
                positions.append(position)
                slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
        query_lens = [len(tokens) for tokens in rows.values()]
        # one column more than any sequence has
        tables = [[*self.tables[name], 0] for name in rows]
        batch = packed_batch(positions, slots, query_lens, [self.lens[name] for name in rows], tables)
        token_ids = [token for tokens in rows.values() for token in tokens]
        with torch.inference_mode():
            hidden = self.decoder.forward(model_inputs(self.decoder, self.attention, batch, token_ids))
            if (head := self.decoder.classifier) is not None:
                logits = head.forward(hidden, torch.zeros(len(hidden), dtype=torch.bool))
            else:
                logits = self.decoder.compute_logits(hidden)
        return dict(zip(rows, logits.split_with_sizes(query_lens), strict=True))
