"""A router or peer with valid credentials that says each field of each message wrong: its own call ends, and workers go on."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from pdserve.common.errors import InternalError
from pdserve.common.net.rpc import ERROR_CODE_KEY
from pdserve.common.net.service_channel import ATTACH, DRAIN, MEET, SET_ROLE, STEP_STREAM, Method
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.wire.messages import layout_to_wire
from pdserve.common.request.wire.request_bytes import encode_request
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.watch_proof import WatchChallenge
from pdserve.common.telemetry.logging_setup import is_news
from pdserve.v1 import decode_pb2, kv_source_pb2, prefill_pb2, step_stream_pb2, worker_pb2
from pdserve.worker.worker import Worker
from tests.support.inputs.wrong_fields import FEW, Wrong, one_of_each, wrong_messages, wrong_structs
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.run.waiting import HANG_S
from tests.support.transfers.worker_call import KEY as CALL_KEY
from tests.support.transfers.worker_call import Kind, submission
from tests.support.transfers.worker_pair import KEY, PROMPT, Pair, ask, check_at_rest, generation_request, running_pair

AT_A_TIME = 12
WATCH: Method[Any, Any] = Method("/pdserve.v1.WorkerService/Watch", worker_pb2.WatchRequest, worker_pb2.WatchEvent)
MANY = 40_000
"""Entries of a list: more than any field has, and less than makes the message too large to be received."""
WROTE_TOO_LATE = "Internal error from Core"


@pytest.fixture
async def pair(tiny_checkpoints: Callable[..., Path]) -> AsyncIterator[Pair]:
    settings: dict[str, Any] = {"attach_timeout_s": 0.3, "lease_grace_s": 0.2, "lease_max_s": 2.0, "max_num_seqs": 16}
    decode = {"session_idle_timeout_s": 0.5}
    folder = tiny_checkpoints("llama")
    async with running_pair(folder, KEY, decode=decode, num_blocks=64, max_model_len=64, **settings) as made:
        for worker in (made.p, made.d):
            # one that drains takes no further call
            worker._watch._drain = lambda: None
        yield made
        for worker in (made.p, made.d):
            await check_at_rest(worker)


def sampling() -> SamplingParams:
    return SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, seed=1, max_tokens=2, stop_token_ids=(7,), logit_bias={5: 1.0}, logprobs=1,
        bad_words_token_ids=((5,), (6, 7)),
    )  # fmt: skip


def source_of(pair: Pair) -> decode_pb2.Source:
    worker_id, epoch = pair.p.identity.key
    # nobody attaches there
    return decode_pb2.Source(
        worker_id=worker_id, epoch=epoch, address=pair.p.identity.attach_address, transfer_id=secrets.token_bytes(16)
    )


def receiver_of(pair: Pair) -> prefill_pb2.Receiver:
    worker_id, epoch = pair.d.identity.key
    return prefill_pb2.Receiver(worker_id=worker_id, epoch=epoch)


def begun(*submissions: step_stream_pb2.Submission) -> step_stream_pb2.StepCommands:
    return step_stream_pb2.StepCommands(submissions=submissions)


Table = dict[str, tuple[Worker, Method[Any, Any], list[Message]]]


def messages(pair: Pair) -> Table:
    """Name -> (worker, method, good messages of a call). The case is made of the last."""
    p, d = pair.p, pair.d
    of_p, of_d = (generation_request(worker, sampling_params=sampling()) for worker in (p, d))
    pooled = generation_request(p, pooling_params=PoolingParams(dimensions=2), sampling_params=SamplingParams())
    prefill = submission("prefill", of_p, attempt=1, transfer_id=bytes(16), receiver=receiver_of(pair))
    decode = submission("decode", of_d, attempt=1, local_prefill_tokens=60, source=source_of(pair))
    alone = submission("prefill", generation_request(p))
    fetch = submission("decode", of_d, attempt=2)
    fetch.fetch.SetInParent()
    worker_id, epoch = p.identity.key
    fetch.block_source.CopyFrom(
        step_stream_pb2.BlockSource(worker_id=worker_id, epoch=epoch, address=p.identity.attach_address, limit_s=1.0)
    )
    migration = step_stream_pb2.Migrate(key=CALL_KEY, transfer_id=bytes(16), receiver=receiver_of(pair))
    migrate = step_stream_pb2.StepCommands(migrations=[migration])
    opening = kv_source_pb2.AttachRequest(
        open=kv_source_pb2.Open(
            transfer_id=bytes(16), source_epoch=p.identity.epoch, receiver=receiver_of(pair), request_digest=bytes(16),
            layout=layout_to_wire(p.identity.layout), digest_algorithms=["gmac"], connectors=["tcp"],
        )
    )  # fmt: skip
    steps = step_stream_pb2.StepCommands(
        submissions=[alone], ended_sequences=[step_stream_pb2.EndedSequences(key=1, indexes=[0], turn=0)],
        cancelled=[1], turns=[step_stream_pb2.Turn(key=2, request=b"")],
    )  # fmt: skip
    session = begun(submission("session", generation_request(d)))
    turn = encode_request(generation_request(d, [5], sampling_params=SamplingParams(max_tokens=1)))
    following = step_stream_pb2.StepCommands(turns=[step_stream_pb2.Turn(key=1, request=turn)])
    words: dict[str, kv_source_pb2.AttachRequest] = {
        "want": kv_source_pb2.AttachRequest(want=kv_source_pb2.Want(first_index=0, num_blocks=1)),
        "landed": kv_source_pb2.AttachRequest(landed=kv_source_pb2.BlocksLanded(num_blocks=1)),
        "alive": kv_source_pb2.AttachRequest(alive=kv_source_pb2.Alive(engine_tick=1)),
        "release": kv_source_pb2.AttachRequest(release=kv_source_pb2.Release()),
    }
    table: Table = {
        "prefill": (p, STEP_STREAM, [begun(prefill)]),
        "embed": (p, STEP_STREAM, [begun(submission("embed", pooled))]),
        "decode": (d, STEP_STREAM, [begun(decode)]),
        "session": (d, STEP_STREAM, [session]),
        "next turn": (d, STEP_STREAM, [session, following]),
        "fetch": (d, STEP_STREAM, [begun(fetch)]),
        "migrate": (d, STEP_STREAM, [begun(submission("decode", of_d, prefill_here=True)), migrate]),
        "drain": (d, DRAIN, [worker_pb2.DrainRequest()]),
        "set role": (d, SET_ROLE, [worker_pb2.SetRoleRequest(role=worker_pb2.ROLE_DECODE, dwell_s=1.0)]),
        "meet": (d, MEET, [worker_pb2.MeetRequest(worker_id="x", epoch=1, address="127.0.0.1:1")]),
        "steps": (p, STEP_STREAM, [steps]),
        "attach": (p, ATTACH, [opening]),
        "watch": (p, WATCH, [WatchChallenge(KEY, blocks=True).opening]),
    }
    return table | {f"attach: {name}": (p, ATTACH, [opening, word]) for name, word in words.items()}


NAMES = [
    "prefill", "embed", "decode", "session", "next turn", "fetch", "migrate", "drain", "set role", "meet", "steps", "attach",
    "watch",
    *(f"attach: {name}" for name in ("want", "landed", "alive", "release")),
]  # fmt: skip


async def test_every_method_and_message_is_in_the_table(pair: Pair) -> None:
    table = messages(pair)
    assert list(table) == NAMES
    said = {method.path for _, method, _ in table.values()}
    services = (kv_source_pb2, step_stream_pb2, worker_pb2)
    offered = {
        f"/{service.full_name}/{method.name}"
        for module in services
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert said == offered
    words = {field.name for field in kv_source_pb2.AttachRequest.DESCRIPTOR.fields}
    assert {name.removeprefix("attach: ") for name in NAMES if name.startswith("attach: ")} | {"open"} == words


async def call(pair: Pair, worker: Worker, method: Method[Any, Any], raws: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Send these and read to the end; the stream stays open for a moment."""

    async def sent() -> AsyncIterator[bytes]:
        for raw in raws:
            yield raw
        await asyncio.sleep(0.2)

    first = raws[0] if raws else b""
    signer = CallSigner(KEY)
    metadata = None if method is WATCH else signer.metadata(method.path, worker.identity.key, first)
    is_unary = method in (MEET, DRAIN, SET_ROLE)
    make: Any = getattr(pair.channel(worker), "unary_unary" if is_unary else "stream_stream")(method.path)
    made = make(first if is_unary else sent(), metadata=metadata, timeout=HANG_S)
    try:
        if is_unary:
            await made
        else:
            async for message in made:
                if method is STEP_STREAM and (bugs := ends_with_a_bug(message)):
                    return grpc.StatusCode.INTERNAL, bugs[0]
    except grpc.aio.AioRpcError as error:
        return error.code(), f"{dict(error.trailing_metadata() or ()).get(ERROR_CODE_KEY)}: {error.details()}"
    return await made.code(), ""


