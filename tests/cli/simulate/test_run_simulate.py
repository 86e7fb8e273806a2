"""`pdserve simulate`: a trace on a fleet in virtual time."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.bench.report_files import ReportFiles
from pdserve.cli.simulate.run_simulate import SimulateOptions, run_simulate
from pdserve.common.errors import ConfigError
from pdserve.models.model_folder import model_folder
from pdserve.simulator.step_times import Chunk, LinearStepTimes
from pdserve.simulator.virtual_transfer import Link

TIMES = LinearStepTimes(0.010, 0.0001)
DRAFTS = {"num_speculative_tokens": 2}


@pytest.fixture
def options(tmp_path: Path) -> SimulateOptions:
    """Ten requests, one per second, in pairs with the same prompt."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * number, "input_length": 160, "output_length": 9, "hash_ids": [1000 + number // 2], "block_size": 160}
        for number in range(10)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return SimulateOptions(
        trace=trace, trace_format=None, num_sessions=100, trace_speed=1.0, trace_scale=1, num_prefill=1, num_decode=1,
        times=TIMES, link=Link(1e9, 1e-4), settings={"num_blocks": 500}, config=None, goodput=["ttft:20"], seed=0,
        files=ReportFiles(tmp_path / "out.json"),
    )  # fmt: skip


def figures(options: SimulateOptions) -> dict[str, Any]:
    assert run_simulate(options) == 0
    assert options.files.json_file is not None
    return dict(json.loads(options.files.json_file.read_text()))


def test_figures_are_those_of_the_given_step_times(options: SimulateOptions) -> None:
    found = figures(options)
    assert (found["completed"], found["failed"]) == (10, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (1600, 90)
    # the second of a pair computes the last block of its prompt only
    assert found["total_cached_tokens"] == 5 * 144
    first_ms, cached_ms = (1e3 * TIMES.step_s([chunk]) for chunk in (Chunk(160, 0), Chunk(16, 144)))
    assert first_ms < found["max_ttft_ms"] < first_ms + 2
    assert cached_ms < found["min_ttft_ms"] < cached_ms + 2
    assert found["median_itl_ms"] == pytest.approx(1e3 * TIMES.step_s([Chunk(1, 165)]), rel=0.01)
    assert found["request_goodput"] * found["duration"] == pytest.approx(5)


def test_a_run_repeats_exactly(options: SimulateOptions) -> None:
    crowded = replace(options, trace_speed=50.0, num_prefill=2, num_decode=2)
    runs = [figures(crowded) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0]["max_ttft_ms"] > runs[0]["min_ttft_ms"]


def test_all_tiers_ranks_drafts_and_adapters_together(options: SimulateOptions, tmp_path: Path) -> None:
    settings = {
        "num_blocks": 40, "max_model_len": 512, "kv_host_mib": 8, "kv_disk_path": str(tmp_path / "disk"), "kv_disk_gib": 0.1,
        "tensor_parallel_size": 2, "speculative_config": DRAFTS, "enable_lora": True,
    }  # fmt: skip
    plain = figures(options)
    found = figures(replace(options, settings=settings, draft_acceptance=1.0))
    assert found["completed"] == 10
    assert found["total_cached_tokens"] == plain["total_cached_tokens"]
    assert found["median_e2el_ms"] < plain["median_e2el_ms"]
    assert not (tmp_path / "disk").exists()


def test_a_folder_without_a_tokenizer_gives_the_same_figures(options: SimulateOptions, tmp_path: Path) -> None:
    shutil.copy(model_folder("demo") / "config.json", tmp_path)
    found = figures(replace(options, settings={"num_blocks": 500, "model": str(tmp_path)}))
    plain = figures(options)
    names = ("completed", "total_output_tokens", "total_cached_tokens", "median_ttft_ms", "median_e2el_ms")
    assert {name: found[name] for name in names} == pytest.approx({name: plain[name] for name in names})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_sessions": 0}, "--num is 0, at least 1 is needed"),
        ({"trace_speed": 0.0}, "--trace-speed is 0, above 0 is needed"),
        ({"trace_scale": 0}, "--trace-scale is 0, at least 1 is needed"),
        ({"trace_scale": 7}, "blocks of 160 tokens cannot be divided by 7"),
        ({"settings": {"num_blocks": 0}}, "num_blocks is 0"),
        ({"draft_acceptance": 1.5}, "--draft-acceptance is 1.5, 0 to 1 is needed"),
        ({"settings": {"num_blocks": 500, "speculative_config": DRAFTS}}, "--draft-acceptance"),
        (
            {"settings": {"num_blocks": 500, "enable_lora": True, "lora_dir": "/nowhere"}},
            "lora_dir is '/nowhere', which is not",
        ),
        ({"trace": Path("/nowhere")}, "/nowhere"),
    ],
)
def test_what_cannot_be_simulated_is_named(options: SimulateOptions, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_simulate(replace(options, **changes))
    assert message in caught.value.message


@pytest.mark.parametrize("is_coarse", [False, True])
def test_queues_and_pools_by_time(options: SimulateOptions, tmp_path: Path, is_coarse: bool) -> None:
    busy = replace(options, trace_speed=1.05, is_coarse=is_coarse, timeline_file=tmp_path / "timeline.csv")
    found = figures(busy)
    with (tmp_path / "timeline.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["role"] for row in rows} == {"router", "prefill", "decode"}
    times = sorted({float(row["time_s"]) for row in rows})
    assert times[0] < 0.1
    assert times[-1] > found["duration"] - 1.5
    assert all(after - before == pytest.approx(1.0) for before, after in itertools.pairwise(times))
    assert max(int(row["running"]) for row in rows) > 0
    decode = [row for row in rows if row["role"] == "decode"]
    assert all(int(row["blocks_total"]) == 500 for row in decode if row["blocks_total"] != "0")


def test_a_page_and_plots_are_written(options: SimulateOptions, tmp_path: Path) -> None:
    files = ReportFiles(None, tmp_path / "page.html", tmp_path / "plots")
    assert run_simulate(replace(options, files=files)) == 0
    assert "Queues and pools by time" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "plots" / "queues_and_pools_by_time.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["json", "timeline"])
def test_files_that_cannot_be_written_are_named_before_the_run(
    options: SimulateOptions, tmp_path: Path, name: str
) -> None:
    missing = tmp_path / "nowhere" / "file"
    broken = (
        replace(options, timeline_file=missing) if name == "timeline" else replace(options, files=ReportFiles(missing))
    )
    with pytest.raises(ConfigError, match=f"--{name} is .*nowhere/file, which cannot be written"):
        run_simulate(broken)
