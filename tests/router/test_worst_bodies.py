"""No body stops the event loop, or fills the router: each at the limit, and built to cost as much as it can."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import shutil
import subprocess
import sys
from collections import deque
from typing import Any, cast
from unittest import mock

import grpc
import msgspec
import pytest
from starlette.routing import Route
from tokenizers import Tokenizer as Backend

from pdserve.common.net.rpc import ERROR_CODE_KEY
from pdserve.common.request.generation_request import MAX_CLIENT_REQUEST_ID_CHARS
from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.http_front.front_http import HttpFront
from pdserve.router.placement.routing_decision import LOG_LENGTH, RoutingLog
from pdserve.router.requests.fields.request_limits import MAX_EMBEDDING_INPUTS, MAX_EMBEDDING_NUMBERS
from pdserve.router.telemetry.request_log import KEPT_REQUESTS, RequestLog
from pdserve.router.telemetry.request_trace import PromptTrace, RequestTrace
from pdserve.router.telemetry.status_view import MAX_SLOWEST, MAX_WORKERS, StatusView
from pdserve.router.workers.fleet import Fleet
from pdserve.v1 import inference_pb2, prefill_pb2, request_pb2
from tests.router import worst_bodies
from tests.router.worst_bodies import Worst
from tests.support.run.loop_watch import LOOP_S, watched
from tests.support.run.process_memory import TracedMemory
from tests.support.run.waiting import HANG_S

MAX_STATUS_BYTES = 1 << 20
MAX_GROWN_BYTES = 64 << 20
"""Memory at its peak, beyond that before the request."""


def names(bodies: list[Worst]) -> list[str]:
    return [f"{worst.path.removeprefix('/v1/')}: {worst.name}" for worst in bodies]


def ask(address: str, worst: Worst) -> tuple[int, bytes]:
    """In a thread: the client's own work does not count."""
    connection = http.client.HTTPConnection(address, timeout=HANG_S)
    connection.request("POST", worst.path, worst.body, {"content-type": worst.content_type})
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


async def _start(cluster, **fields):
    """The fakes run on the same loop: their records of calls would count as memory and garbage of the router."""
    for role in ("prefill", "decode"):
        await cluster.worker(role, **fields).start()
    await cluster.start(prefill=0, decode=0)
    for worker in cluster.workers:
        worker.calls = deque(maxlen=16)


@pytest.mark.few(2)
@pytest.mark.parametrize("worst", worst_bodies.HTTP, ids=names(worst_bodies.HTTP))
async def test_no_body_stops_the_event_loop(cluster, worst):
    assert len(worst.body) <= worst_bodies.LIMIT or worst.status == 413
    await _start(cluster)
    await _check_http(cluster, worst)


async def _check_http(cluster, worst, num_kept_bytes=0):
    """num_kept_bytes: of the body, which is there until it is parsed."""
    await asyncio.to_thread(ask, cluster.addresses[0], Worst("first", worst_bodies.COMPLETIONS, b'{"prompt":"a"}'))
    (status, answer), watch = await watched(lambda: asyncio.to_thread(ask, cluster.addresses[0], worst))
    assert status == worst.status, answer[:300]
    assert len(answer) < 1000 or status == 200
    assert watch.longest_s < LOOP_S, watch.callback
    assert watch.grown_bytes < MAX_GROWN_BYTES + num_kept_bytes


def call(address: str, worst: Worst) -> tuple[grpc.StatusCode, str | None, str]:
    """In a thread; bytes as they are."""
    with grpc.insecure_channel(address) as channel:
        method, made = f"/pdserve.v1.InferenceService/{worst.path}", cast(Any, channel)
        try:
            if worst.path in ("Embed", "Classify", "Score", "GetModel"):
                made.unary_unary(method)(worst.body, timeout=HANG_S)
            elif worst.path == "Session":
                first = worst_bodies.FIRST_TURNS if worst.name.startswith("second turn") else []
                list(made.stream_stream(method)(iter([*first, worst.body]), timeout=HANG_S))
            else:
                list(made.unary_stream(method)(worst.body, timeout=HANG_S))
        except grpc.RpcError as caught:
            error: Any = caught
            code = next((value for key, value in error.trailing_metadata() if key == ERROR_CODE_KEY), None)
            return error.code(), code, error.details()
    return grpc.StatusCode.OK, None, ""


OF_SESSIONS = {"token ids", "a text", "bad words", "no message"}
"""First turns of sessions in `make test`: they are read as `Generate`'s messages, all of which it has."""