def ends_with_a_bug(message: bytes) -> list[str]:
    """Messages of the ends in a worker's message that no call may have."""
    events = step_stream_pb2.StepOutputs.FromString(message).events
    return [event.end.message for event in events if event.end.code == InternalError.code]


Sent = tuple[Worker, Method[Any, Any], Wrong]
"""A call: to whom, by which method, and all of its messages."""


async def attack(pair: Pair, caplog: pytest.LogCaptureFixture, cases: Iterable[Sent]) -> None:
    caplog.set_level(logging.INFO)
    right = await ask(pair, PROMPT)
    limit, problems = asyncio.Semaphore(AT_A_TIME), []

    async def one(worker: Worker, method: Method[Any, Any], case: Wrong) -> None:
        async with limit:
            status, words = await call(pair, worker, method, case.messages)
        bug = status in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL) and not words.endswith(WROTE_TOO_LATE)
        if bug or (status is grpc.StatusCode.DEADLINE_EXCEEDED and words.startswith("None")):
            problems.append(f"{method.path} {case.name}: {status.name} {words[:300]}")

    with LoopWatch() as watch:
        async with asyncio.TaskGroup() as group:
            for case in cases:
                group.create_task(one(*case))
                await asyncio.sleep(0)
    assert not problems, problems
    assert watch.longest_s < LOOP_S, (watch.longest_s, watch.callback)
    for worker in (pair.p, pair.d):
        assert not worker.engine.died.is_set()
        await check_at_rest(worker)
    assert await ask(pair, [token + 1 for token in PROMPT]) is not None
    assert (await ask(pair, PROMPT)).token_ids == right.token_ids
    for record in filter(is_news, caplog.records):
        assert record.levelno < logging.ERROR, caplog.handler.format(record)[-2000:]
        assert record.exc_info is None, caplog.handler.format(record)[-2000:]
        assert len(record.getMessage()) < 4096


