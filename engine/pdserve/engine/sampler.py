"""`Sampler`: from logits to one token a row, in fixed stages over the whole batch.

    1. log-probabilities of the logits as they are, for rows that ask for them (`logprobs.py`)
    2. structured_outputs: tokens that the grammar does not allow get -inf (`grammar_masks.py`); then allowed_token_ids:
       all others do (`token_rules.py`, to stage 4)
    3. bad_words, and EOS and stop tokens before min_tokens, get -inf
    4. logit_bias is added
    5. logits_processors: plug-ins, in the order in which a row names them (`logits_plugin_stage.py`)
    6. repetition, then frequency, then presence penalty (`penalties.py`)
    7. greedy rows take the most likely token; the others are divided by their temperature
    8. min_p, then top_k, then top_p leave a set of tokens
    9. one token of that set by inverse CDF of one uniform number: seed, sequence index, output position (`noise.py`)

A row's result does not depend on its batch mates: filtered and unfiltered rows are drawn apart, each by its own rule.
A row whose rules leave no token at all gets `NO_TOKEN`.
Source: the stages follow vLLM's V1 sampler in order and meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.errors import InternalError
from pdserve.engine.grammar_masks import GrammarMask
from pdserve.engine.logits_plugin_stage import PluginStage
from pdserve.engine.logprobs import LogprobsTensors, RawLogprobs
from pdserve.engine.noise import uniform
from pdserve.engine.penalties import Penalties
from pdserve.engine.scheduler_output import NO_TOKEN
from pdserve.engine.token_rules import TokenRules


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
    token_rules: TokenRules | None = None
    plugins: PluginStage | None = None
    penalties: Penalties | None = None
    grammar_mask: GrammarMask | None = None
    num_logprobs: NDArray[np.int64] | None = None
    """`[N]` most likely tokens to report, -1 for rows that ask for no log-probabilities; None when no row asks."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """`sampled_token_ids` `[N]` int64, on the host; `NO_TOKEN` where the rules leave none."""

    sampled_token_ids: NDArray[np.int64]
    logprobs: LogprobsTensors | None = None
    """Of the rows that ask."""
    failed: Mapping[int, InternalError] = field(default_factory=dict)
    """Row -> why its request must end: a plug-in failed on it. Its token means nothing."""


class Sampler:
    """Stateless; one call a step."""

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """logits `[N, V]` float32; changed in place."""
        raw = RawLogprobs.of(logits, metadata.num_logprobs)
        if metadata.grammar_mask is not None:
            metadata.grammar_mask.apply(logits)
        if metadata.token_rules is not None:
            metadata.token_rules.apply(logits)
        failed = metadata.plugins.apply(logits) if metadata.plugins is not None else {}
        if metadata.penalties is not None:
            metadata.penalties.apply(logits)
        sampled = self._sample(logits, metadata)
        return SamplerOutput(sampled, None if raw is None else raw.of_tokens(sampled), failed)

    def _sample(self, logits: Tensor, metadata: SamplingMetadata) -> NDArray[np.int64]:
        """`[N]` token ids: stages 7 to 9."""
        random_rows = np.flatnonzero(metadata.temperature > 0)
        best = logits.max(-1)
        sampled: NDArray[np.int64] = best.indices.cpu().numpy()
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
        if metadata.token_rules is not None or metadata.plugins is not None or metadata.grammar_mask is not None:
            sampled = np.where(best.values.isneginf().cpu().numpy(), NO_TOKEN, sampled)
        return sampled


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
