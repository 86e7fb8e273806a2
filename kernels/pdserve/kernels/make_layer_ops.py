"""Chooses the implementation of `LayerOps`, by the device and the setting `kernels`."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.torch_layer_ops import TorchLayerOps

NAMES = ("auto", "torch", "triton")


class LayerOpsError(Exception):
    """The setting `kernels` has an unknown value, or one that this device or installation does not support."""


def make_layer_ops(name: str, device: torch.device) -> LayerOps:
    """The implementation called `name`. `auto`: Triton on a GPU where it is installed, else torch.

    Raises: LayerOpsError naming the setting, its value, and what is missing or known.
    """
    if not takes_triton(name, device):
        return TorchLayerOps()
    # imported here, so that a processor that serves does not spend the time and memory
    from pdserve.kernels.triton.layer_ops import TritonLayerOps

    return TritonLayerOps(device)


def takes_triton(name: str, device: torch.device) -> bool:
    """True if the setting `kernels` chooses Triton on this device. Raises: LayerOpsError, as `make_layer_ops`."""
    if name not in NAMES:
        raise LayerOpsError(f"kernels is {name[:200]!r}; there are {', '.join(NAMES)}")
    is_there = find_spec("triton") is not None
    if name != "triton":
        return name == "auto" and device.type == "cuda" and is_there
    if not is_there:
        raise LayerOpsError("kernels is 'triton', but the package triton is not installed")
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise LayerOpsError(f"kernels is 'triton', which needs a GPU; the device is {str(device)!r}")
    return True
