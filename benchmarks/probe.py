"""Single requests over gRPC and HTTP, with the moments of all services."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from pdserve.common.timeline import Timeline, now_unix_ns
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2


@dataclass(frozen=True, slots=True)
class Probe:
    """Times of one request."""

    ttft_s: float
    """TTFT at the client."""
    tpot_s: float
    """TPOT at the client; 0 for one token."""
    timeline: Timeline
    sent_unix_ns: int
    """When the client began to send the request."""


class Prober:
    """Sends requests to one router."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def ask(self, prompt: Sequence[int], max_tokens: int, salt: str = "") -> Probe:
        """Send one greedy request and read its whole answer."""
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=prompt),
            sampling=request_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            cache_salt=salt,
            stream=True,
        )
        timeline = Timeline()
        sent_unix_ns, start = now_unix_ns(), time.perf_counter()
        first = at = 0.0
        async for message in self._stub.Generate(request, wait_for_ready=True):
            at = time.perf_counter() - start
            first = first or at
            timeline.merge({moment.name: moment.unix_ns for moment in message.moments})
        return Probe(first, (at - first) / max(1, max_tokens - 1), timeline, sent_unix_ns)


class HttpProber:
    """As `Prober`, over one connection of HTTP. It parses an answer after its end, so that the times are the router's."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self._host, self._port = host, port
        self._model = model
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            await self._connection[1].wait_closed()

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Probe:
        """Send one greedy request and read its whole answer. Raises: RuntimeError for an error."""
        if self._connection is None:
            self._connection = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._connection
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        encoded = json.dumps(body | {"ignore_eos": True, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\nx-pdserve-timeline: 1\r\n"
            f"content-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n"
        )
        sent_unix_ns, start = now_unix_ns(), time.perf_counter()
        writer.write(head.encode() + encoded)
        answer, first = b"", 0.0
        while not answer.endswith(b"0\r\n\r\n"):
            if not (part := await reader.read(1 << 16)):
                raise RuntimeError(f"the router closed the connection: {answer[:200]!r}")
            at = time.perf_counter() - start
            answer += part
            if not first and b"data: " in answer:
                first = at
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the router answered {answer[:400]!r}")
        timeline = Timeline()
        last = re.findall(rb'data: (\{.*"pdserve".*\})\n\n', answer)[-1]
        timeline.merge(json.loads(last)["pdserve"]["moments"])
        return Probe(first, (at - first) / max(1, max_tokens - 1), timeline, sent_unix_ns)


def prompt_of(length: int, seed: int, vocabulary: int) -> list[int]:
    """Random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(10, vocabulary) for _ in range(length)]
