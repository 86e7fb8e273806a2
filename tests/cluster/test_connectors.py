"""The same texts whatever moves the blocks: TCP, NIXL over shared memory, NIXL over UCX's own TCP."""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_processes import Cluster, pd_cluster, running_cluster
from inference_client import InferenceClient
from oracle import Oracle

pytestmark = pytest.mark.process

FLAGS = ("--set", "dtype=float32", "--set", "num_blocks=256", "--set", "max_num_batched_tokens=64")
PROMPTS = [[random.Random(length).randrange(3, 300) for _ in range(length)] for length in (17, 250, 1000)]


def landed_blocks(cluster: Cluster) -> dict[str, float]:
    """Connector -> blocks that landed at the decode worker over it."""
    found = re.search(r"metrics (http://\S+/metrics)", cluster.services["decode"].read_log())
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=10) as answer:
        text = answer.read().decode()
    pattern = r'^pdserve_kv_transfer_blocks_total\{connector="(\w+)"\} (\S+)$'
    return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}


@pytest.mark.parametrize(
    ("wanted", "transports", "used"),
    [("tcp", None, "tcp"), ("auto", None, "nixl"), ("nixl", "tcp", "nixl"), ("auto", "no_such_transport", "tcp")],
    ids=["tcp", "nixl-shared-memory", "nixl-tcp", "nixl-cannot-start"],
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
    with pd_cluster(tmp_path, model, both=(*FLAGS, "--connector", wanted)) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            for prompt in PROMPTS:
                answer = await router.ask(prompt, max_tokens=12)
                oracle.check(prompt, answer.token_ids)
                assert "kv_landed" in answer.moments, "it did not go through prefill/decode"
        assert landed_blocks(cluster) == {used: sum(-(-len(prompt) // 16) for prompt in PROMPTS)}
        cluster.check_pools()
        cluster.check_logs()
        log = cluster.services["decode"].read_log()
        assert "going on over" not in log, log
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
        cluster.start_router("--model", str(model), prefill=workers[:1], decode=workers[1:])
        async with InferenceClient(cluster.router.address) as router:
            for prompt in PROMPTS:
                oracle.check(prompt, (await router.ask(prompt, max_tokens=12)).token_ids)
        assert landed_blocks(cluster) == {"tcp": sum(-(-len(prompt) // 16) for prompt in PROMPTS)}
        cluster.check_pools()
        cluster.check_logs()
        log = cluster.services["decode"].read_log()
        assert log.count("over nixl failed, going on over tcp") == 1, log
