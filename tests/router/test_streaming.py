"""Streams over HTTP: when headers go out, errors in mid-stream, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from pdserve.common.errors import Cancelled, InternalError, InvalidRequest, TransferFailed
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.requests import generation
from pdserve.router.requests.client_stream import ClientStream
from pdserve.text.outputs.request_output import CompletionOutput, Logprob
from tests.router.fake_worker import (
    ADMITTED,
    LANDED,
    decode_outputs,
    first,
    forever,
    play,
    said,
    token,
)
from tests.support.run.process_memory import MemoryWatch
from tests.support.run.waiting import HANG_S

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


def events(text):
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def test_no_header_before_the_first_token(cluster):
    await cluster.start()
    go_on = asyncio.Event()

    async def wait(worker, call):
        await go_on.wait()

    cluster.of("prefill").script = play(wait, first(), forever)
    cluster.of("decode").script = play(LANDED, decode_outputs(1, "b", "length"))
    reader, writer = await asyncio.open_connection(*cluster.addresses[0].split(":"))
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await reader.read(1)
    go_on.set()
    answer = await reader.readuntil(b"[DONE]")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"text/event-stream" in answer
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_before_the_first_token_is_a_status(cluster, path):
    await cluster.start(on_kv_failure="fail")
    cluster.of("decode").script = play(TransferFailed("lost"))
    cluster.of("prefill").script = play(forever)
    response = await cluster.http.post(path, json={**PATHS[path], "stream": True})
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "transfer_failed"
    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_in_mid_stream_is_an_event_and_there_is_no_done(cluster, path):
    await cluster.start()
    cluster.of("prefill").script = play(first(), forever)
    go_on = asyncio.Event()
    cluster.of("decode").script = play(
        LANDED, lambda worker, call: go_on.wait(), decode_outputs(1, "b"), InternalError("the engine broke")
    )
    received = await cluster.streamed(go_on.set, path, **PATHS[path])
    *chunks, last = events(received)
    assert "[DONE]" not in received
    request_id = json.loads(chunks[0])["id"].partition("-")[2]
    assert json.loads(last)["error"] == {
        "message": f"internal error; the router's log has the details under request {request_id}",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    key = "text" if path == "/v1/completions" else "delta"
    texts = [json.loads(chunk)["choices"][0][key] for chunk in chunks]
    assert "".join(text if isinstance(text, str) else text.get("content", "") for text in texts) == "ab"


@pytest.mark.few(7)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["before the first token", "after it"])
async def test_a_client_that_leaves_ends_both_calls(cluster, path, stream, when):
    await cluster.start()
    early = when == "before the first token"
    cluster.of("prefill").script = play(forever) if early else play(first(), forever)
    cluster.of("decode").script = play(ADMITTED, forever)
    reader, writer = await asyncio.open_connection(*cluster.addresses[0].split(":"))
    body = json.dumps({**PATHS[path], "stream": stream, "max_tokens": 9}).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    if stream and not early:
        await reader.readuntil(b'"a"')
    for role in ("prefill", "decode"):
        await cluster.of(role).called()
    writer.close()
    for role in ("prefill", "decode"):
        async with asyncio.timeout(HANG_S):
            await cluster.of(role).calls[0].cancelled.wait()
    await cluster.idle()
    await writer.wait_closed()


async def test_a_client_that_leaves_more_than_its_share_unread_is_cancelled(cluster):
    await cluster.start(prefill=0, max_unread_bytes=200_000)

    def flood(position):
        return decode_outputs(position, token_ids=[0] * 50_000)

    # beyond what the router may keep and what the two sockets hold
    many = [flood(50_000 * i) for i in range(400)]
    cluster.of("decode").script = play(ADMITTED, *many, forever)
    _reader, writer = await asyncio.open_connection(*cluster.addresses[0].split(":"), limit=1024)
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await cluster.of("decode").called()
    async with asyncio.timeout(HANG_S):
        await cluster.of("decode").calls[0].cancelled.wait()
    writer.transport.abort()
    await cluster.idle()


async def test_a_prompt_that_fails_ends_the_others_though_nobody_reads(cluster):
    await cluster.start(prefill=0, max_unread_bytes=1 << 20)

    # a control character is six bytes of JSON: the router comes to wait for its client before it keeps too much
    control = token(chr(0x101))
    many = [decode_outputs(20_000 * i, token_ids=[control] * 20_000) for i in range(120)]

    def choose(worker, call):
        events = many if len(call.request.prompt_token_ids) == 1 else []
        return play(ADMITTED, *events, forever)(worker, call)

    cluster.of("decode").script = choose
    _reader, writer = await asyncio.open_connection(*cluster.addresses[0].split(":"), limit=1024)
    body = json.dumps({"prompt": ["x", "yy"], "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await cluster.of("decode").called(2)
    async with asyncio.timeout(HANG_S):
        for call in cluster.of("decode").calls:
            await call.ended.wait()
    writer.transport.abort()
    await cluster.idle()


async def test_a_client_that_stops_reading_is_cancelled_in_time(cluster, monkeypatch):
    monkeypatch.setattr(generation, "UNREAD_S", 0.3)
    await cluster.start(prefill=0, max_unread_bytes=1 << 30)
    # a control character is six bytes of JSON: 9.6 MB fill the sockets' buffers, with few tokens to detokenize
    control = token(chr(0x101))
    many = [decode_outputs(20_000 * i, token_ids=[control] * 20_000) for i in range(80)]
    cluster.of("decode").script = play(ADMITTED, *many, forever)
    _reader, writer = await asyncio.open_connection(*cluster.addresses[0].split(":"), limit=1024)
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await cluster.of("decode").called()
    async with asyncio.timeout(HANG_S):
        await cluster.of("decode").calls[0].cancelled.wait()
    await cluster.idle()
    writer.transport.abort()


async def test_a_slow_engine_is_no_slow_reader(cluster, monkeypatch):
    monkeypatch.setattr(generation, "UNREAD_S", 0.1)
    await cluster.start(prefill=0)
    cluster.of("decode").script = play(decode_outputs(0, "a"), 0.5, decode_outputs(1, "b", "length"))
    for stream in (True, False):
        response = await cluster.complete(max_tokens=2, stream=stream)
        assert response.status_code == 200
        assert "error" not in response.text


async def test_timeline_only_when_asked(cluster):
    await cluster.start()
    asked = {"x-pdserve-timeline": "1"}
    for path, fields in PATHS.items():
        for usage in (True, False):
            body = {**fields, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": usage}}
            for headers in ({}, asked):
                response = await cluster.http.post(path, json=body, headers=headers)
                *chunks, done = events(response.text)
                assert done == "[DONE]"
                decoded = [json.loads(chunk) for chunk in chunks]
                assert ["pdserve" in chunk for chunk in decoded] == [False] * (len(chunks) - 1) + [bool(headers)]
                assert [bool(chunk["choices"]) for chunk in decoded] == [True] * (len(chunks) - 1) + [not usage]
        response = await cluster.http.post(path, json={**fields, "max_tokens": 3}, headers=asked)
        vendor = response.json()["pdserve"]
        assert set(vendor) == {"timeline", "moments"}
        assert vendor["timeline"]["tokenize"] >= 0
        assert {"arrived", "tokenized", "placed", "first_token", "finished"} <= set(vendor["moments"])
        assert "pdserve" not in (await cluster.http.post(path, json={**fields, "max_tokens": 3})).json()


async def test_streams_of_many_prompts_are_told_apart(cluster):
    await cluster.start(prefill=2, decode=2)
    for worker in cluster.workers:
        worker.step_s = 0.002
    response = await cluster.complete(
        prompt=["a", "bc", "def"], max_tokens=10, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    texts = ["", "", ""]
    finished = []
    for chunk in map(json.loads, chunks):
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        finished += [choice["index"]] if choice["finish_reason"] == "length" else []
    assert texts == [said(10)] * 3
    assert sorted(finished) == [0, 1, 2]
    assert json.loads(usage)["usage"]["completion_tokens"] == 30
    assert json.loads(usage)["usage"]["prompt_tokens"] == 6


async def test_one_failing_prompt_fails_all(cluster):
    await cluster.start(prefill=0)

    def choose(worker, call):
        if len(call.request.prompt_token_ids) == 2:
            return play(InternalError("no"))(worker, call)
        return play(ADMITTED, forever)(worker, call)

    cluster.of("decode").script = choose
    response = await cluster.complete(prompt=["a", "bc"])
    assert response.status_code == 500
    await cluster.idle()


async def test_many_at_once_each_get_their_own(cluster):
    await cluster.start(prefill=2, decode=2)
    for worker in cluster.workers:
        worker.step_s = 0.001
    answers = await asyncio.gather(*(cluster.text(max_tokens=1 + i % 20, stop=None) for i in range(60)))
    assert answers == [said(1 + i % 20) for i in range(60)]
    await cluster.idle()


async def test_text_that_needs_escaping(cluster):
    await cluster.start(prefill=0)
    text = '"\\\n\t\u2028é🙂</script>'
    from tokenizers import pre_tokenizers

    from tests.router.fake_worker import ALPHABET

    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    ids = [ALPHABET.index(char) for word, _ in spelled for char in word]
    cluster.of("decode").script = play(
        *[decode_outputs(i, token_ids=[t], finish=None if i < len(ids) - 1 else "stop") for i, t in enumerate(ids)]
    )
    response = await cluster.complete(stream=True, max_tokens=100)
    chunks = [json.loads(event) for event in events(response.text)[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def output(text, index=0, finish=None):
    return CompletionOutput(index=index, text=text, token_ids=[1] * len(text), finish_reason=finish)


async def taken(stream):
    await stream.until_ready()
    return stream.take_now()


async def test_what_waits_is_merged():
    stream = ClientStream(2, 1000)
    for text, index in (("a", 0), ("x", 1), ("b", 0)):
        stream.push(output(text, index))
    assert [(o.index, o.text, o.token_ids) for o in await taken(stream)] == [(0, "ab", [1, 1]), (1, "x", [1])]
    stream.push(output("c", 0, "stop"))
    stream.end_run()
    stream.end_run()
    assert [(o.text, o.finish_reason) for o in await taken(stream)] == [("c", "stop")]
    assert await taken(stream) == []


async def test_an_error_comes_after_what_was_pushed_and_the_first_counts():
    stream = ClientStream(1, 1000)
    stream.push(output("a"))
    stream.fail(Cancelled("one"))
    stream.fail(InternalError("two"))
    stream.push(output("late"))
    assert [o.text for o in await taken(stream)] == ["a"]
    with pytest.raises(Cancelled, match="one"):
        await taken(stream)
    with pytest.raises(Cancelled, match="one"):
        await taken(stream)


async def test_unread_bytes_are_bounded():
    stream = ClientStream(1, 100)
    stream.push(output("x" * 15))
    with pytest.raises(Cancelled, match="100 bytes"):
        stream.push(output("x" * 15))


async def test_a_whole_answer_is_bounded_and_says_by_what():
    stream = ClientStream(1, 1000, whole=True)
    stream.push(output("x" * 150))
    with pytest.raises(InvalidRequest, match="more than 1000 bytes \\(max_answer_bytes\\)"):
        stream.push(output("x" * 100))
    with pytest.raises(InvalidRequest) as caught:
        ClientStream(1, 1000, whole=True).expect_prompt_logprobs(100)
    assert caught.value.field == "prompt_logprobs"


async def test_the_largest_whole_answer_takes_bounded_memory():
    def candidates(position):
        return {
            1000 + token_id: Logprob(
                logprob=-position / (token_id + 1),
                rank=token_id,
                decoded_token=f" t{token_id}",
                decoded_bytes=b"%d" % token_id,
            )
            for token_id in range(20)
        }

    stream = ClientStream(1, RouterSettings().limits.max_answer_bytes, whole=True)
    positions = itertools.count()

    def push_without_end():
        for position in positions:
            stream.push(CompletionOutput(index=0, text="a", token_ids=[position], logprobs=[candidates(position)]))

    with MemoryWatch() as watch:
        with pytest.raises(InvalidRequest, match="max_answer_bytes"):
            push_without_end()
        assert watch.grown_bytes < 64 << 20
    assert next(positions) > 5000


async def test_a_long_whole_answer_waits_as_few_outputs():
    stream = ClientStream(2, 1 << 30, whole=True)
    for place in range(5000):
        stream.push(output("ab"[place % 2], index=place % 2))
    assert len(stream._unread) < 1100
    for index in range(2):
        stream.push(output("", index=index, finish="stop"))
        stream.end_run()
    assert [(o.text, o.finish_reason) for o in await taken(stream)] == [("a" * 2500, "stop"), ("b" * 2500, "stop")]


async def test_prompt_logprobs_that_no_answer_could_hold_are_refused_before_they_are_computed(cluster):
    await cluster.start(max_answer_bytes=100_000)
    response = await cluster.complete("x" * 100, max_tokens=1, prompt_logprobs=20, n=2)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt_logprobs")
    assert "max_answer_bytes" in error["message"]
    assert not cluster.of("prefill").calls
    assert (await cluster.complete("x" * 10, max_tokens=1, n=2)).status_code == 200


async def test_a_whole_answer_that_grows_too_large_ends(cluster):
    await cluster.start(max_answer_bytes=500)
    response = await cluster.complete("x", max_tokens=200)
    assert response.status_code == 400
    assert "max_answer_bytes" in response.json()["error"]["message"]
    await cluster.idle()
    received = await cluster.streamed(lambda: None, prompt="x", max_tokens=200)
    assert received.endswith("data: [DONE]\n\n")
