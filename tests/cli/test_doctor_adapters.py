"""The doctor's check of LoRA adapters: one sentence per adapter, with what a worker would say of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.doctor.finding import Finding, Verdict
from pdserve.cli.doctor.lora_check import check_adapters
from pdserve.common.settings.worker_settings import DecodeSettings
from tests.support.engine.settings_with import settings_with
from tests.support.models.lora_adapters import make_adapter

Check = Callable[..., list[Finding]]


@pytest.fixture
def base(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture
def check(base: Path) -> Check:
    def checked(**settings: Any) -> list[Finding]:
        given = settings_with(DecodeSettings, model=str(base), enable_lora=True, max_lora_rank=8, **settings)
        given.verify()
        findings = list(check_adapters(given))
        assert all(bool(found.advice) is (found.verdict is not Verdict.OK) for found in findings)
        return findings

    return checked


def test_good_adapters_of_both_settings(base: Path, tmp_path: Path, check: Check) -> None:
    make_adapter(tmp_path / "sql", base)
    make_adapter(tmp_path / "watched" / "poems", base, rank=2, targets=("q_proj",))
    found = check(lora_modules={"sql": str(tmp_path / "sql")}, lora_dir=str(tmp_path / "watched"))
    assert [one.verdict for one in found] == [Verdict.OK, Verdict.OK]
    assert found[0].what.startswith("adapter sql of lora_modules: rank 4, 14 modules, 0.")
    assert found[1].what.startswith("adapter poems of lora_dir: rank 2, 2 modules, 0.")


def no_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def cut(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def too_large(folder: Path) -> None:
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 16}))


def of_another_model(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"layers.0", b"layers.9"))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (no_weights, "adapter_model.safetensors"),
        (cut, "truncated"),
        (too_large, "r is 16"),
        (of_another_model, "layers.9"),
    ],
)
def test_a_broken_adapter_is_one_sentence(
    base: Path, tmp_path: Path, check: Check, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(make_adapter(tmp_path / "watched" / "broken", base))
    make_adapter(tmp_path / "watched" / "good", base)
    broken, good = check(lora_dir=str(tmp_path / "watched"))
    assert (broken.verdict, good.verdict) == (Verdict.WARNING, Verdict.OK)
    assert broken.what.startswith("adapter broken of lora_dir cannot be used: ")
    assert named in broken.what
    [refused] = check(lora_modules={"mine": str(tmp_path / "watched" / "broken")})
    assert refused.verdict is Verdict.FAILED
    assert named in refused.what


def test_folders_that_are_no_adapters(base: Path, tmp_path: Path, check: Check) -> None:
    (tmp_path / "watched" / "two words").mkdir(parents=True)
    (tmp_path / "watched" / "same").mkdir()
    make_adapter(tmp_path / "same", base)
    found = check(lora_modules={"same": str(tmp_path / "same")}, lora_dir=str(tmp_path / "watched"))
    assert [one.verdict for one in found] == [Verdict.WARNING, Verdict.WARNING, Verdict.OK]
    assert "lora_modules has that name, too" in found[0].what
    assert "'two words'" in found[1].what
    [missing] = [one for one in check(lora_dir=str(tmp_path / "nowhere")) if one.verdict is Verdict.FAILED]
    assert missing.what == f"lora_dir {tmp_path}/nowhere cannot be read: No such file or directory"


def test_without_adapters(base: Path, tmp_path: Path, check: Check) -> None:
    assert [one.verdict for one in check_adapters(DecodeSettings(model=str(base)))] == [Verdict.OK]
    assert [one.verdict for one in check(lora_dir=str(tmp_path))] == [Verdict.OK]
    [found] = check_adapters(DecodeSettings(model=str(tmp_path), enable_lora=True, lora_modules={"a": "b"}))
    assert found.verdict is Verdict.FAILED
    assert found.what.startswith("adapters are not checked: ")
