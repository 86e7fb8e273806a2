"""Malformed requests over both front ends: each has its own clear refusal, and none disturbs the streams beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import pytest

from pdserve.common.net.rpc import ERROR_CODE_KEY
from pdserve.v1 import inference_pb2, request_pb2
from tests.router import bad_requests
from tests.router.fake_worker import Call, FakeWorker, decode_outputs, said, token
from tests.support.run.waiting import HANG_S

MAX_TOKENS = 250
ENDPOINTS = (
    bad_requests.COMPLETIONS,
    bad_requests.CHAT,
    bad_requests.EMBEDDINGS,
    bad_requests.TOKENIZE,
    bad_requests.DETOKENIZE,
)


@pytest.mark.few(2)
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_i6_a_body_that_does_not_come_is_not_waited_for_for_ever(cluster, path):
    await cluster.start(prefill=0, decode=0, request_timeout_s=0.2)
    host, _, port = cluster.addresses[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f'POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{"model":'.encode())
    async with asyncio.timeout(HANG_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 504 ")
        error = json.loads(await reader.readuntil(b"}}"))["error"]
    assert error["code"] == "deadline_exceeded"
    assert error["message"] == "the request's body did not come within 0.2 s"
    writer.close()


@pytest.fixture
async def quick(cluster):
    """A fleet whose decode worker is asked for nothing but the streams beside."""
    return await cluster.start(prefill=1, decode=1, local_prefill="always")


class Beside:
    """Two streams that get a token each time that something malformed has been refused."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._allowed: list[asyncio.Semaphore] = []
        self._heard = 0
        self._tasks: list[asyncio.Task[str]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Beside]:
        self._cluster.of("decode").script = self._speak
        self._tasks = [asyncio.create_task(self._over_http()), asyncio.create_task(self._over_grpc())]
        await self._cluster.of("decode").called(2)
        yield self
        for allowed in self._allowed:
            for _ in range(MAX_TOKENS):
                allowed.release()
        assert await asyncio.gather(*self._tasks) == [said(MAX_TOKENS)] * 2
        # nothing malformed came so far; of several prompts a good one, of one token, may have begun before a bad one was seen
        lengths = [len(call.request.prompt_token_ids) for call in self._cluster.of("decode").calls]
        assert sum(length > 1 for length in lengths) == 2

    def go_on(self) -> None:
        for allowed in self._allowed:
            allowed.release()

    async def _speak(self, worker: FakeWorker, call: Call) -> AsyncIterator[object]:
        allowed = asyncio.Semaphore(0)
        self._allowed.append(allowed)
        for position in range(MAX_TOKENS):
            await allowed.acquire()
            ids = [token(said(position + 1)[-1])]
            yield decode_outputs(position, finish="length" if position == MAX_TOKENS - 1 else None, token_ids=ids)

    async def _over_http(self) -> str:
        received = await self._cluster.streamed(lambda: None, prompt="beside", max_tokens=MAX_TOKENS)
        chunks = [line.removeprefix("data: ") for line in received.split("\n") if line and "[DONE]" not in line]
        return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)

    async def _over_grpc(self) -> str:
        request = inference_pb2.GenerateRequest(
            text=inference_pb2.TextPrompt(text="beside"),
            sampling=request_pb2.SamplingParams(max_tokens=MAX_TOKENS),
            stream=True,
        )
        return "".join([message.text async for message in self._cluster.grpc.Generate(request)])


@pytest.fixture
async def beside(quick):
    async with Beside(quick).running() as streams:
        yield streams


def check(response: httpx.Response, status: int, message: str, param: str | None = None) -> dict[str, str]:
    """An error in OpenAI's shape."""
    told = (str(response.request.url), response.request.content[:200], response.text)
    assert response.status_code == status, told
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, told
    assert message in error["message"], told
    assert len(error["message"]) < 500
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error"), told
    assert error["param"] == param, told
    if param is not None:
        assert param.partition("[")[0].partition(".")[0] in error["message"], told
    return error


def test_there_are_enough_of_them_and_none_twice():
    assert bad_requests.size() >= 150
    bodies = [(path, bad_requests.encoded(body)) for path, body, *_ in bad_requests.HTTP]
    assert len(set(bodies)) == len(bodies)


