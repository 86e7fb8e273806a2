"""Whole answers that their clients do not read are held back, counted for their tenant, and dropped in time."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from pdserve.common.net import body_budget
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.common.request.wire.messages import prompt_logprobs_to_wire
from pdserve.router.bodies import client_bodies
from pdserve.router.http_front.answer_parts import PART_BYTES
from pdserve.router.requests import generation
from pdserve.v1 import decode_pb2, inference_pb2
from tests.router.fake_worker import ADMITTED, decode_outputs, embed_well, play, tokens
from tests.router.reader_process import SlowReaders
from tests.router.test_tenants import key_of, keys_file
from tests.support.processes.tls_authority import Authority
from tests.support.run.loop_watch import watched
from tests.support.run.process_memory import allocated_bytes
from tests.support.run.waiting import HANG_S, eventually

NUM_TOKENS = 280_000
TEXT = "abcdefgh" * (NUM_TOKENS // 8)
GENERATIONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": NUM_TOKENS, "return_token_ids": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": NUM_TOKENS,
        "return_token_ids": True,
    },
    "/v1/responses": {"input": "hello", "max_output_tokens": NUM_TOKENS},
}
EMBEDDINGS = ("/v1/embeddings", {"input": ["a", "b"]})
OTHERS: dict[str, dict[str, Any]] = {
    "/detokenize": {"tokens": tokens(TEXT)},
    "/tokenize": {"prompt": TEXT[:100_000]},
}

NUM_READERS = 60
MAX_GROWN_BYTES = 64 << 20


class SlowReader:
    """A client whose system takes little that it has not read."""

    def __init__(
        self, address: str, path: str, body: dict[str, Any], key: str = "alice", tls: ssl.SSLContext | None = None
    ) -> None:
        self._address = address
        self._tls = tls
        self._stream: asyncio.StreamReader | None = None
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key_of(key)}\r\ncontent-length: {len(content)}\r\n\r\n"
        self._request = head.encode() + content
        self.received = b""
        self.is_closed = False

    async def ask(self) -> SlowReader:
        loop = asyncio.get_running_loop()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)
        host, _, port = self._address.rpartition(":")
        await loop.sock_connect(self.socket, (host, int(port)))
        if self._tls is None:
            await loop.sock_sendall(self.socket, self._request)
            return self
        self._stream, self._writer = await asyncio.open_connection(
            sock=self.socket, ssl=self._tls, server_hostname="127.0.0.1", limit=4096
        )
        self._writer.write(self._request)
        return self

    async def read(self, num_bytes: int = 1 << 16) -> bytes:
        """Some more; empty at the end."""
        async with asyncio.timeout(HANG_S):
            try:
                if self._stream is not None:
                    part = await self._stream.read(num_bytes)
                else:
                    part = await asyncio.get_running_loop().sock_recv(self.socket, num_bytes)
            except ConnectionError:
                part = b""
        self.received += part
        self.is_closed = self.is_closed or not part
        return part

    async def status(self) -> int:
        while b"\r\n" not in self.received:
            await self.read(64)
        return int(self.received.split(b" ")[1])

    async def whole(self, pause_s: float = 0.0) -> Any:
        """The whole answer's JSON."""
        while not self.is_closed:
            head, end, body = self.received.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if end and length and len(body) >= int(length[1]):
                return json.loads(body)
            if end and b"chunked" in head and body.endswith(b"0\r\n\r\n"):
                return json.loads(_unchunked(body))
            await self.read()
            await asyncio.sleep(pause_s)
        raise AssertionError(f"closed after {len(self.received)} bytes")

    def close(self) -> None:
        if self._stream is not None:
            self._writer.transport.abort()
        else:
            self.socket.close()


def _unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        if not (length := int(size, 16)):
            return b"".join(parts)
        parts.append(body[:length])
        body = body[length + 2 :]


