"""`python -m pdserve.engine.runner.cuda_devices`: what torch sees of GPUs, as one JSON line.

A process of its own: a driver may hang, and the first look makes a CUDA context of hundreds of MiB.
"""

from __future__ import annotations

from pdserve.common.child_answers import ChildAnswers
from pdserve.engine.runner.cuda_view import CudaView, Gpu


def cuda_view() -> CudaView:
    """Makes a CUDA context on each device."""
    import torch  # which may print: only now that answers have their own way out

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total_bytes, free_bytes))
    return CudaView(str(torch.__version__), torch.version.cuda, gpus)


if __name__ == "__main__":
    ChildAnswers().say(cuda_view())
