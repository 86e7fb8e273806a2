"""Changed messages from a holder of the deployment key, to every method of two real workers, and between them."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from google.protobuf.message import DecodeError, Message

from pdserve.common.address.peer_address import verify_peer_address
from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import InternalError, PdServeError, WorkerLost
from pdserve.common.net.rpc import ERROR_CODE_KEY, bind, make_server
from pdserve.common.net.service_channel import ATTACH, MEET, STEP_STREAM, Method
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.common.request.wire.request_bytes import encode_request
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.security.peer_message import max_request_bytes
from pdserve.common.security.watch_proof import WatchChallenge
from pdserve.common.telemetry.logging_setup import is_news
from pdserve.kv_transfer.control.attach_servicer import answer_parts
from pdserve.v1 import decode_pb2, kv_source_pb2, prefill_pb2, step_stream_pb2, worker_pb2
from pdserve.worker.worker import TICK_STILL_S, Worker
from tests.support.inputs.fuzz_cases import Fuzzer
from tests.support.inputs.message_changes import MessageChanges, fields_named
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.run.process_memory import in_use_bytes
from tests.support.transfers.worker_call import Kind, WorkerCall, submission
from tests.support.transfers.worker_pair import (
    BLOCK_SIZE,
    KEY,
    PROMPT,
    Pair,
    ask,
    check_at_rest,
    decode_call,
    door_of,
    generation_request,
    running_pair,
    transfers_of,
)

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(0)]

MAX_GROWN_BYTES = 96 << 20
"""Memory in use for large messages: mostly 10 MiB, 56 in one run."""
MAX_LINE_CHARS = 4096
"""Length of one line of the log."""
CALL_S = 60.0
"""No call lasts so long, on a busy machine either: leases, deadlines and timeouts are much shorter here."""
IDLE_S = 120.0
LOOK_EVERY = 200
AT_A_TIME = 12
MAX_BYTES = max_request_bytes(64, 320) - 2048
"""Bytes of a message that has very many entries: its other fields take some messages beyond the limit."""
WATCH = "/pdserve.v1.WorkerService/Watch"
NOT_AN_ADDRESS = (
    "",
    "x",
    "127.0.0.1",
    "127.0.0.1:0",
    "127.0.0.1:70000",
    "unix:/run/x",
    "dns:///a:1",
    "h:1",
    "10.0.0.1:1",
)
BUGS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""No status for what a peer sent."""
WROTE_TOO_LATE = "Internal error from Core"
"""How gRPC's client ends a stream that the server had ended before all was written."""
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, seed=1, max_tokens=6, n=2, stop=("x",), stop_token_ids=(7,),
        presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={5: 1.0}, logprobs=2,
    ),
    SamplingParams(max_tokens=3, min_tokens=1, n=4, allowed_token_ids=(4, 5, 6, 7), bad_words=("a",), prompt_logprobs=1,
                   bad_words_token_ids=((5,), (6, 7))),
    SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(choice=("a", "b"))),
)  # fmt: skip


class Ended(Exception):
    """How a call ended."""

    def __init__(self, method: str, status: grpc.StatusCode, code: str | None, words: str) -> None:
        super().__init__(f"{method}: {status.name} {code} {words[:400]}")
        self.status, self.code, self.words = status, code, words
        self.sent: Sequence[str] = ()

    @property
    def is_a_bug(self) -> bool:
        """A status of a handler that failed, or of a call that this side had to give up."""
        if self.words == WROTE_TOO_LATE:
            return False
        if self.code == InternalError.code:
            return True
        return self.status in BUGS or (self.status is grpc.StatusCode.DEADLINE_EXCEEDED and self.code is None)


