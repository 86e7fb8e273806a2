"""Models with an encoder through real router, prefill and decode processes, against `transformers`."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.common.net.public_server import make_public_channel
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from tests.support.models.encoder_decoder_checkpoints import GreedyAnswers, make_encoder_decoder
from tests.support.processes.cluster_processes import Cluster, pd_cluster, running_cluster
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

FLAGS = ("--dtype=float32", "--num-blocks=80")
REMOTE = ("--local-prefill", "never")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 300) for _ in range(length)]


def body(prompt: list[int], max_tokens: int = 30, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip


def client(cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=HANG_S, trust_env=False)


async def ask(http: httpx.AsyncClient, prompt: list[int], **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/completions", json=body(prompt, **fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(("name", "engine_process"), [("bart", False), ("flan_t5", True)])
async def test_completions_through_prefill_and_decode(name: str, engine_process: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    theirs = GreedyAnswers(make_encoder_decoder(folder, name))
    flags = (*FLAGS, "--engine-process=true") if engine_process else FLAGS
    # few blocks at decode: sequences are preempted, and encoded again there, or evicted and placed again
    small = ("--num-blocks=14", "--max-model-len=96")
    with pd_cluster(tmp_path, folder, both=flags, decode=small, router=REMOTE) as cluster:
        async with client(cluster) as http:
            for prompt in (prompt_of(1), prompt_of(16), prompt_of(47)):
                for again in (False, True):
                    found = await ask(http, prompt)
                    assert found["choices"][0]["token_ids"] == theirs.answer(prompt, 30)
                    assert found["usage"]["prompt_tokens"] == len(prompt)
                    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    assert cached == (len(prompt) if again else 0)
            prompts = [prompt_of(20 + number, number) for number in range(6)]
            answers = await asyncio.gather(*(ask(http, prompt, max_tokens=60) for prompt in prompts))
            for prompt, found in zip(prompts, answers, strict=True):
                assert found["choices"][0]["token_ids"] == theirs.answer(prompt, 60)
            several = await ask(http, prompts[0], n=3, temperature=3.0, seed=5)
            assert len({tuple(choice["token_ids"]) for choice in several["choices"]}) > 1
            await refusals(http)
        await over_grpc(cluster, theirs)
        cluster.check_pools()
        cluster.check_logs()


async def refusals(http: httpx.AsyncClient) -> None:
    for fields, message in (
        ({"prompt": prompt_of(97)}, "prompt has 97 tokens; the model's length is 96 tokens"),
        ({"max_tokens": 96}, "max_tokens is 96, the decoder of this model writes at most 95 tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is 1, and an encoder gives its prompt no probabilities"),
    ):
        answer = await http.post("/v1/completions", json=body(prompt_of(5)) | fields)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]


async def over_grpc(cluster: Cluster, theirs: GreedyAnswers) -> None:
    prompt = prompt_of(33, 7)
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=prompt),
        sampling=request_pb2.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    )
    async with make_public_channel(cluster.router.address, None) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        tokens = [token async for message in stub.Generate(request, timeout=HANG_S) for token in message.token_ids]
    assert tokens == theirs.answer(prompt, 20)


async def test_a_death_of_decode_after_the_first_tokens(tmp_path: Path) -> None:
    """The second attempt goes through prefill, which encodes the prompt again."""
    folder = tmp_path / "model"
    theirs = GreedyAnswers(make_encoder_decoder(folder, "bart", max_position_embeddings=1024))
    prompt = prompt_of(40)
    with running_cluster(tmp_path) as cluster:
        common = ("--model", str(folder), "--dtype=float32", "--num-blocks=160")
        source = cluster.start_worker("prefill", *common)
        sinks = [cluster.start_worker("decode", *common, name=name) for name in ("first", "second")]
        cluster.start_router(
            "--model", str(folder), *REMOTE, prefill=[source.address], decode=[sink.address for sink in sinks]
        )
        async with client(cluster) as http:
            tokens: list[int] = []
            is_killed = False
            given = body(prompt, max_tokens=900, stream=True)
            async with http.stream("POST", "/v1/completions", json=given) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = httpx.Response(200, content=line[6:]).json()
                        tokens += chunk["choices"][0].get("token_ids") or [] if chunk["choices"] else []
                        if len(tokens) > 3 and not is_killed:
                            is_killed = True
                            await kill_busy(cluster, sinks)
            assert is_killed
            assert tokens == theirs.answer(prompt, 900)


async def kill_busy(cluster: Cluster, sinks: list[Any]) -> None:
    """Kill the decode worker that serves the request."""
    async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as http:
        for sink in sinks:
            text = (await http.get(f"{cluster.metrics_url(sink)}/metrics")).text
            lines = [
                line for line in text.splitlines() if line.startswith("pdserve_engine_requests") and "running" in line
            ]
            if any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines):
                sink.signal(signal.SIGKILL)
                return
    raise AssertionError("no decode worker runs a request")
