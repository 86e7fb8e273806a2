"""The reader of WEKA's traces: files as they are, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.bench.traces.trace import MAX_TRACE_TOKENS, TraceRequest, TraceSession
from pdserve.cli.bench.traces.weka import MAX_DEPTH, read_weka
from pdserve.common.errors import ConfigError


def write_weka(folder: Path, requests: list[dict[str, Any]], **fields: object) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"id": "t1", "block_size": 64, "requests": requests, "models": ["m"], **fields}))
    return path


def test_a_session_has_lengths_hashes_and_think_times(tmp_path: Path) -> None:
    path = write_weka(
        tmp_path,
        [
            {"t": 0.0, "type": "s", "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 2.0, "think_time": 0.0},
            {"t": 9.0, "type": "n", "in": 200, "out": 0, "hash_ids": [1, 2, 3], "api_time": 1.0, "think_time": 4.5},
            {"t": 15.0, "type": "n", "in": 210, "out": 7, "hash_ids": [1, 2, 3]},
        ],
    )
    session = read_weka(path)
    assert (session.name, session.scope, session.block_tokens, session.start_s) == ("t1", "t1", 64, 0.0)
    assert session.steps == (
        TraceRequest("t1 0", 130, 5, (1, 2), 0.0),
        TraceRequest("t1 1", 200, 0, (1, 2, 3), 4.5),
        TraceRequest("t1 2", 210, 7, (1, 2, 3), 5.0),  # without a think time what the recorded server did not need
    )
    assert list(session.requests) == list(session.steps)
    assert read_weka(write_weka(tmp_path, [], hash_id_scope="global")).scope == ""


@pytest.mark.parametrize("begin", [0.0, 12.0], ids=["times of their own", "times of the session"])
def test_sub_agents_run_between_two_requests_and_the_next_one_waits(tmp_path: Path, begin: float) -> None:
    def inner(t: float) -> dict[str, Any]:
        return {"t": begin + t, "type": "n", "in": 70, "out": 1, "hash_ids": [9], "api_time": 1.0}

    agent = {"t": 12.0, "type": "subagent", "subagent_type": "Explore", "models": ["m"], "status": "completed"}
    path = write_weka(
        tmp_path,
        [
            {"t": 0.0, "type": "n", "in": 64, "out": 5, "hash_ids": [1], "api_time": 10.0},
            agent | {"agent_id": "a", "duration_ms": 8000, "requests": [inner(0.0), inner(4.0)]},
            agent | {"agent_id": "b", "duration_ms": 3000, "requests": [inner(0.0)]},
            agent | {"agent_id": "c", "status": "async_launched", "requests": [inner(0.0)]},
            {"t": 21.5, "type": "n", "in": 99, "out": 5, "hash_ids": [1], "think_time": 11.5},
        ],
    )
    _, a, b, c, last = read_weka(path).steps
    assert isinstance(a, TraceSession)
    assert isinstance(b, TraceSession)
    assert isinstance(c, TraceSession)
    assert [agent.start_s for agent in (a, b, c)] == [2.0, 2.0, 2.0]
    assert [agent.is_background for agent in (a, b, c)] == [False, False, True]
    assert [request.think_s for request in a.requests] == [0.0, 3.0]
    assert {request.name for request in (*a.requests, *b.requests)} == {"t1 1 a 0", "t1 1 a 1", "t1 2 b 0"}
    assert isinstance(last, TraceRequest)
    assert last.think_s == 1.5, "the think time includes the sub-agents, which the next request waits for anyway"
    assert len(list(read_weka(path).requests)) == 6


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"in": 0, "out": 1}, r"requests\[1\]: in is 0, 1 to"),
        ({"in": MAX_TRACE_TOKENS + 1, "out": 1}, rf"requests\[1\]: in is {MAX_TRACE_TOKENS + 1}"),
        ({"in": 1, "out": -1}, r"requests\[1\]: out is -1, 0 to"),
        ({"type": "subagent", "requests": [{"in": 1, "out": -2}]}, r"requests\[1\], requests\[0\]: out is -2"),
        ({"in": 1, "out": 1, "t": 1e300}, r"requests\[1\]: t is 1e\+300 s"),
        ({"in": 1, "out": 1, "think_time": -1e11}, r"requests\[1\]: think_time is -1e\+11 s"),
        ({"type": "subagent", "duration_ms": 1e300}, r"requests\[1\]: duration_ms is 1e\+297 s"),
        ({"in": "many"}, r"trace.json: Expected `int`, got `str`"),
    ],
)
def test_a_bad_request_of_a_session_is_named(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_weka(write_weka(tmp_path, [{"in": 1, "out": 1}, fields]))


def test_a_file_that_is_no_session_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_size is 0"):
        read_weka(write_weka(tmp_path, [], block_size=0))
    with pytest.raises(ConfigError, match=r"missing\.json, which cannot be read"):
        read_weka(tmp_path / "missing.json")
    nested: dict[str, Any] = {"in": 1, "out": 1}
    for _ in range(MAX_DEPTH + 1):
        nested = {"type": "subagent", "requests": [nested]}
    with pytest.raises(ConfigError, match="nested too deeply, 16 levels are possible"):
        read_weka(write_weka(tmp_path, [nested]))
    deep = tmp_path / "deep.json"
    deep.write_text('{"id": "t", "block_size": 1, "requests": ' + '[{"type": "subagent", "requests": ' * 5000)
    with pytest.raises(ConfigError, match=r"deep\.json"):
        read_weka(deep)
