"""The evaluation harness, unchanged, against the server: the scores of the model's code in `transformers` on the same tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import PYTHON

SCRIPT = Path(__file__).with_name("scores.py")
MODEL = "models/pdserve/models/demo"
LIMIT_S = 200


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Nothing is fetched, and caches are the test's own."""
    cache = str(tmp_path_factory.mktemp("hub"))
    return {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")},
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": cache, "TOKENIZERS_PARALLELISM": "false",
        "OPENAI_API_KEY": "none", "LM_EVAL_SITE": sysconfig.get_path("purelib"),
    }  # fmt: skip


def scores(environment: dict[str, str], python: str, kind: str, **arguments: Any) -> dict[str, Any]:
    command = [python, str(SCRIPT), kind, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_completions(base_url: str, environment: dict[str, str]) -> None:
    ours = scores(
        environment, sys.executable, "local-completions", base_url=f"{base_url}/completions", model="demo", tokenizer=MODEL,
        tokenizer_backend="huggingface", num_concurrent=2, max_length=1024,
    )  # fmt: skip
    theirs = scores(environment, PYTHON, "transformers", folder=MODEL)
    # the server computes in the model's bfloat16
    assert ours["scores"] == theirs["scores"]
    assert ours["scores"]["pdserve_capitals"]["acc"] >= 0.5
    assert ours["answers"]["pdserve_answers"] == theirs["answers"]["pdserve_answers"]
    for one, other in zip(ours["answers"]["pdserve_capitals"], theirs["answers"]["pdserve_capitals"], strict=True):
        for ((score, is_greedy),), ((expected, was_greedy),) in zip(one, other, strict=True):
            assert float(score) == pytest.approx(float(expected), rel=0.01, abs=0.02)
            assert is_greedy == was_greedy


def test_chats(base_url: str, environment: dict[str, str]) -> None:
    ours = scores(
        environment, sys.executable, "local-chat-completions", base_url=f"{base_url}/chat/completions", model="demo",
        num_concurrent=2,
    )  # fmt: skip
    theirs = scores(environment, PYTHON, "transformers chat", folder=MODEL)
    assert ours == theirs
    assert ours["scores"]["pdserve_answers"]["exact_match"] >= 0.5
