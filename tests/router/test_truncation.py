"""`truncate_prompt_tokens` and `truncation_side` over both front ends: what the worker computes, and what is refused."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.text.prompt import LengthRule, Truncation
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import MAX_MODEL_LEN, token, tokens

LONG = "abcdefgh" * 40
"""More tokens than the model's length, a token per character."""


@pytest.fixture
async def quick(cluster: Any) -> Any:
    return await cluster.start(prefill=0, decode=1)


def computed(cluster: Any, role: str = "decode") -> list[int]:
    """Tokens of the prompt that the worker got last."""
    return list(cluster.of(role).calls[-1].request.prompt_token_ids)


KEPT: list[tuple[dict[str, Any], str]] = [
    ({"truncate_prompt_tokens": 3}, LONG[-3:]),
    ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, LONG[-3:]),
    ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, LONG[:3]),
    ({"truncate_prompt_tokens": -1}, LONG[-(MAX_MODEL_LEN - 2) :]),
    ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, LONG[: MAX_MODEL_LEN - 2]),
]


@pytest.mark.parametrize(("fields", "kept"), KEPT)
async def test_completions_over_both_front_ends(quick: Any, fields: dict[str, Any], kept: str) -> None:
    for prompt in (LONG, tokens(LONG)):
        response = await quick.complete(prompt=prompt, max_tokens=2, **fields)
        assert response.json()["usage"]["prompt_tokens"] == len(kept)
        assert computed(quick) == tokens(kept)
    sampling = request_pb2.SamplingParams(max_tokens=2)
    for given in ({"text": inference_pb2.TextPrompt(text=LONG)}, {"tokens": {"token_ids": tokens(LONG)}}):
        call: dict[str, Any] = given | {"sampling": sampling} | fields
        [answer] = [answer async for answer in quick.grpc.Generate(inference_pb2.GenerateRequest(**call))]
        assert answer.usage.prompt_tokens == len(kept)
        assert computed(quick) == tokens(kept)


async def test_a_short_prompt_stays_whole_and_many_are_truncated_one_by_one(quick: Any) -> None:
    await quick.complete(prompt="abc", max_tokens=2, truncate_prompt_tokens=3, truncation_side="right")
    assert computed(quick) == tokens("abc")
    response = await quick.complete(prompt=["abcd", "x"], max_tokens=2, truncate_prompt_tokens=2)
    assert response.json()["usage"]["prompt_tokens"] == 3
    await quick.complete(prompt="abc", max_tokens=2, truncation_side="right")
    assert computed(quick) == tokens("abc")


async def test_a_chat_is_truncated_after_its_template(quick: Any) -> None:
    messages = [{"role": "user", "content": LONG}]
    body = {"messages": messages, "truncate_prompt_tokens": 3, "max_completion_tokens": 2}
    assert (await quick.http.post("/v1/chat/completions", json=body)).status_code == 200
    kept = computed(quick)
    assert kept[:2] == tokens("gh")
    assert kept[2] >= max(map(token, "gh"))  # the template's last token
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content=LONG)])
    sampling = request_pb2.SamplingParams(max_tokens=2)
    call = inference_pb2.GenerateRequest(chat=chat, sampling=sampling, truncate_prompt_tokens=3)
    assert [answer.usage.prompt_tokens async for answer in quick.grpc.Generate(call)] == [3]
    assert computed(quick) == kept
    # without max_tokens one place is left for the output
    assert (
        await quick.http.post("/v1/chat/completions", json=body | {"truncate_prompt_tokens": 255})
    ).status_code == 400
    open_end = {"messages": messages, "truncate_prompt_tokens": 255}
    assert (await quick.http.post("/v1/chat/completions", json=open_end)).json()["usage"]["prompt_tokens"] == 255


async def test_embeddings_have_the_whole_length(cluster: Any) -> None:
    await cluster.start(prefill=1, decode=0)
    for limit, kept in ((-1, MAX_MODEL_LEN), (MAX_MODEL_LEN, MAX_MODEL_LEN), (4, 4)):
        body = {"input": LONG, "truncate_prompt_tokens": limit}
        response = await cluster.http.post("/v1/embeddings", json=body)
        assert response.json()["usage"]["prompt_tokens"] == kept, response.text
        assert computed(cluster, "prefill") == tokens(LONG)[-kept:]
        text = inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text=LONG))
        request = inference_pb2.EmbedRequest(inputs=[text], truncate_prompt_tokens=limit, truncation_side="right")
        assert (await cluster.grpc.Embed(request)).usage.prompt_tokens == kept
        assert computed(cluster, "prefill") == tokens(LONG)[:kept]
    for limit in (0, MAX_MODEL_LEN + 1):
        response = await cluster.http.post("/v1/embeddings", json={"input": "x", "truncate_prompt_tokens": limit})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


SCORED: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"truncate_prompt_tokens": 5}, ("ab", "abc")),
    ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ("yz", "fgh")),
    ({"truncate_prompt_tokens": 40}, ("abyz", LONG[:36])),
    ({"truncate_prompt_tokens": -1}, ("abyz", LONG[: MAX_MODEL_LEN - 4])),
]


