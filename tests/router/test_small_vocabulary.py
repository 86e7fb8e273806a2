"""A tokenizer with more tokens than the model: texts that need them are refused by the field that the client sent."""

from __future__ import annotations

import grpc
import pytest

from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import VOCAB_SIZE, said

BEYOND = "<|assistant|>"
"""The tokenizer's last token, which the workers here do not have."""
MESSAGE = f"contains '{BEYOND}', token {VOCAB_SIZE - 1} of the tokenizer; the model has tokens 0 to {VOCAB_SIZE - 2}"
SAMPLING = request_pb2.SamplingParams(max_tokens=4)


@pytest.fixture
async def small(cluster):
    for role in ("prefill", "decode"):
        worker = cluster.worker(role)
        worker.vocab_size = VOCAB_SIZE - 1
        await worker.start()
    return await cluster.start(prefill=0, decode=0)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": f"hello {BEYOND}"}, "prompt"),
        ("/v1/completions", {"prompt": ["hello", BEYOND]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/v1/embeddings", {"input": BEYOND}, "input"),
        ("/v1/embeddings", {"input": ["a", f"b{BEYOND}"]}, "input[1]"),
    ],
)
async def test_texts_over_http(small, path, body, field):
    response = await small.http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"] == field
    assert f"{field} {MESSAGE}" in error["message"]
    for worker in small.workers:
        assert all(VOCAB_SIZE - 1 not in call.request.prompt_token_ids for call in worker.calls)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"text": inference_pb2.TextPrompt(text=BEYOND)}, "text"),
        ({"chat": inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="x")])}, "chat"),
    ],
)
async def test_texts_over_grpc(small, prompt, field):
    with pytest.raises(grpc.aio.AioRpcError, match="of the tokenizer") as caught:
        async for _ in small.grpc.Generate(inference_pb2.GenerateRequest(sampling=SAMPLING, **prompt)):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert MESSAGE in str(caught.value.details())
    assert str(caught.value.details()).startswith(field)


async def test_embeddings_and_sessions_over_grpc(small):
    inputs = [inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text=text)) for text in ("a", BEYOND)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await small.grpc.Embed(inference_pb2.EmbedRequest(inputs=inputs))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert MESSAGE in str(caught.value.details())

    call = small.grpc.Session()
    text = inference_pb2.TextPrompt(text=BEYOND)
    await call.write(inference_pb2.GenerateRequest(text=text, sampling=SAMPLING, stream=True))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert MESSAGE in str(caught.value.details())


async def test_other_texts_are_served(small):
    assert await small.text(prompt="<|user|>hello", max_tokens=5) == said(5)
