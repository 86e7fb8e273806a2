"""Causal language models of the installed `transformers`, by their own code with our attention, or refused with the reason."""

from __future__ import annotations

import json

import pytest

from tests.support.models.any_family import FLOAT32, causal_families, configuration_digest
from tests.support.models.any_family_record import RECORD, measure
from tests.support.models.family_records import Row

ROWS: dict[str, Row] = json.loads(RECORD.read_text())
FAMILIES = dict(causal_families())
SERVED = [family for family, row in ROWS.items() if "refused" not in row]


def test_every_family_has_a_row() -> None:
    assert {family: row["architecture"] for family, row in ROWS.items()} == FAMILIES, "run make family-records"


@pytest.mark.parametrize("family", SERVED)
def test_the_record_holds_the_bounds(family: str) -> None:
    _verify(ROWS[family])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_i1_a_family_is_computed_or_refused_as_recorded(family: str) -> None:
    row, recorded = measure(family, FAMILIES[family]), ROWS[family]
    assert recorded["configuration"] == configuration_digest(family), "run make family-records"
    assert row.keys() | {"configuration"} == recorded.keys()
    assert row.get("refused") == recorded.get("refused")
    if "refused" not in row:
        _verify(row)
        # sums are rounded otherwise by another CPU
        assert recorded["float32"] / 5 <= row["float32"] <= 5 * recorded["float32"]
        for measured, before in zip(row["bfloat16"], recorded["bfloat16"], strict=True):
            assert before / 2 - 1e-3 <= measured <= 2 * before + 1e-3


def _verify(row: Row) -> None:
    equal, compared = row["tokens"]
    assert equal == compared > 30
    assert row["float32"] < FLOAT32
    ours, theirs = row["bfloat16"]
    assert 0 < ours < 2 * theirs
