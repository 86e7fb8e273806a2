"""Hostile image files over both front ends: clear refusals in bounded memory, while other requests are served."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.v1 import inference_pb2
from tests.router.image_folder import save_image_folder
from tests.support.inputs.hostile_images import chunk, jpeg_with, png_with, progressive, saved, segment, url_of
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.run.waiting import HANG_S

MAX_GROWN_BYTES = 64 << 20
"""Memory at its peak, beyond that before the requests."""
WHERE = "messages[0].content[0].image_url"
MANY = 20_000
NOISE = random.Random(3).randbytes(3 << 20)
REFUSED: list[tuple[str, str, str]] = [
    ("pixels", url_of(png_with(image=saved("PNG")[:16] + struct.pack(">II", 50_000, 50_000) + saved("PNG")[24:])),
     "has 50000 x 50000 pixels, at most 33554432 are decoded"),
    ("scans", url_of(progressive(64, 48, 300)), "scans of 64 x 48 pixels"),
    ("segments", url_of(jpeg_with(*[segment(0xFE, bytes(90))] * MANY)), "has more than 16384 segments"),
    ("chunks", url_of(png_with(*[chunk(b"tEXt", bytes(90))] * MANY)), "has more than 16384 chunks"),
    ("thin", url_of(saved("PNG", Image.new("1", (9000, 4)))), "is 9000 x 4, the sides of an image may differ by a factor of"),
    ("cut", url_of(png_with(image=saved("PNG", Image.effect_noise((500, 500), 90))[:-9000])), "cannot be decoded"),
    ("noise", url_of(NOISE), "bytes that are no image of PNG, JPEG, WEBP, GIF"),
    ("noise-in-jpeg", url_of(jpeg_with()[:300] + NOISE), "image_url "),
    ("type", url_of(saved("PNG"), "text/html"), "has the type 'text/html', image/... is needed"),
    ("base64", url_of(NOISE)[:-3] + "!!!", "is not valid base64"),
    ("parameters", "data:image/png" + ";a=b" * (1 << 20) + ";base64,AAAA", "begins with 'data:'"),
    ("file", "file:///etc/passwd", "begins with 'file:'"),
]  # fmt: skip
SERVED = {
    "comments": jpeg_with(*[segment(0xFE, bytes(90))] * 16_000),
    "exif-parts": jpeg_with(*[segment(0xE1, b"Exif\0\0" + bytes(90))] * 16_000),
    "trailer": jpeg_with() + NOISE,
    "texts": png_with(*[chunk(b"tEXt", bytes(90))] * 16_000),
}
"""Files of which the metadata is dropped."""


@pytest.fixture
def cluster(cluster: Any, tmp_path: Path) -> Any:
    """A cluster whose model takes images."""
    folder = save_image_folder(tmp_path / "images")
    cluster.folder, cluster.fingerprint = folder, tokenizer_fingerprint(folder)
    return cluster


def body_of(url: str) -> bytes:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 4}).encode()


def ask(address: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """In a thread: the client's own work does not count."""
    connection = http.client.HTTPConnection(address, timeout=HANG_S)
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


async def test_each_is_refused_or_served_without_its_metadata(cluster: Any) -> None:
    await cluster.start()
    good = body_of(url_of(jpeg_with()))
    bodies = [(name, body_of(url), told) for name, url, told in REFUSED]
    bodies += [(name, body_of(url_of(data)), "") for name, data in SERVED.items()]
    assert (await asyncio.to_thread(ask, cluster.addresses[0], good))[0] == 200
    with LoopWatch() as watch:
        for name, body, told in bodies:
            (status, answer), (other, _) = await asyncio.gather(
                asyncio.to_thread(ask, cluster.addresses[0], body), asyncio.to_thread(ask, cluster.addresses[0], good)
            )
            assert status == (400 if told else 200), (name, answer)
            assert other == 200
            if told:
                assert answer["error"]["param"] == "messages"
                assert told in answer["error"]["message"], name
                assert WHERE in answer["error"]["message"]
                assert len(answer["error"]["message"]) < 400
            assert watch.longest_s < LOOP_S, (name, watch.callback)
            assert watch.grown_bytes < MAX_GROWN_BYTES, name


@pytest.mark.slow
async def test_each_is_refused_over_grpc(cluster: Any) -> None:
    await cluster.start()
    for name, url, told in REFUSED:
        parts = [inference_pb2.ContentPart(image_url=url)]
        request = inference_pb2.GenerateRequest(
            chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", parts=parts)])
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [_ async for _ in cluster.grpc.Generate(request)]
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert told in (refused.value.details() or ""), name