async def test_over_http(quick, beside):
    for path, body, param, message, *status in bad_requests.HTTP:
        response = await quick.http.post(path, content=bad_requests.encoded(body))
        error = check(response, status[0] if status else 400, message, param)
        assert error["code"] in ("invalid_request", "prompt_too_long", "not_found", "model_not_found")
        beside.go_on()
    # of several inputs a good one may have begun before a bad one was seen
    asked = quick.of("prefill").calls
    assert {len(call.request.prompt_token_ids) for call in asked} <= {1}


async def test_bodies_that_are_no_object(quick, beside):
    for path in ENDPOINTS:
        for data in bad_requests.BODIES:
            response = await quick.http.post(path, content=data, headers={"content-type": "application/json"})
            assert check(response, 400, "the body is")["code"] == "invalid_request"
            beside.go_on()
    for path, data, param, message in bad_requests.RAW:
        check(await quick.http.post(path, content=data), 400, message, param)
        beside.go_on()


@pytest.mark.few(1)
@pytest.mark.parametrize(("path", "form", "field"), bad_requests.DEEP)
async def test_bodies_as_deep_as_they_can_be_read(quick, path, form, field):
    """A body that can just be read is written again with more on the stack."""

    async def refusal(depth: int) -> dict[str, str]:
        response = await quick.http.post(path, content=form.replace("?", "[" * depth + "]" * depth).encode())
        assert response.status_code == 400, (depth, response.text)
        return response.json()["error"]

    readable, too_deep = 100, 100_000
    while too_deep - readable > 1:
        depth = (readable + too_deep) // 2
        if "the body is nested" in (await refusal(depth))["message"]:
            too_deep = depth
        else:
            readable = depth
    for depth in range(readable - 30, too_deep):
        assert (await refusal(depth))["param"] == field


async def test_paths_methods_and_kinds_of_body(quick, beside):
    for method, path, status, code, message in bad_requests.TRANSPORT:
        response = await quick.http.request(method, path)
        assert check(response, status, message, "model" if code == "model_not_found" else None)["code"] == code
        assert ("allow" in response.headers) == (status == 405)
        beside.go_on()
    for media_type in bad_requests.MEDIA_TYPES:
        headers = {"content-type": media_type}
        response = await quick.http.post(bad_requests.COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        error = check(response, 415, f"content-type is {media_type!r}, but only application/json is understood")
        assert error["code"] == "unsupported_media_type"
        beside.go_on()


async def test_a_body_beyond_the_limit(quick, beside):
    for path in ENDPOINTS:
        response = await quick.http.post(path, content=b" " * (17 << 20))
        assert check(response, 413, "the body has more than 2097152 bytes")["code"] == "body_too_large"
        beside.go_on()


@pytest.mark.parametrize(
    "media_type", ["application/json", "application/json; charset=utf-8", "application/vnd.x+json"]
)
async def test_kinds_of_body_that_are_understood(cluster, media_type):
    await cluster.start(prefill=0)
    headers = {"content-type": media_type}
    response = await cluster.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 200


async def ask(stub: Any, request: Any) -> None:
    if isinstance(request, inference_pb2.EmbedRequest):
        await stub.Embed(request)
    else:
        _ = [response async for response in stub.Generate(request)]


@contextlib.contextmanager
def refused(code: grpc.StatusCode, message: str, *codes: str) -> Iterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    details = caught.value.details() or ""
    assert caught.value.code() is code, (message, details)
    assert message in details, details
    assert len(details) < 500
    assert dict(caught.value.trailing_metadata())[ERROR_CODE_KEY] in codes


async def test_over_grpc(quick, beside):
    for request, message in bad_requests.GRPC:
        with refused(grpc.StatusCode.INVALID_ARGUMENT, message, "invalid_request", "prompt_too_long"):
            await ask(quick.grpc, request)
        beside.go_on()
    for request in bad_requests.GRPC_NOT_FOUND:
        with refused(grpc.StatusCode.NOT_FOUND, "is not served here", "model_not_found"):
            await ask(quick.grpc, request)
        beside.go_on()
