"""Chooses the back end of states of an engine, by its device and by the setting `attention_backend`."""

from __future__ import annotations

import logging

from torch import Tensor

from pdserve.kernels.attention.make_attention import AttentionBackendError
from pdserve.kernels.native.native_library import NativeLibraryError, load_library
from pdserve.kernels.native.native_states import NativeStateBackend, unsupported_states
from pdserve.kernels.state.state_backend import StateBackend

_IN_TORCH = ("torch", "triton", "sdpa")
"""Back ends of attention whose states are torch operations."""
_LOGGER = logging.getLogger(__name__)


def make_states(name: str, kv_cache: Tensor, block_size: int) -> StateBackend:
    """The back end of states beside the attention back end called `name`, which may be another package's.

    `auto`, `native` and those of other packages: C++ on a CPU where it is built; `native` is refused where it is not.
    kv_cache: `[num_blocks, H, L, 1, 1, N]`. block_size: tokens of a place in block tables. Raises: AttentionBackendError.
    """
    if name in _IN_TORCH:
        return StateBackend(kv_cache, block_size)
    reason = unsupported_states(kv_cache)
    if reason is None:
        try:
            return NativeStateBackend(kv_cache, block_size, load_library())
        except NativeLibraryError as error:
            reason = str(error)
    if name == "native":
        raise AttentionBackendError(f"attention_backend is 'native', but {reason}")
    _LOGGER.info("states in torch operations: %s", reason)
    return StateBackend(kv_cache, block_size)
