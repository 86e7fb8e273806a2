"""`pdserve plan` from a trace to a fleet and its files."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.plan.fleet_search import Size
from pdserve.cli.plan.run_plan import Planner, PlanOptions, run_plan
from pdserve.cli.plan.targets import Target
from pdserve.cli.simulate.device_times import DeviceOptions
from pdserve.cli.simulate.run_simulate import SimulateOptions
from pdserve.common.errors import ConfigError
from pdserve.simulator.step_times import LinearStepTimes
from pdserve.simulator.virtual_transfer import Link


@pytest.fixture
def options(tmp_path: Path) -> PlanOptions:
    """A load that one worker of each role cannot take."""
    draw, now_ms, lines = random.Random(1), 0.0, []
    for number in range(150):
        now_ms += draw.expovariate(1 / 60)
        length = draw.randint(200, 800)
        blocks = [number * 100 + place for place in range(-(-length // 16))]
        lines.append(
            {"timestamp": now_ms, "input_length": length, "output_length": 40, "hash_ids": blocks, "block_size": 16}
        )
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = SimulateOptions(
        trace=trace, trace_format=None, num_sessions=150, trace_speed=1.0, trace_scale=1, num_prefill=1, num_decode=1,
        times=LinearStepTimes(0.010, 0.0002), link=Link(1e9, 1e-4), settings={"num_blocks": "1000"}, config=None,
        goodput=[], seed=0, is_coarse=True,
    )  # fmt: skip
    targets = [Target.parse("ttft_p95=0.6"), Target.parse("tpot_p95=0.03")]
    return PlanOptions(
        load=load, device=DeviceOptions(), targets=targets, max_workers=8, prefill_cost=1.0, decode_cost=1.0, num_check=30,
        folder=tmp_path / "out",
    )  # fmt: skip


def test_the_planned_fleet_meets_the_targets_and_smaller_ones_do_not(
    options: PlanOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(options) == 0
    shown = capsys.readouterr().out
    assert "20 % more load" in shown
    assert "sessions, exactly" in shown
    assert options.folder is not None
    values = json.loads((options.folder / "values.yaml").read_text())
    size = Size(values["prefill"]["replicas"], values["decode"]["replicas"])
    assert f"{size}: the cheapest" in shown
    planner = Planner(options, options.load.sessions())
    changes = values["router"]["settings"] | {
        name: value for name, value in values["decode"]["settings"].items() if name == "max_num_batched_tokens"
    }
    assert planner.attempt(size, changes).meets(options.targets)
    for num_workers in range(1, sum(size)):
        for num_prefill in range(num_workers):
            smaller = Size(num_prefill, num_workers - num_prefill)
            assert not planner.attempt(smaller, changes).meets(options.targets), smaller
    for name in ("up.sh", "ray.sh"):
        assert f"--prefill {size.num_prefill} --decode {size.num_decode}" in (options.folder / name).read_text()
    assert f"--scale decode={size.num_decode}" in (options.folder / "compose.sh").read_text()


def test_no_fleet_may_do(options: PlanOptions, capsys: pytest.CaptureFixture[str]) -> None:
    impossible = replace(options, targets=[Target.parse("ttft_p99=0.001")], max_workers=3)
    assert run_plan(impossible) == 1
    assert "no fleet of at most 3 workers meets ttft_p99=0.001" in capsys.readouterr().out
    assert options.folder is not None
    assert not options.folder.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": []}, "--slo is needed"),
        ({"max_workers": 0}, "--workers is 0, 1 to 4096 is needed"),
        ({"max_workers": 5000}, "--workers is 5000, 1 to 4096 is needed"),
        ({"prefill_cost": 0.0}, "--prefill-cost is 0, above 0 is needed"),
        ({"decode_cost": float("inf")}, "--decode-cost is inf, above 0 is needed"),
        ({"num_check": -1}, "--check is -1, at least 0 is needed"),
    ],
)
def test_wrong_options_are_named(options: PlanOptions, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_plan(replace(options, **changes))
    assert message in caught.value.message


def test_an_unwritable_folder_is_named(options: PlanOptions, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out is .*file/out, which cannot be written"):
        run_plan(replace(options, folder=tmp_path / "file" / "out", num_check=0))
