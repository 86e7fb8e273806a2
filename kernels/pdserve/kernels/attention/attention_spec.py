"""`AttentionSpec`: how one kind of layer attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

Positions = TypeVar("Positions", int, torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Layers with equal specs share one plan per step. Raises: ValueError for values that no layer can have."""

    num_heads: int
    """Hq, a multiple of `num_kv_heads`."""
    num_kv_heads: int
    """Hkv"""
    head_dim: int
    """D"""
    scale: float
    """Factor of `q k^T`; `D ** -0.5` in most models."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None: all."""
    chunk: int | None = None
    """A token attends to those of its own chunk of so many positions; the first chunk begins at 0. None: to those of all chunks."""
    softcap: float | None = None
    """Scaled scores become `softcap * tanh(score / softcap)` before the mask; None: no cap."""
    sinks: bool = False
    """True: each head has a number that is one more score of every query, whose weight goes to no value."""
    causal: bool = True
    """False: a token also attends to later tokens of its sequence, up to the sequence's length."""
    distance_bias: bool = False
    """True: each head adds a number to a score, by the distance from the query back to the key, as T5's decoder does."""
    value_dim: int | None = None
    """A value is the first `value_dim` numbers of its key, and the cache has one row per token (latent attention, whose queries are
    projected to the rows); None: values are rows of their own, with `head_dim` numbers."""
    kv_cache_group: int = 0
    """Number of the KV cache group whose block tables the layers use."""

    @property
    def output_dim(self) -> int:
        """Numbers of a head's output."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def reach(self) -> int | None:
        """Number of tokens, itself included, that a token attends to at most; None: any number."""
        return self.window if self.chunk is None else self.chunk

    def first_seen(self, positions: Positions) -> Positions:
        """First of the positions to which a token at each of these attends; below 0 where a window reaches so far."""
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return positions * 0 if self.window is None else positions - (self.window - 1)

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, and head_dim at least 1: {self}")
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"a window must be at least 1, and needs causal attention: {self}")
        if self.chunk is not None and (self.chunk < 1 or not self.causal or self.window is not None):
            raise ValueError(f"a chunk must be at least 1, and needs causal attention without a window: {self}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be above 0: {self}")
        if self.value_dim is not None and not 1 <= self.value_dim <= self.head_dim:
            raise ValueError(f"value_dim must be 1 to head_dim: {self}")
        if self.distance_bias and (self.reach is not None or self.softcap is not None or not self.causal):
            raise ValueError(f"a distance bias comes with causal attention, without window, chunk and soft cap: {self}")
