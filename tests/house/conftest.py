"""What holds for every test of the sources."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _parses_undisturbed(uncollected: None) -> None:
    """They parse hundreds of files."""
