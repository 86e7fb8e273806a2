"""A decoder driven over a paged cache, as an engine would drive it, but with nothing kept tidy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.kernels.attention_batch import AttentionBatch, PrefillChunk
from pdserve.models.decoder import Decoder
from pdserve.models.kv_cache import make_kv_cache
from tests.support.checkpoints import ARCHITECTURES


class PagedRun:
    """Sequences in blocks of random order; all memory that no token was written to is NaN, infinite or huge."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 64, block_size: int = 16, seed: int = 0) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.kv_cache = make_kv_cache(decoder.config.kv_layout(block_size, "test"), num_blocks)
        huge = torch.finfo(self.kv_cache.dtype).max
        poison = torch.tensor([torch.nan, torch.inf, -torch.inf, huge], dtype=self.kv_cache.dtype)
        self.kv_cache.view(-1, 4).copy_(poison)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tables: dict[str, list[int]] = {}
        self.lens: dict[str, int] = {}

    def step(self, decodes: dict[str, int], prefills: dict[str, Sequence[int]]) -> dict[str, Tensor]:
        """Append a token to each of `decodes` and tokens to each of `prefills`; logits `[n, V]` of each sequence."""
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
        seq_lens = [self.lens[name] for name in decodes]
        width = max((len(self.tables[name]) for name in decodes), default=0) + 1
        chunks = []
        query_start = len(decodes)
        for name, tokens in prefills.items():
            context_len = self.lens[name] - len(tokens)
            chunks.append(PrefillChunk(query_start, len(tokens), context_len, torch.tensor(self.tables[name])))
            query_start += len(tokens)
        batch = AttentionBatch(
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            num_decodes=len(decodes),
            block_tables=torch.tensor([self.tables[name] + [0] * (width - len(self.tables[name])) for name in decodes]),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
            max_seq_len=max(seq_lens, default=0),
            prefills=tuple(chunks),
        )
        with torch.inference_mode():
            token_ids = torch.tensor([token for tokens in rows.values() for token in tokens])
            logits = self.decoder.compute_logits(self.decoder.forward(token_ids, batch, self.kv_cache))
        return dict(zip(rows, logits.split([len(tokens) for tokens in rows.values()]), strict=True))


@pytest.fixture
def paged_run() -> type[PagedRun]:
    return PagedRun


@pytest.fixture(scope="session")
def oracle_logits() -> Callable[[Path, Sequence[int]], Tensor]:
    """Logits `[n, V]` that `transformers` gives for a text."""
    models = {}

    def logits(folder: Path, tokens: Sequence[int]) -> Tensor:
        if folder not in models:
            architecture = next(name for name in ARCHITECTURES if folder.name.startswith(name))
            models[folder] = ARCHITECTURES[architecture][1].from_pretrained(folder, dtype="auto").eval()
        with torch.inference_mode():
            result: Tensor = models[folder](torch.tensor([list(tokens)])).logits[0].float()
        return result

    return logits
