"""Chooses the attention back end of an engine, by its device and by the setting `attention_backend`.

Other packages add back ends as entry points of the group `pdserve.attention_backends`: a callable that takes the KV cache and makes
an `AttentionBackend`. An entry point is imported only if the setting names it, since any installed package may define some.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionBackend
from pdserve.kernels.attention.kv_pages import has_latent_rows
from pdserve.kernels.attention.quantized_pages import is_quantized
from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from pdserve.kernels.native.native_attention import NativeAttentionBackend, unsupported
from pdserve.kernels.native.native_library import NativeLibraryError, load_library

ENTRY_POINT_GROUP = "pdserve.attention_backends"
AUTO = "auto"
_LOGGER = logging.getLogger(__name__)


class AttentionBackendError(Exception):
    """The setting names a back end that is not installed, or that cannot be made over this cache."""


def _make_triton(name: Literal["auto", "triton", "sdpa"], kv_cache: Tensor) -> AttentionBackend:
    """name: `auto` takes the choice of the table for the device's architecture."""
    if name == "sdpa" and has_latent_rows(kv_cache):
        raise AttentionBackendError(
            f"attention_backend is {name!r}, which reads keys and values, and the cache has latent rows; triton reads them"
        )
    check_triton(name, kv_cache.device)
    # lazy: CPU services never import Triton
    from pdserve.kernels.triton.attention.triton_attention import TritonAttentionBackend

    return TritonAttentionBackend(kv_cache, None if name == "auto" else name)


def check_triton(name: str, device: torch.device) -> None:
    """Raises: AttentionBackendError where Triton's kernels do not run. name: of `attention_backend`."""
    if find_spec("triton") is None:
        raise AttentionBackendError(f"attention_backend is {name!r}, but the package triton is not installed")
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise AttentionBackendError(f"attention_backend is {name!r}, which needs a GPU; the device is {str(device)!r}")


def _make_quantized(name: str, kv_cache: Tensor, dtype: torch.dtype | None) -> AttentionBackend:
    if name not in (AUTO, "torch"):
        raise AttentionBackendError(
            f"attention_backend is {name[:200]!r}, only torch reads a KV cache of {kv_cache.dtype}"
        )
    try:
        return TorchAttentionBackend(kv_cache, dtype)
    except ValueError as error:
        raise AttentionBackendError(str(error)) from error


def _make_native(kv_cache: Tensor) -> AttentionBackend:
    try:
        library = load_library()
    except NativeLibraryError as error:
        raise AttentionBackendError(f"attention_backend is 'native', but {error}") from error
    if reason := unsupported(kv_cache):
        raise AttentionBackendError(f"attention_backend is 'native', but {reason}")
    return NativeAttentionBackend(kv_cache, library)


def _make_auto(kv_cache: Tensor) -> AttentionBackend:
    """Triton's on a GPU where it is installed; on a CPU C++ where it is built; else torch's."""
    if kv_cache.device.type == "cuda" and find_spec("triton") is not None:
        return _make_triton("auto", kv_cache)
    if reason := _no_native(kv_cache):
        _LOGGER.info("attention in torch operations: %s", reason)
        return TorchAttentionBackend(kv_cache)
    return NativeAttentionBackend(kv_cache, load_library())


def _no_native(kv_cache: Tensor) -> str | None:
    """Why decode attention over this cache is not computed in C++; None if it is."""
    if reason := unsupported(kv_cache):
        return reason
    try:
        load_library()
    except NativeLibraryError as error:
        return str(error)
    return None


_BUILT_IN: Mapping[str, Callable[[Tensor], AttentionBackend]] = {
    AUTO: _make_auto,
    "torch": TorchAttentionBackend,
    "native": _make_native,
    "triton": partial(_make_triton, "triton"),
    "sdpa": partial(_make_triton, "sdpa"),
}


def make_attention(name: str, kv_cache: Tensor, dtype: torch.dtype | None = None) -> AttentionBackend:
    """The back end called `name` over one engine's cache.

    name: `auto` for the fastest back end of the cache's device, a built-in back end, or an entry point. kv_cache: `[num_blocks,
    Hkv, L, 2 or 1, bs, D]`, or a quantised one (`QuantizedPages`), which only torch's back end reads. dtype: of queries; default:
    of the cache. Raises: AttentionBackendError naming the setting, its value, and the installed back ends.
    """
    if is_quantized(kv_cache):
        return _make_quantized(name, kv_cache, dtype)
    if name in _BUILT_IN:
        return _BUILT_IN[name](kv_cache)
    points = _installed().get(name, [])
    if len(points) != 1:
        there = ", ".join([*_BUILT_IN, *sorted(_installed())])
        found = (
            f"is installed {len(points)} times: {', '.join(point.value for point in points)}"
            if points
            else "is not installed"
        )
        raise AttentionBackendError(f"attention_backend is {name[:200]!r}, which {found}; there are {there}")
    [point] = points
    try:
        backend: AttentionBackend = point.load()(kv_cache)
    except Exception as error:
        raise AttentionBackendError(
            f"attention_backend {name!r} ({point.value}) cannot be made: {type(error).__name__}: {error}"
        ) from error
    return backend


def make_cross_attention(name: str, kv_cache: Tensor, dtype: torch.dtype | None = None) -> AttentionBackend:
    """A back end that attends only to pages, never to the `k` and `v` of `attend`: over the encoder's keys of a cache.

    Arguments: as of `make_attention`. Full chunks in torch's fused attention read those, and back ends of other packages may.
    """
    if name == "sdpa" or (name == AUTO and kv_cache.device.type == "cuda" and find_spec("triton") is not None):
        name = "triton"
    return make_attention(name if name in _BUILT_IN else AUTO, kv_cache, dtype)


def _installed() -> dict[str, list[EntryPoint]]:
    """Entry points by name; none is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, []).append(point)
    return found
