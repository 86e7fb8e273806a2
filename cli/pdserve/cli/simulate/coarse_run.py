"""`run_coarsely`: the sessions of a trace on a `CoarseFleet`, with what a benchmark's client would have seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pdserve.cli.bench.run_load import RequestRecord
from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.cli.bench.traces.trace_text import continues
from pdserve.simulator.coarse.coarse_fleet import CoarseFleet, CoarseRequest


class _Names:
    """Hash ids of all scopes as bytes."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int], bytes] = {}

    def of(self, session: TraceSession, request: TraceRequest, num_tokens: int | None = None) -> tuple[bytes, ...]:
        """Of full blocks, which caches share. num_tokens: of the prompt's beginning; None: of all of it."""
        if not session.block_tokens:
            return ()
        num_full = min(request.input_tokens, num_tokens or request.input_tokens) // session.block_tokens
        return tuple(self._name(session.scope, each) for each in request.hash_ids[:num_full])

    def of_answer(
        self, session: TraceSession, request: TraceRequest, following: TraceRequest | None
    ) -> tuple[bytes, ...]:
        """Of the full blocks of prompt and answer that are not the prompt's: the next prompt of the session has them."""
        if following is None or not continues(following, request):
            return ()
        said = self.of(session, following, request.input_tokens + request.output_tokens)
        return said[len(self.of(session, request)) :]

    def _name(self, scope: str, hash_id: int) -> bytes:
        key = scope, hash_id
        if (name := self._names.get(key)) is None:
            name = self._names[key] = len(self._names).to_bytes(8, "little")
        return name


class _Replay:
    """A session's requests, one after the other, and its sub-agents at the same time."""

    def __init__(
        self,
        fleet: CoarseFleet,
        session: TraceSession,
        names: _Names,
        on_record: Callable[[RequestRecord], None],
        on_end: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._names = names
        self._on_record = on_record
        self._on_end = on_end
        self._next = 0
        self._num_agents = 0
        """For which the next request waits."""
        self._is_waiting = False

    def go_on(self, now_s: float) -> None:
        """Send what is next."""
        steps = self._session.steps
        while self._next < len(steps):
            step = steps[self._next]
            if isinstance(step, TraceRequest):
                if self._num_agents:
                    self._is_waiting = True
                    return
                self._next += 1
                self._send(step, now_s + step.think_s)
                return
            self._next += 1
            on_end: Callable[[], None] = _nothing
            if not step.is_background:
                self._num_agents += 1
                on_end = self._agent_ended
            _Replay(self._fleet, step, self._names, self._on_record, on_end).go_on(now_s + step.start_s)
        if not self._num_agents:
            self._on_end()
        else:
            self._is_waiting = True

    @property
    def _following(self) -> TraceRequest | None:
        """The next request of the session itself."""
        return next((step for step in self._session.steps[self._next :] if isinstance(step, TraceRequest)), None)

    def _agent_ended(self) -> None:
        self._num_agents -= 1
        if not self._num_agents and self._is_waiting:
            self._is_waiting = False
            self.go_on(self._fleet.events.now_s)

    def _send(self, request: TraceRequest, when_s: float) -> None:
        def ended(coarse: CoarseRequest) -> None:
            chunk_s = [] if coarse.error else [coarse.first_s, coarse.last_s][: coarse.num_outputs]
            self._on_record(
                RequestRecord(
                    request.name, coarse.sent_s, coarse.sent_s, chunk_s, coarse.last_s, coarse.num_tokens,
                    coarse.num_outputs, coarse.num_cached, coarse.error or None,
                )
            )  # fmt: skip
            if coarse.error:
                # as in a benchmark, a failed request ends its session
                self._next = len(self._session.steps)
            self.go_on(self._fleet.events.now_s)

        coarse = CoarseRequest(
            request.input_tokens, max(1, request.output_tokens), self._names.of(self._session, request),
            self._session.block_tokens, ended, self._names.of_answer(self._session, request, self._following),
        )  # fmt: skip
        self._fleet.submit(coarse, when_s)


def _nothing() -> None:
    """Nobody waits."""


def run_coarsely(
    fleet: CoarseFleet, sessions: Sequence[TraceSession], on_record: Callable[[RequestRecord], None]
) -> list[RequestRecord]:
    """Sessions begin at their `start_s`. on_record: called with each request when it has ended."""
    records: list[RequestRecord] = []
    names, coming = _Names(), iter(sorted(sessions, key=lambda session: session.start_s))

    def ended(record: RequestRecord) -> None:
        records.append(record)
        on_record(record)

    def begin(session: TraceSession) -> None:
        _Replay(fleet, session, names, ended, _nothing).go_on(session.start_s)
        expect_next()

    def expect_next() -> None:
        """One at a time: an event costs more the more of them are to come."""
        if (session := next(coming, None)) is not None:
            fleet.events.at(session.start_s, partial(begin, session))

    expect_next()
    fleet.run()
    return records
