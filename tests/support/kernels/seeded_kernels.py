"""Copies of the product's Triton kernels with an error in one of them, to see that the tests of kernels find it."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import triton

import pdserve.kernels.triton

_PACKAGE = "pdserve.kernels.triton"
_COPY = "kernels_with_a_seeded_error"


@dataclass(frozen=True, slots=True)
class SeededError:
    """One change of one kernel."""

    file: str
    """Path within `pdserve.kernels.triton`."""
    right: str
    """Text that the file has `count` times."""
    wrong: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Copies:
    attention: ModuleType
    """`attention/triton_attention.py`"""
    layer_ops: ModuleType
    lora_ops: ModuleType
    states: ModuleType
    """`triton_states.py`"""


@contextmanager
def copied_kernels(folder: Path, error: SeededError | None) -> Iterator[Copies]:
    """Import a copy of all kernels from `folder`, with the error. Raises: ValueError if the file no longer has its text."""
    [source] = pdserve.kernels.triton.__path__
    package = folder / _COPY
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    if error is not None:
        path = package / error.file
        text = path.read_text()
        if text.count(error.right) != error.count:
            raise ValueError(f"{error.file} has {text.count(error.right)} times {error.right!r}")
        path.write_text(text.replace(error.right, error.wrong))
    for path in package.rglob("*.py"):
        path.write_text(path.read_text().replace(_PACKAGE, _COPY))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        with triton.knobs.runtime.scope():
            # else Triton's own interpreter would launch them, without the checks
            triton.knobs.runtime.interpret = False
            modules = [
                importlib.import_module(f"{_COPY}.{name}")
                for name in ("attention.triton_attention", "layer_ops", "lora_ops", "triton_states")
            ]
        yield Copies(*modules)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == _COPY]:
            del sys.modules[name]
