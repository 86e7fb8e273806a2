"""Fixtures of every test of the command line that runs in this process."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def leaves_no_child() -> Iterator[None]:
    """Processes that a test starts end with it; those of fixtures that live longer were there before."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, "a child was left behind"
