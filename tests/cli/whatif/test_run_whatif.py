"""`pdserve whatif`: two fleets on one trace."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cli.simulate.run_simulate import SimulateOptions
from pdserve.cli.whatif.run_whatif import Change, fleet_now, recorded_workers, run_whatif
from pdserve.common.errors import ConfigError
from pdserve.simulator.step_times import LinearStepTimes
from pdserve.simulator.virtual_transfer import Link


def line(number: int, **more: object) -> str:
    return (
        json.dumps({"timestamp": 40 * number, "input_length": 400, "output_length": 30, "hash_ids": [], **more}) + "\n"
    )


@pytest.fixture
def options(tmp_path: Path) -> SimulateOptions:
    """A load for two workers of each role."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(map(line, range(60))))
    return SimulateOptions(
        trace=trace, trace_format=None, num_sessions=60, trace_speed=1.0, trace_scale=1, num_prefill=1, num_decode=1,
        times=LinearStepTimes(0.010, 0.0001), link=Link(1e9, 1e-4), settings={"num_blocks": 500, "local_prefill": "never"},
        config=None, goodput=[], seed=0, is_coarse=True,
    )  # fmt: skip


def row(shown: str, name: str) -> list[float]:
    [found] = [each for each in shown.splitlines() if name in each]
    return [float(number) for number in re.findall(r"-?\d+\.\d+", found)]


def test_both_fleets_are_shown_with_the_change(options: SimulateOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_whatif(options, [Change.parse("prefill=+1"), Change.parse("num-blocks=400")]) == 0
    shown = capsys.readouterr().out
    assert "1 prefill, 1 decode" in shown
    assert "2 prefill, 1 decode" in shown
    assert "then: prefill=+1, num_blocks=400" in shown
    before, after, percent = row(shown, "first token mean, ms")
    assert after < 0.5 * before, "one prefill worker is overloaded"
    assert percent == pytest.approx(100 * (after / before - 1), abs=0.1)
    assert len(row(shown, "cached prompt tokens")) == 2


def test_a_change_of_nothing_changes_nothing(options: SimulateOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_whatif(options, [Change.parse("decode=1")]) == 0
    shown = capsys.readouterr().out
    for name in ("first token mean", "per token p99", "end to end mean"):
        before, after, percent = row(shown, name)
        assert (before, percent) == (after, 0.0)


def test_the_fleet_of_a_record_is_the_one_that_it_names(tmp_path: Path) -> None:
    record, plain = tmp_path / "record.jsonl", tmp_path / "plain.jsonl"
    record.write_text(line(0, prefill="p0", decode="d0") + line(1, decode="d1") + line(2, prefill="p0", decode="d2"))
    plain.write_text(line(0))
    assert recorded_workers(record) == {"prefill": 1, "decode": 3}
    assert fleet_now(record, None, None) == (1, 3)
    assert fleet_now(record, 4, None) == (4, 3)
    assert fleet_now(plain, None, None) == (1, 1)
    record.write_text(line(0, decode="d0"))
    assert fleet_now(record, None, None) == (0, 1)
    (tmp_path / "other.csv").write_bytes(b"TIMESTAMP,ContextTokens\n\xff\xfe")
    assert fleet_now(tmp_path / "other.csv", None, None) == (1, 1)
    assert fleet_now(tmp_path, None, 2) == (1, 2)
    with pytest.raises(ConfigError, match="nowhere"):
        fleet_now(tmp_path / "nowhere", None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode", "--change is 'decode', NAME=VALUE is needed"),
        ("=3", "NAME=VALUE is needed"),
        ("decode=", "NAME=VALUE is needed"),
        ("decode=two", "--change is decode=two, an integer is needed"),
        ("decode=-1", "--change decode=-1 leaves 0 workers, at least 1 is needed"),
        ("prefill=-2", "--change prefill=-2 leaves -1 workers, at least 0 is needed"),
        ("nonsense=3", "nonsense: no service has such a setting"),
        ("num_blocks=0", "num_blocks is 0"),
    ],
)
def test_a_wrong_change_is_named(options: SimulateOptions, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_whatif(options, [Change.parse(text)])
    assert message in caught.value.message


def test_a_change_is_needed(options: SimulateOptions) -> None:
    with pytest.raises(ConfigError, match="--change is needed"):
        run_whatif(options, [])
    with pytest.raises(ConfigError, match="--num is 0"):
        run_whatif(replace(options, num_sessions=0), [Change.parse("decode=2")])
