"""Requests whose logits, log-probabilities or embeddings are no numbers: each ends with an error instead of an answer.

NaN and infinity arise where a checkpoint's numbers leave the range of the dtype, in some prompts and not in others. A
sampler would still name a token: the first or the last of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.common.errors import InternalError
from pdserve.common.request.engine_types import LogprobsLists


def finite_rows(logits: Tensor) -> Tensor:
    """`[N, V]` -> `[N]` bool, on the same device: one pass, since the largest of a row keeps a NaN.

    A row with -infinity in some places is finite: such a token has probability 0.
    """
    return logits.amax(-1).isfinite()


def is_finite_vector(vector: Sequence[float]) -> bool:
    return all(map(math.isfinite, vector))


def are_finite(logprobs: LogprobsLists) -> bool:
    """A logit that is no number makes all log-probabilities of its position NaN, so one per position is enough."""
    return not any(math.isnan(of_position[0]) for of_position in logprobs.logprobs)


def not_finite(what: str, dtype: torch.dtype) -> InternalError:
    """The error that ends the request. what: that is not finite, for the message."""
    advice = "; serve it in bfloat16 or float32 (setting dtype)" if dtype is torch.float16 else ""
    return InternalError(f"the model's {what} are not finite (NaN or infinity) for this prompt in {dtype}{advice}")
