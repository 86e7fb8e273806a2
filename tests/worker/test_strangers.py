"""Strangers at the ports of two real workers, in the clear on loopback: without the key, and with what they saw of others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.common.block_hash import BlockHasher, placement_hash
from pdserve.common.errors import InvalidRequest
from pdserve.common.net.rpc import ERROR_CODE_KEY
from pdserve.common.net.service_channel import ATTACH, MEET, STEP_STREAM, Method
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.wire.request_bytes import encode_request
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.watch_proof import WatchChallenge
from pdserve.common.worker_identity import WorkerRole
from pdserve.v1 import decode_pb2, kv_source_pb2, prefill_pb2, step_stream_pb2, worker_pb2
from pdserve.worker import worker_servicer
from pdserve.worker.worker import Worker
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.worker_call import Kind, WorkerCall, submission
from tests.support.transfers.worker_pair import (
    BLOCK_SIZE,
    KEY,
    PROMPT,
    Pair,
    decode_call,
    generation_request,
    running_pair,
    transfers_of,
)

OTHER = DeploymentKey(b"the key of another one")
OF_PREFILL = (STEP_STREAM, ATTACH, MEET)
OF_DECODE = (STEP_STREAM, MEET)
FORBIDDEN_WORDS = ("Traceback", "a handler failed", "Exception deserializing")


@pytest.fixture
async def pair(tiny_checkpoints: Callable[..., Path]) -> AsyncIterator[Pair]:
    async with running_pair(tiny_checkpoints("llama"), KEY, num_blocks=32, max_model_len=64) as made:
        yield made


def message_for(method: Method[Any, Any], worker: Worker) -> Any:
    """The message of an honest caller."""
    if method is MEET:
        return worker_pb2.MeetRequest(worker_id="x", epoch=1, address="127.0.0.1:1")
    if method is ATTACH:
        opening = kv_source_pb2.Open(transfer_id=secrets.token_bytes(16), source_epoch=worker.identity.epoch)
        return kv_source_pb2.AttachRequest(open=opening)
    kind: Kind = "prefill" if worker.identity.role is WorkerRole.PREFILL else "decode"
    return commands(kind, generation_request(worker))


def commands(kind: Kind, request: GenerationRequest, **fields: Any) -> step_stream_pb2.StepCommands:
    """The first message of a stream with this call."""
    return step_stream_pb2.StepCommands(submissions=[submission(kind, request, **fields)])


async def end_of(
    channel: grpc.aio.Channel,
    method: Method[Any, Any],
    raw: bytes,
    metadata: Any = (),
    computed_by: Worker | None = None,
) -> tuple[grpc.StatusCode, str | None, str]:
    """How a call with these very bytes ends: status, our code, words. computed_by: the stream stays open until this worker
    has computed something, since the end of a step stream cancels its calls."""
    kind = "unary_unary" if method is MEET else "stream_stream"
    begin: Any = getattr(channel, kind)(method.path)
    try:
        if method is MEET:
            call: Any = begin(raw, metadata=metadata, timeout=HANG_S)
            await call
        else:
            call = begin(metadata=metadata, timeout=HANG_S)
            # not from an iterator: where a write meets the call's end, grpc cancels such a call, and its end is lost
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(raw)
                if computed_by is not None:
                    await eventually(lambda: computed_by.engine.stats.num_computed_prompt_tokens > 0)
                await call.done_writing()
            while (await call.read()) is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code(), dict(error.trailing_metadata() or ()).get(ERROR_CODE_KEY), error.details() or ""
    return await call.code(), None, ""


def untouched(worker: Worker) -> bool:
    """True if the worker has computed nothing, keeps nothing and knows no peer."""
    stats = worker.engine.stats
    nothing_ran = not stats.num_computed_prompt_tokens and not stats.num_blocks_in_use and not worker.engine.num_streams
    transfers = transfers_of(worker)
    return (
        nothing_ran
        and not worker.engine.transfer_counts.num_expected
        and not worker.engine.transfer_counts.num_open
        and not transfers.peers._kept
    )


async def test_no_method_of_a_worker_answers_a_stranger(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for worker, methods in ((pair.p, OF_PREFILL), (pair.d, OF_DECODE)):
        for method in methods:
            raw = message_for(method, worker).SerializeToString()
            wrong = CallSigner(OTHER).metadata(method.path, worker.identity.key, raw)
            for metadata in ((), wrong, (("pdserve-proof-bin", b"nonsense"),)):
                ended = await end_of(pair.channel(worker), method, raw, metadata)
                assert ended[:2] == (grpc.StatusCode.UNAUTHENTICATED, "key_mismatch"), method.path
        assert untouched(worker)
    warnings = [record.message for record in caplog.records if "is refused" in record.message]
    # one a worker and host, however many calls
    assert len(warnings) == 2
    assert not any(word in caplog.text for word in FORBIDDEN_WORDS)


async def test_a_message_that_was_changed_replayed_late_or_meant_for_others_is_refused(pair: Pair) -> None:
    worker, channel, me = pair.d, pair.channel(pair.d), pair.d.identity.key
    raw = commands("decode", generation_request(worker, key=KEY)).SerializeToString()
    other = commands("decode", generation_request(worker, [9] * 40)).SerializeToString()

    def sign(receiver: Any = me, at: float | None = None, method: Any = STEP_STREAM) -> Any:
        clock = time.time if at is None else lambda: at
        return CallSigner(KEY, clock=clock).metadata(method.path, receiver, raw)

    now = time.time()
    refused = {
        "changed message": (other, sign(), "key_mismatch"),
        "cut message": (raw[:-1], sign(), "key_mismatch"),
        "of another method": (raw, sign(method=MEET), "key_mismatch"),
        "late": (raw, sign(at=now - 70), "clock_skew"),
        "early": (raw, sign(at=now + 70), "clock_skew"),
        "another life": (raw, sign((me[0], me[1] ^ 1)), "wrong_worker"),
        "another worker": (raw, sign(pair.p.identity.key), "wrong_worker"),
    }
    for name, (message, metadata, code) in refused.items():
        assert (await end_of(channel, STEP_STREAM, message, metadata))[1] == code, name
    assert untouched(worker)
    once = sign()
    assert (await end_of(channel, STEP_STREAM, raw, once, computed_by=worker))[0] is grpc.StatusCode.OK
    computed = worker.engine.stats.num_computed_prompt_tokens
    for _ in range(3):
        status, reason, words = await end_of(channel, STEP_STREAM, raw, once)
        assert (status, reason) == (grpc.StatusCode.UNAUTHENTICATED, "key_mismatch")
        assert "used before" in words
    assert worker.engine.stats.num_computed_prompt_tokens == computed


@pytest.mark.slow
async def test_a_slow_handshake_says_nothing_about_the_key(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_servicer, "HANDSHAKE_S", 0.5)
    watch: Any = pair.channel(pair.d).stream_stream("/pdserve.v1.WorkerService/Watch")
    call = watch(timeout=HANG_S)
    await call.write(WatchChallenge(OTHER, blocks=True).opening.SerializeToString())
    assert await call.read() is not grpc.aio.EOF  # the welcome; unread, the client's own deadline would end the call
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await call.details() == "the proof of the deployment key did not arrive within 0.5 s"
    [line] = [message for message in caplog.messages if "a watch from" in message]
    assert line.endswith(" timed out: the proof of the deployment key did not arrive within 0.5 s")


async def test_a_stranger_is_told_neither_load_nor_blocks_by_a_watch(pair: Pair) -> None:
    assert await answer(pair, PROMPT)
    watch: Any = pair.channel(pair.d).stream_stream("/pdserve.v1.WorkerService/Watch")

    async def events(*messages: worker_pb2.WatchRequest) -> tuple[list[str | None], grpc.StatusCode]:
        call = watch(timeout=HANG_S)
        for message in messages:
            await call.write(message.SerializeToString())
        await call.done_writing()
        seen: list[str | None] = []
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (raw := await call.read()) is not grpc.aio.EOF:
                seen.append(worker_pb2.WatchEvent.FromString(raw).WhichOneof("event"))
        return seen, await call.code()

    opening = WatchChallenge(OTHER, blocks=True).opening
    refused = (["welcome"], grpc.StatusCode.UNAUTHENTICATED)
    assert await events(opening) == refused
    assert await events(opening, worker_pb2.WatchRequest(proof=bytes(32))) == refused
    assert await events(opening, opening) == refused
    assert await events() == ([], grpc.StatusCode.UNAUTHENTICATED)
    old = worker_pb2.WatchRequest(protocol_version=0, blocks=True)
    assert await events(old) == ([], grpc.StatusCode.FAILED_PRECONDITION)


async def answer(pair: Pair, prompt: list[int]) -> tuple[list[int], int]:
    """An honest call to decode: tokens, and how many of the prompt were cached."""
    call = decode_call(pair, generation_request(pair.d, prompt))
    tokens: list[int] = []
    num_cached = 0
    async for event in call:
        if event.HasField("outputs"):
            tokens += event.outputs.token_ids
            num_cached = max(num_cached, event.outputs.cached_tokens.pool)
    return tokens, num_cached


async def test_a_watched_hash_neither_reads_nor_poisons_what_it_names(pair: Pair) -> None:
    """The three attacks with hashes: even a caller that has the key cannot name blocks by anything but their tokens."""
    victim, _ = await answer(pair, PROMPT)
    hasher = BlockHasher(KEY, BLOCK_SIZE)
    root = hasher.root(pair.d.identity.layout.model_fingerprint)
    full = hasher.extend(root, PROMPT)
    published = [placement_hash(block_hash) for block_hash in full]
    assert set(published) <= pair.d.engine.cached_blocks.hashes
    zeros = [1] * 32 + PROMPT[32:]
    for names in (full, published, [bytes(16) + each for each in published]):
        honest = msgspec.msgpack.decode(encode_request(generation_request(pair.d, zeros)))
        forged = msgspec.msgpack.encode(honest | {"block_hashes": names, "ignorable": ["block_hashes"]})
        call = WorkerCall(pair.service(pair.d), "decode", forged)
        cached = [event.outputs.cached_tokens.pool async for event in call if event.HasField("outputs")]
        assert cached[0] in (0, 32), "nothing of the victim's, at most its own"
    # tokens of one prompt under the root or the digest of another
    digest = hasher.request_digest(root, full, PROMPT)
    forgeries: list[dict[str, Any]] = [{"hash_root": full[0][:16]}, {"request_digest": digest}]
    for changes in forgeries:
        assert await decode_call(pair, generation_request(pair.d, zeros, **changes)).code() == "digest_mismatch"
    assert await answer(pair, PROMPT) == (victim, 32), "the victim's blocks are as they were"


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["prefill", "embed", "decode", "session"])
async def test_a_digest_that_is_not_that_of_the_tokens_is_refused_by_every_call(pair: Pair, kind: Kind) -> None:
    worker = pair.p if kind in ("prefill", "embed") else pair.d
    forgeries: list[dict[str, Any]] = [{"request_digest": b"d" * 16}, {"hash_root": b"r" * 16}]
    for changes in forgeries:
        if kind == "embed":
            changes |= {"pooling_params": PoolingParams(), "sampling_params": SamplingParams()}
        request = generation_request(worker, **changes)
        assert await WorkerCall(pair.service(worker), kind, request).code() == "digest_mismatch"
    assert untouched(worker)


async def test_a_copied_transfer_id_opens_nothing_without_the_key(pair: Pair) -> None:
    transfer_id = secrets.token_bytes(16)
    receiver = prefill_pb2.Receiver(worker_id="decode-x", epoch=3)
    request = generation_request(pair.p)
    call = WorkerCall(pair.service(pair.p), "prefill", request, transfer_id=transfer_id, receiver=receiver)
    assert (await call.read()).HasField("admitted")
    opening = kv_source_pb2.Open(
        transfer_id=transfer_id, source_epoch=pair.p.identity.epoch, receiver=receiver,
        request_digest=request.request_digest, digest_algorithms=["xxh3_64"], connectors=["tcp"],
    )  # fmt: skip
    raw = kv_source_pb2.AttachRequest(open=opening).SerializeToString()
    for metadata in ((), CallSigner(OTHER).metadata(ATTACH.path, pair.p.identity.key, raw)):
        assert (await end_of(pair.channel(pair.p), ATTACH, raw, metadata))[1] == "key_mismatch"
    [transfer] = transfers_of(pair.p).source_transfers._transfers.values()
    assert not transfer.has_ended
    call.cancel()


@pytest.mark.slow
async def test_a_large_message_without_a_proof_is_refused_before_it_is_received(pair: Pair) -> None:
    raw = step_stream_pb2.StepCommands(
        submissions=[step_stream_pb2.Submission(key=1, request=bytes(15_000_000))]
    ).SerializeToString()
    started = time.thread_time()
    for _ in range(3):
        status, code, _ = await end_of(pair.channel(pair.d), STEP_STREAM, raw)
        assert (status, code) == (grpc.StatusCode.UNAUTHENTICATED, "key_mismatch")
    # both sides run here; parsing one such message alone takes longer
    assert time.thread_time() - started < 1.0


async def test_what_cannot_be_decoded_is_an_error_of_the_caller_and_one_warning(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for worker, methods in ((pair.p, OF_PREFILL), (pair.d, OF_DECODE)):
        for method in methods:
            raw = b"\xff" * 40
            metadata = CallSigner(KEY).metadata(method.path, worker.identity.key, raw)
            code = (await end_of(pair.channel(worker), method, raw, metadata))[1]
            # a source answers an Open that is none with an event, and ends well
            assert code == (None if method is ATTACH else "peer_error"), method.path
        assert untouched(worker)
    assert len([record for record in caplog.records if "a call from" in record.message]) == 2
    assert not any(word in caplog.text for word in FORBIDDEN_WORDS)


@pytest.mark.few(1)
@pytest.mark.parametrize("address", ["unix:/run/x", "dns:///a:1", "a b:1", "h:0", "h:70000", "h", "", "x" * 400 + ":1"])
async def test_peers_are_host_and_port_alone(pair: Pair, address: str) -> None:
    meeting = worker_pb2.MeetRequest(worker_id="x", epoch=1, address=address)
    source = decode_pb2.Source(worker_id="x", epoch=1, address=address, transfer_id=bytes(16))
    raw = meeting.SerializeToString()
    metadata = CallSigner(KEY).metadata(MEET.path, pair.d.identity.key, raw)
    status, code, words = await end_of(pair.channel(pair.d), MEET, raw, metadata)
    assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
    assert "address" in words
    error = await decode_call(pair, generation_request(pair.d), source=source).end()
    assert isinstance(error, InvalidRequest)
    assert "address" in error.message
    assert untouched(pair.d)


async def test_health_stays_open(pair: Pair) -> None:
    asked = health_pb2_grpc.HealthStub(pair.channel(pair.d)).Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
    assert (await asked).status == health_pb2.HealthCheckResponse.SERVING
