"""Single requests over gRPC, with the moments of all services."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from pdserve.common.timeline import Timeline
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2


@dataclass(frozen=True, slots=True)
class Probe:
    """Times of one request."""

    ttft_s: float
    """TTFT at the client."""
    tpot_s: float
    """TPOT at the client; 0 for one token."""
    timeline: Timeline


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
        start = time.perf_counter()
        first = at = 0.0
        async for message in self._stub.Generate(request, wait_for_ready=True):
            at = time.perf_counter() - start
            first = first or at
            timeline.merge({moment.name: moment.unix_ns for moment in message.moments})
        return Probe(first, (at - first) / max(1, max_tokens - 1), timeline)


def prompt_of(length: int, seed: int, vocabulary: int) -> list[int]:
    """Random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(10, vocabulary) for _ in range(length)]
