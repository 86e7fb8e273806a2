"""Traces of WEKA's kv-cache-tester: one JSON file per agentic coding session, with think times and nested sub-agents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession, verify_length, verify_time
from pdserve.cli.bench.traces.trace_file import decoded, whole_file
from pdserve.common.errors import ConfigError

MAX_DEPTH = 16
"""Of sub-agents within sub-agents."""


class _Step(msgspec.Struct):
    """One request, or a sub-agent where `type` is `subagent`."""

    type: str = "n"
    t: float = 0.0
    """Seconds from the start of the session; within a sub-agent in some files from its start."""
    input_tokens: int = msgspec.field(default=0, name="in")
    output_tokens: int = msgspec.field(default=0, name="out")
    hash_ids: tuple[int, ...] = ()
    api_time: float | None = None
    """Seconds that the recorded server took."""
    think_time: float | None = None
    """Seconds between the answer before it and the request."""
    agent_id: str = ""
    requests: list[_Step] = []
    """Of a sub-agent."""
    duration_ms: float | None = None
    """Of a sub-agent."""
    status: str = ""
    """Of a sub-agent; `async_launched` if no request waits for it."""

    @property
    def end_s(self) -> float:
        return self.t + (self.duration_ms / 1e3 if self.duration_ms is not None else self.api_time or 0.0)


class _File(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Step]
    hash_id_scope: Literal["local", "global"] = "local"


def read_weka(path: Path) -> TraceSession:
    """The session of one file, which begins at 0. Raises: ConfigError naming the file, and a request by its place."""
    trace = decoded(str(path), whole_file(path), msgspec.json.Decoder(_File).decode)
    verify_length(str(path), "block_size", trace.block_size)
    scope = trace.id if trace.hash_id_scope == "local" else ""
    steps = tuple(_steps(trace.requests, str(path), trace.id, scope, trace.block_size))
    return TraceSession(trace.id, scope, trace.block_size, steps)


def _steps(
    steps: Sequence[_Step], label: str, session: str, scope: str, block_size: int, depth: int = 0
) -> Iterator[TraceRequest | TraceSession]:
    last: _Step | None = None
    agents_end_s: float | None = None
    """Of the sub-agents for which the next request waits."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{label}: sub-agents are nested too deeply, {MAX_DEPTH} levels are possible")
    for place, step in enumerate(steps):
        label_here, name = f"{label}, requests[{place}]", f"{session} {place}"
        for field, seconds in (("t", step.t), ("think_time", step.think_time), ("api_time", step.api_time)):
            verify_time(label_here, field, seconds)
        verify_time(label_here, "duration_ms", None if step.duration_ms is None else step.duration_ms / 1e3)
        if step.type == "subagent":
            is_background = step.status == "async_launched"
            if not is_background:
                agents_end_s = max(agents_end_s or 0.0, step.end_s)
            inner = tuple(_steps(step.requests, label_here, f"{name} {step.agent_id}", scope, block_size, depth + 1))
            start_s = 0.0 if last is None else max(0.0, step.t - last.end_s)
            yield TraceSession(name, scope, block_size, inner, start_s, is_background)
            continue
        verify_length(label_here, "in", step.input_tokens)
        verify_length(label_here, "out", step.output_tokens, least=0)
        think_s = step.think_time
        if agents_end_s is not None:
            think_s = step.t - agents_end_s  # what is recorded includes the time of the sub-agents
        elif think_s is None:
            think_s = 0.0 if last is None else step.t - last.end_s
        yield TraceRequest(name, step.input_tokens, step.output_tokens, step.hash_ids, max(0.0, think_s))
        last, agents_end_s = step, None