def _in_every_run(worst: Worst) -> bool:
    if (worst.path, worst.name) == ("Embed", "all inputs"):  # it takes some seconds
        return False
    return worst.path != "Session" or worst.name.startswith("second turn") or worst.name in OF_SESSIONS


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "worst",
    [pytest.param(worst, marks=() if _in_every_run(worst) else pytest.mark.slow) for worst in worst_bodies.GRPC],
    ids=names(worst_bodies.GRPC),
)
async def test_no_message_stops_the_event_loop(cluster, worst):
    assert len(worst.body) <= worst_bodies.LIMIT
    await _start(cluster)
    await _check_grpc(cluster, worst)


async def _check_grpc(cluster, worst):
    await asyncio.to_thread(call, cluster.addresses[1], Worst("first", "Generate", worst_bodies._TEXT))
    (status, code, details), watch = await watched(lambda: asyncio.to_thread(call, cluster.addresses[1], worst))
    if worst.status == 200:
        assert status is grpc.StatusCode.OK, details
    else:
        assert status is grpc.StatusCode.INVALID_ARGUMENT, details
        assert code in ("invalid_request", "prompt_too_long"), details
    assert watch.longest_s < LOOP_S, watch.callback
    assert watch.grown_bytes < MAX_GROWN_BYTES


LARGE_CLIENT = """
import sys, grpc
address, path, first, code_key = sys.argv[1:]
with grpc.insecure_channel(address) as channel:
    messages = [bytes.fromhex(first)] * bool(first) + [sys.stdin.buffer.read()]
    try:
        list(channel.stream_stream(f"/pdserve.v1.InferenceService/{path}")(iter(messages), timeout=60))
        print("OK")
    except grpc.RpcError as error:
        code = next((value for key, value in error.trailing_metadata() if key == code_key), None)
        print(error.code().name, code, error.details()[:300])
"""
"""In a process of its own: a client holds such a message twice, as it is and as it is sent."""


@pytest.mark.slow
@pytest.mark.parametrize("worst", worst_bodies.LARGE, ids=names(worst_bodies.LARGE))
async def test_no_large_message_stops_the_event_loop(cluster, worst):
    """A router that takes large files takes no more of anything else."""
    assert len(worst.body) <= worst_bodies.LARGE_LIMIT
    for role in ("prefill", "decode"):
        await cluster.worker(role).start()
    await cluster.start(prefill=0, decode=0, enable_prompt_embeds=True)
    for worker in cluster.workers:
        worker.calls = deque(maxlen=16)
    await asyncio.to_thread(call, cluster.addresses[1], Worst("first", "Generate", worst_bodies._TEXT))
    first = worst_bodies.FIRST_TURNS[0].hex() if worst.name.startswith("second turn") else ""
    command = (sys.executable, "-c", LARGE_CLIENT, cluster.addresses[1], worst.path, first, ERROR_CODE_KEY)

    async def send() -> str:
        client = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return (await client.communicate(worst.body))[0].decode()

    answer, watch = await watched(send)
    assert answer.split()[:2] in (["INVALID_ARGUMENT", "invalid_request"], ["INVALID_ARGUMENT", "body_too_large"]), (
        answer
    )
    assert watch.longest_s < LOOP_S, watch.callback
    assert watch.grown_bytes < MAX_GROWN_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("worst", worst_bodies.LARGE_HTTP, ids=names(worst_bodies.LARGE_HTTP))
async def test_no_large_body_stops_the_event_loop(cluster, worst):
    assert len(worst.body) <= worst_bodies.LARGE_LIMIT
    for role in ("prefill", "decode"):
        await cluster.worker(role).start()
    await cluster.start(prefill=0, decode=0, enable_prompt_embeds=True)
    await _check_http(cluster, worst, len(worst.body))


@pytest.mark.slow
async def test_large_messages_leave_nothing_behind(cluster):
    """An error that its own frame keeps would keep the message, too, until the next full collection."""
    await cluster.start(enable_prompt_embeds=True)
    worst = worst_bodies.LARGE[0]
    await asyncio.to_thread(call, cluster.addresses[1], worst)
    gc.disable()
    try:
        with TracedMemory() as memory:
            for _ in range(4):
                await asyncio.to_thread(call, cluster.addresses[1], worst)
            kept = memory.bytes
    finally:
        gc.enable()
    # gRPC keeps the last one until the next comes
    assert kept < 1.5 * len(worst.body)


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_largest_conversation_goes_on_without_stopping_the_event_loop(cluster, stream):
    """Its messages are empty, so that its tokens are few."""
    await _start(cluster, max_model_len=worst_bodies.MODEL_LEN)
    items = [{"role": "user", "content": "", "id": "x" * 450} for _ in range(4000)]
    fields = {"max_output_tokens": 1, "instructions": "y" * 10_000}
    first = Worst("first", worst_bodies.RESPONSES, json.dumps({"input": items, **fields}).encode())
    status, answer = await asyncio.to_thread(ask, cluster.addresses[0], first)
    assert status == 200, answer[:300]
    going_on = {"input": "a", "previous_response_id": json.loads(answer)["id"], "stream": stream, **fields}
    await _check_http(cluster, Worst("next", first.path, json.dumps(going_on).encode(), 200))


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory, model_folder):
    """Its longest token has 512 bytes, so that a text within a body's limit may fit, as far as its length says."""
    folder = tmp_path_factory.mktemp("models") / "long-model"
    shutil.copytree(model_folder, folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["-" * 512])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize("worst", worst_bodies.TEXTS, ids=names(worst_bodies.TEXTS))
