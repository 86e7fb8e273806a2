"""Two workers whose ranks share a model: transfers between equal and unequal degrees, over real connections."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import PdServeError
from pdserve.engine.ranks import rank_processes
from pdserve.engine.ranks.rank_processes import RankProcesses
from pdserve.worker.worker import Worker
from tests.support.engine.forked_engine import start_rank
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import make_latent_model
from tests.support.models.oracle import Oracle
from tests.support.run.waiting import eventually
from tests.support.transfers.worker_pair import Pair, check_at_rest, door_of, running_pair, transfers_of
from tests.support.transfers.worker_pair import ask as ask_both

DEATH_S = 5.0
"""Seconds within which a rank's death ends its worker."""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "start_program", start_rank)


async def ask(pair: Pair, prompt: list[int]) -> list[int]:
    """The answer through both workers."""
    answer = await ask_both(pair, prompt)
    assert answer.num_landed == -(-len(prompt) // 16)
    return answer.token_ids


def ranks(size: int) -> dict[str, int]:
    return {"tensor_parallel_size": size}


@pytest.mark.few(1)
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2), (2, 1)])
async def test_i1_greedy_texts_through_ranks_of_both_workers(
    prefill: int, decode: int, tiny_checkpoints: Callable[..., Path]
) -> None:
    folder = tiny_checkpoints("llama")
    oracle = Oracle(folder)
    async with running_pair(
        folder, dtype="float32", num_blocks=32, prefill=ranks(prefill), decode=ranks(decode)
    ) as pair:
        for length in (5, 16, 70):
            oracle.check(prompt_of(length, 1), await ask(pair, prompt_of(length, 1)))
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


@pytest.mark.few(1)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
async def test_i1_latent_rows_are_read_from_one_rank(prefill: int, decode: int, tmp_path: Path) -> None:
    folder = make_latent_model(tmp_path / "model")
    oracle = Oracle(folder)
    async with running_pair(
        folder, dtype="float32", num_blocks=32, prefill=ranks(prefill), decode=ranks(decode)
    ) as pair:
        for length in (5, 16, 70):
            oracle.check(prompt_of(length, 1), await ask(pair, prompt_of(length, 1)))
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


@pytest.mark.slow
async def test_ranks_that_have_one_head_together_read_it_both(tiny_checkpoints: Callable[..., Path]) -> None:
    folder = tiny_checkpoints("llama", num_key_value_heads=1)
    oracle = Oracle(folder)
    async with running_pair(folder, dtype="float32", num_blocks=32, prefill=ranks(1), decode=ranks(2)) as pair:
        oracle.check(prompt_of(70), await ask(pair, prompt_of(70)))
    async with running_pair(folder, dtype="float32", num_blocks=32, prefill=ranks(2), decode=ranks(2)) as pair:
        oracle.check(prompt_of(70), await ask(pair, prompt_of(70)))


def rank_1_of(worker: Worker) -> int:
    """The process id of its rank 1."""
    executor: Any = door_of(worker).core.executor
    assert isinstance(executor._ranks, RankProcesses)
    [process] = executor._ranks.process_ids
    return process


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
async def test_i6_the_death_of_a_rank_is_its_workers_and_ends_its_transfers(
    role: str, tiny_checkpoints: Callable[..., Path]
) -> None:
    folder = tiny_checkpoints("llama")
    fields: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "max_num_batched_tokens": 16, **ranks(2)}
    async with running_pair(folder, **fields) as pair:
        victim, other = (pair.p, pair.d) if role == "prefill" else (pair.d, pair.p)
        asked = asyncio.create_task(ask(pair, prompt_of(900)))
        await eventually(lambda: transfers_of(pair.d).manager.num_open > 0, "the transfer begins")
        os.kill(rank_1_of(victim), signal.SIGKILL)
        async with asyncio.timeout(2 * DEATH_S):
            await victim.engine.died.wait()
        with pytest.raises(PdServeError):
            await asked
        await eventually(lambda: not transfers_of(other).manager.num_open, "the other side's transfer ends")
        assert not other.engine.died.is_set()
        await eventually(lambda: not door_of(other).core.scheduler.pool.num_in_use, "its blocks are back")
