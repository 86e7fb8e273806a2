"""Changed events of workers that have the deployment key: an answer or an error, and the router and its other clients go on."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx
import pytest
from google.protobuf.message import DecodeError, Message

from pdserve.v1 import inference_pb2, prefill_pb2, request_pb2, worker_pb2
from tests.router.conftest import Cluster
from tests.router.fake_worker import Call, FakeWorker, Script, said
from tests.router.worst_bodies import CHAT, COMPLETIONS, EMBEDDINGS
from tests.support.inputs.fuzz_cases import Fuzzer
from tests.support.inputs.message_changes import MessageChanges
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.run.process_memory import in_use_bytes
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(0)]

ANSWER_S = 30.0
TIMEOUT_S = 3.0
"""Limit of a request at the router: a worker may leave out the event that would end it."""
AT_A_TIME = 6
LOOK_EVERY = 100
MAX_LINE_CHARS = 4096
MAX_BYTES = 256 << 10
BODIES = [
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "temperature": 0.5, "seed": 1}),
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 4, "n": 3, "stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1, "echo": True}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stop": ["c"]}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True, "logprobs": True}),
    (EMBEDDINGS, {"input": ["a", "b"], "encoding_format": "base64"}),
]  # fmt: skip


class Changing:
    """Changes the events of all workers, while it is on."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self.fuzzer = fuzzer
        self.rate = 0.0
        self._changes = MessageChanges(fuzzer.draw, addresses=("127.0.0.1:1", "x", ""), max_bytes=MAX_BYTES)

    async def events(self, event: Message) -> list[Message]:
        """None, one or more in its place."""
        draw = self.fuzzer.draw
        if draw.random() >= self.rate:
            return [event]
        match draw.randrange(8):
            case 0 if not isinstance(event, prefill_pb2.PoolingResult):
                return []
            case 1:
                return [event, event]
            case 2:
                return [await self._by_bytes(event)]
            case _:
                return [await asyncio.to_thread(self._changes.changed, event)]

    async def _by_bytes(self, event: Message) -> Message:
        try:
            return type(event).FromString(self.fuzzer.bytes(event.SerializeToString()))
        except DecodeError:
            return event


class ChangingWorker(FakeWorker):
    changing: Changing

    async def _play(self, call: Call, script: Script | None = None) -> AsyncGenerator[Any]:
        async for event in super()._play(call, script):
            for changed in await self.changing.events(event):
                yield changed

    async def Watch(self, request_iterator, context):
        async for event in super().Watch(request_iterator, context):
            # the proof of a changed Welcome would not hold: test_unproved_workers.py
            for changed in [event] if event.HasField("welcome") else await self.changing.events(event):
                yield changed


async def start(cluster: Cluster, fuzzer: Fuzzer) -> Changing:
    changing = Changing(fuzzer)
    for role in ("prefill", "prefill", "decode", "decode"):
        count = sum(worker.role == role for worker in cluster.workers)
        worker = ChangingWorker(role, cluster.fingerprint, worker_id=f"{role}{count}")
        worker.changing = changing
        worker.calls = cast(list[Call], deque(maxlen=16))
        cluster.workers.append(await worker.start())
    await cluster.start(prefill=0, decode=0, request_timeout_s=TIMEOUT_S)
    return changing


async def over_http(cluster: Cluster, fuzzer: Fuzzer) -> int:
    path, body = fuzzer.draw.choice(BODIES)
    answer = await cluster.http.post(path, json=body, timeout=ANSWER_S)
    return answer.status_code


async def session(cluster: Cluster, fuzzer: Fuzzer) -> int:
    open_session: Any = cluster.grpc.Session
    call = open_session(timeout=ANSWER_S)
    turn = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=[1, 2]),
        sampling=request_pb2.SamplingParams(max_tokens=3),
        stream=True,
    )
    try:
        for _ in range(2):
            await call.write(turn)
        await call.done_writing()
        async for _ in call:
            pass
    except (httpx.HTTPError, asyncio.InvalidStateError):
        pass
    except Exception as error:
        if type(error).__name__ != "AioRpcError":
            raise
    return 200


def blocks(fuzzer: Fuzzer, worker: FakeWorker) -> None:
    """A step of the watch, whose numbers and lengths are at times wrong."""
    draw = fuzzer.draw
    worker.tell_blocks(draw.choice((1, 2, 3, 2**63)), stored=draw.randbytes(draw.choice((0, 8, 80, 7, 8000))))
    worker.report(
        num_running=draw.choice((0, 1, 2**32 - 1)), prefill_tokens_per_s=draw.choice((0.0, 1e308, float("nan")))
    )


async def look(cluster: Cluster, changing: Changing, caplog: pytest.LogCaptureFixture, rate: float) -> None:
    changing.rate = 0.0
    await cluster.idle()
    for worker in cluster.workers:
        worker.load.CopyFrom(worker_pb2.Load(engine_tick=worker.load.engine_tick + 1))
    async with asyncio.timeout(HANG_S):
        # workers may be out for a while, by what they said of themselves
        while (await cluster.complete(prompt="still")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert await cluster.text(prompt="still") == said(5)
    for record in caplog.records:
        assert record.levelno < logging.ERROR, caplog.text[-4000:]
        assert record.exc_info is None, caplog.text[-4000:]
        assert len(record.getMessage()) < MAX_LINE_CHARS
    caplog.clear()
    await asyncio.to_thread(gc.collect)
    changing.fuzzer.look_at_memory()
    changing.rate = rate


async def test_events(cluster, fuzzer, caplog):
    changing = await start(cluster, fuzzer)
    await cluster.text()
    running: set[asyncio.Task[int]] = set()
    statuses: dict[int, int] = {}
    with LoopWatch() as watch:
        fuzzer.watched_by(watch)
        # in 1600 cases the allocators of gRPC's threads kept 79 MiB more, and 14 were in use
        fuzzer.measure = in_use_bytes
        for number in fuzzer.cases(looks=False):
            changing.rate = fuzzer.draw.choice((0.1, 0.3, 0.6))
            if fuzzer.draw.random() < 0.1:
                blocks(fuzzer, fuzzer.draw.choice(cluster.workers))
            case = session if fuzzer.draw.random() < 0.1 else over_http
            running.add(asyncio.create_task(case(cluster, fuzzer)))
            while len(running) >= (1 if number % LOOK_EVERY == 0 else AT_A_TIME):
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    statuses[task.result()] = statuses.get(task.result(), 0) + 1
            assert watch.longest_s < LOOP_S, (str(fuzzer), watch.longest_s, watch.callback)
            if number % LOOK_EVERY == 0:
                await look(cluster, changing, caplog, changing.rate)
        await asyncio.gather(*running)
        await look(cluster, changing, caplog, 0.0)
    print(statuses)
    fuzzer.check_memory()
