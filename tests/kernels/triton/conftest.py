"""Kernels run in the checked interpreter where there is no GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def checked_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test has a random order of programs of its own, the same in every run."""
    if torch.cuda.is_available():
        yield
        return
    from tests.support.kernels.triton_interpreter import interpreted

    with interpreted(zlib.crc32(request.node.nodeid.encode())):
        yield
