"""Prompts as embeddings in the router: what each worker gets, the bytes that are kept, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import save

from pdserve.common.errors import Evicted, InvalidRequest
from pdserve.common.request.prompt_embeds import PromptEmbeds
from pdserve.router.requests.fields.prompt_embeds_field import MAX_PROMPT_EMBEDS_BYTES, read_base64_embeds, read_embeds
from pdserve.v1 import inference_pb2
from tests.router.fake_worker import HIDDEN_SIZE, MAX_MODEL_LEN, play

ROWS = torch.arange(5 * HIDDEN_SIZE, dtype=torch.float32).view(5, HIDDEN_SIZE)
FILE = save({"prompt": ROWS})
EMBEDS = PromptEmbeds.of(5, HIDDEN_SIZE, "float32", ROWS.numpy().tobytes())


def written(rows: torch.Tensor = ROWS) -> str:
    return base64.b64encode(save({"prompt": rows.contiguous()})).decode()


async def complete(cluster: Any, **body: Any) -> Any:
    return await cluster.http.post("/v1/completions", json={"prompt_embeds": written(), "max_tokens": 4, **body})


async def refusal(cluster: Any, **body: Any) -> tuple[str | None, str]:
    response = await complete(cluster, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def got(worker: Any) -> list[PromptEmbeds | None]:
    """Embeddings in each call."""
    return [call.request.prompt_embeds for call in worker.calls]


async def test_prefill_gets_the_numbers_and_decode_their_digest(cluster: Any) -> None:
    await cluster.start(enable_prompt_embeds=True, local_prefill="never")
    response = await complete(cluster, n=2, return_token_ids=True)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["usage"]["prompt_tokens"], len(answer["choices"])) == (5, 2)
    assert got(cluster.of("prefill")) == [EMBEDS]
    assert got(cluster.of("decode")) == [EMBEDS.without_data()]
    requests = [cluster.of(role).calls[0].request for role in ("prefill", "decode")]
    assert requests[0].request_digest == requests[1].request_digest
    assert [request.prompt_token_ids for request in requests] == [[0] * 5] * 2
    await complete(cluster, prompt_embeds=written(ROWS + 1))
    other = cluster.of("prefill").calls[1].request
    assert other.hash_root != requests[0].hash_root
    assert other.request_digest != requests[0].request_digest


async def test_decode_alone_gets_the_numbers_too(cluster: Any) -> None:
    await cluster.start(prefill=0, enable_prompt_embeds=True)
    request = inference_pb2.GenerateRequest(embeds=inference_pb2.EmbedsPrompt(safetensors=FILE))
    assert [output async for output in cluster.grpc.Generate(request)]
    assert got(cluster.of("decode")) == [EMBEDS]


async def test_a_second_attempt_has_the_numbers_again(cluster: Any) -> None:
    await cluster.start(enable_prompt_embeds=True, local_prefill="never")
    cluster.of("decode").scripts = [play(Evicted("its blocks were needed"))]
    assert (await complete(cluster)).status_code == 200
    assert got(cluster.of("prefill")) == [EMBEDS] * 2
    assert got(cluster.of("decode")) == [EMBEDS.without_data()] * 2


async def test_more_bytes_than_the_router_keeps_are_refused_as_overload(cluster: Any) -> None:
    num_bytes = len(EMBEDS.data)
    await cluster.start(enable_prompt_embeds=True, max_prompt_embeds_bytes=2 * num_bytes)
    for worker in cluster.workers:
        worker.script = play(lambda worker, call: asyncio.Event().wait())
    first = [asyncio.create_task(complete(cluster)) for _ in range(2)]
    for worker in cluster.workers:
        await worker.called(2)
    refused = await complete(cluster)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    told = f"prompt_embeds has {num_bytes} bytes, and requests in the router keep {2 * num_bytes} of at most"
    assert told in refused.json()["error"]["message"]
    for task in first:
        task.cancel()
    await asyncio.gather(*first, return_exceptions=True)
    await cluster.idle()
    refused = await complete(cluster, prompt_embeds=[written()] * 3)
    assert refused.status_code == 429
    for worker in cluster.workers:
        worker.script = type(worker)(worker.role, "x").script
    assert (await complete(cluster)).status_code == 200


async def test_they_are_off_by_default(cluster: Any) -> None:
    await cluster.start()
    told = "is given, and this router takes no embeddings (enable_prompt_embeds)"
    assert await refusal(cluster) == ("prompt_embeds", f"prompt_embeds {told}")
    request = inference_pb2.GenerateRequest(embeds=inference_pb2.EmbedsPrompt(safetensors=FILE))
    with pytest.raises(grpc.aio.AioRpcError, match="embeds is given") as refused:
        await anext(aiter(cluster.grpc.Generate(request)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_size_is_checked_before_anything_is_decoded() -> None:
    with pytest.raises(InvalidRequest, match="prompt_embeds has 12582913 bytes, at most 12582912 bytes are possible"):
        read_embeds(bytes(MAX_PROMPT_EMBEDS_BYTES + 1), "prompt_embeds", 8)
    with pytest.raises(InvalidRequest, match="has 16777220 characters of base64, at most 12582912 bytes are possible"):
        read_base64_embeds("%" * (MAX_PROMPT_EMBEDS_BYTES // 3 * 4 + 4), "prompt_embeds", 8)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "x"}, "prompt", "prompt and prompt_embeds are given: one of prompt and"),
    ({"prompt_embeds": None}, "prompt", "prompt is missing: one of prompt and prompt_embeds"),
    ({"prompt_embeds": []}, "prompt_embeds", "prompt_embeds has 0 entries, 1 to 128 are allowed"),
    ({"prompt_embeds": ["x"] * 129}, "prompt_embeds", "has 129 entries"),
    ({"prompt_embeds": "%"}, "prompt_embeds", "is not base64"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "has 3 bytes, which is no safetensors file"),
    (
        {"prompt_embeds": written(ROWS[:, :7])},
        "prompt_embeds",
        "rows of 7 numbers, the model's hidden size is 8",
    ),
    (
        {"prompt_embeds": written(torch.zeros(MAX_MODEL_LEN, 8))},
        "prompt_embeds",
        "has 256 tokens; the model's length is 256",
    ),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "the tokens of prompt_embeds are not known"),
    ({"echo": True}, "echo", "prompt_embeds have no text"),
    ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "prompt_embeds are not truncated"),
    ({"use_beam_search": True, "n": 2}, "use_beam_search", "beams begin with token ids"),
]


async def test_bad_bodies(cluster: Any) -> None:
    await cluster.start(enable_prompt_embeds=True)
    for body, param, message in REFUSED:
        found, told = await refusal(cluster, **body)
        assert message in told
        assert found == param
    session = cluster.grpc.Session(
        iter([inference_pb2.GenerateRequest(embeds=inference_pb2.EmbedsPrompt(safetensors=FILE))])
    )
    with pytest.raises(grpc.aio.AioRpcError, match="a session's prompt is token ids"):
        await anext(aiter(session))
    assert not any(worker.calls for worker in cluster.workers)
    # the prompt beside a refused one may be computed before that is known
    _, told = await refusal(cluster, prompt_embeds=[written(), written(ROWS[:, :7])])
    assert "rows of 7 numbers" in told
