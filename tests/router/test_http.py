"""OpenAI's API over fake workers, with OpenAI's own client where it can say what is meant."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.router.fake_worker import ADMITTED, forever, play, said


@pytest.fixture
async def client(cluster):
    await cluster.start()
    client = openai.AsyncOpenAI(base_url=f"http://{cluster.addresses[0]}/v1", api_key="none", max_retries=0)
    yield client
    await client.close()


async def test_completion(client, cluster):
    answer = await client.completions.create(model="fake-model", prompt="hello", max_tokens=5)
    assert answer.choices[0].text == said(5)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5, 10)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_completion_streamed(client, cluster):
    stream = await client.completions.create(
        model="fake-model", prompt="hello", max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == said(5)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


async def test_chat(client, cluster):
    messages = [{"role": "user", "content": "hi"}]
    answer = await client.chat.completions.create(model="fake-model", messages=messages, max_completion_tokens=4)
    assert answer.choices[0].message.content == said(4)
    assert answer.choices[0].message.role == "assistant"


async def test_chat_streamed(client, cluster):
    messages = [{"role": "user", "content": "hi"}]
    stream = await client.chat.completions.create(model="fake-model", messages=messages, max_tokens=6, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said(6)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_vllms_ping_and_load(cluster):
    await cluster.start(api_keys=("0123456789abcdef",))
    headers = {"authorization": "Bearer 0123456789abcdef"}
    for method in ("GET", "POST"):
        assert (await cluster.http.request(method, "/ping")).status_code == 200
    assert (await cluster.http.get("/load")).status_code == 401
    assert (await cluster.http.get("/load", headers=headers)).json() == {"server_load": 0}
    decode = cluster.of("decode")
    decode.script = play(ADMITTED, forever)
    body = {"prompt": "hello", "max_tokens": 5}
    asking = asyncio.create_task(cluster.http.post("/v1/completions", json=body, headers=headers))
    await decode.called(1)
    assert (await cluster.http.get("/load", headers=headers)).json() == {"server_load": 1}
    asking.cancel()
    await cluster.idle()
    assert (await cluster.http.get("/load", headers=headers)).json() == {"server_load": 0}
    await decode.kill()
    await cluster.live(prefill=1, decode=0)
    assert (await cluster.http.get("/ping")).status_code == 503
