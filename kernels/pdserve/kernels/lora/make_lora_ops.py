"""`make_lora_ops`: chooses the implementation of `LoraOps` by device, dtype and the setting `kernels`."""

from __future__ import annotations

import logging

import torch

from pdserve.kernels.lora.lora_linear import LoraOps
from pdserve.kernels.lora.torch_lora import TorchLoraOps
from pdserve.kernels.make_layer_ops import takes_triton
from pdserve.kernels.native.native_library import NativeLibraryError, load_library
from pdserve.kernels.native.native_lora import NativeLoraOps, unsupported_lora

_LOGGER = logging.getLogger(__name__)


def make_lora_ops(
    kernels: str, dtype: torch.dtype, device: torch.device, *, max_loras: int, max_tokens: int
) -> LoraOps:
    """The implementation for the setting `kernels`. `auto`: on a CPU the C++ kernels if they are built, on a GPU Triton if it is
    installed, else torch.

    dtype: the model's. max_loras: slots. max_tokens: most tokens of a step. Raises: LayerOpsError, as `make_layer_ops`.
    """
    if takes_triton(kernels, device):
        # lazy: CPU services never import Triton
        from pdserve.kernels.triton.lora_ops import TritonLoraOps

        return TritonLoraOps(device, max_loras, max_tokens)
    if kernels in ("auto", "native") and device.type == "cpu":
        reason = unsupported_lora(dtype, device)
        try:
            if reason is None:
                return NativeLoraOps(load_library())
        except NativeLibraryError as error:
            reason = str(error)
        _LOGGER.info("LoRA in torch operations: %s", reason)
    return TorchLoraOps(device)
