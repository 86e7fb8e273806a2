"""The fuzz target for model folders, for its part of the time."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from fuzz_cases import Fuzzer

PARTS = 4
"""Of a run: between them its memory is looked at."""


@pytest.fixture(scope="module")
def target() -> ModuleType:
    spec = spec_from_file_location("target_checkpoint", Path(__file__).with_name("target_checkpoint.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_unchanged_folder_loads(target: ModuleType, tmp_path: Path) -> None:
    """Else every case would be refused for the same reason."""
    assert target.load_and_ask(target.make_folder(tmp_path / "model"))


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_hostile_model_folders_load_or_are_refused(target: ModuleType, fuzzer: Fuzzer) -> None:
    fuzzer.look_at_memory()
    for part in range(PARTS):
        ran = target.run(seconds=fuzzer.seconds / PARTS, seed=fuzzer.seed + part * 1_000_000)
        fuzzer.num_cases += ran.num_cases
        fuzzer.longest_s = max(fuzzer.longest_s, ran.longest_s)
        fuzzer.look_at_memory()
    assert fuzzer.num_cases >= 50
    fuzzer.check_memory()
