"""`python -m pdserve.engine.runner.cuda_devices`: prints the GPUs that torch finds, a `CudaView` as one JSON line.

A process of its own: a driver may hang, and the first look makes a CUDA context of hundreds of MiB.
"""

from __future__ import annotations

import msgspec

from pdserve.common.processes.child_answers import ChildAnswers


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device, as torch numbers it."""

    name: str
    total_bytes: int
    free_bytes: int


class CudaView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    torch: str
    """Version of torch."""
    cuda: str | None
    """CUDA version of torch's build; None for a build without CUDA."""
    gpus: list[Gpu]


def cuda_view() -> CudaView:
    """GPUs and versions. Makes a CUDA context on each device."""
    import torch  # may print, so it is imported after standard output was redirected

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total_bytes, free_bytes))
    return CudaView(str(torch.__version__), torch.version.cuda, gpus)


if __name__ == "__main__":
    ChildAnswers().send(cuda_view())
