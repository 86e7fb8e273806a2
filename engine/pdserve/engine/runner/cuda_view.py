"""`CudaView`: what torch sees of GPUs, as one process tells another."""

from __future__ import annotations

import msgspec


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device, as torch numbers it."""

    name: str
    total_bytes: int
    free_bytes: int


class CudaView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    torch: str
    """Its version."""
    cuda: str | None
    """The CUDA version it was built with; None for a build without."""
    gpus: list[Gpu]
