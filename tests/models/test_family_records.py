"""Records of model families are renewed where they are out of date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.family_records import digest, renew

MEASURED: dict[str, Any] = {"tokens": [60, 60], "float32": 1e-5, "bfloat16": [0.02, 0.02]}
OLD = {
    "same": {**MEASURED, "configuration": "1"},
    "changed": {**MEASURED, "configuration": "2"},
    "refused": {"refused": "it has an encoder", "configuration": "4"},
    "without tokens": {"float32": 1e-5, "configuration": "5"},
    "gone": {**MEASURED, "configuration": "6"},
}
DIGESTS = {"changed": "3", "missing": "7", "refused": "4", "same": "1", "without tokens": "5"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "record.json").write_text(json.dumps(OLD))
    return tmp_path / "record.json"


def _measure(family: str) -> dict[str, Any]:
    return {**MEASURED, "name": family}


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [
        ([], ["changed", "missing", "without tokens"]),
        (["same"], ["same"]),
        (["all"], ["changed", "missing", "refused", "same", "without tokens"]),
    ],
)
def test_rows_out_of_date_are_measured(arguments: list[str], measured: list[str], path: Path) -> None:
    assert renew(path, DIGESTS, _measure, arguments) == 0
    rows = json.loads(path.read_text())
    assert [name for name, row in rows.items() if "name" in row] == measured
    assert "gone" not in rows
    assert all(rows[name]["configuration"] == DIGESTS[name] for name in measured)
    if not arguments:
        assert list(rows) == list(DIGESTS)
        assert renew(path, DIGESTS, _fail, []) == 0, "no row is out of date"


def _fail(family: str) -> dict[str, Any]:
    raise RuntimeError(family)


def test_a_measurement_that_fails_keeps_the_row(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert renew(path, DIGESTS, _fail, ["changed", "missing"]) == 2
    assert json.loads(path.read_text()) == OLD
    assert "failed: changed, missing" in capsys.readouterr().out


def test_a_digest_changes_with_each_part() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3}) != digest({"a": 1}, 3)
