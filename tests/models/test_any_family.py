"""Causal language models of the installed `transformers`, by their own code with our attention, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.any_family import (
    FEW_TOKENS,
    NOT_CHECKED,
    bfloat16_errors,
    causal_families,
    float32_logits,
    refusal,
    tokens_of_pair,
)
from tests.support.any_family_record import RECORD

pytestmark = pytest.mark.slow

FLOAT32 = 1e-3
"""Largest difference of a logit; the largest logits are near 10."""
ROWS: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
FAMILIES = dict(causal_families())
REFUSED = [family for family, row in ROWS.items() if "refused" in row]
UNKNOWN = [family for family in FAMILIES if family not in ROWS]
"""Families that no record has yet: they are served exactly, or refused."""


def test_the_record_is_of_families_that_there_are() -> None:
    assert {family: row["architecture"] for family, row in ROWS.items()}.items() <= FAMILIES.items()


@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_family_has_the_recorded_reason(family: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, family, FAMILIES[family]) == ROWS[family]["refused"]


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in REFUSED and family not in NOT_CHECKED]
)
def test_a_served_family_in_float32(family: str, tmp_path: Path) -> None:
    reason = refusal(tmp_path, family, FAMILIES[family])
    if reason is not None:
        assert family in UNKNOWN, reason
        return
    logits = float32_logits(tmp_path, family)
    assert logits.difference < FLOAT32
    is_tie = logits.theirs.topk(2).values.diff(dim=-1).abs().flatten() < 2 * FLOAT32
    assert ((logits.ours.argmax(-1) == logits.theirs.argmax(-1)) | is_tie).all()
    if family not in FEW_TOKENS:
        assert len(set(logits.theirs.argmax(-1).tolist())) > 5, "the answers are degenerate and test nothing"


@pytest.mark.parametrize("family", [family for family, row in ROWS.items() if "tokens" in row])
def test_i1_greedy_tokens_through_prefill_and_decode(family: str, tmp_path: Path) -> None:
    tokens = tokens_of_pair(tmp_path, family)
    assert tokens.equal == tokens.compared > 30
    assert tokens.distinct > 5, "the answers are degenerate and test nothing"


@pytest.mark.parametrize("family", [family for family, row in ROWS.items() if "bfloat16" in row])
def test_bfloat16_is_about_as_close_to_the_truth_as_transformers(family: str, tmp_path: Path) -> None:
    ours, theirs = bfloat16_errors(tmp_path, family)
    print(f"{family}: {ours:.4f} beside {theirs:.4f} of transformers")
    assert 0 < ours < 2 * theirs
