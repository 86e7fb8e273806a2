"""`Sampler`: from logits to one token a row, in fixed stages over the whole batch.

    1. tokens that may not come yet (EOS and stop tokens before min_tokens) get -inf
    2. greedy rows take the most likely token; the others are divided by their temperature
    3. min_p, then top_k, then top_p leave a set of tokens
    4. one token of that set by inverse CDF of one uniform number: seed, sequence index, output position (`noise.py`)

A row's result does not depend on its batch mates: filtered and unfiltered rows are drawn apart, each by its own rule.
Source: stages 2 and 3 follow vLLM's V1 sampler in order and meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.noise import uniform


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampled rows' parameters, `[N]` each."""

    temperature: NDArray[np.float32]
    """0 for greedy."""
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    """Vocabulary size for all."""
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    indexes: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Output position of the token to sample."""
    forbidden: Sequence[tuple[int, Sequence[int]]]
    """(row, token ids) that may not be sampled now."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """`sampled_token_ids` `[N]` int64, on the host."""

    sampled_token_ids: NDArray[np.int64]


class Sampler:
    """Stateless; one call a step."""

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """logits `[N, V]` float32; changed in place."""
        for row, token_ids in metadata.forbidden:
            logits[row, list(token_ids)] = -torch.inf
        random_rows = np.flatnonzero(metadata.temperature > 0)
        sampled = logits.max(-1).indices.cpu().numpy()
        if len(random_rows):
            sampled = sampled.copy()
            filtered = (
                (metadata.top_k[random_rows] < logits.shape[-1])
                | (metadata.top_p[random_rows] < 1)
                | (metadata.min_p[random_rows] > 0)
            )
            for rows, draw in ((random_rows[filtered], _draw_filtered), (random_rows[~filtered], _draw_plain)):
                if len(rows):
                    sampled[rows] = draw(logits, rows, metadata).cpu().numpy()
        return SamplerOutput(sampled)


def _scaled(logits: Tensor, rows: NDArray[np.int64], metadata: SamplingMetadata) -> Tensor:
    """`[R, V]` logits over temperature."""
    return logits[torch.from_numpy(rows).to(logits.device)] / _column(metadata.temperature, rows, logits)


def _column(values: NDArray[np.float32] | NDArray[np.int64], rows: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(values[rows]).to(like.device).unsqueeze(-1)


def _draw_plain(logits: Tensor, rows: NDArray[np.int64], metadata: SamplingMetadata) -> Tensor:
    """`[R]` token ids over the whole vocabulary."""
    probs = torch.softmax(_scaled(logits, rows, metadata), dim=-1)
    return _inverse_cdf(probs, rows, metadata)


def _draw_filtered(logits: Tensor, rows: NDArray[np.int64], metadata: SamplingMetadata) -> Tensor:
    """`[R]` token ids out of what min_p, top_k and top_p leave."""
    scaled, token_ids = _scaled(logits, rows, metadata).sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(scaled, dim=-1)
    keep = probs >= probs[:, :1] * _column(metadata.min_p, rows, logits)
    keep &= torch.arange(probs.shape[-1], device=probs.device) < _column(metadata.top_k, rows, logits)
    # top_p counts within what min_p and top_k left; the token that crosses the line stays
    left = torch.where(keep, probs, 0)
    left = left / left.sum(-1, keepdim=True)
    before = left.cumsum(-1) - left
    keep &= before < _column(metadata.top_p, rows, logits)
    keep[:, 0] = True
    chosen = _inverse_cdf(torch.where(keep, probs, 0), rows, metadata)
    return token_ids.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def _inverse_cdf(weights: Tensor, rows: NDArray[np.int64], metadata: SamplingMetadata) -> Tensor:
    """`[R]` columns; weights `[R, V]`, not negative, not all zero. A column of weight 0 is never chosen."""
    noise = uniform(metadata.seeds[rows], metadata.indexes[rows], metadata.positions[rows])
    cdf = weights.double().cumsum(-1)
    target = torch.from_numpy(noise).to(cdf.device).unsqueeze(-1) * cdf[:, -1:]
    # the first column whose cdf exceeds the target; rounding may put the target at the very end
    chosen = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.int8).max(-1).indices
    return torch.minimum(chosen, last)
