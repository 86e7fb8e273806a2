"""The gRPC front end against strangers: nothing of a refused call is read, inflated, parsed or kept."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pdserve.common.errors import BodyTooLarge, Overloaded
from pdserve.common.net import open_calls
from pdserve.common.net.rpc import ERROR_CODE_KEY, from_rpc_error
from pdserve.router.bodies import client_bodies
from pdserve.router.tenants import failed_attempts
from pdserve.v1 import inference_pb2
from tests.support.run.process_memory import allocated_bytes, resident_bytes
from tests.support.run.waiting import HANG_S, eventually

GENERATE = "/pdserve.v1.InferenceService/Generate"
GROWN_BYTES = 64 << 20
CLIENT = Path(__file__).with_name("stopped_client.py")


@pytest.fixture
def parsed(monkeypatch):
    """The messages that were parsed."""
    seen: list[int] = []
    whole = client_bodies._message

    def count(data, *others):
        seen.append(len(data))
        return whole(data, *others)

    monkeypatch.setattr(client_bodies, "_message", count)
    return seen


def refused_calls(
    address: str, count: int, data: bytes, compression: grpc.Compression | None
) -> set[tuple[grpc.StatusCode, Any]]:
    """In a thread. The statuses, with our codes."""
    statuses = set()
    options = [("grpc.max_send_message_length", -1)]
    for _ in range(count):
        with grpc.insecure_channel(address, options=options, compression=compression) as channel:
            generate: Any = channel.unary_stream(GENERATE)
            call = generate(data, timeout=HANG_S, metadata=(("authorization", "Bearer wrong"),))
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            metadata: Any = caught.value.trailing_metadata() or ()
            trailing: dict[str, Any] = dict(metadata)
            statuses.add((caught.value.code(), trailing.get(ERROR_CODE_KEY)))
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip], ids=["plain", "gzip"])
async def test_refused_calls_are_not_read(cluster, parsed, compression, monkeypatch):
    # what repeated failures are delayed by is no part of this
    monkeypatch.setattr(failed_attempts, "LONGEST_DELAY_S", 0.0)
    await cluster.start(prefill=0, decode=0, api_keys=("a-key-that-is-long-enough",))
    tokens = inference_pb2.TokenPrompt(token_ids=[1] * 15_000_000)
    data = inference_pb2.GenerateRequest(tokens=tokens).SerializeToString()
    del tokens
    # the client is in this process, too: its own buffers are there after the first calls, and a moment after each
    await asyncio.to_thread(refused_calls, cluster.addresses[1], 3, data, compression)
    before = allocated_bytes()
    statuses = await asyncio.to_thread(refused_calls, cluster.addresses[1], 50, data, compression)
    await eventually(
        lambda: allocated_bytes() - before < GROWN_BYTES, lambda: f"{allocated_bytes() - before} bytes kept"
    )
    if compression is None:
        assert statuses == {(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")}
    else:
        # the channel refuses the encoding, or our code the key, whichever is looked at first
        assert {code for code, _ in statuses} <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
    assert parsed == []


@pytest.mark.slow
async def test_nothing_is_inflated(cluster, parsed):
    """0.4 MB that would be 419 MB."""
    await cluster.start(prefill=0, decode=0)
    data = b"a" * (400 << 20)

    def ask() -> grpc.StatusCode:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(cluster.addresses[1], options=options, compression=grpc.Compression.Gzip) as channel:
            generate: Any = channel.unary_stream(GENERATE)
            with pytest.raises(grpc.RpcError) as caught:
                list(generate(data, timeout=HANG_S))
            assert "Compression algorithm" in str(caught.value.details())
            return caught.value.code()

    highest = before = resident_bytes()
    asking = asyncio.create_task(asyncio.to_thread(ask))
    while not asking.done():
        await asyncio.sleep(0.002)
        highest = max(highest, resident_bytes())
    assert await asking is grpc.StatusCode.UNIMPLEMENTED
    # the client's own copy is one of them
    assert highest - before < len(data) + GROWN_BYTES
    assert parsed == []


async def test_too_large_a_message_is_refused_with_the_limit(cluster, parsed):
    await cluster.start(prefill=0, decode=0, max_request_bytes=1 << 20)
    text = inference_pb2.TextPrompt(text="a" * (1 << 20))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.grpc.Embed(inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text=text)]))
    error = from_rpc_error(caught.value)
    assert isinstance(error, BodyTooLarge)
    assert "at most 1048576 are allowed (max_request_bytes)" in error.message
    # so much is not even received
    text = inference_pb2.TextPrompt(text="a" * (4 << 20))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.grpc.Embed(inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text=text)]))
    error = from_rpc_error(caught.value)
    assert isinstance(error, BodyTooLarge), error
    assert "1572864" in error.message
    assert not error.retryable
    assert parsed == []


async def test_a_call_without_a_message_is_refused(cluster):
    await cluster.start(prefill=0, decode=0)
    call = cluster.channel.stream_stream(GENERATE)(iter([]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the call ended without a message"


async def test_calls_that_need_no_key_are_bounded(cluster, monkeypatch):
    monkeypatch.setattr(open_calls, "MAX_OPEN_CALLS_PER_ADDRESS", 3)
    await cluster.start(prefill=0, decode=0, api_keys=("a-key-that-is-long-enough",))
    watch = cluster.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    check = cluster.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    calls = [watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
    for call in calls:
        assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(health_pb2.HealthCheckRequest())
    assert isinstance(from_rpc_error(caught.value), Overloaded)
    assert "3 from one address" in str(caught.value.details())
    for call in calls:
        call.cancel()
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                await check(health_pb2.HealthCheckRequest())
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(health_pb2.HealthCheckRequest(service="x" * open_calls.MAX_OPEN_BYTES))
    assert isinstance(from_rpc_error(caught.value), BodyTooLarge)


@pytest.mark.slow
async def test_a_client_that_stands_still_keeps_its_stream(cluster):
    """Stop the client's process for 5 s: services notice a stopped peer within 2 s, but a client may pause."""
    await cluster.start(prefill=0, decode=1)
    address = cluster.addresses[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CLIENT), address, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert (await asyncio.wait_for(process.stdout.readline(), HANG_S)).strip() == b"abc"
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(5)
        process.send_signal(signal.SIGCONT)
        process.stdin.write(b"go on\n")
        assert (await asyncio.wait_for(process.stdout.readline(), HANG_S)).strip() == b"abc"
    finally:
        process.kill()
        await process.wait()
