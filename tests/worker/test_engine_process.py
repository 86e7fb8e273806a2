"""Workers whose engine has a process of its own: a request through both, and the death of a process in the middle of it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pdserve.common.errors import WorkerLost
from pdserve.common.net.rpc import ERROR_CODE_KEY
from pdserve.common.net.service_channel import GENERATE, PREFILL, Method
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.protocol_3 import request_to_version_3
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.v1 import decode_pb2, prefill_pb2
from pdserve.worker.engine_host import proc_host
from pdserve.worker.engine_host.proc_host import ProcHost
from pdserve.worker.worker import Worker
from tests.support.forked_engine import start_host
from tests.support.waiting import HANG_S, eventually
from tests.support.worker_pair import KEY, Pair, generation_request, running_pair

DEATH_S = 10.0
"""Twice what a process's death may take to be told."""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc_host, "start_program", start_host)


@pytest.fixture
async def pair(tiny_checkpoints: Callable[..., Path]) -> AsyncIterator[Pair]:
    async with running_pair(
        tiny_checkpoints("llama"), KEY, num_blocks=64, max_model_len=512, engine_process=True
    ) as made:
        yield made


def proc_host_of(worker: Worker) -> ProcHost:
    assert isinstance(worker.host, ProcHost)
    return worker.host


def calls(pair: Pair, request: GenerationRequest) -> tuple[Any, Any]:
    """The prefill call and the decode call of one attempt, as a router makes them."""
    transfer_id, message = secrets.token_bytes(16), request_to_version_3(request)
    p, d = pair.p.identity, pair.d.identity
    receiver = prefill_pb2.Receiver(worker_id=d.worker_id, epoch=d.epoch)
    source = decode_pb2.Source(worker_id=p.worker_id, epoch=p.epoch, address=p.address, transfer_id=transfer_id)
    prefill = pair.service(pair.p).unary_stream(
        PREFILL, prefill_pb2.PrefillRequest(request=message, transfer_id=transfer_id, receiver=receiver)
    )
    decode = pair.service(pair.d).unary_stream(GENERATE, decode_pb2.DecodeRequest(request=message, source=source))
    return prefill, decode


async def tokens_of(pair: Pair, request: GenerationRequest, *, remote: bool) -> dict[int, list[int]]:
    """Sequence -> tokens. remote: prefilled at P, else at D."""
    tokens: dict[int, list[int]] = {}
    if remote:
        prefill, decode = calls(pair, request)
        events = [event async for event in prefill]
        assert [event.WhichOneof("event") for event in events] == ["admitted", "computed", "ended"]
        assert events[-1].ended.how == prefill_pb2.Ended.RELEASED
        for outputs in events[1].computed.first_outputs:
            tokens[outputs.index] = list(outputs.token_ids)
    else:
        message = decode_pb2.DecodeRequest(request=request_to_version_3(request))
        message.attempt.prefill_here = True
        decode = pair.service(pair.d).unary_stream(GENERATE, message)
    landed = []
    async for event in decode:
        if event.HasField("outputs"):
            had = tokens.setdefault(event.outputs.index, [])
            assert event.outputs.first_position == len(had)
            had += event.outputs.token_ids
        elif event.HasField("landed"):
            landed.append(event.landed)
    if remote:
        assert [(each.num_blocks, each.connector) for each in landed] == [(3, "tcp")]
        assert landed[0].transfer_bytes == 3 * pair.d.identity.layout.block_bytes
    return tokens


async def at_rest(pair: Pair) -> None:
    """No block is in use in either pool, and no transfer is open."""
    for worker in (pair.p, pair.d):
        engine = worker.engine

        def rests(engine: Any = engine) -> bool:
            return not (engine.stats.num_blocks_in_use or engine.transfer_counts.num_open or engine.num_waiting)

        await eventually(rests)
        stats = engine.stats
        assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total


async def code_of(call: grpc.aio.Call) -> str | None:
    """The code with which the other side ends a call."""
    await call.code()
    metadata: dict[str, Any] = dict(await call.trailing_metadata())
    return metadata.get(ERROR_CODE_KEY)


async def test_i1_a_request_through_two_processes_has_the_tokens_of_one(pair: Pair) -> None:
    async with asyncio.timeout(HANG_S):
        for first, params in (
            (3, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)),
            (103, SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=6, ignore_eos=True, logprobs=2)),
        ):
            prompt = list(range(first, first + 40))
            remote = await tokens_of(
                pair, generation_request(pair.d, prompt, n=params.n, sampling_params=params), remote=True
            )
            assert [len(tokens) for tokens in remote.values()] == [params.max_tokens] * params.n
            local = generation_request(pair.d, prompt, n=params.n, sampling_params=params)
            assert await tokens_of(pair, local, remote=False) == remote
        await at_rest(pair)
        page = await pair.p.host.transfers()
        assert [(view.state, view.num_blocks_landed) for view in page.ended] == [("RELEASED", 3)] * 2
        assert all(worker.health().ok for worker in (pair.p, pair.d))


@pytest.mark.few(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_i6_the_death_of_a_process_is_told_to_every_call(pair: Pair, role: str) -> None:
    victim, other = (pair.p, pair.d) if role == "prefill" else (pair.d, pair.p)
    method: Method[Any, Any] = PREFILL if role == "prefill" else GENERATE
    process = proc_host_of(victim).process_id
    async with asyncio.timeout(HANG_S):
        os.kill(process, signal.SIGSTOP)  # so that every call is open when it dies
        prefill, decode = calls(pair, generation_request(pair.d))
        local = pair.service(victim).unary_stream(method, _any_message(role, victim))
        for call in (prefill, decode, local):
            await call.read()
        began = time.monotonic()
        os.kill(process, signal.SIGKILL)
        assert await code_of(prefill if role == "prefill" else decode) == "worker_lost"
        assert await code_of(local) == "worker_lost"
        if role == "prefill":
            assert await code_of(decode) == "transfer_failed"
        assert time.monotonic() - began < DEATH_S
        assert await local.code() is grpc.StatusCode.UNAVAILABLE
        assert victim.engine.died.is_set()
        assert (victim.health().ok, victim.health().status) == (False, "dead")
        with pytest.raises(WorkerLost):
            await victim.host.transfers()
        late = pair.service(victim).unary_stream(method, _any_message(role, victim))
        assert await code_of(late) == "worker_lost"
        prefill.cancel()
        await eventually(lambda: not other.engine.num_streams and not other.engine.transfer_counts.num_open)


def _any_message(role: str, worker: Worker) -> Any:
    kind = prefill_pb2.PrefillRequest if role == "prefill" else decode_pb2.DecodeRequest
    return kind(request=request_to_version_3(generation_request(worker)))
