"""`DraftSampler`: samples drafts from logits.

The noise and the parameters are those of the sequence itself, without its rules, so that at any temperature a draft is right
wherever model and drafter predict the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.sampler import Sampler, SamplingMetadata, TokenSampler
from pdserve.engine.speculation.drafter import DraftRows
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.sampled_rows import PackedRows, SamplingStages, packed


class DraftSampler:
    """One drafter's."""

    def __init__(
        self, compute_logits: Callable[[Tensor], Tensor], ops: LayerOps, sampler: TokenSampler | None = None
    ) -> None:
        """compute_logits: `[R, H]` -> `[R, V]` float32. sampler: default: `Sampler`."""
        self._compute_logits = compute_logits
        self._packs = ops.sample is not None
        self._sampler = sampler or Sampler(ops.sample)

    def sample(self, hidden: Tensor, rows: IntArray, number: int, wanted: DraftRows) -> Tensor:
        """`[R]` tokens after `number` drafts, on the device; hidden `[R, H]`, rows `[R]` of the batch."""
        logits = self._compute_logits(hidden)
        metadata: SamplingMetadata = wanted.parameters(rows, number)
        packed_rows = None
        if self._packs or hidden.device.type != "cpu":
            parameters = torch.from_numpy(packed(metadata)).to(hidden.device)
            packed_rows = PackedRows(parameters, SamplingStages.of(metadata, logits.shape[1]))
        return self._sampler.launch(logits, metadata, PlacedArrays(), packed_rows).token_ids


def on_host(sampled: Sequence[tuple[IntArray, Tensor]], num_rows: int) -> list[list[int]]:
    """The drafts of each of `num_rows` rows. sampled: rows `[n]` that got a further draft, and these `[n]`, step by step."""
    drafts: list[list[int]] = [[] for _ in range(num_rows)]
    if sampled:
        token_ids = torch.cat([tokens for _, tokens in sampled]).cpu().tolist()
        places = [place for places, _ in sampled for place in places.tolist()]
        for place, token_id in zip(places, token_ids, strict=True):
            drafts[place].append(token_id)
    return drafts
