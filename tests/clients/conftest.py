"""Fixtures for tests of client libraries. One cluster serves all tests of a run; each test ends with the pool check."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.support.processes.up_cluster import UpCluster, running_up
from tests.support.run.waiting import HANG_S

PYTHON = os.environ.get("PDSERVE_PYTHON", ".venv/bin/python")
"""The interpreter of the product's own environment."""


@pytest.fixture(scope="session", autouse=True)
def no_other_server() -> None:
    """Clients send what the environment names to no one, and report nothing."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    with running_up(tmp_path_factory.mktemp("up"), python=PYTHON) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def pools_at_rest(up: UpCluster) -> Iterator[None]:
    """Nothing that a client did, or left, holds a block, a request or a transfer."""
    yield
    up.check_pools()


@pytest.fixture(scope="session")
def base_url(up: UpCluster) -> str:
    return up.base_url


@pytest.fixture(scope="session")
def only_braces(base_url: str) -> dict[str, Any]:
    """Fields that let the bundled model write nothing but `{}` where any JSON object is asked for: it does not end others."""
    body = json.dumps({"prompt": "{}<|im_end|>", "return_token_strs": True}).encode()
    request = Request(base_url.removesuffix("/v1") + "/tokenize", body, {"content-type": "application/json"})
    with urlopen(request, timeout=HANG_S) as answer:
        return {"allowed_token_ids": json.load(answer)["tokens"]}


@pytest.fixture
def root() -> Path:
    return Path(__file__).parents[2]
