"""Messages that a holder of the deployment key should not send: refused by name, at a cost that they pay for."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pdserve.common.errors import InvalidRequest, PdServeError, PeerError
from pdserve.common.net.rpc import from_rpc_error
from pdserve.common.net.service_channel import ATTACH, EMBED, END_SEQUENCES, GENERATE, MEET, PREFILL, SESSION, Method
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.request.sampling_params import MOST_SEQUENCES, SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.common.request.wire import layout_to_wire
from pdserve.common.security.peer_message import MAX_FIELDS, max_request_bytes
from pdserve.v1 import decode_pb2, kv_source_pb2, prefill_pb2, worker_pb2
from pdserve.worker.worker import Worker
from tests.support.loop_watch import LOOP_S, LoopWatch, watched
from tests.support.waiting import HANG_S, eventually
from tests.support.worker_pair import Pair, check_at_rest, host_of, prepared, running_pair, transfers_of

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


async def refusal(pair: Pair, method: Method[Any, Any], message: Any) -> PdServeError:
    """How a call with this message, signed, ends."""
    worker = pair.p if method in (PREFILL, EMBED, ATTACH) else pair.d
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    service = pair.service(worker)
    metadata = await asyncio.to_thread(service._signer.metadata, method.path, worker.identity.key, raw)
    kind = "unary_unary" if method in (EMBED, END_SEQUENCES, MEET) else "unary_stream"
    call: Any = getattr(pair.channel(worker), kind)(method.path)(raw, metadata=metadata, timeout=HANG_S)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await (call if kind == "unary_unary" else call.read())
    return from_rpc_error(ended.value)


FULL = LIMIT - 64
WORST = {
    "empty trace headers": long(1, b"\x4a\x00" * (FULL // 2)),
    "empty stop strings": long(1, long(3, b"\x42\x00" * (FULL // 2))),
    "empty plug-ins": long(1, long(3, b"\xda\x01\x00" * (FULL // 3))),
    "empty bad words": long(1, long(3, b"\x9a\x01\x00" * (FULL // 3))),
    "biases": long(1, long(3, b"\x82\x01\x02\x08\x05" * (FULL // 5))),
    "unknown fields": long(1, b"\xa0\x06\x01" * (FULL // 3)),
    "tokens": long(1, b"\x0a\x01r" + long(2, b"\x05" * (FULL - 8))),
    "tokens that do not fit": long(1, b"\x0a\x01r" + long(2, b"\xff\xff\xff\xff\x0f" * (FULL // 5 - 8))),
    "stop tokens": long(1, b"\x0a\x01r\x12\x01\x05" + long(3, long(9, b"\x05" * (FULL - 32)))),
    "EOS tokens": long(1, b"\x0a\x01r\x12\x01\x05" + long(4, b"\x05" * (FULL - 32))),
    "a long id": long(1, long(1, b"r" * (FULL - 8))),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("raw", WORST.values(), ids=WORST)
async def test_no_message_stops_the_loop(pair: Pair, raw: bytes) -> None:
    await refusal(pair, GENERATE, decode_pb2.DecodeRequest())
    error, watch = await watched(lambda: refusal(pair, GENERATE, raw))
    assert isinstance(error, InvalidRequest | PeerError), error
    assert watch.longest_s < LOOP_S, watch.callback


async def test_a_message_larger_than_any_request_is_not_received(pair: Pair) -> None:
    raw = long(1, b"\x4a\x00" * (MAX_MESSAGE_BYTES // 2 - 64))
    error, watch = await watched(lambda: refusal(pair, GENERATE, raw))
    assert error.code == "body_too_large"
    assert watch.longest_s < LOOP_S, watch.callback
    # this side's own copies are most of it
    assert watch.grown_bytes < 64 << 20


async def test_fields_are_counted_before_they_are_parsed(pair: Pair) -> None:
    error = await refusal(pair, GENERATE, long(1, b"\x4a\x00" * (MAX_FIELDS + 1)))
    assert isinstance(error, PeerError)
    assert f"has more than {MAX_FIELDS} fields" in error.message


async def test_a_compressed_message_is_not_inflated(pair: Pair) -> None:
    worker, raw = pair.d, decode_pb2.DecodeRequest().SerializeToString()
    metadata = pair.service(worker)._signer.metadata(GENERATE.path, worker.identity.key, raw)
    generate: Any = pair.channel(worker).unary_stream(GENERATE.path)
    call = generate(raw, metadata=metadata, timeout=HANG_S, compression=grpc.Compression.Gzip)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert ended.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)


REFUSED = {
    "sequences": (
        END_SEQUENCES,
        decode_pb2.EndSequencesRequest(request_id="r", indexes=[0] * (MOST_SEQUENCES + 1)),
        "indexes",
    ),
    "no id": (END_SEQUENCES, decode_pb2.EndSequencesRequest(indexes=[0]), "request_id"),
    "long id": (END_SEQUENCES, decode_pb2.EndSequencesRequest(request_id=LONG), "request_id"),
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
    for method, message, field in (
        (GENERATE, decode_pb2.DecodeRequest(request=prepared(pair.d), source=source), "source.worker_id"),
        (
            PREFILL,
            prefill_pb2.PrefillRequest(request=prepared(pair.p), transfer_id=bytes(16), receiver=receiver),
            "receiver.worker_id",
        ),
    ):
        error = await refusal(pair, method, message)
        assert isinstance(error, InvalidRequest)
        assert error.field == field
    assert not host_of(pair.p).counts.num_expected


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
    request = prepared(pair.p, sampling_params=form)
    request.pooling.dimensions = 2
    answer = await pair.service(pair.p).unary_unary(EMBED, prefill_pb2.PoolingRequest(request=request))
    assert len(answer.values) == 2
    request.resume.output_token_ids.append(5)
    error = await refusal(pair, EMBED, prefill_pb2.PoolingRequest(request=request))
    assert isinstance(error, InvalidRequest)
    assert error.field == "resume"


# ---- two requests of one name


async def _read(call: Any) -> list[Any]:
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


@contextmanager
def _busy(worker: Worker) -> Iterator[None]:
    """Hold the engine, so that requests submitted meanwhile meet in it."""
    go_on = threading.Event()
    host_of(worker).call(lambda core: go_on.wait(HANG_S))
    try:
        yield
    finally:
        go_on.set()


async def test_a_second_request_of_a_name_stops_no_transfer_of_the_first(pair: Pair) -> None:
    transfer_id, name = secrets.token_bytes(16), "same"
    source_id, source_epoch = pair.p.identity.key
    source = decode_pb2.Source(
        worker_id=source_id, epoch=source_epoch, address=pair.p.identity.address, transfer_id=transfer_id
    )
    rest = decode_pb2.DecodeRequest(request=prepared(pair.d, request_id=name), source=source)
    running: Any = pair.service(pair.d).unary_stream(GENERATE, rest)
    assert (await running.read()).HasField("admitted")
    second = decode_pb2.DecodeRequest(request=prepared(pair.d, request_id=name))
    error = await refusal(pair, GENERATE, second)
    assert isinstance(error, InvalidRequest)
    assert error.field == "request_id"
    call = prefill_pb2.PrefillRequest(
        request=prepared(pair.p, request_id=name), transfer_id=transfer_id, receiver=_receiver(pair)
    )
    events: Any
    events, _ = await asyncio.gather(_read(running), _read(pair.service(pair.p).unary_stream(PREFILL, call)))
    assert sum(len(event.outputs.token_ids) for event in events) == 3


async def test_a_second_request_of_a_name_does_not_abort_the_first(pair: Pair) -> None:
    first = prefill_pb2.PrefillRequest(request=prepared(pair.p, request_id="same"))
    second = prefill_pb2.PrefillRequest(
        request=prepared(pair.p, request_id="same"), transfer_id=bytes(16), receiver=_receiver(pair)
    )
    with _busy(pair.p):
        running: Any = pair.service(pair.p).unary_stream(PREFILL, first)
        assert (await running.read()).HasField("admitted")
        error = await refusal(pair, PREFILL, second)
    assert isinstance(error, InvalidRequest)
    assert error.field == "request_id"
    assert [event.WhichOneof("event") for event in await _read(running)] == ["computed"]


def _receiver(pair: Pair) -> prefill_pb2.Receiver:
    worker_id, epoch = pair.d.identity.key
    return prefill_pb2.Receiver(worker_id=worker_id, epoch=epoch)


async def test_a_resumed_sequence_does_not_take_the_name_of_another_that_parts(pair: Pair) -> None:
    many = SamplingParams(n=2, temperature=0.0, max_tokens=20, ignore_eos=True)
    resumed = prepared(pair.d, request_id="r", sampling_params=many)
    resumed.resume.index = 1
    with _busy(pair.d):
        first: Any = pair.service(pair.d).unary_stream(
            GENERATE, decode_pb2.DecodeRequest(request=prepared(pair.d, request_id="r", sampling_params=many))
        )
        assert (await first.read()).HasField("admitted")
        error = await refusal(pair, GENERATE, decode_pb2.DecodeRequest(request=resumed))
    assert isinstance(error, InvalidRequest)
    assert error.field == "request_id"
    outputs = [event.outputs for event in await _read(first)]
    assert {output.index for output in outputs if output.finish_reason} == {0, 1}
    # both names are free again once the engine has nothing of the first
    await eventually(lambda: not pair.d.engine._taken)
    assert await _read(pair.service(pair.d).unary_stream(GENERATE, decode_pb2.DecodeRequest(request=resumed)))


@pytest.mark.slow
async def test_a_turn_of_a_session_is_counted_before_it_is_read(pair: Pair) -> None:
    request = prepared(pair.d)
    turns = [
        decode_pb2.DecodeTurn(open=request),
        decode_pb2.DecodeTurn(next=decode_pb2.NextTurn(prompt_token_ids=[1] * (LIMIT - 100))),
    ]
    call = pair.service(pair.d).stream_stream(SESSION, turns[0].SerializeToString())
    with LoopWatch() as watch:
        for turn in turns:
            await call.write(turn)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await _read(call)
    assert from_rpc_error(ended.value).code == "prompt_too_long"
    assert watch.longest_s < LOOP_S, watch.callback
