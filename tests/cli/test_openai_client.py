"""The client of the first question with a picture: what it sends over OpenAI HTTP, and what it makes of the answer."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from pdserve.cli.clients.grpc_client import ClientMessage
from pdserve.cli.clients.openai_client import OpenAIClient
from pdserve.cli.up.cluster import Addresses
from pdserve.cli.up.greeting import Greeting
from pdserve.common.errors import InvalidRequest, Overloaded, PdServeError, PeerError, WorkerLost
from pdserve.common.request.engine_types import FinishReason

PICTURE = "data:image/png;base64,AAAA"
LAST: dict[str, Any] = {
    "choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}},
    "pdserve": {"timeline": {}, "moments": {"arrived": 1_000_000, "tokenized": 3_000_000}},
}  # fmt: skip


def words(*texts: str) -> list[dict[str, Any]]:
    """Events of a stream."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    said = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts]
    return [role, *said, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, LAST]


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[tuple[str, dict[str, str], dict[str, Any]]]]]:
    """A server's address, and path, headers and body of each request that it got."""
    got: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
            got.append((self.path, dict(self.headers.items()), sent))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


def stream_of(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


async def test_a_picture_goes_as_a_part_and_the_answer_streams() -> None:
    with answering(200, stream_of(*words("A red", " circle."))) as (address, got):
        async with OpenAIClient(f"http://{address}/v1", "a-key") as client:
            turns = [ClientMessage("system", "Be brief."), ClientMessage("user", "What?", PICTURE)]
            deltas = [delta async for delta in client.chat(turns, temperature=0.0, max_tokens=None)]
    [(path, headers, body)] = got
    assert path == "/v1/chat/completions"
    assert (headers["authorization"], headers["x-pdserve-timeline"]) == ("Bearer a-key", "1")
    parts = [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What?"}]
    assert body == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}],
        "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert "".join(delta.text for delta in deltas) == "A red circle."
    assert [delta.finish_reason for delta in deltas][-2:] == [FinishReason.STOP, None]
    last = deltas[-1]
    assert (last.num_prompt_tokens, last.num_output_tokens, last.num_cached_tokens) == (20, 5, 16)
    assert last.timeline.seconds("arrived", "tokenized") == 0.002


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, b'{"error": {"message": "no images", "param": "messages", "code": "invalid_request"}}', InvalidRequest),
        (429, b'{"error": {"message": "full", "code": "overloaded"}}', Overloaded),
        (200, stream_of(words("A")[0], {"error": {"message": "it died", "code": "worker_lost"}}), WorkerLost),
        (502, b"<html>", PeerError),
    ],
)
async def test_errors_are_those_of_the_router(status: int, body: bytes, error: type[PdServeError]) -> None:
    with answering(status, body) as (address, _):
        async with OpenAIClient(f"http://{address}/v1") as client:
            with pytest.raises(error) as raised:
                [delta async for delta in client.chat([ClientMessage("user", "What?")])]
    assert type(raised.value) is error


async def test_without_a_server_the_error_names_its_address() -> None:
    async with OpenAIClient("http://127.0.0.1:9/v1") as client:
        with pytest.raises(WorkerLost, match=r"no answer from http://127\.0\.0\.1:9/v1: "):
            [delta async for delta in client.chat([ClientMessage("user", "What?")])]


async def test_up_asks_about_a_picture_over_http() -> None:
    said = io.StringIO()
    greeting = Greeting(Console(file=said, width=200), "What?", True, "", PICTURE)
    with answering(200, stream_of(*words("A red circle."))) as (address, got):
        assert not await greeting(Addresses(address, "127.0.0.1:9", [], ["127.0.0.1:1"], {}, "a-key"))
    assert greeting.answered
    lines = said.getvalue().splitlines()
    assert lines[lines.index("What?") + 1] == "A red circle."
    assert got[0][2]["messages"][0]["content"][0]["image_url"]["url"] == PICTURE
