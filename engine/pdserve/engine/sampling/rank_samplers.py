"""Samplers of several ranks: rank 0 samples, and the others get its tokens.

Logits processors, grammars and penalties then run once, functions of a caller need not exist in another process, and the ranks'
batches are equal whatever a rank's numbers are. The tokens are sent from device to device, so that no host waits for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.sampler import Sampled, SamplingMetadata, TokenSampler
from pdserve.kernels.rank_group import RankGroup
from pdserve.kernels.sampled_rows import PackedRows


class SharingSampler:
    """The `TokenSampler` of rank 0."""

    def __init__(self, sampler: TokenSampler, group: RankGroup) -> None:
        self._sampler = sampler
        self._group = group

    def launch(
        self, logits: Tensor, metadata: SamplingMetadata, placed: PlacedArrays, rows: PackedRows | None
    ) -> Sampled:
        sampled = self._sampler.launch(logits, metadata, placed, rows)
        self._group.broadcast(sampled.tokens)
        return sampled


class ReceivingSampler:
    """The `TokenSampler` of the other ranks. Its log-probabilities and failures are not known; results come from rank 0."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def launch(
        self, logits: Tensor, metadata: SamplingMetadata, placed: PlacedArrays, rows: PackedRows | None
    ) -> Sampled:
        """logits `[N, 0]`."""
        tokens = torch.empty((2, len(logits)), dtype=torch.int64, device=logits.device)
        return Sampled(self._group.broadcast(tokens), has_rules=False, logprobs=None, failed={})
