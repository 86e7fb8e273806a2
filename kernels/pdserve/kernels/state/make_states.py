"""Chooses the back end of states of an engine, by its device and by the setting `attention_backend`."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from torch import Tensor

from pdserve.kernels.attention.make_attention import AttentionBackendError, check_triton
from pdserve.kernels.native.native_library import NativeLibraryError, load_library
from pdserve.kernels.native.native_states import NativeStateBackend, unsupported_states
from pdserve.kernels.state.state_backend import StateBackend

_LOGGER = logging.getLogger(__name__)


def make_states(name: str, kv_cache: Tensor, block_size: int) -> StateBackend:
    """The back end of states next to the attention back end called `name`, which may be another package's.

    `torch`, `native`, and `triton` or `sdpa` take that one, or are refused where it is not there; all others take Triton's on a GPU
    where it is installed, on a CPU C++ where it is built, else torch's. kv_cache: `[num_blocks, H, L, 1, 1, N]`. block_size: tokens
    of a place in block tables. Raises: AttentionBackendError.
    """
    if name == "torch":
        return StateBackend(kv_cache, block_size)
    is_triton_there = find_spec("triton") is not None
    if name in ("triton", "sdpa") or (name != "native" and kv_cache.device.type == "cuda" and is_triton_there):
        return _make_triton(name, kv_cache, block_size)
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


def _make_triton(name: str, kv_cache: Tensor, block_size: int) -> StateBackend:
    check_triton(name, kv_cache.device)
    # lazy: CPU services never import Triton
    from pdserve.kernels.triton.triton_states import TritonStateBackend

    return TritonStateBackend(kv_cache, block_size)