async def test_no_text_stops_the_event_loop(cluster, long_folder, worst):
    assert len(worst.body) <= worst_bodies.LIMIT
    cluster.folder, cluster.fingerprint = long_folder, tokenizer_fingerprint(long_folder)
    await _start(cluster, max_model_len=worst_bodies.MODEL_LEN)
    await (_check_http if worst.path.startswith("/") else _check_grpc)(cluster, worst)


def read_of(address: str, worst: Worst) -> tuple[int, int, bytes]:
    """In a thread: status, length and end of an answer of which the client keeps nothing else."""
    connection = http.client.HTTPConnection(address, timeout=HANG_S)
    connection.request("POST", worst.path, worst.body, {"content-type": "application/json"})
    response = connection.getresponse()
    length, end = 0, b""
    while part := response.read(1 << 16):
        length, end = length + len(part), (end + part)[-200:]
    connection.close()
    return response.status, length, end


NUM_INPUTS = 256
NUM_DIMENSIONS = MAX_EMBEDDING_NUMBERS // NUM_INPUTS
"""Numbers of one embedding of this many inputs, at most."""


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_the_largest_embeddings_over_http(cluster, monkeypatch, encoding):
    await _start_large(cluster, monkeypatch)
    body = {"input": ["a"] * NUM_INPUTS, "encoding_format": encoding}
    worst = Worst("largest", worst_bodies.EMBEDDINGS, json.dumps(body).encode(), 200)
    await asyncio.to_thread(ask, cluster.addresses[0], Worst("first", worst_bodies.COMPLETIONS, b'{"prompt":"a"}'))
    (status, length, end), watch = await watched(lambda: asyncio.to_thread(read_of, cluster.addresses[0], worst))
    assert watch.longest_s < LOOP_S, watch.callback
    assert watch.grown_bytes < MAX_GROWN_BYTES
    assert status == 200
    assert length > NUM_INPUTS * NUM_DIMENSIONS * 5
    assert end.endswith(b"}}}")


EMBED_CLIENT = """
import sys, grpc
with grpc.insecure_channel(sys.argv[1], options=[("grpc.max_receive_message_length", -1)]) as channel:
    print(len(channel.unary_unary("/pdserve.v1.InferenceService/Embed")(sys.stdin.buffer.read(), timeout=60)))
"""
"""In a process of its own: a client holds such an answer twice, as it comes and as it is read."""


@pytest.mark.slow
async def test_the_largest_embeddings_over_grpc(cluster, monkeypatch):
    await _start_large(cluster, monkeypatch)
    entry = inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text="a"))
    request = inference_pb2.EmbedRequest(inputs=[entry] * NUM_INPUTS).SerializeToString()
    await asyncio.to_thread(call, cluster.addresses[1], Worst("first", "Generate", worst_bodies._TEXT))
    command = (sys.executable, "-c", EMBED_CLIENT, cluster.addresses[1])

    async def embed() -> bytes:
        client = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return (await client.communicate(request))[0]

    length, watch = await watched(embed)
    assert watch.longest_s < LOOP_S, watch.callback
    assert watch.grown_bytes < MAX_GROWN_BYTES
    assert int(length) > NUM_INPUTS * NUM_DIMENSIONS * 4


async def _start_large(cluster, monkeypatch):
    """Workers whose vectors make the largest answer; what they say is made once, for they run here, too."""
    monkeypatch.setattr("tests.router.fake_worker.HIDDEN_SIZE", NUM_DIMENSIONS)
    answer = prefill_pb2.PoolingResult(
        values=[place / 7 for place in range(NUM_DIMENSIONS)], cached_tokens=request_pb2.CachedTokens(pool=2)
    )

    async def embed_largest(worker, call):
        yield answer

    monkeypatch.setattr("tests.router.fake_worker.embed_well", embed_largest)
    await _start(cluster)


