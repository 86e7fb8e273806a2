"""Rows and table of `make gpu`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gpu.plan import GOALS, STAGES
from gpu.report import is_in_order, line, table
from gpu.rows import Row, Rows, read_rows

NAMES = [stage.name for stage in STAGES]


def row(stage: str, case: str, **values: Any) -> Row:
    return {"stage": stage, "case": case, "dry": False} | values


ENDED = [row(name, "took", took_s=1.0) for name in NAMES]


def test_a_dry_run_cannot_write_a_time(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", "decode_step", dry=True)
    for field in ("step_ms", "rate_tb_s", "took_us", "ratio", "ours_tflops", "rate_tokens_per_s"):
        with pytest.raises(ValueError, match=field):
            rows.add("B 1", **{field: 1.0})
    rows.add("B 1", step_ms=math.nan, tokens=3, rate_tb_s=math.inf)
    assert read_rows(rows.path) == [
        {"stage": "decode_step", "case": "B 1", "dry": True, "step_ms": None, "tokens": 3, "rate_tb_s": None}
    ]


@pytest.mark.parametrize(
    ("goal", "good", "bad"), [("decode_attention", 0.8, 0.79), ("decode_step", 1.25, 1.26), ("nixl", 0.7, 0.4)]
)
def test_a_ratio_is_judged_by_its_goal(tmp_path: Path, goal: str, good: float, bad: float) -> None:
    rows = Rows(tmp_path / "rows.jsonl", "decode_step", dry=False)
    for ratio in (good, bad, math.nan):
        rows.judge("case", goal, ratio)
    assert [found["met"] for found in read_rows(rows.path)] == [True, False, None]


def test_the_table_names_goals_met_missed_and_not_measured() -> None:
    found = [
        row("decode_attention", "B 1", ratio=0.9, goal="decode_attention", met=True),
        row("decode_attention", "B 8", ratio=0.5, goal="decode_attention", met=False),
        row("decode_step", "B 1", ratio=1.1, goal="decode_step", met=True),
        row("nixl_copies", "stage", skipped="the package nixl cannot be imported"),
        *ENDED,
    ]
    text = table(found, NAMES)
    goals = text.split("\ngoals\n")[1]
    assert "at least 0.8: MISSED in 1 of 2, worst 0.5 (B 8)" in goals
    assert "at most 1.25: MET in 1 of 1, worst 1.1 (B 1)" in goals
    assert goals.count("not measured") == len(GOALS) - 2
    assert "the package nixl cannot be imported"[:40] in text
    assert "DRY RUN" not in text
    assert is_in_order(found, NAMES), "a missed goal is a result"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ENDED[1:], f"{NAMES[0]}: not begun"),
        ([*ENDED, row("equality", "llama", ok=False)], "equality, llama: wrong result"),
        ([*ENDED, row("layer_ops", "limit", failed="ended after 40 s")], "layer_ops, limit: ended after 40 s"),
    ],
)
def test_what_is_not_in_order_is_named_and_fails_the_run(found: list[Row], words: str) -> None:
    assert words in table(found, NAMES).split("\nnot in order\n")[1]
    assert not is_in_order(found, NAMES)


def test_the_table_of_a_dry_run_says_so_first() -> None:
    assert table([row("graphs", "B 1", ok=True) | {"dry": True}], NAMES).startswith("DRY RUN")


def test_a_row_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Rows(path, "graphs", dry=False).check("B 1", True, tokens=4)
    with path.open("a") as file:
        file.write('{"stage": "gra')
    [found] = read_rows(path)
    assert line(found).split() == ["graphs", "B", "1", "ok=yes", "tokens=4"]
    assert read_rows(tmp_path / "none") == []


def test_each_stage_is_a_module_and_each_goal_has_one() -> None:
    folder = Path(__file__).parents[2] / "benchmarks/gpu/stages"
    assert {path.stem for path in folder.glob("[a-z]*.py")} == set(NAMES)
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    assert all(f'"{goal}"' in text for goal in GOALS)