async def started(cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **settings: Any) -> None:
    """Two workers that answer at once with much, and two tenants; alice may have two sequences."""
    monkeypatch.setattr("tests.router.fake_worker.HIDDEN_SIZE", 50_000)
    for role in ("prefill", "decode"):
        await cluster.worker(role, max_model_len=1 << 19).start()
    keys = keys_file(tmp_path, alice="max_sequences = 2", bob="")
    await cluster.start(prefill=0, decode=0, local_prefill="always", api_keys_file=keys, **settings)
    cluster.of("decode").script = play(decode_outputs(0, TEXT, "length"))
    cluster.of("prefill").script = embed_well


async def reading(
    cluster: Any, count: int, path: str, body: dict[str, Any], key: str = "alice", tls: ssl.SSLContext | None = None
) -> list[SlowReader]:
    readers = [SlowReader(cluster.addresses[0], path, body, key, tls) for _ in range(count)]
    return [await reader.ask() for reader in readers]


@pytest.mark.slow
@pytest.mark.parametrize("path", [*GENERATIONS, EMBEDDINGS[0]])
async def test_a_tenant_has_no_more_unread_answers_than_sequences(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    await started(cluster, monkeypatch, tmp_path)
    body = GENERATIONS.get(path, EMBEDDINGS[1])
    at_once = 2 if path in GENERATIONS else 1  # an input is a sequence
    unread = await reading(cluster, at_once, path, body)
    assert [await reader.status() for reader in unread] == [200] * at_once
    for _ in range(3):
        refused = await reading(cluster, 2, path, body)
        for reader in refused:
            assert await reader.status() == 429
            assert "max_sequences of this API key is 2" in (await reader.whole())["error"]["message"]
            reader.close()
    # others are served, and each answer is whole once it is read
    [other] = await reading(cluster, 1, path, body, key="bob")
    answers = [await reader.whole() for reader in (other, *unread)]
    assert {len(json.dumps(answer)) > 4 * PART_BYTES for answer in answers} == {True}
    if path == "/v1/completions":
        assert {answer["choices"][0]["text"] for answer in answers} == {TEXT}
    [again] = await reading(cluster, 1, path, body)
    assert await again.status() == 200
    for reader in (other, again, *unread):
        reader.close()
    await cluster.idle()


PROMPT_LEN, NUM_TOP = 4000, 20
"""A short request with a large answer."""


async def with_prompt_logprobs(worker: Any, call: Any) -> AsyncIterator[object]:
    num = PROMPT_LEN - 1
    ids, logprobs = [*tokens("a"), *range(NUM_TOP)], [-1.5] * (NUM_TOP + 1)
    yield ADMITTED
    for piece in prompt_logprobs_to_wire(LogprobsLists([ids] * num, [logprobs] * num, [1] * num), 1):
        yield decode_pb2.DecodeEvent(prompt_logprobs=piece)
    yield decode_outputs(0, "a", "length")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "TLS"])
async def test_short_requests_with_large_answers_count_for_their_tenant(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, authority: Authority, *, has_tls: bool
) -> None:
    tls = files = None
    if has_tls:
        issued = authority.issue()
        files = {"front_tls_cert_file": str(issued.cert), "front_tls_key_file": str(issued.key)}
        tls = ssl.create_default_context(cafile=str(authority.ca_file))
    await started(cluster, monkeypatch, tmp_path, wait=not has_tls, **(files or {}))
    if has_tls:
        await cluster.http.aclose()
        cluster.http = httpx.AsyncClient(
            base_url=f"https://{cluster.addresses[0]}", timeout=HANG_S, trust_env=False, verify=tls or False
        )
        await cluster.live(prefill=1, decode=1)
    cluster.of("decode").script = with_prompt_logprobs
    body = {"prompt": "a" * PROMPT_LEN, "max_tokens": 1, "prompt_logprobs": NUM_TOP}
    path = "/v1/completions"
    unread = await reading(cluster, 2, path, body, tls=tls)
    assert [await reader.status() for reader in unread] == [200, 200]
    for _ in range(10):
        [refused] = await reading(cluster, 1, path, body, tls=tls)
        assert await refused.status() == 429
        refused.close()
    answer = await unread[0].whole()
    assert len(answer["choices"][0]["prompt_logprobs"]) == PROMPT_LEN
    assert len(unread[0].received) > 4 << 20
    [again] = await reading(cluster, 1, path, body, tls=tls)
    assert await again.status() == 200
    for reader in (again, *unread):
        reader.close()
    await cluster.idle()


