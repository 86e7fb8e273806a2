"""The comparison of a simulated cluster with a real one."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest
from simulated import BLOCK_SIZE, MEASURES, compared, make_trace

from pdserve.cli.bench.traces.read_trace import read_trace


def test_the_trace_is_read_as_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(make_trace(400, 4.0, 100, 10))
    sessions = read_trace(path, 400)
    requests = [request for session in sessions for request in session.requests]
    assert {request.output_tokens for request in requests} == set(range(5, 16))
    assert min(request.input_tokens for request in requests) == 50
    assert max(request.input_tokens for request in requests) == 150
    # no two prompts begin alike
    hash_ids = [each for request in requests for each in request.hash_ids]
    assert len(hash_ids) == len(set(hash_ids)) == sum(-(-request.input_tokens // BLOCK_SIZE) for request in requests)
    starts = [session.start_s for session in sessions]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert statistics.mean(gaps) == pytest.approx(1 / 4.0, rel=0.2)


def test_reports_are_compared_measure_by_measure() -> None:
    measured = dict.fromkeys(MEASURES.values(), 10.0)
    simulated = {name: float(number) for number, name in enumerate(MEASURES.values(), 1)}
    head, line, *rows = compared(measured, simulated)
    assert len(rows) == len(MEASURES)
    assert head.count("|") == line.count("|")
    assert rows[0] == "| TTFT mean | 10.00 | 1.00 | 0.10 |"
    assert rows[-1] == "| TPOT p99 | 10.00 | 6.00 | 0.60 |"
