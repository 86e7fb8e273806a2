"""The value of `--model` that is no folder of a checkpoint: what it is, and what to do with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.common.errors import ConfigError
from pdserve.models.model_folder import PACKAGED, model_folder


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("pytorch_model.bin", "pickled weights are not read, since they can run code; convert it with transformers"),
        ("consolidated.00.pth", "pickled weights are not read"),
        ("adapter_model.safetensors", "an adapter is served only after it was merged into its model"),
    ],
)
@pytest.mark.parametrize("is_relative", [False, True])
def test_weights_in_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, advice: str, is_relative: bool
) -> None:
    # ORG/NAME looks like this, too
    folder = tmp_path / "org"
    folder.mkdir()
    (folder / name).write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    shown = f"org/{name}" if is_relative else str(folder / name)
    with pytest.raises(ConfigError) as refused:
        model_folder(shown)
    assert f"model {shown!r} is a file: " in refused.value.message
    assert advice in refused.value.message
    with pytest.raises(ConfigError) as refused:
        model_folder(str(folder))
    assert "has no config.json" in refused.value.message
    assert f"but {name}: " in refused.value.message
    assert advice in refused.value.message


def test_another_file_and_another_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"is a file: a model is a folder with config\.json"):
        model_folder(str(tmp_path / "notes.txt"))
    with pytest.raises(ConfigError, match=r"so it is not a Hugging Face checkpoint$"):
        model_folder(str(tmp_path))


def test_a_folder_with_a_gguf_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError, match=r"has no config\.json, .* but model\.Q4_K_M\.gguf: give the GGUF file itself as the model"
    ):
        model_folder(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"model\.Q4_K_M\.gguf is truncated or no GGUF file: it has 4 bytes, and more follow"
    ):
        model_folder(str(tmp_path / "model.Q4_K_M.gguf"))


def test_a_model_whose_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "smollm2", "no-such-package-of-weights")
    with pytest.raises(
        ConfigError, match=r"'smollm2' is a file of the package no-such-package-of-weights, which is not installed"
    ):
        model_folder("smollm2")
