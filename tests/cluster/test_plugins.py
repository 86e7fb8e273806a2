"""Rules that only workers can check: plug-ins that are installed there, and rules that leave no token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pdserve.v1 import request_pb2
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import pd_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.process

SETTINGS = ("dtype=float32", "num_blocks=128", "max_num_batched_tokens=32", "logits_processors=ban,broken")
FLAGS = tuple(f"--{setting}" for setting in SETTINGS)
PROMPT = [3 + (place * place) % 290 for place in range(70)]
TOKENS = range(320)
CODE = Path(__file__).parents[1] / "support/engine/logits_plugins.py"


def install(folder: Path) -> None:
    """A distribution with the plug-ins of the tests, as pip would have left it."""
    (folder / "installed_plugins.py").write_text(CODE.read_text())
    (folder / "not_to_be_imported.py").write_text("raise SystemExit('an unnamed plug-in was imported')\n")
    info = folder / "installed_plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-plugins\nVersion: 1\n")
    points = "ban = installed_plugins:Ban\nbroken = installed_plugins:Broken\nunnamed = not_to_be_imported:Any\n"
    (info / "entry_points.txt").write_text(f"[pdserve.logits_processors]\n{points}")


REFUSED: Any = [
    (
        [{"name": "nobody"}],
        {},
        400,
        "logits_processors[0].name is 'nobody', which is not known; loaded here: ban, broken",
    ),
    ([{"name": "ban"}], {}, 400, "logits_processors[0].args were refused by 'ban': tokens must be token ids below 320"),
    ([{"name": "ban", "args": {"tokens": [320]}}], {}, 400, "not [320]"),
    ([{"name": "ban", "args": {"tokens": [*TOKENS]}}], {}, 400, "leave no token for output position 0"),
    ([{"name": "ban", "args": {"tokens": [*TOKENS], "after": 3}}], {}, 400, "leave no token for output position 3"),
    (
        [],
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2},
        400,
        "leave no token for output position 0",
    ),
    (
        [{"name": "broken", "args": {"how": "raise"}}],
        {},
        500,
        "failed with RuntimeError; the worker's log has the traceback",
    ),
    ([{"name": "broken", "args": {"how": "nan", "at": 2}}], {}, 500, "made a logit that is NaN"),
]
"""Processors, other fields, status, a part of the message; through prefill at position 0, through decode later."""


@pytest.mark.slow
async def test_through_prefill_and_decode(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    plugins = tmp_path / "site"
    plugins.mkdir()
    install(plugins)
    monkeypatch.setenv("PYTHONPATH", str(plugins))
    with pd_cluster(tmp_path, model, both=FLAGS, router=("--local-prefill", "never")) as cluster:
        url = f"http://{cluster.router.http}"
        async with (
            InferenceClient(cluster.router.address) as client,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=HANG_S) as http,
        ):
            beside = asyncio.create_task(client.ask(PROMPT, max_tokens=150))
            body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            for processors, fields, status, message in REFUSED:
                asked: dict[str, Any] = {"logits_processors": processors, **fields}
                response = await http.post("/v1/completions", json=body | asked)
                assert (response.status_code, message in response.text) == (status, True), response.text
                wire = [
                    request_pb2.LogitsProcessor(name=one["name"], args=json.dumps(one.get("args", {})))
                    for one in processors
                ]
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await client.ask(PROMPT, max_tokens=12, logits_processors=wire, **fields)
                assert message in str(refused.value.details())
            usual = oracle.greedy(PROMPT, 12)
            banned = sorted({usual[0], usual[5]})
            ban = request_pb2.LogitsProcessor(name="ban", args=json.dumps({"tokens": banned}))
            answer = await client.ask(PROMPT, max_tokens=12, logits_processors=[ban])
            for place, token in enumerate(answer.token_ids):
                logits = oracle.logits([*PROMPT, *answer.token_ids[:place]])[-1].clone()
                logits[banned] = -float("inf")
                assert float(logits.max() - logits[token]) < 1e-4
            oracle.check(PROMPT, (await beside).token_ids)
        cluster.check_pools()
