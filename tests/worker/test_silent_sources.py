"""Real services where the prefill worker computes a prompt and publishes none of its blocks, or is slow to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.engine.client import process_client
from pdserve.kv_transfer.control.source_transfer import SourceTransfer
from pdserve.router.attempts import attempt
from pdserve.worker.transfers import worker_transfers
from pdserve.worker.worker import Worker
from tests.router.conftest import Cluster
from tests.support.engine.forked_engine import start_forked
from tests.support.run.waiting import HANG_S
from tests.support.transfers.worker_pair import check_at_rest, running_pair


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_transfers, "RECEIVING_EVERY_S", 0.1)
    monkeypatch.setattr(attempt, "PUBLISHED_WITHIN_S", 0.5)
    monkeypatch.setattr(process_client, "start_program", start_forked)


class Known:
    """A worker that `running_pair` starts and stops, in a `Cluster`."""

    def __init__(self, role: str, worker: Worker) -> None:
        self.role, self.address = role, worker.identity.address

    async def kill(self) -> None:
        """`running_pair` does."""


async def answer(folder: Path, *, engine_process: bool = False, **settings: Any) -> tuple[dict[str, Any], int]:
    """(a completion through a router and two workers, transfers that ended at the receiver)"""
    cluster: Any = Cluster(folder, "")
    async with running_pair(
        folder,
        DEVELOPMENT_KEY,
        num_blocks=64,
        max_model_len=128,
        lease_grace_s=0.3,
        decode={"engine_process": engine_process},
    ) as pair:
        cluster.workers += [Known("prefill", pair.p), Known("decode", pair.d)]
        try:
            await cluster.start(prefill=0, decode=0, request_timeout_s=HANG_S, local_prefill="never", **settings)
            body = {"prompt": list(range(3, 83)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            response = await cluster.http.post("/v1/completions", json=body)
        finally:
            await cluster.close()
        for worker in (pair.p,) if engine_process else (pair.p, pair.d):
            await check_at_rest(worker)
        return response.json(), sum(pair.d.engine.transfer_counts.num_ended.values())


@pytest.mark.parametrize("engine_process", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_source_that_publishes_nothing_ends_its_attempts(
    tiny_checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, engine_process: bool
) -> None:
    monkeypatch.setattr(SourceTransfer, "settled", lambda *_: None)
    folder = tiny_checkpoints("llama")
    said, num_ended = await answer(folder, engine_process=engine_process, on_kv_failure="remote", max_attempts=2)
    assert said["error"]["code"] == "transfer_failed", said
    if not engine_process:
        assert num_ended == 2


@pytest.mark.slow
async def test_a_source_that_publishes_slowly_is_waited_for(
    tiny_checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block each 0.6 s, for longer than the limit in all."""
    monkeypatch.setattr(attempt, "PUBLISHED_WITHIN_S", 2.0)
    settled, tasks = SourceTransfer.settled, set[asyncio.Task[None]]()

    def slowly(transfer: SourceTransfer, first_index: int, block_ids: Any, digests: Any) -> None:
        async def publish() -> None:
            for place in range(len(block_ids)):
                await asyncio.sleep(0.6)
                if not transfer.has_ended:
                    settled(transfer, first_index + place, [block_ids[place]], [digests[place]])

        tasks.add(asyncio.ensure_future(publish()))

    monkeypatch.setattr(SourceTransfer, "settled", slowly)
    said, num_ended = await answer(tiny_checkpoints("llama"), on_kv_failure="fail")
    assert said["usage"]["completion_tokens"] == 4, said
    assert num_ended == 1
    await asyncio.gather(*tasks)
