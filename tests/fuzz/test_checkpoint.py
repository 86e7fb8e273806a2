"""A few seconds of the fuzz target for model folders."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


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


def test_hostile_model_folders_load_or_are_refused(target: ModuleType) -> None:
    assert target.run(seconds=4, seed=1) >= 100
