"""Names of the dtypes that weights and KV blocks may have."""

from __future__ import annotations

import torch

from pdserve.common.kv_layout import QUANTIZED_DTYPES

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of weights, and of a KV cache that is not quantised."""
CACHE_DTYPES = TORCH_DTYPES | {name: getattr(torch, name) for name in QUANTIZED_DTYPES}
"""Dtypes of KV blocks."""