async def test_a_client_that_leaves_gives_its_place_back(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await started(cluster, monkeypatch, tmp_path)
    path, body = next(iter(GENERATIONS.items()))
    for reader in await reading(cluster, 2, path, body):
        assert await reader.status() == 200
        reader.close()
    await cluster.idle()
    for reader in await reading(cluster, 2, path, body):
        assert await reader.status() == 200
        await reader.whole()
        reader.close()


async def test_a_client_that_reads_nothing_is_dropped_in_time(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generation, "UNREAD_S", 0.3)
    await started(cluster, monkeypatch, tmp_path)
    path, body = next(iter(GENERATIONS.items()))
    unread = await reading(cluster, 2, path, body)
    assert [await reader.status() for reader in unread] == [200, 200]
    await cluster.idle()
    with pytest.raises(AssertionError, match="closed after"):
        await unread[0].whole()
    for reader in unread:
        reader.close()


@pytest.mark.slow
async def test_a_client_that_reads_slowly_gets_everything(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole takes several times as long as nothing may be read."""
    monkeypatch.setattr(generation, "UNREAD_S", 1.0)
    await started(cluster, monkeypatch, tmp_path)
    path, body = next(iter(GENERATIONS.items()))
    [reader] = await reading(cluster, 1, path, body)
    assert (await reader.whole(pause_s=0.01))["choices"][0]["text"] == TEXT
    reader.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("path", [*GENERATIONS, *OTHERS, EMBEDDINGS[0]])
async def test_all_unread_answers_share_one_budget(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    """With room for one, the one that has read for longest goes when others wait. What needs no worker has a budget of its own."""
    monkeypatch.setattr(client_bodies, "_MIN_BUDGET_BYTES", 1 << 18)
    monkeypatch.setattr(body_budget, "FAIR_SHARE_S", 0.2)
    budgets: list[Any] = []
    init = client_bodies.ClientBodies.__init__

    def noted(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        budgets.append(self.aside if path in OTHERS else self.unread)

    monkeypatch.setattr(client_bodies.ClientBodies, "__init__", noted)
    await started(cluster, monkeypatch, tmp_path, max_answer_bytes=6 << 20)
    body = (GENERATIONS | OTHERS | {EMBEDDINGS[0]: EMBEDDINGS[1]})[path]
    [first] = await reading(cluster, 1, path, body, key="bob")
    assert await first.status() == 200
    await eventually(lambda: bool(budgets) and budgets[0].used_bytes > 0)
    assert budgets[0].used_bytes <= budgets[0].max_bytes
    budgets[0].max_bytes = budgets[0].used_bytes * 3 // 2
    [next_one] = await reading(cluster, 1, path, body, key="bob")
    assert await next_one.whole()
    await eventually(lambda: budgets[0].used_bytes == 0)
    with pytest.raises(AssertionError, match="closed after"):
        await first.whole()
    for reader in (first, next_one):
        reader.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("path", OTHERS)
async def test_an_answer_without_room_is_refused(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    monkeypatch.setattr(client_bodies, "_ASIDE_BYTES", 1 << 18)
    monkeypatch.setattr(body_budget, "MAX_WAIT_S", 0.1)
    await started(cluster, monkeypatch, tmp_path)
    [first, second] = await reading(cluster, 1, path, OTHERS[path]) + await reading(cluster, 1, path, OTHERS[path])
    assert await first.status() == 200
    assert await second.status() == 429
    assert "overloaded" in json.dumps(await second.whole())
    assert await first.whole()
    for reader in (first, second):
        reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", OTHERS)
async def test_what_waits_to_be_tokenized_is_bounded(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    """Parsed bodies are larger than bodies, and wait for a thread and for room."""
    await started(cluster, monkeypatch, tmp_path)
    ids = [1 + number % 90 for number in range(600_000)]
    bodies: dict[str, dict[str, Any]] = {"/detokenize": {"tokens": ids}, "/tokenize": {"prompt": "a b " * 160_000}}
    body = bodies[path]
    async with SlowReaders(cluster.addresses[0], 2, path, body, key_of("bob")) as readers:
        assert await readers.statuses() == ["200", "200"]

    async def ask_all() -> Counter[str]:
        async with SlowReaders(cluster.addresses[0], NUM_READERS, path, body, key_of("bob")) as readers:
            return Counter(await readers.statuses())

    answers, watch = await watched(ask_all)
    assert set(answers) <= {"200", "429"}, answers
    # the budget has 32 MiB; the clients of this test, and what Python keeps of ended requests, are in the same process
    assert watch.grown_bytes < 2 * MAX_GROWN_BYTES


HOLDING_CLIENT = """
import sys, grpc
address, key, count, request = sys.argv[1], sys.argv[2], int(sys.argv[3]), bytes.fromhex(sys.argv[4])
options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
with grpc.insecure_channel(address, options) as channel:
    ask = channel.stream_stream("/pdserve.v1.InferenceService/Embed")
    calls = [ask(iter([request]), metadata=(("authorization", f"Bearer {key}"),)) for _ in range(count)]
    for call in calls:
        call.initial_metadata()
    print("begun", flush=True)
    sys.stdin.readline()
    print(*[call.code().name for call in calls], [call.details() for call in calls], flush=True)
    sys.stdin.read()
"""
"""In a process of its own: a client holds what it has received."""


@pytest.mark.slow
async def test_over_grpc_the_memory_of_unread_answers_is_given_back(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A client that reads nothing loses its connection in time: without that gRPC keeps what it has not read."""
    await started(cluster, monkeypatch, tmp_path)
    monkeypatch.setattr(generation, "UNREAD_S", 1.0)
    entry = inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text="a"))
    request = inference_pb2.EmbedRequest(inputs=[entry] * 16).SerializeToString()

    async def unread(count: int) -> int:
        """Memory that is in use when so many calls were not read in time."""
        command = (sys.executable, "-c", HOLDING_CLIENT, cluster.addresses[1], key_of("bob"), str(count), request.hex())
        client = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert client.stdin is not None
        assert client.stdout is not None
        try:
            async with asyncio.timeout(HANG_S):
                assert await client.stdout.readline() == b"begun\n"
                await cluster.idle()
                for worker in cluster.workers:
                    worker.calls.clear()
                client.stdin.write(b"\n")
                told = (await client.stdout.readline()).decode()
                assert told.split()[:count] == ["UNAVAILABLE"] * count, told
                return allocated_bytes()
        finally:
            client.kill()
            await client.communicate()

    before = await unread(1)
    num_calls, num_bytes = 5, 16 * 50_000 * 4
    assert await unread(num_calls) - before < num_calls * num_bytes // 4


