"""A busy machine is not a dead peer; a killed process and a silent host still are."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.cluster_processes import Cluster, Service, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S

from .busy_loops import busy_loops
from .chaos_load import FLAGS, Load
from .prepared_worker import PREPARED_WORKER

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

NOT_LOST = ("is lost", "broke", "was not reached", "attempt 0 failed", "attempt 1 failed")
"""Parts of a service's log lines about a connection or an attempt that it takes for lost."""
SUSPENDED_S = 2.0


def _start(cluster: Cluster, model: Path, *router: str, workers: Sequence[str] = ()) -> None:
    flags = ("--model", str(model), *FLAGS, *workers)
    started = {
        role: [cluster.launch_worker(role, *flags, name=f"{role}-{number}") for number in (1, 2)]
        for role in ("prefill", "decode")
    }
    for service in (*started["prefill"], *started["decode"]):
        cluster.wait_for_worker(service)
    addresses: dict[str, Any] = {role: [service.address for service in services] for role, services in started.items()}
    cluster.start_router("--model", str(model), *router, **addresses)


def _losses(cluster: Cluster) -> list[str]:
    lines = [line for service in cluster.services.values() for line in service.read_log().splitlines()]
    return [line for line in lines if any(word in line for word in NOT_LOST)]


@pytest.mark.parametrize(
    ("idle_s", "busy_s"),
    [pytest.param(5.0, 10.0, marks=pytest.mark.slow), pytest.param(30.0, 60.0, marks=pytest.mark.faults)],
    ids=["short", "long"],
)
async def test_no_connection_breaks_and_no_attempt_is_lost_on_a_busy_machine(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, idle_s: float, busy_s: float
) -> None:
    with running_cluster(tmp_path, PREPARED_WORKER) as cluster:
        _start(cluster, tiny_checkpoints("llama", num_hidden_layers=2), "--local-prefill", "never")
        async with InferenceClient(cluster.router.address) as client:
            load = Load(client, seed=3, num_clients=4, sessions=False)
            await load.learn()
            with busy_loops(2, idle_s + busy_s + 3 * HANG_S):
                await asyncio.sleep(idle_s)  # idle workers were lost first
                load.begin()
                await asyncio.sleep(busy_s)
                await load.more_answers(max(0, 6 - load.num_answers))
                await load.end()
        cluster.check_pools()
        assert not _losses(cluster)
        cluster.check_logs()


def _suspend(service: Service) -> None:
    """In a thread that only sleeps: what keeps the event loop of the clients busy must not make it longer."""
    service.signal(signal.SIGSTOP)
    time.sleep(SUSPENDED_S)
    service.signal(signal.SIGCONT)


@pytest.mark.parametrize("connector", [pytest.param(name, marks=pytest.mark.slow) for name in ("tcp", "nixl")])
async def test_a_worker_that_is_suspended_for_two_seconds_loses_nothing(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, connector: str
) -> None:
    """As a machine is that is paused, migrated, or short of CPU time; the others work on."""
    with running_cluster(tmp_path, PREPARED_WORKER) as cluster:
        flags = (f"--connector={connector}",)
        _start(cluster, tiny_checkpoints("llama", num_hidden_layers=2), "--local-prefill", "never", workers=flags)
        async with InferenceClient(cluster.router.address) as client:
            load = Load(client, seed=5, num_clients=4, sessions=False)
            await load.learn()
            load.begin()
            for name in ("prefill-1", "decode-1", "prefill-2", "decode-2"):
                await load.more_answers(4)
                await asyncio.to_thread(_suspend, cluster.services[name])
                await load.answered()
            await load.end()
        cluster.check_pools()
        assert not _losses(cluster)
        cluster.check_logs()
