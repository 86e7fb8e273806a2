"""Clients that ask without end, and hold every answer to that of an undisturbed run."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from pdserve.common.errors import Draining, WorkerLost
from pdserve.common.net.rpc import from_rpc_error
from pdserve.v1 import request_pb2
from tests.support.inputs.random_prompts import prompt_of
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S, eventually

NUM_CLIENTS = 10
PATIENCE_S = 2 * HANG_S
"""A deadline that no request may need, on a machine with busy loops beside it either."""
FLAGS = (
    "--dtype=float32", "--num-blocks=300", "--max-num-batched-tokens=64", "--drain-s=10",
    f"--grammar-timeout-s={HANG_S}",
)  # fmt: skip
"""Settings of the workers that carry it."""
ALL_REMOTE = ("--local-prefill", "never", "--policy", "round_robin", "--on-kv-failure=remote")
"""Settings of its router: every request needs a transfer. Sessions are refused, for decode prefills them."""
MOVES = ("--block-moves=always", "--rebalance=always")
"""Settings of a router whose sequences never stay where they are."""
SCHEMA = {
    "type": "object",
    "properties": {"sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["sizes"],
}
SHARED = prompt_of(100, 7)
"""Begins several prompts: what one leaves in the caches is found by the others."""
REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": (prompt_of(300, 1), {"max_tokens": 40}),
    "short": (prompt_of(20, 2), {"max_tokens": 12}),
    "seeded": ([*SHARED, *prompt_of(45, 3)], {"max_tokens": 60, "temperature": 0.9, "top_p": 0.95, "seed": 11}),
    "penalties": (
        [*SHARED, *prompt_of(33, 4)],
        {"max_tokens": 50, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 50},
    ),
    "form": (
        prompt_of(90, 5),
        {
            "max_tokens": 24,
            "temperature": 0.8,
            "seed": 12,
            "structured_outputs": request_pb2.StructuredOutputs(json=json.dumps(SCHEMA)),
        },
    ),
    "logprobs": (prompt_of(150, 8), {"max_tokens": 20, "logprobs": 3, "stop_token_ids": [9, 17]}),
    "bias": (
        [*SHARED, *prompt_of(60, 9)],
        {"max_tokens": 25, "presence_penalty": 0.5, "temperature": 0.7, "seed": 3, "min_p": 0.02},
    ),
    "one": (prompt_of(80, 10), {"max_tokens": 1}),
    "two": ([*SHARED, *prompt_of(100, 11)], {"max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 5}),
    "three": (prompt_of(130, 6), {"max_tokens": 30, "temperature": 0.9, "seed": 13, "n": 3}),
}
SESSIONS: dict[str, list[tuple[list[int], dict[str, Any]]]] = {
    "talk": [
        ([*SHARED, *prompt_of(20, 12)], {"max_tokens": 15}),
        (prompt_of(3, 13), {"max_tokens": 25, "temperature": 0.8, "seed": 4}),
        (prompt_of(70, 14), {"max_tokens": 10, "repetition_penalty": 1.1}),
    ],
}
"""The turns of sessions. Each turn's answer is expected as a sequence of its own."""


@dataclass
class Asked:
    """One request or session under way."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    disturbed: bool = False


class Load:
    """A number of clients of one router."""

    def __init__(
        self,
        client: InferenceClient,
        seed: int,
        *,
        num_clients: int = NUM_CLIENTS,
        sessions: bool = True,
        models: Sequence[str] = ("",),
        without: Sequence[str] = (),
    ) -> None:
        """models: adapters, and "" for the base model, that the requests name in turn. without: requests that are not made."""
        self._client = client
        self._names = [name for name in (*REQUESTS, *(SESSIONS if sessions else ())) if name not in without]
        self._models = {name: models[place % len(models)] for place, name in enumerate(self._names)}
        self._num_clients = num_clients
        self._draw = random.Random(seed)
        self._numbers = itertools.count()
        self._over = False
        self._clients: list[asyncio.Task[None]] = []
        self._disturbances = 0
        self.expected: dict[str, list[list[int]]] = {}
        self.under_way: dict[int, Asked] = {}
        self.num_answers = 0
        self.num_left = 0
        self.num_sessions = 0
        self.num_lost = 0
        """Sessions that their worker's end took with it."""

    async def learn(self) -> None:
        """The answers of an undisturbed run."""
        for name in self._names:
            self.expected[name] = await self._ask(name, "calm")

    def begin(self) -> None:
        self._clients = [asyncio.create_task(self._keep_asking()) for _ in range(self._num_clients)]

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._clients)

    async def abandon(self) -> None:
        """Its router is dead: every client leaves. What had come by then must have been right."""
        for client in self._clients:
            client.cancel()
        for came in await asyncio.gather(*self._clients, return_exceptions=True):
            if not isinstance(came, asyncio.CancelledError | grpc.aio.AioRpcError):
                raise AssertionError("a client has ended on its own") from came

    async def more_answers(self, number: int) -> None:
        """Returns when so many more have come."""
        enough = self.num_answers + number
        await eventually(
            lambda: self.num_answers >= enough or any(client.done() for client in self._clients),
            f"{number} more answers",
        )
        for client in self._clients:
            if client.done():
                client.result()

    async def answered(self) -> None:
        """All that is under way now has ended: nothing meets the faults of two rounds."""
        for asked in list(self.under_way.values()):
            waiting = asyncio.create_task(asked.ended.wait())
            done, _ = await asyncio.wait({waiting, *self._clients}, return_when=asyncio.FIRST_COMPLETED)
            if waiting not in done:
                waiting.cancel()
                await done.pop()  # a client that ends on its own has failed

    @contextmanager
    def sessions_may_be_lost(self, may: bool = True) -> Iterator[None]:
        """Lose sessions that are under way meanwhile, to their worker's end and to nothing else."""
        self._disturbances += may
        for asked in self.under_way.values():
            asked.disturbed |= may
        try:
            yield
        finally:
            self._disturbances -= may

    async def _ask(self, name: str, salt: str) -> list[list[int]]:
        if name in SESSIONS:
            return await self._client.converse(SESSIONS[name], PATIENCE_S, salt, (self._models[name],))
        prompt, params = REQUESTS[name]
        token_ids: list[list[int]] = [[] for _ in range(params.get("n", 1))]
        async for message in self._client.start(prompt, PATIENCE_S, salt, self._models[name], **params):
            token_ids[message.index] += message.token_ids
        return token_ids

    async def _keep_asking(self) -> None:
        while not self._over:
            number, name = next(self._numbers), self._draw.choice(self._names)
            salt = self._draw.choice(("", "", f"{number}"))  # a salt of its own finds nothing cached
            patience_s = self._draw.choice((None, None, None, None, 0.02, 0.2))
            asked = self.under_way[number] = Asked(disturbed=self._disturbances > 0)
            try:
                async with asyncio.timeout(patience_s):
                    answer = await self._ask(name, salt)
                    assert answer == self.expected[name], f"{name}: {answer}, not {self.expected[name]}"
                self.num_answers += 1
                self.num_sessions += name in SESSIONS
            except TimeoutError:
                self.num_left += 1
            except grpc.aio.AioRpcError as error:
                is_end = isinstance(from_rpc_error(error), WorkerLost | Draining)
                if not (name in SESSIONS and asked.disturbed and is_end):
                    raise
                self.num_lost += 1
            finally:
                asked.ended.set()
                del self.under_way[number]
