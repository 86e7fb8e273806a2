"""Models that the code of `transformers` computes, with our attention, against that code with its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.any_family import float32_logits

ATOL = 3e-4


@pytest.mark.parametrize("family", ["starcoder2", "stablelm", "gpt2", "cohere"])
def test_a_family_without_code_of_ours(family: str, tmp_path: Path) -> None:
    logits = float32_logits(tmp_path, family)
    assert logits.difference < ATOL
    assert len(set(logits.theirs.argmax(-1).tolist())) > 5, "the answers are degenerate and test nothing"
