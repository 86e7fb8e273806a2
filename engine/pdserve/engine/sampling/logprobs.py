"""Log-probabilities of sampled tokens: log-softmax of the model's unchanged logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.arrays import IntArray
from pdserve.engine.sampling.placed_arrays import PlacedArrays


@dataclass(frozen=True, slots=True)
class LogprobsRows:
    """The rows of a step that request log-probabilities."""

    places: IntArray
    """`[R]` rows of the logits."""
    num_top: IntArray
    """`[R]` number of most likely tokens to report per row, in addition to the sampled token."""

    @classmethod
    def of(cls, num_logprobs: IntArray) -> LogprobsRows | None:
        """num_logprobs: `[N]`, -1 for rows without log-probabilities. None if no row requests them."""
        places = np.flatnonzero(num_logprobs >= 0)
        return cls(places, num_logprobs[places]) if len(places) else None

    def arrays(self) -> list[NDArray[Any]]:
        """Arrays that `RawLogprobs.of` needs on the logits' device."""
        return [self.places]


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-probabilities computed before any stage changes the logits, for rows that request them."""

    rows: LogprobsRows
    places: Tensor | None
    """`rows.places` on the device; None: all rows."""
    values: Tensor
    """`[R, V]` float32."""

    @classmethod
    def of(cls, logits: Tensor, rows: LogprobsRows, placed: PlacedArrays) -> RawLogprobs:
        """logits `[N, V]`."""
        if len(rows.places) == len(logits):
            return cls(rows, None, torch.log_softmax(logits, dim=-1, dtype=torch.float32))
        places = placed(rows.places)
        return cls(rows, places, torch.log_softmax(logits[places], dim=-1, dtype=torch.float32))

    def of_tokens(self, token_ids: Tensor) -> LogprobsTensors:
        """token_ids: `[N]`, the sampled token of every row of the logits, on their device."""
        sampled = token_ids if self.places is None else token_ids[self.places]
        sampled = sampled.clamp(min=0).unsqueeze(-1)
        sampled_values = self.values.gather(-1, sampled)
        width = min(int(self.rows.num_top.max()), self.values.shape[-1])
        top_values, top_ids = self.values.topk(width, dim=-1)
        return LogprobsTensors(
            rows=self.rows.places,
            num_top=np.minimum(self.rows.num_top, width),
            logprob_token_ids=torch.cat((sampled, top_ids), dim=-1),
            logprobs=torch.cat((sampled_values, top_values), dim=-1),
            selected_token_ranks=(self.values >= sampled_values).sum(-1),
        )


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Log-probabilities of one token per row. K is the largest number of most likely tokens that a row requests."""

    rows: IntArray
    """`[R]` rows of the logits."""
    num_top: IntArray
    """`[R]` number of the K most likely tokens that each row requests."""
    logprob_token_ids: Tensor
    """`[R, 1 + K]`, the sampled token first."""
    logprobs: Tensor
    """`[R, 1 + K]` float32."""
    selected_token_ranks: Tensor
    """`[R]`, 1 for the most likely."""

    def tensors(self) -> list[Tensor]:
        """Tensors to copy to the host."""
        return [self.logprob_token_ids, self.logprobs, self.selected_token_ranks]

    def on_host(self, arrays: Sequence[NDArray[Any]]) -> LogprobsTensors:
        """The same, over copies of `tensors`."""
        return LogprobsTensors(self.rows, self.num_top, *(torch.from_numpy(array) for array in arrays))

    def lists(self) -> dict[int, LogprobsLists]:
        """Row of the logits -> its log-probabilities as lists."""
        token_ids, values = self.logprob_token_ids.tolist(), self.logprobs.tolist()
        ranks = self.selected_token_ranks.tolist()
        return {
            row: LogprobsLists([token_ids[place][: top + 1]], [values[place][: top + 1]], [ranks[place]])
            for place, (row, top) in enumerate(zip(self.rows.tolist(), self.num_top.tolist(), strict=True))
        }
