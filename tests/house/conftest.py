"""Fixtures for all tests of the sources."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _parses_undisturbed(uncollected: None) -> None:
    """Turn collection off, since tests of the house parse hundreds of files."""
