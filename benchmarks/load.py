"""A closed-loop load on an OpenAI completions endpoint: a number of equal requests with a fixed concurrency."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from completions import stream_completion

ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Target(Protocol):
    """Something that streams completions."""

    @property
    def name(self) -> str: ...

    async def first_call(self, client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        """Make the call before the streamed request; returns the body of the streamed request."""

    @property
    def url(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PdServe:
    """A pdserve router, which needs no first call."""

    url: str
    model: str
    name: str = "pdserve"

    async def first_call(self, client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"model": self.model}


@dataclass(frozen=True, slots=True)
class VllmPrefillDecode:
    """vLLM's prefill and decode servers, called in turn as by vLLM's proxy."""

    prefill_url: str
    url: str
    model: str = "peer"
    name: str = "vLLM P/D"

    async def first_call(self, client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        body = body | {"model": self.model}
        ask = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_PREFILL}
        reply = await client.post(self.prefill_url, json=ask)
        return body | {"kv_transfer_params": reply.raise_for_status().json()["kv_transfer_params"]}


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The requests of a load."""

    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    vocabulary: int
    seed: int = 1


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Results of a load. Times in seconds."""

    requests_per_s: float
    ttft_p50_s: float
    tpot_p50_s: float

    def __str__(self) -> str:
        return (
            f"{self.requests_per_s:7.2f} requests/s   TTFT p50 {self.ttft_p50_s * 1e3:8.1f} ms   "
            f"TPOT p50 {self.tpot_p50_s * 1e3:7.2f} ms"
        )


async def run_load(target: Target, shape: LoadShape) -> LoadResult:
    """Send all requests. Every prompt is random, so that nothing is found in a prefix cache."""
    draw = random.Random(shape.seed)
    gate = asyncio.Semaphore(shape.concurrency)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=shape.concurrency + 4)) as client:

        async def one() -> list[float]:
            prompt = [draw.randrange(10, shape.vocabulary) for _ in range(shape.prompt_tokens)]
            async with gate:
                return await _stream(client, target, prompt, shape.output_tokens)

        await one()
        start = time.perf_counter()
        runs = await asyncio.gather(*(one() for _ in range(shape.num_requests)))
        wall = time.perf_counter() - start
    return LoadResult(
        requests_per_s=shape.num_requests / wall,
        ttft_p50_s=statistics.median(run[0] for run in runs),
        # a server may send several tokens in one chunk, so the total time is divided by the requested tokens
        tpot_p50_s=statistics.median((run[-1] - run[0]) / (shape.output_tokens - 1) for run in runs),
    )


async def _stream(client: httpx.AsyncClient, target: Target, prompt: list[int], output_tokens: int) -> list[float]:
    """Seconds from the first sent byte to each received chunk."""
    start = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = await target.first_call(client, body)
    completion = await stream_completion(client, target.url, body)
    return [at_s - start for at_s in completion.message_s]
