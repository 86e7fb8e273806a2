"""OpenAI streams as `pdserve bench` reads them, from a server that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.cli.bench.endpoints import Chunk, OpenAIEndpoint, Prompt, RequestFailed

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def server(*parts: bytes, status: str = "200 OK") -> AsyncIterator[tuple[str, list[bytes]]]:
    """A base URL, and the requests that came; each gets the parts as chunks of a body, one by one."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        ]
        requests.append(head + await reader.readexactly(length))
        try:
            writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode())
            for part in parts:
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
                await asyncio.sleep(0.005)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except ConnectionError:
            pass  # the client has read enough
        finally:
            writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}", requests
    finally:
        listening.close()
        await listening.wait_closed()


async def chunks_of(url: str, *, chat: bool = False, prompt: Prompt | None = None) -> list[Chunk]:
    endpoint = OpenAIEndpoint(url, "demo", chat=chat, api_key="secret", extra_body={"temperature": 0}, tls=None)
    try:
        return [chunk async for chunk in endpoint.stream(prompt or Prompt("a", [1, 2], []), 5)]
    finally:
        await endpoint.close()


async def test_chunks_split_anywhere_are_read_whole() -> None:
    stream = b'data: {"choices":[{"text":"\xc3\xa4"}]}\n\ndata: {"choices":[{"text":""}]}\r\n\r\n' + USAGE + DONE
    for cut in range(1, len(stream), 7):
        async with server(stream[:cut], stream[cut:]) as (url, _):
            chunks = await chunks_of(url)
        # the second has a token without text
        assert chunks == [Chunk("ä", has_output=True), Chunk(has_output=True), Chunk("", False, 4, 2, 1)]


async def test_a_request_has_the_fields_of_its_api() -> None:
    async with server(DONE) as (url, requests):
        await chunks_of(url)
        await chunks_of(url, chat=True, prompt=Prompt("a", None, ["hi", "ho", "again"]))
    assert b'"prompt":[1,2]' in requests[0]
    assert b'"max_tokens":5' in requests[0]
    assert b"Bearer secret" in requests[0]
    assert requests[0].startswith(b"POST /v1/completions ")
    assert requests[1].startswith(b"POST /v1/chat/completions ")
    roles = [b"user", b"assistant", b"user"]
    said = b",".join(
        b'{"role":"%b","content":"%b"}' % pair for pair in zip(roles, [b"hi", b"ho", b"again"], strict=True)
    )
    assert b'"messages":[' + said in requests[1]


async def test_a_role_alone_is_no_output_and_reasoning_is() -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    thought = b'data: {"choices":[{"delta":{"role":"assistant","reasoning_content":"hm"}}]}\n\n'
    special = b'data: {"choices":[{"delta":{"content":""}}]}\n\n'
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    async with server(role, thought, special, end, DONE) as (url, _):
        assert [chunk.has_output for chunk in await chunks_of(url, chat=True)] == [False, True, True, True]


@pytest.mark.parametrize(
    ("parts", "status", "kind"),
    [
        ([b'{"error":{"message":"full"}}'], "429 Too Many Requests", "HTTP 429"),
        ([b'data: {"choices":[{"text":"a"}]}\n\n'], "200 OK", "stream ended early"),
        ([b'data: {"error":{"message":"lost"}}\n\n', DONE], "200 OK", "error in the stream"),
        ([b"data: {broken\n\n", DONE], "200 OK", "unreadable event"),
        ([b'data: {"choices":[{"text":"\xff"}]}\n\n', DONE], "200 OK", "unreadable event"),
        ([b'data: {"choices":[{"text":"a","token_ids":[-1]}]}\n\n', DONE], "200 OK", "unreadable event"),
        ([b'data: {"choices":[{"text":"a","token_ids":[4294967296]}]}\n\n', DONE], "200 OK", "unreadable event"),
    ],
)
async def test_failures_have_kinds(parts: list[bytes], status: str, kind: str) -> None:
    async with server(*parts, status=status) as (url, _):
        with pytest.raises(RequestFailed) as failed:
            await chunks_of(url)
    assert failed.value.kind == kind


async def test_nobody_listens() -> None:
    with pytest.raises(RequestFailed) as failed:
        await chunks_of("http://127.0.0.1:9")
    assert failed.value.kind == "ConnectError"
