"""Triton kernels on the pretended device: launches run in the checked interpreter, over the numbers that the tensors hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_map
from triton.runtime.jit import JITFunction

from tests.support.engine.pretend_device import PretendTensor
from tests.support.kernels.triton_interpreter import interpreted


def _held(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.held
    if isinstance(value, Tensor):
        raise ValueError(f"a kernel is given a tensor of the CPU, {tuple(value.shape)}")
    return value


@contextmanager
def interpreted_on_device() -> Iterator[None]:
    """As `interpreted`. Raises, from a launch: ValueError for a tensor of the CPU, as on a GPU."""
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        run = JITFunction.run

        def run_on_device(self: Any, *args: Any, **kwargs: Any) -> None:
            run(self, *tree_map(_held, args), **tree_map(_held, kwargs))

        patch.setattr(JITFunction, "run", run_on_device)
        yield
