"""schemathesis: bodies made and broken by what `/openapi.json` declares, and answers compared with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.clients.conftest import PYTHON
from tests.support.processes.up_cluster import ENVIRON, UpCluster, running_up
from tests.support.run.waiting import HANG_S

MAX_TIME_S = 60
OPTIONS = (
    "--phases=examples,coverage,fuzzing",
    f"--max-time={MAX_TIME_S}",
    # a body of the right form may still ask for what is not served, such as `max_tokens` beyond the model's length
    "--exclude-checks=positive_data_acceptance",
    "--continue-on-failure",
    "--suppress-health-check=all",
    "--request-timeout=30",
    "--workers=2",
    "--seed=1",
    "--generation-database=none",
)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpCluster]:
    """A cluster with a short model, so that no body can ask for many tokens."""
    with running_up(tmp_path, "--max-model-len", "128", python=PYTHON) as cluster:
        yield cluster


def outcomes(up: UpCluster) -> dict[str, float]:
    """Outcome of prompts -> their number."""
    with urlopen(up.metrics["router"], timeout=HANG_S) as answer:
        found = re.findall(r'^pdserve_requests_total\{outcome="(\w+)"\} (\S+)', answer.read().decode(), re.MULTILINE)
    return {outcome: float(number) for outcome, number in found}


@pytest.mark.timeout(MAX_TIME_S + 3 * HANG_S)
def test_no_body_is_an_error_of_the_server(up: UpCluster, tmp_path: Path) -> None:
    root = up.base_url.removesuffix("/v1")
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{root}/openapi.json", *OPTIONS]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=MAX_TIME_S + HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Tested: (\d+)", done.stdout), done.stdout
    found = outcomes(up)
    assert found.get("stop", 0) + found.get("length", 0) > 10, found
    assert found.get("invalid_request", 0) > 10, found
    assert "internal_error" not in found
    body = json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0})
    request = Request(f"{up.base_url}/chat/completions", body.encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=HANG_S) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"] == "The capital of France is Paris."
