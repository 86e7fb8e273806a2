"""Embeddings from real processes, by `transformers`' last hidden states in float32, next to an answer that is generated."""

from __future__ import annotations

import asyncio

import pytest
import torch
from openai import AsyncOpenAI

from pdserve.common.net.public_server import make_public_channel
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.shared_cluster import SharedCluster

pytestmark = pytest.mark.process

TEXTS = ["Where does the water go?", "To the sea, said the miller. " * 8, "one, two, three"]


def close(vector: list[float], expected: torch.Tensor) -> bool:
    return float((torch.tensor(vector) - expected / expected.norm()).abs().max()) < 1e-4


async def test_equal_to_transformers_over_both_front_ends(shared: SharedCluster) -> None:
    cluster, oracle, tokenizer = shared.processes, shared.oracle, Tokenizer.from_folder(shared.model)
    states = [oracle.hidden_states(tokenizer.encode(text, add_special_tokens=True)) for text in TEXTS]
    prompt = [3 + place % 200 for place in range(50)]
    async with (
        InferenceClient(cluster.router.address) as client,
        AsyncOpenAI(base_url=f"http://{cluster.router.http}/v1", api_key="none", max_retries=0) as openai,
        make_public_channel(cluster.router.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        mean = request_pb2.PoolingParams(pooling_type=request_pb2.POOLING_TYPE_MEAN, dimensions=24)
        inputs = [inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text=text)) for text in TEXTS]
        # a stream that runs next to them
        generated = asyncio.create_task(client.ask(prompt, max_tokens=40))
        name = (await openai.models.list()).data[0].id
        for _ in range(2):  # the second time the prefix cache has most of it
            by_http = await openai.embeddings.create(model=name, input=TEXTS)
            by_grpc = await stub.Embed(inference_pb2.EmbedRequest(inputs=inputs, pooling=mean))
            for entry, values, state in zip(by_http.data, by_grpc.embeddings, states, strict=True):
                assert close(entry.embedding, state[-1])
                assert close(list(values.values), state.mean(0)[:24])
        assert by_grpc.usage.cached_tokens == 0
        again = await stub.Embed(inference_pb2.EmbedRequest(inputs=inputs))
        assert again.usage.cached_tokens > 0
        assert close(list(again.embeddings[1].values), states[1][-1])
        oracle.check(prompt, (await generated).token_ids)
