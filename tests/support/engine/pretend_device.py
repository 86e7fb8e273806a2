"""A simulated device: tensors that report another device, with numbers computed by the CPU.

An operation between such a tensor and a tensor of the CPU is refused, as on a GPU. Code that runs on the simulated device
therefore leaves no tensor on the host, and takes the same branches on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
"""The one device type other than the CPU that every build of torch lets a tensor name."""
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))
"""The parameter that names a real one, where there is one."""
_COPY_INTO = torch.ops.aten.copy_.default
_WIDENED_PRODUCT = torch.ops.aten.mm.dtype
"""A product whose result has another dtype than its factors: GPUs have it, processors do not."""


class PretendTensor(Tensor):
    """A tensor of the pretended device."""

    held: Tensor
    """Its numbers, on the CPU."""

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        with torch.inference_mode(False):  # a view of a tensor from outside such a mode must not be born inside it
            return Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=DEVICE,
            )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def tolist(self) -> Any:
        """Tensor's own refuses subclasses."""
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class _OnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes new tensors, and copies, that ask for the device into pretended ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    pretended = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    devices = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
    target = devices[0] if devices else None
    if pretended and target is None and func is not _COPY_INTO:
        for stranger in tensors:
            if not isinstance(stranger, PretendTensor) and stranger.dim() > 0:
                raise RuntimeError(f"{func} is given tensors of two devices, {tuple(stranger.shape)} of the CPU")
    held_args, held_kwargs = tree_map(_held, (args, kwargs))
    if func is _WIDENED_PRODUCT:
        left, right, dtype = held_args
        result = left.to(dtype) @ right.to(dtype)
    else:
        result = func(*held_args, **held_kwargs)
    if func is _COPY_INTO:
        return args[0]
    on_device = bool(pretended) if target is None else target.type == DEVICE.type
    wrappers = {id(tensor.held): tensor for tensor in pretended} if on_device else {}

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor) or not on_device:
            return value
        return wrappers[id(value)] if id(value) in wrappers else PretendTensor(value)

    return tree_map(placed, result)


def _held(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.held if isinstance(value, PretendTensor) else value


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """While it lasts, this thread can make tensors on the device. Within another of the thread, it changes nothing."""
    if any(isinstance(mode, _OnDevice) for mode in _get_current_dispatch_mode_stack()):
        yield DEVICE
        return
    with _OnDevice():  # type: ignore[no-untyped-call]
        yield DEVICE


def usable(device: str) -> AbstractContextManager[object]:
    """While it lasts, this thread can make tensors on the device of this name, pretended or real."""
    return pretended_device() if device == str(DEVICE) else nullcontext()


def host_copy(tensor: Tensor) -> Tensor:
    """The numbers, on the CPU."""
    return tensor.held.clone() if isinstance(tensor, PretendTensor) else tensor
