"""Messages that a holder of the deployment key should not send: refused by name, at a cost that they pay for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest

from pdserve.common.errors import InvalidRequest, PdServeError, PeerError
from pdserve.common.net.rpc import from_rpc_error
from pdserve.common.net.service_channel import ATTACH, MEET, STEP_STREAM, Method
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.common.request.wire.messages import layout_to_wire
from pdserve.common.request.wire.step_wire import end_from_wire
from pdserve.common.security.peer_message import MAX_FIELDS, max_request_bytes
from pdserve.v1 import decode_pb2, kv_source_pb2, prefill_pb2, step_stream_pb2, worker_pb2
from pdserve.worker.worker import Worker
from tests.support.run.loop_watch import LOOP_S, LoopWatch, watched
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.worker_call import WorkerCall, submission
from tests.support.transfers.worker_pair import (
    Pair,
    calls,
    check_at_rest,
    decode_call,
    door_of,
    generation_request,
    running_pair,
    transfers_of,
)

LIMIT = max_request_bytes(64, 320)
LONG = "w" * 129


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture
async def pair(folder: Path) -> AsyncIterator[Pair]:
    async with running_pair(folder, num_blocks=32, max_model_len=64, lease_grace_s=0.3) as made:
        yield made
        for worker in (made.p, made.d):
            await check_at_rest(worker)


def long(number: int, content: bytes) -> bytes:
    """One field of that number with a length."""

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    return varint(number << 3 | 2) + varint(len(content)) + content


def request(**fields: Any) -> bytes:
    """A request of these fields only, encoded as a worker reads it."""
    return msgspec.msgpack.encode({"request_id": "r", **fields})


def begun(data: bytes) -> bytes:
    """A message of a stream, with one decode call."""
    return step_stream_pb2.StepCommands(submissions=[submission("decode", data)]).SerializeToString()


async def refusal(pair: Pair, method: Method[Any, Any], message: Any) -> PdServeError:
    """The error that ends a call with this message, signed, or the first call in a stream of it."""
    worker = pair.p if method is ATTACH else pair.d
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    service = pair.service(worker)
    metadata = await asyncio.to_thread(service._signer.metadata, method.path, worker.identity.key, raw)
    try:
        if method is MEET:
            meet: Any = pair.channel(worker).unary_unary(method.path)
            await meet(raw, metadata=metadata, timeout=HANG_S)
            raise AssertionError("the call was not refused")
        call: Any = pair.channel(worker).stream_stream(method.path)(metadata=metadata, timeout=HANG_S)
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(raw)
        while (answer := await call.read()) is not grpc.aio.EOF:
            for event in step_stream_pb2.StepOutputs.FromString(answer).events:
                if event.HasField("end"):
                    call.cancel()
                    error = end_from_wire(event.end)
                    assert error is not None
                    return error
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call was not refused")


FULL = LIMIT - 64
WORST = {
    "empty submissions": b"\x0a\x00" * (FULL // 2),
    "empty ended sequences": b"\x12\x00" * (FULL // 2),
    "empty turns": b"\x22\x00" * (FULL // 2),
    "cancelled keys": long(3, b"\x05" * (FULL - 8)),
    "ended sequences": long(2, b"\x08\x01" + long(2, b"\x05" * (FULL - 16))),
    "unknown fields": b"\xa0\x06\x01" * (FULL // 3),
    "trace headers": begun(request(trace_headers={str(number): "" for number in range(FULL // 9)})),
    "empty stop strings": begun(request(sampling_params={"stop": [""] * (FULL - 64)})),
    "empty plug-ins": begun(request(sampling_params={"logits_processors": [{}] * (FULL - 64)})),
    "empty bad words": begun(request(sampling_params={"bad_words_token_ids": [()] * (FULL - 64)})),
    "biases": begun(request(sampling_params={"logit_bias": dict.fromkeys(range(FULL // 6), 0)})),
    "unknown fields of a request": begun(request(**{f"x{number}": 0 for number in range(FULL // 9)})),
    "tokens": begun(request(prompt_token_ids=[5] * (FULL - 64))),
    "tokens that do not fit": begun(request(prompt_token_ids=[2**40] * (FULL // 9 - 64))),
    "stop tokens": begun(request(prompt_token_ids=[5], sampling_params={"stop_token_ids": [5] * (FULL - 128)})),
    "EOS tokens": begun(request(prompt_token_ids=[5], eos_token_ids=[5] * (FULL - 64))),
    "a long id": begun(request(request_id="r" * (FULL - 64))),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("raw", WORST.values(), ids=WORST)
async def test_no_message_stops_the_loop(pair: Pair, raw: bytes) -> None:
    await refusal(pair, STEP_STREAM, begun(b""))
    error, watch = await watched(lambda: refusal(pair, STEP_STREAM, raw))
    assert isinstance(error, InvalidRequest | PeerError), error
    assert watch.longest_s < LOOP_S, watch.callback


async def test_a_message_larger_than_any_request_is_not_received(pair: Pair) -> None:
    raw = begun(bytes(MAX_MESSAGE_BYTES - 128))
    error, watch = await watched(lambda: refusal(pair, STEP_STREAM, raw))
    assert error.code == "body_too_large"
    assert watch.longest_s < LOOP_S, watch.callback
    # this side's own copies are most of it
    assert watch.grown_bytes < 64 << 20


async def test_fields_are_counted_before_they_are_parsed(pair: Pair) -> None:
    error = await refusal(pair, STEP_STREAM, b"\x0a\x00" * (MAX_FIELDS + 1))
    assert isinstance(error, PeerError)
    assert f"has more than {MAX_FIELDS} fields" in error.message


async def test_a_compressed_message_is_not_inflated(pair: Pair) -> None:
    worker, raw = pair.d, begun(b"")
    metadata = pair.service(worker)._signer.metadata(STEP_STREAM.path, worker.identity.key, raw)
    make: Any = pair.channel(worker).stream_stream(STEP_STREAM.path)
    call = make(metadata=metadata, timeout=HANG_S, compression=grpc.Compression.Gzip)
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(raw)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert ended.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)


REFUSED = {
    "peer": (MEET, worker_pb2.MeetRequest(worker_id=LONG, epoch=1, address="127.0.0.1:1"), "worker_id"),
    "no peer": (MEET, worker_pb2.MeetRequest(epoch=1, address="127.0.0.1:1"), "worker_id"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("method", "message", "field"), REFUSED.values(), ids=REFUSED)
async def test_ids_and_counts_are_verified(pair: Pair, method: Any, message: Any, field: str) -> None:
    error = await refusal(pair, method, message)
    assert isinstance(error, InvalidRequest), error
    assert (error.field, field in error.message) == (field, True)
    assert not transfers_of(pair.d).peers._kept


async def test_the_ids_of_peers_are_verified_in_both_calls(pair: Pair) -> None:
    source = decode_pb2.Source(worker_id=LONG, epoch=1, address="127.0.0.1:1", transfer_id=bytes(16))
    receiver = prefill_pb2.Receiver(worker_id="a\nb", epoch=1)
    prefill = WorkerCall(
        pair.service(pair.p), "prefill", generation_request(pair.p), transfer_id=bytes(16), receiver=receiver
    )
    decode = decode_call(pair, generation_request(pair.d), source=source)
    for call, field in ((decode, "source.worker_id"), (prefill, "receiver.worker_id")):
        error = await call.end()
        assert isinstance(error, InvalidRequest)
        assert error.field == field
    assert not pair.p.engine.transfer_counts.num_expected


@pytest.mark.few(1)
@pytest.mark.parametrize("field", ["connectors", "digest_algorithms"])
async def test_the_names_of_an_open_are_counted(pair: Pair, field: str) -> None:
    opening = kv_source_pb2.Open(
        transfer_id=bytes(16), source_epoch=pair.p.identity.epoch, layout=layout_to_wire(pair.p.identity.layout),
        receiver=prefill_pb2.Receiver(worker_id="decode-0", epoch=1),
    )  # fmt: skip
    getattr(opening, field).extend(["x"] * 17)
    first = kv_source_pb2.AttachRequest(open=opening)
    call = pair.service(pair.p).stream_stream(ATTACH, first.SerializeToString())
    await call.write(first)
    answer: Any = await call.read()
    assert f"open.{field} has 17 names, at most 16" in answer.failed.error.message


async def test_an_embedding_has_neither_form_nor_output(pair: Pair) -> None:
    form = SamplingParams(n=4, structured_outputs=StructuredOutputsParams(choice=("a",)))
    pooled = generation_request(pair.p, pooling_params=PoolingParams(dimensions=2), sampling_params=SamplingParams())
    [answer] = [result async for result in WorkerCall(pair.service(pair.p), "embed", pooled)]
    assert len(answer.values) == 2
    for changes, field in (
        ({"sampling_params": form}, "sampling_params"),
        ({"output_token_ids": [5]}, "output_token_ids"),
    ):
        wrong = msgspec.structs.replace(pooled, request_id="wrong", **changes)
        error = await WorkerCall(pair.service(pair.p), "embed", wrong).end()
        assert isinstance(error, InvalidRequest)
        assert error.field == field


# ---- two requests of one name


async def _read(call: WorkerCall) -> list[Any]:
    return [event async for event in call]


@contextmanager
def _busy(worker: Worker) -> Iterator[None]:
    """Hold the engine, so that requests submitted meanwhile meet in it."""
    go_on = threading.Event()
    door_of(worker).side.post(lambda core: go_on.wait(HANG_S))
    try:
        yield
    finally:
        go_on.set()


async def test_a_second_request_of_a_name_stops_no_transfer_of_the_first(pair: Pair) -> None:
    same = generation_request(pair.d, request_id="same")
    prefill, running = calls(pair, same)
    assert (await running.read()).HasField("admitted")
    error = await decode_call(pair, generation_request(pair.d, request_id="same")).end()
    assert isinstance(error, InvalidRequest)
    assert error.field == "request_id"
    events: list[Any]
    events, _ = await asyncio.gather(_read(running), _read(prefill))
    assert sum(len(event.outputs.token_ids) for event in events) == 3


async def test_a_second_request_of_a_name_does_not_abort_the_first(pair: Pair) -> None:
    same, service = generation_request(pair.p, request_id="same"), pair.service(pair.p)
    with _busy(pair.p):
        running = WorkerCall(service, "prefill", same)
        assert (await running.read()).HasField("admitted")
        second = WorkerCall(service, "prefill", same, transfer_id=bytes(16), receiver=_receiver(pair))
        error = await second.end()
    assert isinstance(error, InvalidRequest)
    assert error.field == "request_id"
    assert [event.WhichOneof("event") for event in await _read(running)] == ["computed"]


def _receiver(pair: Pair) -> prefill_pb2.Receiver:
    worker_id, epoch = pair.d.identity.key
    return prefill_pb2.Receiver(worker_id=worker_id, epoch=epoch)


async def test_a_resumed_sequence_does_not_take_the_name_of_another_that_parts(pair: Pair) -> None:
    many = SamplingParams(n=2, temperature=0.0, max_tokens=20, ignore_eos=True)
    resumed = generation_request(pair.d, request_id="r", sampling_params=many, index=1, n=1)
    with _busy(pair.d):
        first = decode_call(pair, generation_request(pair.d, request_id="r", sampling_params=many))
        assert (await first.read()).HasField("admitted")
        error = await decode_call(pair, resumed).end()
    assert isinstance(error, InvalidRequest)
    assert error.field == "request_id"
    outputs = [event.outputs for event in await _read(first)]
    assert {output.index for output in outputs if output.finish_reason} == {0, 1}
    # both names are free again once the engine has nothing of the first
    await eventually(lambda: not pair.d.engine._taken)
    assert await _read(decode_call(pair, resumed))


@pytest.mark.slow
async def test_a_turn_of_a_session_is_counted_before_it_is_read(pair: Pair) -> None:
    session = WorkerCall(pair.service(pair.d), "session", generation_request(pair.d))
    with LoopWatch() as watch:
        assert (await session.read()).HasField("admitted")
        await session.send_turn(request(prompt_token_ids=[1] * (LIMIT - 100)))
        assert await session.code() == "prompt_too_long"
    assert watch.longest_s < LOOP_S, watch.callback


async def test_a_turn_of_what_is_no_session_ends_the_stream(pair: Pair) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    call = decode_call(pair, generation_request(pair.d, sampling_params=params))
    assert (await call.read()).HasField("admitted")
    await call.send_turn(generation_request(pair.d))
    assert isinstance(await call.end(), InvalidRequest)
