"""GPU: the devices of this machine, and whether torch can use them."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.cli.doctor.child_process import ChildBroke, child
from pdserve.cli.doctor.finding import Finding, failed, ok
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.device.cuda_devices import CudaView, rank_devices

LOOK_S = 50.0
_NEEDED = "install a torch with CUDA and the driver it needs (`nvidia-smi` shows it), or set device=cpu"


class NoView(Exception):
    """The devices could not be examined; the text says why."""


def look_at_gpus(settings: WorkerSettings) -> CudaView:
    """Ask torch in a child process: a driver may hang, and a CUDA context would take memory of this process. Raises: NoView."""
    try:
        with child("pdserve.engine.runner.device.cuda_devices", *rank_devices(settings), timeout_s=LOOK_S) as probe:
            return probe.answer(CudaView)
    except ChildBroke as error:
        raise NoView(f"torch cannot be examined: {error}") from error
    except TimeoutError:
        raise NoView(f"torch and its driver did not answer within {LOOK_S:g} s") from None


def check_gpu(settings: WorkerSettings) -> Iterator[Finding]:
    """torch's build, the devices that it can use, and whether those of the worker's ranks are among them."""
    device = settings.device
    try:
        view = look_at_gpus(settings)
    except NoView as error:
        yield failed(str(error), "import torch by hand, and look at what it says")
        return
    gpus = [
        f"cuda:{index} {gpu.name}, {gpu.free_bytes >> 20} of {gpu.total_bytes >> 20} MiB free"
        for index, gpu in enumerate(view.gpus)
    ]
    shown = "; ".join([f"torch {view.torch}, {f'CUDA {view.cuda}' if view.cuda else 'without CUDA'}", *gpus])
    if view.problem is not None:
        yield failed(f"{view.problem}: {shown}", "name one of them" if gpus else _NEEDED)
    else:
        yield ok(f"device is {device}{', not used' if gpus and device == 'cpu' else ''}: {shown}")
