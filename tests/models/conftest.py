"""Decoders over paged caches, and `transformers` on the same checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.kernels.paged_run import PagedRun
from tests.support.models.checkpoints import ARCHITECTURES
from tests.support.models.family_checkpoints import cases, make_family


@pytest.fixture
def paged_run() -> type[PagedRun]:
    return PagedRun


@pytest.fixture(scope="session")
def oracle_logits() -> Callable[[Path, Sequence[int]], Tensor]:
    """Logits `[n, V]` that `transformers` gives for a text."""
    models = {}

    def logits(folder: Path, tokens: Sequence[int]) -> Tensor:
        if folder not in models:
            architecture = max((name for name in ARCHITECTURES if folder.name.startswith(name)), key=len)
            models[folder] = ARCHITECTURES[architecture][1].from_pretrained(folder, dtype="auto").eval()
        with torch.inference_mode():
            result: Tensor = models[folder](torch.tensor([list(tokens)])).logits[0].float()
        return result

    return logits


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`plain_checkpoint(family)`: its plain case, made once."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        make_family(folder, family, cases(family)[0])
        return folder

    return make
