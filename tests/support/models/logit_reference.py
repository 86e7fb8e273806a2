"""Parameters applied to one position's logits: `transformers`' processors where it has one, else OpenAI's formula."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

NO_SUCH_TOKEN = 10**6
"""Stands before an output: `transformers` wants a context longer than a bad word's prefix."""


def processed(prompt: Sequence[int], output: Sequence[int], logits: Tensor, params: Mapping[str, Any]) -> Tensor:
    """`[V]` logits after every stage, in the order of the sampler.

    params: by the names of `SamplingParams`, and `forbidden_after`, from an output to tokens that may not follow.
    """
    logits = logits.clone().unsqueeze(0)
    if allowed := params.get("allowed_token_ids"):
        others = [token for token in range(logits.shape[1]) if token not in allowed]
        logits[0, others] = -torch.inf
    if words := params.get("bad_words_token_ids"):
        processor = NoBadWordsLogitsProcessor([list(word) for word in words])
        logits = processor(torch.tensor([[NO_SUCH_TOKEN, *output]]), logits)
    if (forbidden_after := params.get("forbidden_after")) is not None:
        logits[0, list(forbidden_after(output))] = -torch.inf
    if len(output) < params.get("min_tokens", 0):
        logits[0, list(params["stop_token_ids"])] = -torch.inf
    if bias := params.get("logit_bias"):
        processor = SequenceBiasLogitsProcessor({(token,): float(value) for token, value in bias.items()})
        logits = processor(torch.tensor([[NO_SUCH_TOKEN]]), logits)
    if (repetition := params.get("repetition_penalty", 1.0)) != 1:
        processor = RepetitionPenaltyLogitsProcessor(repetition)
        logits = processor(torch.tensor([[*prompt, *output]]), logits)
    for token in set(output):
        logits[0, token] -= params.get("frequency_penalty", 0.0) * list(output).count(token)
        logits[0, token] -= params.get("presence_penalty", 0.0)
    return logits[0]
