"""MXFP4: 32 numbers of four bits share a scale, a power of 2.

Source: "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.2 and 5.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 32
"""Numbers of a block."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the low three bits; the fourth is the sign."""
_BIAS = 127


def unpacked(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks `[*, N, 16]` uint8, the first number of a pair in the low bits; scales `[*, N]` uint8 -> `[*, N * 32]`."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=dtype, device=blocks.device)
    numbers = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), -1).flatten(-2)
    return torch.ldexp(numbers, scales.int().sub(_BIAS).unsqueeze(-1)).to(dtype).flatten(-2)
