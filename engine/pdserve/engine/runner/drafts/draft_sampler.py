"""`DraftSampler`: samples drafts from logits.

The noise and the parameters are those of the sequence itself, without its rules, so that at any temperature a draft is right
wherever model and drafter predict the same token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.sampler import Sampler, SamplingMetadata, TokenSampler
from pdserve.engine.speculation.drafter import DraftRows
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.sampled_rows import PackedRows, SamplingStages, packed

Further = Callable[[IntArray, Tensor], Tensor]
"""Places `[n]` of rows and their drafts on the device `[n]` -> the hidden states `[n, H]` from which the next drafts are made."""


class DraftSampler:
    """One drafter's."""

    def __init__(
        self, compute_logits: Callable[[Tensor], Tensor], ops: LayerOps, sampler: TokenSampler | None = None
    ) -> None:
        """compute_logits: `[R, H]` -> `[R, V]` float32. sampler: default: `Sampler`."""
        self._compute_logits = compute_logits
        self._packs = ops.sample is not None
        self._sampler = sampler or Sampler(ops.sample)

    def drafts(
        self, hidden: Tensor, rows: IntArray, limits: IntArray, wanted: DraftRows, further: Further
    ) -> list[list[int]]:
        """`limits` `[R]` drafts of each of `rows` `[R]` of the batch. hidden `[R, H]`: from which the first ones are made."""
        device, going = hidden.device, np.flatnonzero(limits > 0)
        hidden = hidden[torch.from_numpy(going).to(device)]
        sampled: list[tuple[IntArray, Tensor]] = []
        while len(going):
            token_ids = self._sample(hidden, rows[going], len(sampled), wanted)
            sampled.append((going, token_ids))
            kept = np.flatnonzero(limits[going] > len(sampled))
            going = going[kept]
            if len(going):
                hidden = further(going, token_ids[torch.from_numpy(kept).to(device)])
        drafts: list[list[int]] = [[] for _ in range(len(rows))]
        if sampled:
            places = np.concatenate([places for places, _ in sampled]).tolist()
            for place, token_id in zip(places, torch.cat([each for _, each in sampled]).cpu().tolist(), strict=True):
                drafts[place].append(token_id)
        return drafts

    def _sample(self, hidden: Tensor, rows: IntArray, number: int, wanted: DraftRows) -> Tensor:
        """`[R]` tokens after `number` drafts, on the device; hidden `[R, H]`, rows `[R]` of the batch."""
        logits = self._compute_logits(hidden)
        metadata: SamplingMetadata = wanted.parameters(rows, number)
        packed_rows = None
        if self._packs or hidden.device.type != "cpu":
            parameters = torch.from_numpy(packed(metadata)).to(hidden.device)
            packed_rows = PackedRows(parameters, SamplingStages.of(metadata, logits.shape[1]))
        return self._sampler.launch(logits, metadata, PlacedArrays(), packed_rows).token_ids


def spread(drafts: list[list[int]], places: IntArray, num_rows: int) -> list[list[int]]:
    """The drafts of `num_rows` rows: those at `places` have some, the others none."""
    of_rows: list[list[int]] = [[] for _ in range(num_rows)]
    for place, of_row in zip(places.tolist(), drafts, strict=True):
        of_rows[place] = of_row
    return of_rows