@pytest.mark.parametrize(("fields", "kept"), SCORED)
async def test_of_a_pair_the_longer_text_is_truncated_first(
    cluster: Any, fields: dict[str, Any], kept: tuple[str, str]
) -> None:
    worker = cluster.worker("prefill")
    worker.num_labels, worker.hidden_size = 1, 0
    await worker.start()
    await cluster.start(prefill=0, decode=0)
    expected = tokens(kept[0]) + tokens(kept[1])
    for path, texts in (
        ("/v1/score", {"text_1": "abyz", "text_2": LONG}),
        ("/v1/rerank", {"query": "abyz", "documents": [LONG]}),
    ):
        response = await cluster.http.post(path, json=texts | fields)
        assert response.json()["usage"]["prompt_tokens"] == len(expected), response.text
        assert list(worker.calls[-1].request.prompt_token_ids) == expected
    await cluster.grpc.Score(inference_pb2.ScoreRequest(text_1=["abyz"], text_2=[LONG], **fields))
    assert list(worker.calls[-1].request.prompt_token_ids) == expected
    for value, message in (
        (1, "truncate_prompt_tokens must be at least 2, not 1: a pair of texts has 0 special tokens"),
        (0, "truncate_prompt_tokens must be -1 or at least 1, not 0"),
        (MAX_MODEL_LEN + 1, f"truncate_prompt_tokens must be at most {MAX_MODEL_LEN}, not {MAX_MODEL_LEN + 1}"),
    ):
        body = {"query": "abyz", "documents": [LONG], "truncate_prompt_tokens": value}
        response = await cluster.http.post("/v1/rerank", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
        assert message in response.json()["error"]["message"]


async def test_scores_without_a_head_are_of_truncated_texts(cluster: Any) -> None:
    await cluster.start(prefill=1, decode=0)
    body = {"text_1": LONG, "text_2": "xyfgh", "truncate_prompt_tokens": 3}
    response = await cluster.http.post("/v1/score", json=body)
    assert response.json()["data"][0]["score"] == pytest.approx(1.0)
    assert response.json()["usage"]["prompt_tokens"] == 6
    right = await cluster.http.post("/v1/score", json=body | {"truncation_side": "right"})
    assert right.json()["data"][0]["score"] != pytest.approx(1.0, abs=1e-7)


async def test_an_echo_has_the_kept_tokens(quick: Any) -> None:
    body = {"prompt": LONG, "truncate_prompt_tokens": 3, "max_tokens": 2, "echo": True}
    for prompt in (LONG, tokens(LONG)):
        response = await quick.http.post("/v1/completions", json=body | {"prompt": prompt})
        assert response.json()["choices"][0]["text"] == LONG[-3:] + "ab"


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or at least 1, not 0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be -1 or at least 1, not -2"),
    ({"truncate_prompt_tokens": 2**40}, "truncate_prompt_tokens", f"must be at most {MAX_MODEL_LEN - 2}, not {2**40}"),
    ({"truncate_prompt_tokens": MAX_MODEL_LEN - 1}, "truncate_prompt_tokens", "of which 2 are left for the output"),
    ({"truncate_prompt_tokens": "3"}, "truncate_prompt_tokens", "expected `int"),
    ({"truncate_prompt_tokens": 3, "truncation_side": "up"}, "truncation_side", "is 'up', left or right is needed"),
    ({"truncation_side": "up"}, "truncation_side", "is 'up', left or right is needed"),
]


@pytest.mark.parametrize(("fields", "field", "told"), REFUSALS)
async def test_refusals(quick: Any, fields: dict[str, Any], field: str, told: str) -> None:
    error = (await quick.complete(prompt="x", max_tokens=2, **fields)).json()["error"]
    assert (error["param"], told in error["message"]) == (field, True), error
    if all(isinstance(value, str) or abs(value) < 2**31 for value in fields.values()) and told[0] != "e":
        text = inference_pb2.TextPrompt(text="x")
        request = inference_pb2.GenerateRequest(text=text, sampling=request_pb2.SamplingParams(max_tokens=2), **fields)
        with pytest.raises(grpc.aio.AioRpcError, match=told):
            await quick.grpc.Generate(request).read()
    assert not quick.of("decode").calls


async def test_a_text_has_a_limit_in_bytes(quick: Any) -> None:
    for num_bytes, status in ((1 << 19, 200), ((1 << 19) + 1, 400)):
        response = await quick.complete(
            prompt="a " * (num_bytes // 2) + "a" * (num_bytes % 2), truncate_prompt_tokens=3
        )
        assert response.status_code == status, response.text
    assert "at most 524288 are tokenized at once" in response.json()["error"]["message"]


@pytest.mark.parametrize("num_before", [0, 250])
def test_what_precedes_the_prompt_takes_room(num_before: int) -> None:
    rule = LengthRule(MAX_MODEL_LEN, num_before)
    assert len(Truncation(-1).apply(list(range(300)), rule, 4)) == MAX_MODEL_LEN - 4 - num_before
    with pytest.raises(InvalidRequest, match=f"must be at most {MAX_MODEL_LEN - 1 - num_before}, not 256"):
        Truncation(256).apply([1], rule)
