"""Images that the router keeps for further attempts: what exceeds `max_held_image_bytes` is refused, and the bytes come free."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from PIL import Image

from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import play
from tests.router.image_folder import save_image_folder

WIDTH, HEIGHT = 40, 24
"""Multiples of a token's side: the picture keeps its size."""
NUM_BYTES = 3 * WIDTH * HEIGHT
OVER = (
    f"images or sound of {NUM_BYTES} bytes, and those of other requests have {2 * NUM_BYTES} of {2 * NUM_BYTES} bytes"
)


def data_url() -> str:
    Image.new("RGB", (WIDTH, HEIGHT), "red").save(file := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


PICTURE = data_url()


@pytest.fixture
def cluster(cluster: Any, tmp_path: Path) -> Any:
    """A cluster whose model takes images, each of which stands for one token `<|user|>`."""
    folder = save_image_folder(tmp_path / "images")
    cluster.folder, cluster.fingerprint = folder, tokenizer_fingerprint(folder)
    return cluster


async def chat(cluster: Any, num_pictures: int = 1) -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": PICTURE}}] * num_pictures
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return await cluster.http.post("/v1/chat/completions", json=body)


async def over_grpc(cluster: Any) -> str:
    parts = [inference_pb2.ContentPart(image_url=PICTURE)]
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", parts=parts)]),
        sampling=request_pb2.SamplingParams(max_tokens=4),
    )
    return "".join([response.text async for response in cluster.grpc.Generate(request)])


async def test_more_bytes_than_the_router_keeps_are_refused_as_overload(cluster: Any) -> None:
    await cluster.start(max_held_image_bytes=2 * NUM_BYTES)
    scripts = [worker.script for worker in cluster.workers]
    for worker in cluster.workers:
        worker.script = play(lambda worker, call: asyncio.Event().wait())
    running = [asyncio.create_task(chat(cluster)) for _ in range(2)]
    for worker in cluster.workers:
        await worker.called(2)
    refused = await chat(cluster)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert OVER in refused.json()["error"]["message"]
    with pytest.raises(grpc.aio.AioRpcError, match=OVER) as error:
        await over_grpc(cluster)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await cluster.idle()
    for worker, script in zip(cluster.workers, scripts, strict=True):
        worker.script = script
    assert (await chat(cluster, 3)).status_code == 429
    # all of them are free, after requests that were cancelled, refused and served
    for _ in range(2):
        answer = await chat(cluster, 2)
        assert answer.status_code == 200, answer.text
        assert await over_grpc(cluster) == "abcd"