class Hostile:
    """Has the deployment key, and signs whatever it sends."""

    def __init__(self, pair: Pair, fuzzer: Fuzzer, closed: Sequence[str], relay: str) -> None:
        """closed: addresses at which nobody listens. relay: that of the `Relay`."""
        self.pair = pair
        self.fuzzer = fuzzer
        self.draw = fuzzer.draw
        self.relay = relay
        self._addresses = (*closed, relay, *NOT_AN_ADDRESS)
        self._changes = MessageChanges(fuzzer.draw, addresses=self._addresses, max_bytes=MAX_BYTES)
        self._signer = CallSigner(KEY)
        self.sent: deque[tuple[str, str]] = deque(maxlen=60)
        """The last ones: for whoever looks for the case."""

    # ---- messages

    def request(self, worker: Worker, **changes: Any) -> GenerationRequest:
        """A good one, of a few that often meet each other in an engine."""
        length = self.draw.choice((1, 15, 16, 17, 40, 48))
        prompt = PROMPT[:length] if length <= 40 else PROMPT + PROMPT[:8]
        fields: dict[str, Any] = {
            "request_id": self.draw.choice(("r", "r.0", "r0", secrets.token_hex(4), secrets.token_hex(4))),
            "sampling_params": self.draw.choice(SAMPLINGS),
            "eos_token_ids": (2,),
            "client_request_id": "mine",
            "tenant": b"t" * 16,
            "trace_headers": {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"},
        } | changes
        if self.draw.random() < 0.2 and "pooling_params" not in changes:
            output = [5] * self.draw.randrange(4)
            hasher = BlockHasher(KEY, BLOCK_SIZE)
            root = hasher.root(worker.identity.layout.model_fingerprint)
            given = prompt + output
            fields |= {
                "index": self.draw.randrange(fields["sampling_params"].n), "n": 1, "output_token_ids": output,
                "request_digest": hasher.request_digest(root, hasher.extend(root, given), given),
            }  # fmt: skip
        return generation_request(worker, prompt, **fields)

    def encoded(self, request: GenerationRequest) -> bytes:
        """The request, sometimes with a field changed or with other bytes."""
        kind = self.draw.random()
        if kind < 0.3:
            known = msgspec.msgpack.decode(encode_request(request))
            name = self.draw.choice(sorted(known))
            known[name] = self.draw.choice((None, -1, 2**40, "", "x" * 300, b"", [], [5] * 300, {}, known[name], 0.5))
            return msgspec.msgpack.encode(known)
        raw = encode_request(request)
        return self.fuzzer.bytes(raw) if kind < 0.45 else raw

    def changed(self, worker: Worker, message: Message) -> bytes:
        """The message changed by fields or bytes, cut off, or as it was. Nothing reaches a port at which others may listen."""
        while True:
            raw = self._changed(worker, message)
            if not self._reaches_out(type(message), raw):
                return raw

    def _changed(self, worker: Worker, message: Message) -> bytes:
        kind = self.draw.random()
        if kind < 0.65:
            message = self._changes.changed(message)
        raw = message.SerializeToString()
        if 0.55 < kind < 0.8 and len(raw) < 1 << 16:
            raw = self.fuzzer.bytes(raw)
        elif 0.8 < kind < 0.85:
            raw = raw[: self.draw.randrange(len(raw) + 1)]
        return raw

    def _reaches_out(self, kind: type[Message], raw: bytes) -> bool:
        try:
            addresses = fields_named(kind.FromString(raw), "address")
        except DecodeError:
            return False
        return any(address not in self._addresses and _is_possible(address) for address in addresses)

    # ---- calls

    async def call(self, worker: Worker, method: Method[Any, Any], *raws: bytes, stays_s: float = 0.0) -> Ended:
        """Send these messages and read to the end. stays_s: how long a stream stays open after the last."""

        async def messages() -> AsyncIterator[bytes]:
            for raw in raws:
                yield raw
                await asyncio.sleep(0.001)
            await asyncio.sleep(stays_s)

        self.sent += [(method.path, _shown(raw)) for raw in raws]
        proof = await asyncio.to_thread(self._signer.metadata, method.path, worker.identity.key, raws[0])
        kind = "unary_unary" if method is MEET else "stream_stream"
        make: Any = getattr(self.pair.channel(worker), kind)(method.path)
        call = make(raws[0] if method is MEET else messages(), metadata=proof, timeout=CALL_S)
        ended = await _end_of(method, call)
        ended.sent = [_shown(raw) for raw in raws]
        return ended

    # ---- cases

    async def one_call(self) -> list[Ended]:
        p, d = self.pair.p, self.pair.d
        worker = self.draw.choice((p, d))
        if self.draw.random() < 0.2:
            meeting = worker_pb2.MeetRequest(worker_id="x", epoch=1, address=self.draw.choice(self._addresses[:4]))
            return [await self.call(worker, MEET, await self.aside(worker, meeting))]
        commands = step_stream_pb2.StepCommands(submissions=[self._submission(worker, 1)])
        raw = await self.aside(worker, commands)
        return [await self.call(worker, STEP_STREAM, raw, stays_s=self.draw.choice((0.0, 0.3)))]

    def _submission(self, worker: Worker, key: int) -> step_stream_pb2.Submission:
        if worker is self.pair.p and self.draw.random() < 0.4:
            fields = {"pooling_params": PoolingParams(dimensions=2), "sampling_params": SamplingParams()}
            return submission("embed", self.encoded(self.request(worker, **fields)), key=key)
        data = self.encoded(self.request(worker))
        if worker is self.pair.p:
            transfer_id = secrets.token_bytes(16) if self.draw.random() < 0.5 else b""
            return submission("prefill", data, key=key, transfer_id=transfer_id, receiver=self._receiver())
        source: dict[str, Any] = {}
        if self.draw.random() < 0.5:
            worker_id, epoch = self.pair.p.identity.key
            source["source"] = decode_pb2.Source(
                worker_id=worker_id, epoch=epoch, address=self.draw.choice(self._addresses),
                transfer_id=secrets.token_bytes(16),
            )  # fmt: skip
        return submission("decode", data, key=key, **source)

    async def aside(self, worker: Worker, message: Message) -> bytes:
        """The bytes in place of the message, made in a thread: this side's work is not the worker's."""
        return await asyncio.to_thread(self.changed, worker, message)

    def _receiver(self) -> prefill_pb2.Receiver:
        worker_id, epoch = self.pair.d.identity.key
        return prefill_pb2.Receiver(worker_id=worker_id, epoch=epoch)

    async def session(self) -> list[Ended]:
        d = self.pair.d
        first = self.encoded(self.request(d, sampling_params=SAMPLINGS[0]))
        messages: list[Message] = [step_stream_pb2.StepCommands(submissions=[submission("session", first)])]
        for _ in range(self.draw.choice((0, 1, 2))):
            turn = self.request(d, sampling_params=SamplingParams(max_tokens=2, temperature=0.0))
            messages.append(
                step_stream_pb2.StepCommands(turns=[step_stream_pb2.Turn(key=1, request=self.encoded(turn))])
            )
        raws = await self._some_changed(d, messages)
        return [await self.call(d, STEP_STREAM, *raws, stays_s=self.draw.choice((0.0, 0.3)))]

    async def steps(self) -> list[Ended]:
        """A router's stream with a few calls, of which some are changed, and what it says of them."""
        worker = self.draw.choice((self.pair.p, self.pair.d))
        messages: list[Message] = []
        key = 0
        for _ in range(self.draw.choice((1, 2, 3))):
            commands = step_stream_pb2.StepCommands()
            for _ in range(self.draw.choice((0, 1, 2))):
                key += 1
                commands.submissions.append(self._submission(worker, key))
            if self.draw.random() < 0.4:
                commands.cancelled.append(self.draw.randrange(4))
            if self.draw.random() < 0.02:
                commands.cancelled.extend(range(5, self.draw.choice((1000, 1024, 1030, 100_000))))
            if self.draw.random() < 0.3:
                commands.ended_sequences.add(key=self.draw.randrange(4), indexes=[0])
            messages.append(commands)
        raws = await self._some_changed(worker, messages)
        return [await self.call(worker, STEP_STREAM, *raws, stays_s=self.draw.choice((0.0, 0.3)))]

    async def _some_changed(self, worker: Worker, messages: Sequence[Message]) -> list[bytes]:
        changes = [self.draw.random() < 0.5 for _ in messages]
        changes[self.draw.randrange(len(changes))] = True
        return [
            await self.aside(worker, message) if change else message.SerializeToString()
            for message, change in zip(messages, changes, strict=True)
        ]

    async def watch(self) -> list[Ended]:
        worker = self.draw.choice((self.pair.p, self.pair.d))
        challenge = WatchChallenge(KEY, blocks=True)
        call: Any = self.pair.channel(worker).stream_stream(WATCH)(timeout=CALL_S)
        opening = challenge.opening.SerializeToString()
        try:
            await call.write(await self.aside(worker, challenge.opening) if self.draw.random() < 0.5 else opening)
            raw = await call.read()
            if raw is not grpc.aio.EOF:
                try:
                    challenge.read(worker_pb2.WatchEvent.FromString(raw))
                except PdServeError:
                    answer = worker_pb2.WatchRequest(proof=secrets.token_bytes(32))
                else:
                    answer = challenge.answer
                await call.write(await self.aside(worker, answer))
            await call.done_writing()
            for _ in range(3):
                if await asyncio.wait_for(call.read(), 0.1) is grpc.aio.EOF:
                    break
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            pass
        call.cancel()
        return []

    async def attach(self) -> list[Ended]:
        """The receiver's stream, beside the prefill call that it is for or without one."""
        p, transfer_id = self.pair.p, secrets.token_bytes(16)
        request = self.request(p)
        messages: list[Message] = [kv_source_pb2.AttachRequest(open=self._open(transfer_id, request.request_digest))]
        for _ in range(self.draw.randrange(6)):
            messages.append(self._word())
        prefill = submission("prefill", request, transfer_id=transfer_id, receiver=self._receiver())
        commands = step_stream_pb2.StepCommands(submissions=[prefill])
        stays_s = self.draw.choice((0.0, 0.1, 0.5))
        stream = self.call(p, ATTACH, *await self._some_changed(p, messages), stays_s=stays_s)
        calls = [stream]
        if self.draw.random() < 0.8:
            calls.append(self.call(p, STEP_STREAM, commands.SerializeToString(), stays_s=0.5))
        if self.draw.random() < 0.2:
            calls.append(self.call(p, ATTACH, *await self._some_changed(p, messages), stays_s=stays_s))
        return list(await asyncio.gather(*calls))

    def _open(self, transfer_id: bytes, request_digest: bytes) -> kv_source_pb2.Open:
        from pdserve.common.request.wire.messages import layout_to_wire

        p = self.pair.p
        return kv_source_pb2.Open(
            transfer_id=transfer_id, source_epoch=p.identity.epoch, receiver=self._receiver(),
            request_digest=request_digest, layout=layout_to_wire(p.identity.layout),
            digest_algorithms=self.draw.choice((["xxh3_64"], ["gmac"], ["xxh3_64", "gmac"])), connectors=["tcp"],
        )  # fmt: skip

    def _word(self) -> kv_source_pb2.AttachRequest:
        message = kv_source_pb2.AttachRequest()
        match self.draw.randrange(5):
            case 0:
                message.want.num_blocks = self.draw.choice((0, 1, 3))
            case 1:
                message.landed.num_blocks = 1
            case 2:
                message.alive.engine_tick = 1
            case 3:
                message.release.SetInParent()
            case _:
                message.open.have = 1
        return message

    async def transfer(self) -> list[Ended]:
        """Both calls of a request, whose control stream goes through the relay."""
        p, d, transfer_id = self.pair.p, self.pair.d, secrets.token_bytes(16)
        request = self.request(p)
        worker_id, epoch = p.identity.key
        source = decode_pb2.Source(worker_id=worker_id, epoch=epoch, address=self.relay, transfer_id=transfer_id)
        of_p = submission("prefill", request, transfer_id=transfer_id, receiver=self._receiver())
        of_d = submission("decode", request, source=source)
        calls = []
        for worker, one in ((p, of_p), (d, of_d)):
            commands = step_stream_pb2.StepCommands(submissions=[one])
            raw = await self.aside(worker, commands) if self.draw.random() < 0.2 else commands.SerializeToString()
            calls.append(self.call(worker, STEP_STREAM, raw, stays_s=1.0))
        return list(await asyncio.gather(*calls))


class Relay:
    """Between a decode worker and its source: changes what passes by, and signs the source's answer again."""

    def __init__(self) -> None:
        self.server = make_server()
        handler: Any = grpc.stream_stream_rpc_method_handler(self._attach)
        service, _, method = ATTACH.path[1:].partition("/")
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1', 0)}"
        self.hostile: Hostile | None = None

    async def _attach(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        hostile = self.hostile
        assert hostile is not None
        p, draw = hostile.pair.p, hostile.draw
        first = await anext(requests, b"")
        opened = kv_source_pb2.AttachRequest.FromString(first).open
        rate = draw.choice((0.0, 0.1, 0.5))
        if draw.random() < rate / 2:
            first = await hostile.aside(p, kv_source_pb2.AttachRequest(open=opened))

        async def passed() -> AsyncIterator[bytes]:
            yield first
            async for raw in requests:
                if draw.random() < rate:
                    raw = await hostile.aside(p, kv_source_pb2.AttachRequest.FromString(raw))
                yield raw

        hostile.sent.append((ATTACH.path, _shown(first)))
        metadata = CallSigner(KEY).metadata(ATTACH.path, p.identity.key, first)
        attach: Any = hostile.pair.channel(p).stream_stream(ATTACH.path)
        call = attach(passed(), metadata=metadata, timeout=CALL_S)
        try:
            async for raw in call:
                if draw.random() < rate:
                    raw = await asyncio.to_thread(self._changed, hostile, opened, raw)
                    hostile.sent.append(("event", _shown(raw)))
                yield raw
                if draw.random() < rate / 4:
                    yield raw
        except grpc.aio.AioRpcError:
            return
        finally:
            call.cancel()

    def _changed(self, hostile: Hostile, opened: kv_source_pb2.Open, raw: bytes) -> bytes:
        changed = hostile.changed(hostile.pair.p, kv_source_pb2.AttachEvent.FromString(raw))
        try:
            event = kv_source_pb2.AttachEvent.FromString(changed)
        except DecodeError:
            return changed
        if not event.HasField("accepted") or hostile.draw.random() < 0.2:
            return changed
        digests, accepted = transfers_of(hostile.pair.p).manager._receiving.digests, event.accepted
        accepted.proof = digests.answer_proof(opened.transfer_id, opened.source_epoch, answer_parts(accepted))
        return event.SerializeToString()


def _shown(raw: bytes) -> str:
    return f"{len(raw)} bytes {raw[:1000].hex()}"


def _is_possible(address: str) -> bool:
    try:
        verify_peer_address("address", address)
    except PdServeError:
        return False
    return is_loopback(address)


async def _end_of(method: Method[Any, Any], call: Any) -> Ended:
    path = method.path
    try:
        if method is MEET:
            await call
        else:
            async for message in call:
                if method is STEP_STREAM and (end := _bug_in(message)) is not None:
                    return Ended(path, grpc.StatusCode.OK, end.code, end.message)
    except grpc.aio.AioRpcError as error:
        code = dict(error.trailing_metadata() or ()).get(ERROR_CODE_KEY)
        return Ended(path, error.code(), code, error.details() or "")
    return Ended(path, await call.code(), None, "")


def _bug_in(message: bytes) -> step_stream_pb2.CallEnd | None:
    """The end of a call in a worker's message that no call may have."""
    ends = (event.end for event in step_stream_pb2.StepOutputs.FromString(message).events)
    return next((end for end in ends if end.code == InternalError.code), None)


class Oracle:
    """Checks that both workers are intact."""

    def __init__(self, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
        self._pair = pair
        self._caplog = caplog
        self._right: list[list[int]] = []
        self.longest_tick_s = 0.0

    async def learn(self) -> None:
        """Record the workers' answers while nobody attacks them; then the processes of grammars are there, too."""
        kinds: tuple[tuple[Worker, Kind], ...] = ((self._pair.p, "prefill"), (self._pair.d, "decode"))
        for worker, kind in kinds:
            request = generation_request(worker, sampling_params=SAMPLINGS[3], deadline=time.monotonic() + 600.0)
            async for _ in WorkerCall(self._pair.service(worker), kind, request):
                pass
        self._right = await self._answers()
        assert all(len(tokens) == 4 for tokens in self._right), self._right

    async def look(self) -> None:
        """At idle workers. Raises: AssertionError."""
        for worker in (self._pair.p, self._pair.d):
            await self._idle(worker)
            await check_at_rest(worker)
        assert await self._patient_answers() == self._right
        self.look_at_log()
        self._caplog.clear()
        await asyncio.to_thread(gc.collect)

    def look_at_log(self) -> None:
        for record in filter(is_news, self._caplog.records):
            line = record.getMessage()
            assert record.levelno < logging.ERROR, self._caplog.handler.format(record)
            assert record.exc_info is None, self._caplog.handler.format(record)
            assert len(line) < MAX_LINE_CHARS, line[:400]

    def look_at_engines(self) -> None:
        for worker in (self._pair.p, self._pair.d):
            assert not worker.engine.died.is_set(), self._caplog.text[-4000:]
            self.longest_tick_s = max(self.longest_tick_s, worker.engine.tick_age_s)
        assert self.longest_tick_s < 2 * TICK_STILL_S

    async def _idle(self, worker: Worker) -> None:
        """Wait until nothing is under way. Raises: AssertionError."""
        try:
            async with asyncio.timeout(IDLE_S):
                while (  # noqa: ASYNC110 - five counters in two threads
                    worker.engine.num_streams
                    or worker.engine.num_sessions
                    or worker.engine.transfer_counts.num_open
                    or worker.engine.transfer_counts.num_expected
                    or door_of(worker).core.scheduler.requests
                ):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            engine = worker.engine
            left = engine.num_streams, engine.num_sessions, worker.engine.transfer_counts
            raise AssertionError(f"{worker.identity}: {left}, {door_of(worker).core.scheduler.requests}") from None

    async def _patient_answers(self) -> list[list[int]]:
        """A connection breaks where the machine gives this process nothing for seconds; that is no fault of a worker's."""
        while True:
            try:
                return await self._answers()
            except WorkerLost:
                await asyncio.sleep(0.5)

    async def _answers(self) -> list[list[int]]:
        """Answers to an honest router: computed at decode, and through a transfer."""
        return [await self._local(), await self._transferred()]

    async def _local(self) -> list[int]:
        call = decode_call(self._pair, generation_request(self._pair.d))
        return [token async for event in call for token in event.outputs.token_ids]

    async def _transferred(self) -> list[int]:
        return (await ask(self._pair, [token + 1 for token in PROMPT])).token_ids


@pytest.fixture
def closed() -> Iterator[list[str]]:
    """Addresses whose ports are taken, and nobody listens."""
    taken = [socket.socket() for _ in range(3)]
    for sock in taken:
        sock.bind(("127.0.0.1", 0))
    yield [f"127.0.0.1:{sock.getsockname()[1]}" for sock in taken]
    for sock in taken:
        sock.close()


@pytest.fixture
async def hostile(tiny_checkpoints: Callable[..., Path], fuzzer: Fuzzer, closed: list[str]) -> AsyncIterator[Hostile]:
    settings: dict[str, Any] = {"attach_timeout_s": 0.5, "lease_grace_s": 0.3, "lease_max_s": 5.0, "max_num_seqs": 8}
    decode = {"max_sessions": 4, "session_idle_timeout_s": 0.5}
    folder = tiny_checkpoints("llama")
    relay = Relay()
    async with running_pair(folder, KEY, decode=decode, num_blocks=32, max_model_len=64, **settings) as pair:
        made = relay.hostile = Hostile(pair, fuzzer, closed, relay.address)
        await relay.server.start()
        yield made
        await relay.server.stop(0.1)


async def attack(
    hostile: Hostile, caplog: pytest.LogCaptureFixture, cases: Sequence[Callable[[], Coroutine[Any, Any, list[Ended]]]]
) -> None:
    """Some at a time, for as long as the test has; then everything is whole, and right."""
    fuzzer, oracle = hostile.fuzzer, Oracle(hostile.pair, caplog)
    caplog.set_level(logging.INFO)
    await oracle.learn()
    running: set[asyncio.Task[list[Ended]]] = set()
    try:
        with LoopWatch() as watch:
            fuzzer.watched_by(watch)
            fuzzer.measure = in_use_bytes
            for number in fuzzer.cases(looks=False):
                running.add(asyncio.create_task(hostile.draw.choice(cases)()))
                if number % LOOK_EVERY == 0:
                    await _ended(running, AT_A_TIME)
                    await oracle.look()
                    fuzzer.look_at_memory()
                elif len(running) == AT_A_TIME:
                    await _ended(running, 1)
                assert watch.longest_s < LOOP_S, (watch.longest_s, watch.callback)
                oracle.look_at_engines()
            await _ended(running, AT_A_TIME)
            await oracle.look()
            fuzzer.look_at_memory()
        fuzzer.check_memory(MAX_GROWN_BYTES)
    except Ended as ended:
        print(f"{fuzzer}: {ended} after {ended.sent}")
        raise
    except BaseException:
        print(f"{fuzzer}: sent {list(hostile.sent)}")
        raise
    finally:
        for task in running:
            task.cancel()


async def _ended(running: set[asyncio.Task[list[Ended]]], count: int) -> None:
    """Wait for so many. Raises: Ended for a call that ended as none may."""
    while running and count > 0:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        running -= done
        count -= len(done)
        if bugs := [end for task in done for end in task.result() if end.is_a_bug]:
            raise bugs[0]


async def test_calls(hostile: Hostile, caplog: pytest.LogCaptureFixture) -> None:
    await attack(hostile, caplog, [hostile.one_call, hostile.steps])


@pytest.mark.slow
async def test_streams(hostile: Hostile, caplog: pytest.LogCaptureFixture) -> None:
    await attack(hostile, caplog, [hostile.session, hostile.watch, hostile.attach, hostile.steps])


@pytest.mark.slow
async def test_transfers(hostile: Hostile, caplog: pytest.LogCaptureFixture) -> None:
    await attack(hostile, caplog, [hostile.transfer, hostile.transfer, hostile.attach, hostile.one_call])
