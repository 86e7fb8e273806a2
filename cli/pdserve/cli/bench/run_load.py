"""`LoadRun`: sends the requests of a benchmark and records the arrival of each chunk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pdserve.cli.bench.endpoints import Endpoint, Prompt, RequestFailed
from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.cli.bench.traces.trace_text import Said, TraceTexts, continues
from pdserve.common import clock

Decode = Callable[[list[int]], str]


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds since the start of the run."""

    name: str
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
    """When sessions begin. What is within a session waits for what precedes it, in every plan."""

    concurrency: int | None = None
    """Number of concurrent sessions: the next begins when one ends. With a rate or a trace, the maximum number of
    concurrent sessions."""
    requests_per_s: float | None = None
    """Sessions that begin per second on average, at random times (a Poisson process)."""
    follows_trace: bool = False
    """Sessions begin at their `start_s`, in whose order they are given."""
    seed: int = 0


@dataclass(slots=True)
class _Answer:
    """What a client has of an answer."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int | None = None
    """As counted by the server; None without a count."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A request with its answer."""

    request: TraceRequest
    prompt: Prompt
    token_ids: list[int]
    """The prompt's."""
    answer: _Answer


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A session so far."""

    said: Said
    texts: list[str]
    """Of client and server in turn; empty where prompts are token ids."""
    has_ids: bool
    """False if the token ids of some answer are not known: `said` then has others in their place."""


class LoadRun:
    """One run of a workload against an endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        texts: TraceTexts,
        decode: Decode,
        *,
        as_text: bool,
        timeout_s: float,
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        """texts: of the sessions' scopes. decode: token ids to text. as_text: send prompts as text, as chat requires.

        timeout_s: limit of each request.
        """
        self._endpoint = endpoint
        self._texts = texts
        self._decode = decode
        self._as_text = as_text
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._start = 0.0
        self.records: list[RequestRecord] = []
        """In the order sent, including those in flight."""

    async def run(self, sessions: Iterable[TraceSession], plan: LoadPlan) -> None:
        """Send all sessions and return when all have ended. Cancellation ends those in flight."""
        self._start = clock.monotonic()
        iterator = iter(sessions)
        if plan.requests_per_s is None and plan.concurrency is not None and not plan.follows_trace:
            async with asyncio.TaskGroup() as group:
                for _ in range(plan.concurrency):
                    group.create_task(self._closed_loop(iterator))
        else:
            await self._open_loop(iterator, plan)

    async def _closed_loop(self, sessions: Iterator[TraceSession]) -> None:
        for session in sessions:
            await self._converse(session, None)

    async def _open_loop(self, sessions: Iterator[TraceSession], plan: LoadPlan) -> None:
        draw = random.Random(plan.seed)
        gate = asyncio.Semaphore(plan.concurrency) if plan.concurrency is not None else None
        due_s = 0.0
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                if plan.requests_per_s is not None:
                    due_s += draw.expovariate(plan.requests_per_s)
                else:
                    due_s = session.start_s
                await asyncio.sleep(max(0.0, due_s - self._now()))
                group.create_task(self._gated(session, due_s, gate))

    async def _gated(self, session: TraceSession, due_s: float, gate: asyncio.Semaphore | None) -> None:
        if gate is None:
            return await self._converse(session, due_s)
        async with gate:
            return await self._converse(session, due_s)

    async def _converse(self, session: TraceSession, due_s: float | None) -> None:
        """Send the requests of a session, each after what precedes it, until one fails."""
        last: _Exchange | None = None
        async with asyncio.TaskGroup() as all_agents:
            agents: list[asyncio.Task[None]] = []
            """The sub-agents for which the next request waits."""
            for step in session.steps:
                if isinstance(step, TraceSession):
                    agent = all_agents.create_task(self._converse_later(step))
                    agents += [] if step.is_background else [agent]
                    continue
                if agents:
                    await asyncio.gather(*agents)
                    agents.clear()
                    due_s = None
                if step.think_s:
                    await asyncio.sleep(step.think_s)
                    due_s = None if due_s is None else due_s + step.think_s
                before = None if last is None else self._spoken(last)
                token_ids = self._texts.of(session).prompt(step, None if before is None else before.said)
                prompt = self._prompt(step, token_ids, before)
                answer = await self._ask(prompt, step, due_s)
                if answer is None:
                    return
                last, due_s = _Exchange(step, prompt, token_ids, answer), None

    async def _converse_later(self, session: TraceSession) -> None:
        await asyncio.sleep(session.start_s)
        await self._converse(session, None)

    def _prompt(self, request: TraceRequest, token_ids: list[int], before: _Spoken | None) -> Prompt:
        """The prompt of these tokens as it is sent: as token ids where no answer in it is known only as a text."""
        goes_on = before is not None and continues(request, before.said.request)
        if not self._as_text and (before is None or before.has_ids or not goes_on):
            return Prompt(request.name, token_ids, [])
        if before is not None and goes_on and len(token_ids) > len(before.said.token_ids):
            return Prompt(request.name, None, [*before.texts, self._decode(token_ids[len(before.said.token_ids) :])])
        return Prompt(request.name, None, [self._decode(token_ids)])

    def _spoken(self, last: _Exchange) -> _Spoken:
        """A session up to this answer."""
        answer = last.answer
        num_tokens = last.request.output_tokens if answer.num_tokens is None else answer.num_tokens
        knows_answer = len(answer.token_ids) == num_tokens
        has_ids = knows_answer and last.prompt.token_ids is not None
        texts: list[str] = []
        if self._as_text or not has_ids:
            texts = [*(last.prompt.texts or [self._decode(last.token_ids)]), "".join(answer.texts)]
        # other tokens keep the place of an answer that is known only as a text
        answered = answer.token_ids if knows_answer else last.token_ids[-1:] * last.request.output_tokens
        return _Spoken(Said(last.request, [*last.token_ids, *answered]), texts, has_ids)

    async def _ask(self, prompt: Prompt, request: TraceRequest, due_s: float | None) -> _Answer | None:
        """Return the answer; None after a failure."""
        sent_s = self._now()
        record = RequestRecord(prompt.name, sent_s if due_s is None else due_s, sent_s)
        self.records.append(record)
        answer = _Answer()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in self._endpoint.stream(prompt, max(1, request.output_tokens)):
                    if chunk.has_output:
                        record.chunk_s.append(self._now())
                        answer.texts.append(chunk.text)
                        answer.token_ids += chunk.token_ids
                    if chunk.output_tokens is not None:
                        record.prompt_tokens, record.output_tokens = chunk.prompt_tokens, chunk.output_tokens
                        record.cached_tokens, answer.num_tokens = chunk.cached_tokens, chunk.output_tokens
            if not record.chunk_s:
                raise RequestFailed("no output", "the answer has no output")
        except TimeoutError:
            record.error, record.error_message = "timeout", f"no complete answer within {self._timeout_s:g} s"
        except RequestFailed as error:
            record.error, record.error_message = error.kind, str(error)
        record.ended_s = self._now()
        self._on_end(record)
        return answer if record.error is None else None

    def _now(self) -> float:
        return clock.monotonic() - self._start
