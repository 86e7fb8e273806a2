"""`LoadRun`: sends the requests of a benchmark and records the arrival of each chunk."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pdserve.cli.bench.endpoints import Endpoint, Prompt, RequestFailed
from pdserve.cli.bench.workload import BenchSession, Turn

Decode = Callable[[list[int]], str]


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds since the start of the run."""

    scheduled_s: float
    """Planned time of sending in an open loop; else equal to `sent_s`."""
    sent_s: float
    chunk_s: list[float] = field(default_factory=list)
    """Arrival of each chunk that has output."""
    ended_s: float | None = None
    """None while the request is in flight."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """As counted by the server."""
    cached_tokens: int | None = None
    error: str | None = None
    """Kind of failure; None if there has been none so far."""
    error_message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """When sessions begin."""

    concurrency: int | None = None
    """Number of concurrent sessions: the next begins when one ends. With a rate or a trace, the maximum number of
    concurrent sessions."""
    requests_per_s: float | None = None
    """Sessions that begin per second on average, at random times (a Poisson process)."""
    seed: int = 0


class LoadRun:
    """One run of a workload against an endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        decode: Decode,
        *,
        as_text: bool,
        timeout_s: float,
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        """decode: token ids to text. as_text: send prompts as text, as chat and multi-turn sessions require.

        timeout_s: limit of each request.
        """
        self._endpoint = endpoint
        self._decode = decode
        self._as_text = as_text
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._start = 0.0
        self.records: list[RequestRecord] = []
        """In the order sent, including those in flight."""

    async def run(self, sessions: Iterable[BenchSession], plan: LoadPlan) -> None:
        """Send all sessions and return when all have ended. Cancellation ends those in flight."""
        self._start = time.perf_counter()
        if plan.requests_per_s is None and not isinstance(sessions, list):
            sessions = list(sessions)
        iterator = iter(sessions)
        if plan.requests_per_s is None and plan.concurrency is not None and not _has_arrivals(sessions):
            async with asyncio.TaskGroup() as group:
                for _ in range(plan.concurrency):
                    group.create_task(self._closed_loop(iterator))
        else:
            await self._open_loop(iterator, plan)

    async def _closed_loop(self, sessions: Iterator[BenchSession]) -> None:
        for session in sessions:
            await self._converse(session, None)

    async def _open_loop(self, sessions: Iterator[BenchSession], plan: LoadPlan) -> None:
        draw = random.Random(plan.seed)
        gate = asyncio.Semaphore(plan.concurrency) if plan.concurrency is not None else None
        due_s = 0.0
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                if plan.requests_per_s is not None:
                    due_s += draw.expovariate(plan.requests_per_s)
                else:
                    due_s = session.arrival_s or 0.0
                await asyncio.sleep(max(0.0, due_s - self._now()))
                group.create_task(self._gated(session, due_s, gate))

    async def _gated(self, session: BenchSession, due_s: float, gate: asyncio.Semaphore | None) -> None:
        if gate is None:
            return await self._converse(session, due_s)
        async with gate:
            return await self._converse(session, due_s)

    async def _converse(self, session: BenchSession, due_s: float | None) -> None:
        """Send the turns of a session one after the other, until one fails."""
        said: list[str] = []
        as_text = self._as_text or len(session.turns) > 1
        for turn in session.turns:
            if as_text:
                said.append(self._decode(turn.token_ids))
            prompt = Prompt(None if as_text else turn.token_ids, said)
            answer = await self._ask(prompt, turn, due_s)
            if answer is None:
                return
            said.append(answer)
            due_s = None

    async def _ask(self, prompt: Prompt, turn: Turn, due_s: float | None) -> str | None:
        """Return the answer; None after a failure."""
        sent_s = self._now()
        record = RequestRecord(sent_s if due_s is None else due_s, sent_s)
        self.records.append(record)
        texts: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in self._endpoint.stream(prompt, turn.output_tokens):
                    if chunk.has_output:
                        record.chunk_s.append(self._now())
                        texts.append(chunk.text)
                    if chunk.output_tokens is not None:
                        record.prompt_tokens, record.output_tokens = chunk.prompt_tokens, chunk.output_tokens
                        record.cached_tokens = chunk.cached_tokens
            if not record.chunk_s:
                raise RequestFailed("no output", "the answer has no output")
        except TimeoutError:
            record.error, record.error_message = "timeout", f"no complete answer within {self._timeout_s:g} s"
        except RequestFailed as error:
            record.error, record.error_message = error.kind, str(error)
        record.ended_s = self._now()
        self._on_end(record)
        return "".join(texts) if record.error is None else None

    def _now(self) -> float:
        return time.perf_counter() - self._start


def _has_arrivals(sessions: Iterable[BenchSession]) -> bool:
    return isinstance(sessions, list) and bool(sessions) and sessions[0].arrival_s is not None
