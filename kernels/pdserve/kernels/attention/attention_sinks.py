"""Softmax with one more score per row, whose weight goes to no value.

Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; gpt-oss learns one number per head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of the scores, which add up to less than 1 if there are sinks.

    scores `[*, R, S]`, sinks `[*, R, 1]` or None: no sinks -> `[*, R, S]`, a view of a longer row with sinks.
    """
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.to(scores.dtype)), -1).softmax(-1)[..., :-1]
