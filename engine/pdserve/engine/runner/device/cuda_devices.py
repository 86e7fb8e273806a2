"""The devices of a worker's ranks, and whether they are here.

`python -m pdserve.engine.runner.device.cuda_devices DEVICE ...` prints the GPUs that torch finds, a `CudaView` as one JSON line.
A process of its own: a driver may hang, and the first look makes a CUDA context of hundreds of MiB.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdserve.common.errors import ConfigError
from pdserve.common.processes.child_answers import ChildAnswers
from pdserve.common.settings.worker_settings import WorkerSettings

CPU_INFO = Path("/proc/cpuinfo")


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
    problem: str | None
    """Reason why one of the devices that were asked about cannot be used."""


def rank_devices(settings: WorkerSettings) -> list[str]:
    """Each rank has a GPU of its own, from `device` on."""
    size, first = settings.tensor_parallel_size, gpu_index(settings.device)
    return [settings.device] * size if size == 1 or first is None else [f"cuda:{first + rank}" for rank in range(size)]


def gpu_index(device: str) -> int | None:
    """`cuda` -> 0, `cuda:N` -> N, `cpu` -> None. device: as `WorkerSettings` verifies it."""
    return int(device.removeprefix("cuda").removeprefix(":") or "0") if device.startswith("cuda") else None


def verify_device(device: str) -> None:
    """Raises: ConfigError for a device that does not exist."""
    import torch  # may print, so it is imported after standard output was redirected

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (index := gpu_index(device)) is not None and index >= num_gpus:
        raise ConfigError(f"device is {device!r}, but torch {torch.__version__} sees {num_gpus} CUDA devices here")


def device_name(device: str) -> str:
    """The GPU's name, or that of the processor with its number of cores. device: as `WorkerSettings` verifies it, and here."""
    import torch  # may print, so it is imported after standard output was redirected

    if (index := gpu_index(device)) is not None:
        return str(torch.cuda.get_device_name(index))
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def cuda_view(devices: Sequence[str]) -> CudaView:
    """GPUs and versions, and whether these devices are among them. Makes a CUDA context on each device."""
    import torch  # may print, so it is imported after standard output was redirected

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total_bytes, free_bytes))
    problem = None
    try:
        for device in devices:
            verify_device(device)
    except ConfigError as error:
        problem = error.message
    return CudaView(str(torch.__version__), torch.version.cuda, gpus, problem)


if __name__ == "__main__":
    ChildAnswers().send(cuda_view(sys.argv[1:]))
