"""A `DecoderModel` without weights: the next token is a hash of what stands in the KV cache, read by block tables.

A wrong block, slot, order, position or stale content gives another token, at the speed of a table look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.sampling.sampler import Sampler, SamplingMetadata
from pdserve.kernels.attention_batch import AttentionBatch

VOCAB_SIZE = 64
_PRIME = 2**31 - 1
_MAX_TOKENS = 4096
_UNWRITTEN = -7


def prompt_of(length: int) -> list[int]:
    """Tokens of its vocabulary; two lengths below 60 begin with different ones."""
    return [(7 * place + length) % 60 for place in range(length)]


def _powers() -> NDArray[np.int64]:
    values, power = [], 1
    for _ in range(_MAX_TOKENS):
        power = power * 48271 % _PRIME
        values.append(power)
    return np.array(values, dtype=np.int64)


_WEIGHTS = _powers()
_SPREAD = (np.arange(1, VOCAB_SIZE + 1, dtype=np.int64) * 1_103_515_245) % _PRIME


def _stored(token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions * 1024 + token_ids


def _hash(values: NDArray[np.int64]) -> int:
    return int((values * _WEIGHTS[: len(values)] % _PRIME).sum() % _PRIME)


def _logits(hashes: NDArray[np.int64]) -> NDArray[np.float32]:
    return ((hashes[:, None] * _SPREAD) % _PRIME / _PRIME * 6).astype(np.float32)


def next_logits(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """`[V]`: what a correct engine sees after these tokens."""
    ids = np.asarray(token_ids, dtype=np.int64)
    return _logits(np.array([_hash(_stored(ids, np.arange(len(ids))))]))[0]


def greedy_answer(prompt: Sequence[int], count: int) -> list[int]:
    """The reference: `count` tokens after the prompt, without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def sampled_answer(prompt: Sequence[int], count: int, *, seed: int, index: int = 0) -> list[int]:
    """The reference for a sampled sequence: one token at a time, in no batch and without a cache. Temperature 1."""
    tokens = list(prompt)
    for position in range(count):
        tokens.append(sampled_token(next_logits(tokens), position, seed=seed, index=index))
    return tokens[len(prompt) :]


def sampled_token(
    logits: NDArray[np.float32], position: int, *, temperature: float = 1.0, seed: int = 0, index: int = 0
) -> int:
    """logits `[V]`. The token that a sequence alone in its batch has at this output position."""
    metadata = SamplingMetadata(
        temperature=np.array([temperature], dtype=np.float32),
        top_p=np.ones(1, dtype=np.float32),
        top_k=np.array([VOCAB_SIZE]),
        min_p=np.zeros(1, dtype=np.float32),
        seeds=np.array([seed]),
        indexes=np.array([index]),
        positions=np.array([position]),
    )
    return int(Sampler()(torch.from_numpy(logits).unsqueeze(0), metadata).sampled_token_ids[0])


def make_hash_cache(num_blocks: int, block_size: int) -> Tensor:
    """The pool: one number a token, `[num_blocks, block_size]` int64."""
    return torch.full((num_blocks, block_size), _UNWRITTEN, dtype=torch.int64)


class HashModel:
    """See above. `num_tokens` counts every token computed."""

    hidden_size = 1

    def __init__(self) -> None:
        self.num_tokens = 0
        self.batches: list[tuple[int, int]] = []
        """(decode rows, prefill rows) of each step."""
        self.before_step: Callable[[], None] | None = None

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_cache: Tensor,
        before_layer: Callable[[], None] | None = None,
    ) -> Tensor:
        if self.before_step is not None:
            self.before_step()
        if before_layer is not None:
            before_layer()
        total = len(token_ids)
        self.num_tokens += total
        self.batches.append((batch.num_decodes, total - batch.num_decodes))
        cache = kv_cache.numpy()
        block_size = cache.shape[1]
        slots = batch.slot_mapping.numpy()
        assert len(set(slots.tolist())) == total, "two tokens of one step share a slot"
        cache.reshape(-1)[slots] = _stored(token_ids.numpy(), batch.positions.numpy())
        hidden = np.full(total, -1, dtype=np.int64)
        for row in range(batch.num_decodes):
            length = int(batch.seq_lens[row])
            table = batch.block_tables[row].numpy()[: -(-length // block_size)]
            hidden[row] = _hash(cache[table].reshape(-1)[:length])
        for chunk in batch.prefills:
            length = chunk.context_len + chunk.num_tokens
            last = chunk.query_start + chunk.num_tokens - 1
            hidden[last] = _hash(cache[chunk.block_table.numpy()].reshape(-1)[:length])
        return torch.from_numpy(hidden).unsqueeze(-1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        hashes = hidden.squeeze(-1).numpy()
        assert (hashes >= 0).all(), "sampled from a token that is not the last of its sequence"
        return torch.from_numpy(_logits(hashes))