@pytest.mark.slow
async def test_over_grpc_a_tenant_has_no_more_unread_answers_than_sequences(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`Embed`, `Classify` and `Score` have one answer, which gRPC would take whole after their handlers have ended."""
    await started(cluster, monkeypatch, tmp_path)
    monkeypatch.setattr(generation, "UNREAD_S", 1.5)
    entry = inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text="a"))
    request = inference_pb2.EmbedRequest(inputs=[entry, entry])
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 4096),
        ("grpc.max_receive_message_length", -1),
    ]
    metadata = (("authorization", f"Bearer {key_of('alice')}"),)
    async with grpc.aio.insecure_channel(cluster.addresses[1], options=options) as channel:
        ask: Any = channel.stream_stream(
            "/pdserve.v1.InferenceService/Embed", request_serializer=inference_pb2.EmbedRequest.SerializeToString
        )

        async def asked() -> Any:
            """A call whose answer's header has come."""
            call = ask(metadata=metadata)
            await call.write(request)
            await call.done_writing()
            await call.initial_metadata()
            return call

        first = await asked()
        for _ in range(3):
            refused = await asked()
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "max_sequences of this API key is 2" in await refused.details()
        answer = inference_pb2.EmbedResponse.FromString(await first.read())
        assert len(answer.embeddings[1].values) == 50_000
        assert await first.code() is grpc.StatusCode.OK
        second = await asked()
        # it reads nothing, and its place is free again in time
        await cluster.idle()
        third = await asked()
        second.cancel()
        third.cancel()
