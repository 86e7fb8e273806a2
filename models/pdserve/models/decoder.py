"""A decoder-only transformer over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.kernels.attention_batch import AttentionBatch
from pdserve.kernels.attention_step import AttentionStep
from pdserve.kernels.kv_pages import KvPages
from pdserve.kernels.linear import Linear
from pdserve.kernels.rms_norm import RmsNorm
from pdserve.kernels.rotary import rotary_phases
from pdserve.models.config import ModelConfig
from pdserve.models.decoder_layer import DecoderLayer


class Decoder:
    """Token ids in, hidden states out; keys and values stay in the caller's cache.

    The caller is in `torch.inference_mode`, and no two threads are in `forward` at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: RmsNorm,
        lm_head: Linear,
    ) -> None:
        """embedding `[V, H]`."""
        self.config = config
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._lm_head = lm_head
        device = embedding.device
        self._inverse_frequencies = config.rope.inverse_frequencies(config.head_dim).to(device)
        self._magnitude = torch.full((), config.rope.attention_factor, device=device)
        self._windows = frozenset(config.sliding_windows)
        self._pages: KvPages | None = None

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.config.hidden_size

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_cache: Tensor,
        before_layer: Callable[[], None] | None = None,
    ) -> Tensor:
        """Write this step's keys and values into the cache and return the last hidden states.

        token_ids `[T]` int64, kv_cache `[num_blocks, L, 2, Hkv, bs, D]` -> `[T, H]`. `before_layer` is called before
        each layer, so that a caller can tell a long step from a dead one.
        """
        step = AttentionStep(batch, self._pages_of(kv_cache), self.config.num_heads, self._windows)
        phases = rotary_phases(batch.positions, self._inverse_frequencies, self._magnitude)
        x = self._embedding.index_select(0, token_ids)
        for layer in self._layers:
            if before_layer is not None:
                before_layer()
            x = layer.forward(x, phases, step)
        return self._final_norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[N, H]` -> `[N, V]` float32."""
        return self._lm_head(hidden).float()

    def _pages_of(self, kv_cache: Tensor) -> KvPages:
        """Views of the cache, made once for the engine's one pool."""
        if self._pages is None or self._pages.kv_cache is not kv_cache:
            config = self.config
            expected = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
            if (*kv_cache.shape[1:4], *kv_cache.shape[5:]) != expected or kv_cache.dtype is not self._embedding.dtype:
                raise ValueError(f"kv_cache {tuple(kv_cache.shape)} {kv_cache.dtype} does not fit {config}")
            self._pages = KvPages(kv_cache)
        return self._pages
