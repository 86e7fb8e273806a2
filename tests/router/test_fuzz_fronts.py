"""Bytes that no client should send, at both front ends: an answer or a closed connection, never more than it pays for."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import grpc
import numpy as np
import pytest

from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.audio_folder import RATE, save_audio_folder
from tests.router.conftest import Cluster
from tests.router.fake_worker import said
from tests.router.worst_bodies import CHAT, COMPLETIONS, DETOKENIZE, EMBEDDINGS, RESPONSES, TOKENIZE
from tests.support.inputs.fuzz_cases import Fuzzer
from tests.support.models.wav_files import wav_file
from tests.support.run.loop_watch import LOOP_S, LoopWatch

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(0)]

ANSWER_S = 20.0
FORGET_EVERY = 200
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
_SCHEMA = {"name": "s", "schema": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}}
BODIES = [
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["x"], "min_p": 0.1}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "logit_bias": {"5": 1.0}, "stream": True, "max_tokens": 2}),
    (COMPLETIONS, {"prompt": [1, 2, 3], "echo": True, "max_tokens": 1, "response_format": {"type": "json_object"}}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "tools": [_TOOL], "tool_choice": "auto", "max_tokens": 2}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": _SCHEMA}, "stream": True,
            "stream_options": {"include_usage": True}}),
    (RESPONSES, {"input": "hi", "instructions": "x", "max_output_tokens": 2, "stream": True, "metadata": {"a": "b"},
                 "text": {"format": {"type": "json_schema", **_SCHEMA}}, "reasoning": {"effort": "low"}}),
    (RESPONSES, {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ], "tools": [{"type": "function", **_TOOL["function"]}], "tool_choice": "auto", "max_output_tokens": 2}),
    (EMBEDDINGS, {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 2}),
    (TOKENIZE, {"prompt": "hello", "return_token_strs": True}),
    (DETOKENIZE, {"tokens": [1, 2, 3]}),
]  # fmt: skip


def http_request(fuzzer: Fuzzer) -> bytes:
    """A third of the requests has another body, a third other bytes in the body, a third other bytes anywhere."""
    path, body = fuzzer.draw.choice(BODIES)
    kind = fuzzer.draw.randrange(3)
    content = json.dumps(fuzzer.json(body) if kind == 0 else body).encode()
    if kind == 1:
        content = fuzzer.bytes(content)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
    whole = f"{head}connection: close\r\n\r\n".encode() + content
    return fuzzer.bytes(whole) if kind == 2 else whole


async def exchange(address: str, request: bytes) -> bytes:
    """All bytes until the router closes the connection; the client sends nothing more."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), ANSWER_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def forget_calls(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Fake workers keep every call for tests to look at, and the log every line; here they would be all that grows."""
    await cluster.idle()
    for worker in cluster.workers:
        worker.calls.clear()
    assert "Traceback" not in caplog.text
    caplog.clear()
    await asyncio.to_thread(gc.collect)


async def test_http(cluster, fuzzer, caplog):
    await cluster.start()
    assert await cluster.text() == said(5)
    with LoopWatch() as watch:
        fuzzer.watched_by(watch)
        for number in fuzzer.cases():
            if number % FORGET_EVERY == 0:
                await forget_calls(cluster, caplog)
            asked = http_request(fuzzer)
            answer = await exchange(cluster.addresses[0], asked)
            status = int(answer[9:12] or 400) if answer.startswith(b"HTTP/1.1 ") else 400
            assert status < 500 or status in (503, 504), (str(fuzzer), asked[:2000], answer[:300])
            assert watch.longest_s < LOOP_S, (str(fuzzer), asked[:2000], watch.callback)
    fuzzer.check_memory()
    assert await cluster.text() == said(5)
    assert "Traceback" not in caplog.text


