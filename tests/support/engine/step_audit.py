"""Operations of an engine step on the pretended device: launches, copies from and to the host, shapes that depend on data.

A graph can hold neither copies nor such shapes, and each copy to the host waits for the device.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.support.engine.pretend_device import PretendTensor

_FREE = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand",
    "narrow", "new_empty", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
}  # fmt: skip
_DATA_DEPENDENT = {"_unique2", "masked_select", "nonzero", "repeat_interleave", "unique_consecutive"}
_COPIES = {"_to_copy", "copy_", "cpu", "to"}
"""In inference mode the last two arrive whole."""


@dataclass
class StepCounts:
    """Each counter is by the line of the product that asked, as `runner/model_runner.py:171`."""

    launches: Counter[str] = field(default_factory=Counter)
    """Kernels; views and fresh tensors are free."""
    uploads: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    """Copies to the host, and numbers that are read there."""
    shapes: Counter[str] = field(default_factory=Counter)
    """Results whose shape depends on data: they wait, too."""


class StepAudit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is open, counts what this thread does to the pretended device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = StepCounts()
        tolist = PretendTensor.tolist

        def counted(tensor: PretendTensor) -> Any:
            self.counts.waits[_line()] += 1
            return tolist(tensor)

        patch.setattr(PretendTensor, "tolist", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        is_given = any(isinstance(value, PretendTensor) for value in given)
        is_made = any(isinstance(value, PretendTensor) for value in tree_flatten(result)[0])
        name = func._schema.name.partition("::")[2]
        if (is_given or is_made) and name not in _FREE and (name != "to" or result is not args[0]):
            self._counter(name, args, given, is_given, is_made)[_line()] += 1
        return result

    def _counter(self, name: str, args: Any, given: list[Tensor], is_given: bool, is_made: bool) -> Counter[str]:
        counts = self.counts
        if name == "_local_scalar_dense" or (name in _COPIES and is_given and not is_made):
            return counts.waits
        has_host = any(not isinstance(value, PretendTensor) and value.dim() for value in given)
        if name in _COPIES and is_made and (has_host or not is_given):
            return counts.uploads
        indices = tree_flatten(args[1])[0] if name.startswith("index") else []
        is_masked = any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices)
        if name in _DATA_DEPENDENT or is_masked:
            return counts.shapes
        return counts.launches


def _line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if "/pdserve/" in frame.filename and "/tests/" not in frame.filename:
            return f"{frame.filename.rpartition('/pdserve/')[2]}:{frame.lineno}"
    return "tests"
