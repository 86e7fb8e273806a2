"""Finds requests whose logits, log-probabilities or embeddings are NaN or infinite; each ends with an error.

NaN and infinity arise if a checkpoint's numbers exceed the range of the dtype, for some prompts and not for others. A sampler would
still return a token: the first or the last of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.common.errors import InternalError
from pdserve.common.request.engine_types import LogprobsLists


def finite_rows(logits: Tensor) -> Tensor:
    """`[N, V]` -> `[N]` bool, on the same device: one pass, since the maximum of a row propagates NaN.

    A row with -infinity in some places is finite: such a token has probability 0. A rank without logits has nothing to find.
    """
    if not logits.shape[1]:
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    return logits.amax(-1).isfinite()


def is_finite_vector(vector: Sequence[float]) -> bool:
    return all(map(math.isfinite, vector))


def are_finite(logprobs: LogprobsLists) -> bool:
    """True if all are finite. One log-probability per position is checked: a NaN logit makes all of its position NaN."""
    return not any(math.isnan(of_position[0]) for of_position in logprobs.logprobs)


def not_finite(what: str, dtype: torch.dtype) -> InternalError:
    """The error that ends the request. what: name of the values, for the message."""
    advice = "; serve it in bfloat16 or float32 (setting dtype)" if dtype is torch.float16 else ""
    return InternalError(f"the model's {what} are not finite (NaN or infinity) for this prompt in {dtype}{advice}")