def grpc_requests() -> list[tuple[str, bytes]]:
    sampling = request_pb2.SamplingParams(max_tokens=3, temperature=0.5, stop=["x"], logit_bias={5: 1.0}, n=2)
    text, tokens = inference_pb2.TextPrompt(text="hello"), inference_pb2.TokenPrompt(token_ids=[1, 2, 3])
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    tool = inference_pb2.Tool(function=inference_pb2.FunctionDefinition(name="f", parameters='{"type":"object"}'))
    parts = inference_pb2.ChatMessage(role="user", parts=[inference_pb2.ContentPart(text="hi")])
    call = inference_pb2.ToolCall(id="1", function=inference_pb2.FunctionCall(name="f", arguments="{}"))
    with_tools = inference_pb2.ChatPrompt(
        messages=[parts, inference_pb2.ChatMessage(role="assistant", tool_calls=[call])],
        tools=[tool],
        tool_choice=inference_pb2.ToolChoice(function="f"),
        chat_template_kwargs='{"a":[1]}',
        documents='[{"text":"t"}]',
    )
    form = request_pb2.SamplingParams(
        max_tokens=2, structured_outputs=request_pb2.StructuredOutputs(json='{"type":"object"}')
    )
    generate = [
        inference_pb2.GenerateRequest(text=text, sampling=sampling, stream=True, client_request_id="mine"),
        inference_pb2.GenerateRequest(tokens=tokens, sampling=form, cache_salt="s", priority=3),
        inference_pb2.GenerateRequest(chat=chat, sampling=request_pb2.SamplingParams(max_tokens=1, top_k=2)),
        inference_pb2.GenerateRequest(chat=with_tools, sampling=request_pb2.SamplingParams(max_tokens=2)),
    ]
    embed = inference_pb2.EmbedRequest(
        inputs=[inference_pb2.EmbedInput(text=text), inference_pb2.EmbedInput(tokens=tokens)]
    )
    return [
        *(("Generate", message.SerializeToString()) for message in generate),
        ("Session", generate[0].SerializeToString()),
        ("Embed", embed.SerializeToString()),
        ("GetModel", inference_pb2.GetModelRequest().SerializeToString()),
    ]


async def call(channel: grpc.aio.Channel, method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
    """The status with which the call ends, and its details."""
    path = f"/pdserve.v1.InferenceService/{method}"
    try:
        if method in ("Embed", "GetModel"):
            unary: Any = channel.unary_unary(path)
            await unary(message, timeout=ANSWER_S)
        elif method == "Session":
            session: Any = channel.stream_stream(path)(timeout=ANSWER_S)
            await session.write(message)
            await session.done_writing()
            async for _ in session:
                pass
        else:
            stream: Any = channel.unary_stream(path)
            async for _ in stream(message, timeout=ANSWER_S):
                pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    except asyncio.InvalidStateError:  # the session had ended before it was written to
        return grpc.StatusCode.INVALID_ARGUMENT, ""
    return grpc.StatusCode.OK, ""


BUGS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
"""No status for what a client sent."""


def audio_requests() -> list[tuple[str, bytes]]:
    noise = np.random.default_rng(1).uniform(-1, 1, RATE // 100)
    sampling = request_pb2.SamplingParams(max_tokens=3)
    files = [
        wav_file(noise, RATE),
        wav_file(noise, 44_100, kind=3, bits=32, channels=2, extensible=True),
        wav_file(noise[:40], 8_000, bits=24, chunks=[(b"LIST", b"a text")]),
        wav_file(noise[:40], 192_000, bits=8, channels=8),
    ]
    prompts = [inference_pb2.AudioPrompt(file=file, language="en", prompt="hi") for file in files]
    requests = [inference_pb2.GenerateRequest(audio=prompt, sampling=sampling, stream=True) for prompt in prompts]
    return [("Generate", request.SerializeToString()) for request in requests]


async def test_grpc(cluster, fuzzer, caplog):
    await cluster.start(scheduling_policy="priority")
    await fuzz_grpc(cluster, fuzzer, caplog, grpc_requests() + audio_requests()[:1])
    assert await cluster.text() == said(5)
    assert "Traceback" not in caplog.text


async def test_sound_over_grpc(cluster, fuzzer, caplog, tmp_path):
    cluster.folder = save_audio_folder(tmp_path / "audio")
    cluster.fingerprint = tokenizer_fingerprint(cluster.folder)
    await cluster.start()
    known = audio_requests()
    await fuzz_grpc(cluster, fuzzer, caplog, known)
    for method, message in known:
        assert await call(cluster.channel, method, message) == (grpc.StatusCode.OK, "")
    assert "Traceback" not in caplog.text


async def fuzz_grpc(
    cluster: Cluster, fuzzer: Fuzzer, caplog: pytest.LogCaptureFixture, known: list[tuple[str, bytes]]
) -> None:
    """known: methods and messages that are changed."""
    for method, message in known:
        assert (await call(cluster.channel, method, message))[0] not in BUGS, method
    with LoopWatch() as watch:
        fuzzer.watched_by(watch)
        for number in fuzzer.cases():
            if number % FORGET_EVERY == 0:
                await forget_calls(cluster, caplog)
            method, message = fuzzer.draw.choice(known)
            changed = fuzzer.bytes(message)
            status, details = await call(cluster.channel, method, changed)
            assert status not in BUGS, (str(fuzzer), method, changed, status, details)
            assert watch.longest_s < LOOP_S, (str(fuzzer), method, changed, watch.callback)
    fuzzer.check_memory()
