"""Two workers whose ranks share a model: transfers between equal and unequal degrees, over real connections."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.net.service_channel import GENERATE, PREFILL
from pdserve.engine.ranks import rank_processes
from pdserve.v1 import decode_pb2, prefill_pb2
from tests.support.forked_engine import start_rank
from tests.support.oracle import Oracle
from tests.support.random_prompts import prompt_of
from tests.support.waiting import HANG_S
from tests.support.worker_pair import Pair, host_of, prepared, running_pair


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "start_program", start_rank)


async def ask(pair: Pair, prompt: list[int]) -> list[int]:
    """The answer through both workers."""
    message, transfer_id = prepared(pair.p, prompt), secrets.token_bytes(16)
    p, d = pair.p.identity, pair.d.identity
    receiver = prefill_pb2.Receiver(worker_id=d.worker_id, epoch=d.epoch)
    prefill: Any = pair.service(pair.p).unary_stream(
        PREFILL, prefill_pb2.PrefillRequest(request=message, transfer_id=transfer_id, receiver=receiver)
    )
    source = decode_pb2.Source(worker_id=p.worker_id, epoch=p.epoch, address=p.address, transfer_id=transfer_id)
    decode: Any = pair.service(pair.d).unary_stream(GENERATE, decode_pb2.DecodeRequest(request=message, source=source))
    first: list[int] = []
    rest: list[int] = []
    async with asyncio.timeout(HANG_S):
        async for event in decode:
            if event.HasField("landed"):
                assert event.landed.num_blocks == -(-len(prompt) // 16)
            rest += event.outputs.token_ids
        async for event in prefill:
            for output in event.computed.first_outputs:
                first += output.token_ids
    return [*first, *rest]


def ranks(size: int) -> dict[str, int]:
    return {"tensor_parallel_size": size}


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
            host_of(worker).core.scheduler.check(idle=True)
