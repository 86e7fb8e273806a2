"""Chooses the implementation of `LayerOps`, by the device and the setting `kernels`."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.native.native_layer_ops import NativeLayerOps
from pdserve.kernels.native.native_library import NativeLibraryError, load_library
from pdserve.kernels.torch_layer_ops import TorchLayerOps

NAMES = ("auto", "torch", "native", "triton")


class LayerOpsError(Exception):
    """The setting `kernels` has an unknown value, or one that this device or installation does not support."""


def make_layer_ops(name: str, device: torch.device) -> LayerOps:
    """The implementation called `name`. `auto`: Triton on a GPU, C++ on a CPU, torch where these are not installed.

    Raises: LayerOpsError naming the setting, its value, and what is missing or known.
    """
    if not takes_triton(name, device):
        return _make_native(name, device) or TorchLayerOps()
    # lazy: CPU services never import Triton
    from pdserve.kernels.triton.layer_ops import TritonLayerOps

    return TritonLayerOps(device)


def _make_native(name: str, device: torch.device) -> NativeLayerOps | None:
    """None where `auto` does not choose it, or the setting names another. Raises: LayerOpsError."""
    if name == "torch" or (name == "auto" and device.type != "cpu"):
        return None
    if device.type != "cpu":
        raise LayerOpsError(f"kernels is 'native', which needs a CPU; the device is {str(device)!r}")
    try:
        return NativeLayerOps(load_library())
    except NativeLibraryError as error:
        if name == "native":
            raise LayerOpsError(f"kernels is 'native', but {error}") from error
        return None


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
