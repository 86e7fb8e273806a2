"""Log-probabilities of sampled tokens: log-softmax of the model's unchanged logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.arrays import IntArray


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-probabilities computed before any stage changes the logits, for rows that request them."""

    rows: IntArray
    """`[R]` rows of the logits."""
    num_top: IntArray
    """`[R]` number of most likely tokens to report per row, beside the sampled token."""
    values: Tensor
    """`[R, V]` float32."""

    @classmethod
    def of(cls, logits: Tensor, num_logprobs: IntArray | None) -> RawLogprobs | None:
        """num_logprobs: `[N]`, -1 for rows without log-probabilities. None if no row requests them."""
        if num_logprobs is None:
            return None
        rows = np.flatnonzero(num_logprobs >= 0)
        if not len(rows):
            return None
        asked = logits[torch.from_numpy(rows).to(logits.device)]
        return cls(rows, num_logprobs[rows], torch.log_softmax(asked, dim=-1, dtype=torch.float32))

    def of_tokens(self, token_ids: IntArray) -> LogprobsTensors:
        """token_ids: `[N]`, the sampled token of every row of the logits."""
        sampled = torch.from_numpy(token_ids[self.rows]).to(self.values.device).clamp(min=0).unsqueeze(-1)
        sampled_values = self.values.gather(-1, sampled)
        width = min(int(self.num_top.max()), self.values.shape[-1])
        top_values, top_ids = self.values.topk(width, dim=-1)
        return LogprobsTensors(
            rows=self.rows,
            num_top=np.minimum(self.num_top, width),
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

    def lists(self) -> dict[int, LogprobsLists]:
        """Row of the logits -> its log-probabilities as lists."""
        token_ids, values = self.logprob_token_ids.tolist(), self.logprobs.tolist()
        ranks = self.selected_token_ranks.tolist()
        return {
            row: LogprobsLists([token_ids[place][: top + 1]], [values[place][: top + 1]], [ranks[place]])
            for place, (row, top) in enumerate(zip(self.rows.tolist(), self.num_top.tolist(), strict=True))
        }
