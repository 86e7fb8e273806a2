"""`rounded_keys`: transformers' cache with keys and values of eight bits, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache


@contextmanager
def rounded_keys(stored: str) -> Iterator[None]:
    """Attention of models with a `DynamicCache` sees keys and values that were rounded per token and head, new ones too.

    stored: `int8` or `float8_e4m3fn`.
    """
    exact: Callable[..., Any] = DynamicCache.update

    def update(cache: DynamicCache, keys: Tensor, values: Tensor, *others: Any, **named: Any) -> Any:
        return exact(cache, _rounded(keys, stored), _rounded(values, stored), *others, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicCache, "update", update)
        yield


def _rounded(rows: Tensor, stored: str) -> Tensor:
    largest = 127 if stored == "int8" else 448
    # a token may have keys that are all 0
    steps = (rows.double().abs().amax(-1, keepdim=True) / largest).clamp_min(1e-300)
    numbers = rows / steps
    held = numbers.round() if stored == "int8" else numbers.to(torch.float8_e4m3fn).double()
    return (held * steps).to(rows.dtype)
