"""Snippets of docs/clients.md for libraries of this environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.clients.documented import Snippet, snippets
from tests.support.processes.up_cluster import UpCluster


@pytest.mark.parametrize("snippet", snippets("openai_2"), ids=lambda snippet: snippet.heading)
def test_the_page_is_true(up: UpCluster, root: Path, snippet: Snippet) -> None:
    snippet.run(up, [sys.executable, "-"], root)
