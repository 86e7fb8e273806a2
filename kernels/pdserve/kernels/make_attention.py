"""Chooses the attention back end of an engine, by its device and by the setting `attention_backend`.

Other packages add back ends as entry points of the group `pdserve.attention_backends`: a callable that takes the KV cache and makes
an `AttentionBackend`. An entry point is imported only if the setting names it, since any installed package may define some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

import torch
from torch import Tensor

from pdserve.kernels.attention_backend import AttentionBackend
from pdserve.kernels.torch_attention import TorchAttentionBackend

ENTRY_POINT_GROUP = "pdserve.attention_backends"
AUTO = "auto"


class AttentionBackendError(Exception):
    """The setting names a back end that is not installed, or that cannot be made over this cache."""


def _make_triton(kv_cache: Tensor) -> AttentionBackend:
    device = kv_cache.device
    if find_spec("triton") is None:
        raise AttentionBackendError("attention_backend is 'triton', but the package triton is not installed")
    # imported here, so that a processor that serves does not spend the time and memory
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise AttentionBackendError(f"attention_backend is 'triton', which needs a GPU; the device is {str(device)!r}")
    from pdserve.kernels.triton.attention.triton_attention import TritonAttentionBackend

    return TritonAttentionBackend(kv_cache)


_BUILT_IN: Mapping[str, Callable[[Tensor], AttentionBackend]] = {
    "torch": TorchAttentionBackend,
    "triton": _make_triton,
}


def _fastest(device: torch.device) -> str:
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"


def make_attention(name: str, kv_cache: Tensor) -> AttentionBackend:
    """The back end called `name` over one engine's cache.

    name: `auto` for the fastest back end of the cache's device, a built-in back end, or an entry point. kv_cache: `[num_blocks,
    Hkv, L, 2, bs, D]`. Raises: AttentionBackendError naming the setting, its value, and the installed back ends.
    """
    if name == AUTO:
        name = _fastest(kv_cache.device)
    if name in _BUILT_IN:
        return _BUILT_IN[name](kv_cache)
    points = _installed().get(name, [])
    if len(points) != 1:
        there = ", ".join([AUTO, *_BUILT_IN, *sorted(_installed())])
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


def _installed() -> dict[str, list[EntryPoint]]:
    """Entry points by name; none is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, []).append(point)
    return found
