"""The fuzz target for model folders, for its part of the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import target_checkpoint as target
from tests.support.inputs.fuzz_cases import Fuzzer

PARTS = 4
"""Parts of a run; memory is compared between them."""


def test_the_unchanged_folder_loads(tmp_path: Path) -> None:
    """Else every case would be refused for the same reason."""
    assert target.load_and_ask(target.make_folder(tmp_path / "model"))


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_hostile_model_folders_load_or_are_refused(fuzzer: Fuzzer) -> None:
    fuzzer.look_at_memory()
    for part in range(PARTS):
        ran = target.run(seconds=fuzzer.seconds / PARTS, seed=fuzzer.seed + part * 1_000_000)
        fuzzer.num_cases += ran.num_cases
        fuzzer.longest_s = max(fuzzer.longest_s, ran.longest_s)
        fuzzer.look_at_memory()
    assert fuzzer.num_cases >= 50
    fuzzer.check_memory()
