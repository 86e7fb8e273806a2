"""Chats with images through real router, prefill and decode processes, against `transformers`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from pdserve.common.net.public_server import make_public_channel
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from pdserve.worker.worker_process import ENGINE_PROGRAM
from tests.support.models.image_checkpoints import (
    FAMILIES,
    ImageOracle,
    chat_of,
    chat_text,
    data_url,
    file_of,
    make_image_checkpoint,
    picture,
)
from tests.support.processes.cluster_processes import Cluster, pd_cluster, running_cluster
from tests.support.processes.served_file import serving_file
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

FLAGS = ("--dtype=float32", "--max-num-batched-tokens=48", "--max-model-len=1024")
REMOTE = ("--local-prefill", "never")
OWN_PROCESS = ("--engine-process=true",)


def body(*parts: str | Image.Image, max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    return {
        "messages": chat_of(*parts), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip


async def ask(http: httpx.AsyncClient, *parts: str | Image.Image, **fields: Any) -> tuple[list[int], int]:
    """Token ids, and cached tokens of the prompt."""
    answer = await http.post("/v1/chat/completions", json=body(*parts, **fields))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def client(cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=HANG_S, trust_env=False)


class Expected:
    def __init__(self, folder: Path, family: str) -> None:
        self._oracle = ImageOracle(folder, family)
        self._tokenizer = Tokenizer.from_folder(folder)

    def __call__(self, *parts: str | Image.Image, max_tokens: int = 20) -> list[int]:
        images = [part for part in parts if isinstance(part, Image.Image)]
        return self._oracle.greedy(self._tokenizer.encode(chat_text(*parts)), images, max_tokens)


@pytest.mark.parametrize(("family", "engine_process"), [*((family, False) for family in FAMILIES), (FAMILIES[1], True)])
async def test_chats_through_prefill_and_decode(tmp_path: Path, family: str, engine_process: bool) -> None:
    folder = make_image_checkpoint(tmp_path / "model", family)
    expected = Expected(folder, family)
    first: list[str | Image.Image] = ["Compare ", picture(1), " with ", picture(2, 64, 48), "!"]
    other: list[str | Image.Image] = ["Compare ", picture(3), " with ", picture(2, 64, 48), "!"]
    # few blocks at decode: sequences are evicted and placed again, and go through the encoder again
    small = ("--num-blocks=24", "--max-model-len=256")
    with (
        serving_file(file_of(picture(6)), "image/png") as web,
        pd_cluster(
            tmp_path,
            folder,
            both=(*FLAGS, *OWN_PROCESS) if engine_process else FLAGS,
            decode=small,
            router=(*REMOTE, f"--allowed-media-domains={web.address}"),
        ) as cluster,
    ):
        async with client(cluster) as http:
            await by_url(http, web.url, expected)
            for parts, has_cache in ((first, False), (first, True), (other, False)):
                tokens, cached = await ask(http, *parts)
                assert tokens == expected(*parts)
                assert (cached > 32) is has_cache
            many: list[list[str | Image.Image]] = [[f"Picture {number}: ", picture(number % 4)] for number in range(8)]
            answers = await asyncio.gather(*(ask(http, *parts, max_tokens=60, n=1) for parts in many))
            for parts, (tokens, _) in zip(many, answers, strict=True):
                assert tokens == expected(*parts, max_tokens=60)
            await refusals(http)
            await over_grpc(cluster, expected)
        cluster.check_pools()
        cluster.check_logs()


async def test_workers_of_two_ranks(tmp_path: Path) -> None:
    """Each rank encodes every image; prefill may have other ranks than decode."""
    folder = make_image_checkpoint(tmp_path / "model")
    expected = Expected(folder, "qwen2_5_vl")
    ranks = ("--tensor-parallel-size=2",)
    with pd_cluster(tmp_path, folder, both=FLAGS, prefill=ranks, router=REMOTE) as cluster:
        async with client(cluster) as http:
            many: list[list[str | Image.Image]] = [
                [f"{number}: ", picture(number % 3), picture(4)] for number in range(5)
            ]
            answers = await asyncio.gather(*(ask(http, *parts) for parts in many))
            for parts, (tokens, _) in zip(many, answers, strict=True):
                assert tokens == expected(*parts)
        cluster.check_pools()
        cluster.check_logs()


async def by_url(http: httpx.AsyncClient, url: str, expected: Expected) -> None:
    """The router fetches an image."""
    given = body("What is ")
    given["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": url}})
    answer = await http.post("/v1/chat/completions", json=given)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected("What is ", picture(6))


async def refusals(http: httpx.AsyncClient) -> None:
    url: dict[str, Any] = {"type": "image_url", "image_url": {"url": "https://example.com/boat.png"}}
    file: dict[str, Any] = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    cases: list[tuple[dict[str, Any], str]] = [
        (
            body("a") | {"messages": [{"role": "user", "content": [url]}]},
            "which is not in the router's allowed_media_domains",
        ),
        (body("a") | {"messages": [{"role": "user", "content": [file]}]}, "images are taken as data:image"),
        (body(*[picture(1)] * 17), "messages has 17 images, at most 16 are allowed"),
        (body(picture(1, 400, 1)), "the sides of an image may differ by a factor of 200"),
        (body(picture(1), truncate_prompt_tokens=5), "the prompt has images"),
        (body(picture(1), use_beam_search=True, n=2), "the prompt of a beam search has none"),
    ]
    for given, message in cases:
        answer = await http.post("/v1/chat/completions", json=given)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]


async def over_grpc(cluster: Cluster, expected: Expected) -> None:
    image = picture(5)
    parts = [inference_pb2.ContentPart(text="What is "), inference_pb2.ContentPart(image_url=data_url(image))]
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", parts=parts)]),
        sampling=request_pb2.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    )
    async with make_public_channel(cluster.router.address, None) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        tokens = [token async for message in stub.Generate(request, timeout=HANG_S) for token in message.token_ids]
    assert tokens == expected("What is ", image)


@pytest.mark.parametrize("engine_process", [False, True])
async def test_a_death_after_the_first_tokens(tmp_path: Path, engine_process: bool) -> None:
    """The router still has the images for the second attempt. engine_process: that of the engine is killed alone."""
    folder = make_image_checkpoint(tmp_path / "model")
    expected = Expected(folder, "qwen2_5_vl")
    parts: list[str | Image.Image] = ["A long answer about ", picture(1, 64, 64)]
    with running_cluster(tmp_path) as cluster:
        common = ("--model", str(folder), *FLAGS, *(OWN_PROCESS if engine_process else ()))
        source = cluster.start_worker("prefill", *common)
        sinks = [cluster.start_worker("decode", *common, name=name) for name in ("first", "second")]
        cluster.start_router(
            "--model", str(folder), *REMOTE, prefill=[source.address], decode=[sink.address for sink in sinks]
        )
        async with client(cluster) as http:
            given = body(*parts, max_tokens=400, stream=True)
            tokens: list[int] = []
            async with http.stream("POST", "/v1/chat/completions", json=given) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = httpx.Response(200, content=line[6:]).json()
                        tokens += chunk["choices"][0].get("token_ids") or [] if chunk["choices"] else []
                        if len(tokens) > 3 and sinks:
                            await kill_busy(cluster, sinks, only_engine=engine_process)
                            sinks = []
            assert tokens == expected(*parts, max_tokens=400)


async def kill_busy(cluster: Cluster, sinks: list[Any], *, only_engine: bool) -> None:
    """Kill the decode worker that serves the request, or the process of its engine."""
    for sink in sinks:
        async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as http:
            text = (await http.get(f"{cluster.metrics_url(sink)}/metrics")).text
        running = [
            line for line in text.splitlines() if line.startswith("pdserve_engine_requests") and "running" in line
        ]
        if any(float(line.rsplit(" ", 1)[1]) for line in running):
            if only_engine:
                children = psutil.Process(sink.process.pid).children()
                [engine] = [child for child in children if ENGINE_PROGRAM in child.cmdline()]
                engine.kill()
            else:
                sink.signal(signal.SIGKILL)
            return
    raise AssertionError("no decode worker runs the request")
