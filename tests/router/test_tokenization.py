"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

import pytest
from fake_worker import EOS, MAX_MODEL_LEN, SPECIAL, tokens

USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def quick(cluster):
    return await cluster.start(prefill=0, decode=1)


async def ask(cluster, path, **body):
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_prompt(quick):
    answer = await ask(quick, "/tokenize", model="fake-model", prompt="hi there")
    ids = tokens("hi\u0120there")
    assert answer == {"count": 8, "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}
    answer = await ask(quick, "/tokenize", prompt="i j", return_token_strs=True)
    # as the vocabulary has them
    assert answer["token_strs"] == ["i", "\u0120", "j"]
    assert (await ask(quick, "/tokenize", prompt=""))["tokens"] == []


async def test_messages_go_through_the_chat_template(quick):
    whole = [EOS + 1, *tokens("hi"), EOS + 2]
    assert (await ask(quick, "/tokenize", messages=[USER]))["tokens"] == whole
    cut = await ask(quick, "/tokenize", messages=[USER], add_generation_prompt=False, add_special_tokens=False)
    assert cut["tokens"] == whole[:-1]
    # what a chat is computed from
    await quick.http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1})
    assert list(quick.of("decode").calls[0].request.request.prompt_token_ids) == whole
    await quick.http.post(
        "/v1/chat/completions", json={"messages": [USER], "max_tokens": 1, "add_generation_prompt": False}
    )
    assert list(quick.of("decode").calls[1].request.request.prompt_token_ids) == whole[:-1]


async def test_and_back(quick):
    ids = (await ask(quick, "/tokenize", prompt="gr\u00fc\u00df dich"))["tokens"]
    assert await ask(quick, "/detokenize", tokens=ids) == {"prompt": "gr\u00fc\u00df dich"}
    assert await ask(quick, "/detokenize", tokens=[EOS, EOS + 2]) == {"prompt": SPECIAL[0] + SPECIAL[2]}
    assert await ask(quick, "/detokenize", tokens=[], model="fake-model") == {"prompt": ""}


async def test_no_worker_is_needed(cluster):
    await cluster.start(prefill=0, decode=0)
    answer = await ask(cluster, "/tokenize", prompt="a")
    assert (answer["tokens"], answer["max_model_len"]) == (tokens("a"), None)
    assert await ask(cluster, "/detokenize", tokens=tokens("a")) == {"prompt": "a"}


async def test_but_a_key_is(cluster):
    await cluster.start(prefill=0, decode=0, api_keys=("k1",))
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert (await cluster.http.post(path, json=body)).status_code == 401
        response = await cluster.http.post(path, json=body, headers={"authorization": "Bearer k1"})
        assert response.status_code == 200
