"""Prompts as embeddings through real processes: the text of the tokens, over both front ends, and after a decode worker's death."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save

from pdserve.common.net.public_server import make_public_channel
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import pd_cluster, running_cluster
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

FLAGS = ("--dtype=float32", "--max-num-batched-tokens=32", "--enable-prompt-embeds=true")
ROUTER = ("--enable-prompt-embeds=true", "--local-prefill", "never")
PROMPTS = [[3 + (7 * place + start) % 290 for place in range(length)] for start, length in enumerate((5, 50, 90))]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


def file_of(oracle: Oracle, prompt: list[int]) -> bytes:
    with torch.inference_mode():
        rows: torch.Tensor = oracle._model.get_input_embeddings()(torch.tensor(prompt))
    return save({"prompt": rows.contiguous()})


def base64_of(oracle: Oracle, prompt: list[int]) -> str:
    return base64.b64encode(file_of(oracle, prompt)).decode()


async def test_the_text_of_the_tokens(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    # D has room for some of the sequences alone, so that others are evicted and prefilled again
    small = ("--num-blocks=20", "--max-model-len=128")
    with pd_cluster(tmp_path, model, both=FLAGS, prefill=("--num-blocks=128",), decode=small, router=ROUTER) as cluster:
        async with (
            httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=HANG_S, trust_env=False) as http,
            make_public_channel(cluster.router.address) as channel,
        ):
            body = {"prompt_embeds": [base64_of(oracle, prompt) for prompt in PROMPTS], "max_tokens": 24} | GREEDY
            answer = (await http.post("/v1/completions", json=body)).json()
            for choice, prompt in zip(answer["choices"], PROMPTS, strict=True):
                oracle.check(prompt, choice["token_ids"])
            assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = inference_pb2.GenerateRequest(
                embeds=inference_pb2.EmbedsPrompt(safetensors=file_of(oracle, PROMPTS[1])),
                sampling=request_pb2.SamplingParams(temperature=0, max_tokens=12, n=2, logprobs=1),
            )
            sequences = [output async for output in stub.Generate(request)]
            assert len(sequences) == 2
            for output in sequences:
                oracle.check(PROMPTS[1], list(output.token_ids))
                assert len(output.logprobs) == len(output.token_ids)
            refused = await http.post("/v1/completions", json=body | {"prompt_logprobs": 1})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
            rows = torch.zeros(3, 64)
            rows[2, 7] = torch.inf
            broken = base64.b64encode(save({"prompt": rows})).decode()
            refused = await http.post("/v1/completions", json={"prompt_embeds": broken})
            assert refused.status_code == 400
            assert "prompt_embeds[2][7] is not finite" in refused.json()["error"]["message"]
        cluster.check_pools()
        cluster.check_logs()


async def test_i4_after_a_decode_workers_death(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    oracle, prompt = Oracle(model), PROMPTS[2]
    common = ("--model", str(model), *FLAGS, "--num-blocks=128")
    with running_cluster(tmp_path) as cluster:
        prefill = cluster.start_worker("prefill", *common)
        decode = [cluster.start_worker("decode", *common, name=name) for name in ("d0", "d1")]
        cluster.start_router(
            "--model", str(model), *ROUTER, prefill=[prefill.address], decode=[worker.address for worker in decode]
        )
        body = {"prompt_embeds": base64_of(oracle, prompt), "max_tokens": 150, "stream": True} | GREEDY
        received: list[int] = []
        killed = ""
        async with (
            httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=HANG_S, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    received += json.loads(line[6:])["choices"][0]["token_ids"] or []
                if len(received) > 5 and not killed:
                    loads = [await asyncio.to_thread(cluster.load, worker) for worker in decode]
                    [busy] = [worker for worker, load in zip(decode, loads, strict=True) if load.num_running]
                    busy.process.kill()
                    killed = busy.name
        assert killed
        assert len(received) == 150
        oracle.check(prompt, received)
        cluster.check_pools()
