"""GPU: the devices of this machine, and whether torch can use them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdserve.cli.doctor.child_process import ChildBroke, child
from pdserve.cli.doctor.finding import Finding, failed, ok
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.cuda_view import CudaView

LOOK_S = 50.0
_NEEDED = "install a torch with CUDA and the driver it needs (`nvidia-smi` shows it), or set device=cpu"


class NoView(Exception):
    """The devices could not be examined; the text says why."""


def look_at_gpus() -> CudaView:
    """Ask torch in a child process: a driver may hang, and a CUDA context would take memory of this process. Raises: NoView."""

    async def look() -> CudaView:
        async with asyncio.timeout(LOOK_S), child("pdserve.engine.runner.cuda_devices") as probe:
            return await probe.answer(CudaView)

    try:
        return asyncio.run(look())
    except ChildBroke as error:
        raise NoView(f"torch cannot be examined: {error}") from error
    except TimeoutError:
        raise NoView(f"torch and its driver did not answer within {LOOK_S:g} s") from None


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """Checks the device in the settings. Implements `Check`."""

    settings: WorkerSettings
    name: str = "gpu"
    deadline_s: float = 60.0

    def run(self) -> list[Finding]:
        """See `Check.run`."""
        device = self.settings.device
        on_gpu = device != "cpu"
        try:
            view = look_at_gpus()
        except NoView as error:
            return [failed(str(error), "import torch by hand, and look at what it says")]
        build = f"torch {view.torch}, {f'CUDA {view.cuda}' if view.cuda else 'without CUDA'}"
        listed = [
            f"cuda:{index} {gpu.name}, {gpu.free_bytes >> 20} of {gpu.total_bytes >> 20} MiB free"
            for index, gpu in enumerate(view.gpus)
        ]
        shown = "; ".join([build, *listed])
        if not on_gpu:
            unused = ", not used" if listed else ""
            return [ok(f"device is cpu{unused}: {shown}")]
        if not device.startswith("cuda"):
            return [failed(f"device is {device!r}", "it must be cpu, cuda or cuda:N")]
        if not listed:
            return [failed(f"device is {device!r}, and torch sees no GPU: {shown}", _NEEDED)]
        index = gpu_index(device)
        if index is None or index >= len(view.gpus):
            return [failed(f"device is {device!r}, which is not among: {shown}", "name one of them")]
        return [ok(f"device is {device}: {shown}")]


def gpu_index(device: str) -> int | None:
    """`cuda` -> 0, `cuda:N` -> N; None for anything else."""
    if device == "cuda":
        return 0
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" and number.isascii() and number.isdigit() else None
