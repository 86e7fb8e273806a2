"""Checks the numbers of a prompt's embeddings."""

from __future__ import annotations

import numpy as np

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.prompt_embeds import PromptEmbeds

_EXPONENT_BITS = {"float32": ("<u4", 0x7F800000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80)}
"""Dtype -> integers of its size, and the bits of the exponent, which are all set in NaN and infinity."""


def verify_finite(embeds: PromptEmbeds) -> None:
    """Raises: InvalidRequest naming the first row with NaN or infinity."""
    kind, exponent = _EXPONENT_BITS[embeds.dtype]
    values = np.frombuffer(embeds.data, dtype=kind)
    broken = (values & exponent) == exponent
    if broken.any():
        row, column = divmod(int(broken.argmax()), embeds.hidden_size)
        raise InvalidRequest(f"prompt_embeds[{row}][{column}] is not finite (NaN or infinity)", "prompt_embeds")
