"""`verify_finite`: refuses weights with NaN or infinity when they are read; they would make every answer empty."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError


def verify_finite(tensor: Tensor, source: Tensor, where: str) -> None:
    """Check a weight, in one pass at memory speed: 0.06 s for 783 MB in bfloat16, of 1 s for loading.

    tensor: in the served dtype. source: in the file's dtype. where: file and name, for the message.
    Raises: ConfigError for NaN, infinity, or a number that exceeds the served dtype.
    """
    if _is_finite(tensor):
        return
    if _is_finite(source):
        raise ConfigError(
            f"{where} has numbers beyond {tensor.dtype}, whose largest is {torch.finfo(tensor.dtype).max:g}; "
            f"serve it in {source.dtype} (setting dtype)"
        )
    values = source.flatten()
    place = int((~values.isfinite()).nonzero()[0])
    count = int((~values.isfinite()).sum())
    raise ConfigError(
        f"{where} has {count} values that are NaN or infinite; the first is number {place} of {len(values)}"
    )


def _is_finite(tensor: Tensor) -> bool:
    """Minimum and maximum propagate NaN, and take a tenth of the time of a test of each number."""
    if tensor.is_meta or not tensor.numel():
        return True
    smallest, largest = torch.aminmax(tensor)
    return bool(smallest.isfinite() & largest.isfinite())
