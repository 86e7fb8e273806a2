"""Kernels run in the checked interpreter where there is no GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.attention_contract import AttentionContract


@pytest.fixture(autouse=True)
def checked_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test has a random order of programs of its own, the same in every run."""
    if torch.cuda.is_available():
        yield
        return
    from tests.support.triton_interpreter import interpreted

    with interpreted(zlib.crc32(request.node.nodeid.encode())):
        yield


_ONE_OF = 5
"""`make test` runs one case of this number, of a contract test with three parameters or more."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A case takes half a second in the interpreter: mark most of the contract's `slow`."""
    for item in items:
        if not isinstance(item, pytest.Function) or item.path.parent != Path(__file__).parent:
            continue
        if item.cls is not None and issubclass(item.cls, AttentionContract):
            indices = [*item.callspec.indices.values()] if hasattr(item, "callspec") else []
            if len(indices) >= 3 and indices[0] % _ONE_OF:
                item.add_marker(pytest.mark.slow)
