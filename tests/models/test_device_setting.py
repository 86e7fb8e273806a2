"""A device that is not here is refused before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.loaded_model import load_model


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device is 'gpu', which torch does not know; it must be cpu, cuda or cuda:N"),
        ("cuda:x", "device is 'cuda:x', which torch does not know"),
        ("meta", "device is 'meta', it must be cpu, cuda or cuda:N"),
        ("cuda:99", rf"device is 'cuda:99', but torch {torch.__version__} sees \d CUDA devices here"),
    ],
)
def test_a_device_that_is_not_here_is_refused_by_name(tmp_path: Path, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        load_model(tmp_path, DecodeSettings(device=device))


def test_a_processor_alone_says_that_it_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees 0 CUDA devices"):
        load_model(tmp_path, DecodeSettings(device="cuda"))