def wrong_calls(table: Table, name: str, many: int = MANY) -> Iterator[Sent]:
    """Calls whose last message is wrong."""
    worker, method, good = table[name]
    *before, last = good
    prefix = [message.SerializeToString() for message in before]
    for case in wrong_messages(last, many=many):
        yield worker, method, Wrong(case.name, [*prefix, *case.messages])


ROLES: tuple[Kind, ...] = ("prefill", "decode", "session")


def wrong_requests(pair: Pair, role: Kind) -> Iterator[Sent]:
    """Calls with a wrong struct."""
    worker = pair.p if role == "prefill" else pair.d
    good = encode_request(generation_request(worker, sampling_params=sampling()))
    for case in wrong_structs(good, GenerationRequest, "sampling_params"):
        raw = begun(submission(role, case.messages[0])).SerializeToString()
        yield worker, STEP_STREAM, Wrong(case.name, [raw])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_a_wrong_field_ends_that_call_alone(pair: Pair, caplog: pytest.LogCaptureFixture, name: str) -> None:
    await attack(pair, caplog, wrong_calls(messages(pair), name))


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
async def test_a_wrong_field_of_a_request_ends_that_call_alone(
    pair: Pair, caplog: pytest.LogCaptureFixture, role: Kind
) -> None:
    await attack(pair, caplog, wrong_requests(pair, role))


async def test_one_wrong_value_of_each_field_ends_its_call_alone(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    table = messages(pair)
    calls = [wrong_calls(table, name, FEW) for name in NAMES] + [wrong_requests(pair, role) for role in ROLES]
    sent = [list(one) for one in calls]
    few = [(*one[0][:2], case) for one in sent for case in one_of_each(case for _, _, case in one)]
    await attack(pair, caplog, few)