def test_every_endpoint_has_a_worst_body(cluster):
    """An endpoint without a message cannot be given a large one."""
    front = HttpFront(mock.Mock(), mock.Mock())
    routes = [route for route in front.app.routes if isinstance(route, Route)]
    posts = {route.path for route in routes if "POST" in (route.methods or ())}
    # neither reads a body
    posts -= {"/ping", "/workers/{worker_id}/drain"} | worst_bodies.ALIASES
    assert posts == {worst.path for worst in worst_bodies.HTTP}
    texts = {worst.path for worst in worst_bodies.TEXTS}
    # a form's fields are short, and a role is one of two words
    assert posts - {worst_bodies.DETOKENIZE, worst_bodies.TRANSCRIPTIONS, worst_bodies.ROLE} <= texts
    methods = {method.name for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods}
    assert methods == {worst.path for worst in worst_bodies.GRPC}
    assert methods - {"GetModel"} <= texts


async def test_bodies_that_never_end_hold_bounded_memory(cluster):
    """16 MiB each without an end, of which no length is said."""
    await _start(cluster)
    host, _, port = cluster.addresses[0].rpartition(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    part = b"10000\r\n" + b" " * 65536 + b"\r\n"

    async def send() -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            writer.write(head)
            for _ in range(256):
                writer.write(part)
                await writer.drain()
        answer = await asyncio.wait_for(reader.readline(), HANG_S)
        writer.close()
        return answer

    async def send_all() -> list[bytes | BaseException]:
        return await asyncio.gather(*(send() for _ in range(12)), return_exceptions=True)

    answers, watch = await watched(send_all)
    assert watch.longest_s < LOOP_S, watch.callback
    assert watch.grown_bytes < MAX_GROWN_BYTES
    assert {answer for answer in answers if isinstance(answer, bytes) and answer} == {
        b"HTTP/1.1 413 Request Entity Too Large\r\n"
    }


PAGES = (
    "/", "/debug/status", f"/debug/requests/{'x' * 60_000}", "/debug/routing", "/metrics", "/health", "/v1/models",
    f"/v1/models/{'x' * 60_000}",
)  # fmt: skip
"""Each that takes no message, without those whose answer is the same for every deployment."""


@pytest.mark.few(2)
@pytest.mark.parametrize("path", PAGES)
async def test_no_page_stops_the_event_loop(cluster, path, monkeypatch):
    """In a fleet of 500 workers, after as many placements and requests as are remembered, with the longest ids."""
    add, ended = RoutingLog.add, RequestLog.ended

    def add_large(log, decision):
        for _ in range(LOG_LENGTH):
            add(log, msgspec.structs.replace(decision, candidates=decision.candidates * 250))

    def end_many(log, record):
        asked = msgspec.structs.replace(
            log._under_way[record], client_request_id="\u20ac" * MAX_CLIENT_REQUEST_ID_CHARS
        )
        for _ in range(KEPT_REQUESTS):
            log.began(record, asked)
            ended(log, record)
        for _ in range(MAX_SLOWEST):
            under_way.append(RequestTrace(record.metrics, 0, None, {}))
            under_way[-1].runs.extend(PromptTrace(record, record.runs[0].timeline) for _ in range(MAX_EMBEDDING_INPUTS))
            log.began(under_way[-1], asked)

    under_way: list[RequestTrace] = []
    monkeypatch.setattr(RoutingLog, "add", add_large)
    monkeypatch.setattr(RequestLog, "ended", end_many)
    await _start(cluster)
    await cluster.live(prefill=1, decode=1)
    await cluster.text()
    lives, refused = Fleet.lives, ("x" * 128, "refused: " + "\u20ac" * 9999)
    monkeypatch.setattr(Fleet, "lives", lambda fleet, role=None: lives(fleet, role) * 250)
    monkeypatch.setattr(Fleet, "absent", lambda fleet: [(WorkerRole.DECODE, *refused)] * 250)
    await asyncio.to_thread(get, cluster.addresses[0], "/health")
    (status, answer), watch = await watched(lambda: asyncio.to_thread(get, cluster.addresses[0], path))
    assert watch.longest_s < LOOP_S, watch.callback
    assert watch.grown_bytes < MAX_GROWN_BYTES
    assert status == (404 if "xxx" in path else 200)
    if path == "/debug/routing":
        assert len(answer) > 10_000_000
    elif path == "/debug/status":
        view = msgspec.json.decode(answer, type=StatusView)
        assert (view.num_workers, len(view.workers), len(view.slowest)) == (750, MAX_WORKERS, MAX_SLOWEST)
        assert len(answer) < MAX_STATUS_BYTES


def get(address: str, path: str) -> tuple[int, bytes]:
    """In a thread."""
    connection = http.client.HTTPConnection(address, timeout=HANG_S)
    connection.request("GET", path)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer
