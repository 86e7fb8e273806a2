"""The same texts whatever moves the blocks: TCP, NIXL over shared memory, NIXL over UCX's own TCP."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, pd_cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S, wait_until

pytestmark = pytest.mark.process

FLAGS = ("--dtype=float32", "--num-blocks=256", "--max-num-batched-tokens=64")
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 12}
SEEDED = [[3 + (place * place + length) % 297 for place in range(length)] for length in (15, 40)]
PROMPTS = [[3 + (place * place + length) % 297 for place in range(length)] for length in (17, 250, 1000)]


def check_landed(cluster: Cluster, expected: dict[str, int]) -> None:
    """connector -> blocks; a call is counted a moment after its client has the last token."""
    total = sum(expected.values())
    wait_until(lambda: sum(landed_blocks(cluster).values()) >= total, lambda: f"{total}: {landed_blocks(cluster)}")
    assert landed_blocks(cluster) == expected


def landed_blocks(cluster: Cluster) -> dict[str, float]:
    """Connector -> blocks that landed at the decode worker over it."""
    found = re.search(r"metrics (http://\S+/metrics)", cluster.services["decode"].read_log())
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=HANG_S) as answer:
        text = answer.read().decode()
    pattern = r'^pdserve_kv_transfer_blocks_total\{connector="(\w+)"\} (\S+)$'
    return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("wanted", "transports", "used"),
    [
        pytest.param("tcp", None, "tcp", id="tcp"),
        pytest.param("auto", None, "nixl", id="nixl-shared-memory"),
        pytest.param("nixl", "tcp", "nixl", id="nixl-tcp", marks=pytest.mark.slow),
        pytest.param("auto", "no_such_transport", "tcp", id="nixl-cannot-start"),
    ],
)
async def test_i1_texts_are_equal_over_every_connector(
    wanted: str,
    transports: str | None,
    used: str,
    tiny_checkpoints: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if used == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    flags = (*FLAGS, "--connector", wanted)
    with pd_cluster(tmp_path, model, both=flags, router=("--local-prefill", "never")) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            for prompt in PROMPTS:
                answer = await router.ask(prompt, max_tokens=12)
                oracle.check(prompt, answer.token_ids)
                assert "kv_landed" in answer.moments, "it did not go through prefill/decode"
            sampled = [await router.ask(prompt, **SAMPLED) for prompt in SEEDED]
        check_landed(cluster, {used: sum(-(-len(prompt) // 16) for prompt in PROMPTS + SEEDED)})
        # the decode worker alone says the same, so every connector's texts are equal to every other's
        alone = cluster.start_router(
            *("--model", str(model), "--local-prefill", "always"),
            prefill=[cluster.services["prefill"].address],
            decode=[cluster.services["decode"].address],
            name="router-alone",
        )
        async with InferenceClient(alone.address) as router:
            for prompt, answer in zip(SEEDED, sampled, strict=True):
                assert (await router.ask(prompt, **SAMPLED)).token_ids == answer.token_ids
        cluster.check_pools()
        cluster.check_logs()
        log = cluster.services["decode"].read_log()
        assert "continuing over" not in log, log
        if wanted == "auto" and used == "tcp":
            assert "not nixl: NIXL cannot start UCX" in log


async def test_workers_whose_nixl_cannot_reach_each_other_go_on_over_tcp(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with running_cluster(tmp_path) as cluster:
        workers = []
        for role, transports in (("prefill", "posix,self"), ("decode", "tcp")):
            monkeypatch.setenv("UCX_TLS", transports)
            workers.append(cluster.start_worker(role, "--model", str(model), *FLAGS, "--connector", "nixl").address)
        router_flags = ("--model", str(model), "--local-prefill", "never")
        cluster.start_router(*router_flags, prefill=workers[:1], decode=workers[1:])
        async with InferenceClient(cluster.router.address) as router:
            for prompt in PROMPTS:
                oracle.check(prompt, (await router.ask(prompt, max_tokens=12)).token_ids)
        check_landed(cluster, {"tcp": sum(-(-len(prompt) // 16) for prompt in PROMPTS)})
        cluster.check_pools()
        cluster.check_logs()
        log = cluster.services["decode"].read_log()
        assert log.count("over nixl failed, continuing over tcp") == 1, log
